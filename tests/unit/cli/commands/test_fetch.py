"""A known model that is not in the store is fetched if a person says so, and else named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scanloom.convert import store
from support.commands import scanloom, write_tiny_bundle
from support.https_server import Page, Server, serve
from support.terminal import answer
from support.write_dicom import noise, write_series

NAME = "spleen_ct_segmentation"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model zoo with one bundle."""
    folder = tmp_path_factory.mktemp("network") / "zoo"
    bundle, content = write_tiny_bundle(folder, NAME), io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for file in sorted(bundle.rglob("*")):
            archive.write(file, file.relative_to(folder))
    with serve(folder.parent) as server:
        checksum = hashlib.sha1(content.getvalue()).hexdigest()
        listed = {"source": f"{server.address}/zoo.zip", "checksum": checksum}
        server.pages["/list"] = Page(json.dumps({f"{NAME}_v1.0.0": listed}).encode())
        server.pages["/zoo.zip"] = Page(content.getvalue())
        yield server


@pytest.fixture
def own(tmp_path: Path, network: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's store, which is empty."""
    network.log.clear()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("SSL_CERT_FILE", str(network.certificate))
    for name in ("SCANLOOM_MODELS", "SCANLOOM_OFFLINE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return store.user_models()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_series(tmp_path / "study", noise())
    return tmp_path / "study"


def names(own: Path) -> list[str]:
    return sorted(p.name for p in own.glob("[!.]*"))


@pytest.mark.thorough
def test_on_a_terminal_it_is_fetched_after_one_question(
    own: Path, study: Path, network: Server, tmp_path: Path
) -> None:
    """The familiar name then means the model in the store, which is not asked for again."""
    command = ("segment", study, "-m", "spleen", "-o", tmp_path / "labels.nii.gz")
    code, shown = answer(f"{network.address}/list", *command, typed="y\n", environment=os.environ)

    assert code == 0, shown
    size = len(network.pages["/zoo.zip"].content)
    for text in (NAME, "MONAI model zoo", "Apache-2.0", f"{size / 1024:.4g} KiB", "Fetch it now?"):
        assert text in shown
    assert shown.count("[y/N]") == 1
    assert names(own) == [NAME]
    network.log.clear()
    again = scanloom("segment", study, "-m", "spleen", "-o", tmp_path / "labels.nii.gz", "--json")
    assert again.document["cases"][0]["recalled"]
    assert scanloom("models", "show", NAME.upper(), "--json").document["model"]["name"] == NAME
    assert network.log == []


@pytest.mark.parametrize(
    ("typed", "offline", "requests"), [("n\n", "", ["/list", "/zoo.zip"]), ("y\n", "1", [])]
)
def test_nothing_is_added_if_the_answer_is_no_or_the_network_is_forbidden(
    typed: str, offline: str, requests: list[str], own: Path, study: Path, network: Server
) -> None:
    """The list and the size of the zip file are asked for, before the question."""
    code, shown = answer(
        f"{network.address}/list",
        *("segment", study, "-m", NAME, "-o", study / "labels.nii.gz"),
        typed=typed,
        environment={**os.environ, "SCANLOOM_OFFLINE": offline},
    )

    assert code == 65
    assert f"`scanloom models add {NAME}` gets it" in shown
    assert ("[y/N]" in shown) == (not offline)
    assert [path for path, _ in network.log] == requests
    assert names(own) == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("total_fast", "`scanloom models add totalsegmentator/total_fast` gets it"),
        ("TotalSegmentator", "`scanloom models add totalsegmentator/total` gets it"),
        ("brain", "`scanloom models add brainchop/mindgrab` gets it"),
        ("monai/vista3d", "`scanloom models add vista3d` gets it"),
        ("wholeBody_ct_segmentation:highres=false", "add wholeBody_ct_segmentation` gets it"),
        ("tissue_types", "'tissue_types' need a licence"),
        ("totl_fast", "no model or folder 'totl_fast'; did you mean total_fast"),
        ("models/spleen", "there is no folder 'models/spleen'"),
    ],
)
def test_without_a_terminal_the_command_is_named(
    typed: str, expected: str, own: Path, study: Path, network: Server
) -> None:
    ended = scanloom("segment", study, "-m", typed, "-o", study / "out")

    assert ended.code == 65
    assert expected in ended.err
    assert "MODEL_UNKNOWN" in ended.err
    assert network.log == []


def test_without_a_network_the_message_says_so(
    own: Path, network: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no resolver knows (RFC 6761) stands for a machine without a network."""
    monkeypatch.setattr(
        "scanloom.convert.download.addresses.ZOO_LIST", "https://scanloom.invalid/list"
    )

    ended = scanloom("models", "add", "spleen")

    assert ended.code == 65
    assert "there is no network, or no such host (DOWNLOAD)" in ended.err
    assert "`scanloom models bundle`" in ended.err
