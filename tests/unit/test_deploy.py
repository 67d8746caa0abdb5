"""What deploy/ starts are commands that exist, with pages that are read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from scanloom.cli.main import app
from scanloom.engine.listen.site import read_site

DEPLOY = Path(__file__).parents[2] / "deploy"


def parse(words: list[str]) -> None:
    """Parse a command line without running it; SystemExit and errors of usage are failures."""
    group = typer.main.get_command(app)
    name, command, rest = group.resolve_command(group.make_context("scanloom", list(words)), words)
    assert command is not None, name
    command.make_context(str(name), rest)


def test_services_of_the_compose_file_are_commands() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours = {name: each for name, each in services.items() if each["image"] == "scanloom"}

    assert set(ours) == {"listen", "review"}
    for each in ours.values():
        parse(each["command"])
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
    sources = {volume.split(":")[0] for each in services.values() for volume in each["volumes"]}
    own = {name for name in sources if (DEPLOY / name).is_file()}
    assert own == {"./orthanc.json", "./site.yaml"}


def test_orthanc_sends_where_the_site_listens() -> None:
    site = read_site(DEPLOY / "site.yaml")
    orthanc = json.loads((DEPLOY / "orthanc.json").read_text())
    [target] = orthanc["DicomModalities"].values()

    assert (target["AET"], target["Host"], target["Port"]) == (site.title, site.address, site.port)
    assert orthanc["DicomAet"] in {peer.title for peer in site.peers}
    assert orthanc["RemoteAccessAllowed"] is False
    [back] = site.targets
    assert (back.title, back.port) == (orthanc["DicomAet"], orthanc["DicomPort"])


def test_the_unit_starts_a_command(tmp_path: Path) -> None:
    unit = (DEPLOY / "scanloom-listen.service").read_text()
    [line] = re.findall(r"^ExecStart=/opt/scanloom/bin/scanloom (.*)$", unit, re.MULTILINE)
    parse(shlex.split(line))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / "scanloom-listen.service"
    copy.write_text(unit.replace("/opt/scanloom/bin/scanloom", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert not done.stderr


def test_the_image_is_made_of_what_is_gathered() -> None:
    gathered = (DEPLOY / "offline.sh").read_text()
    for line in (DEPLOY / "Containerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            assert line.split()[1] in gathered
    listed = set(re.findall(r"deploy/([\w.-]+)", gathered.split("\ncp ")[1]))
    assert listed == {each.name for each in DEPLOY.iterdir()} - {"offline.sh", "check.sh"}
