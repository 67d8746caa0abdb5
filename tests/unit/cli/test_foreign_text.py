"""Names of files, words of headers and of models reach a terminal by their letters alone."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydicom import Dataset
from rich.text import Text

from scanloom.cli.console import clean, console, print_json
from scanloom.engine.monitor import StatusWriter, final_status
from support.commands import Ended, scanloom, write_tiny_bundle
from support.write_dicom import Words, noise, write_series

EVIL = "\x1b]0;owned\x07 \x9b31m \u202ecod\u2028"
NAME = "\x1b[2J\x9b31m\u202eevil\nfine"
STEERING = ("\x1b", "\x07", "\x9b", "\u202e", "\u2028", "\x85")


def assert_tame(ended: Ended) -> None:
    for text in (ended.out, ended.err):
        assert not [c for c in STEERING if c in text]


def mark(k: int, ds: Dataset) -> None:
    ds.SpecificCharacterSet = "ISO_IR 192"
    ds.PatientID, ds.PatientName, ds.SeriesDescription = EVIL, EVIL, EVIL


@pytest.fixture(scope="module")
def evil(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A study whose names and headers steer terminals; its results, and their case."""
    folder = tmp_path_factory.mktemp("evil")
    study, out = folder / NAME, folder / f"out {NAME}"
    write_series(study, noise(), words=Words(), edit=mark)
    command = ["segment", study, "--model", tiny_model, "--out", out, "--key", folder / "key"]
    ended = scanloom(*command, "--json")
    assert ended.code == 0, ended.err
    assert_tame(ended)
    return study, out, ended.document["cases"][0]["case"]


def test_where_tells_words_of_headers_without_their_effect(evil: tuple[Path, Path, str]) -> None:
    study, out, case = evil
    key = ["--out", out, "--key", out.parent / "key"]

    reported = scanloom("where", case, *key)
    as_json = scanloom("where", case, *key, "--json")

    for ended in (reported, as_json):
        assert ended.code == 0
        assert_tame(ended)
    assert "\\x1b]0;owned" in reported.out
    assert "\\nfine" in reported.out  # a name makes no lines of its own
    [source] = as_json.document["sources"]
    assert (source["path"], source["patient_id"]) == (str(study), EVIL.strip())


def test_where_steers_no_real_terminal(evil: tuple[Path, Path, str]) -> None:
    _, out, case = evil
    screen, shown = pty.openpty()
    command = [sys.executable, "-m", "scanloom", "where", case, "--out", str(out)]
    done = subprocess.Popen([*command, "--key", str(out.parent / "key")], stdout=shown)
    os.close(shown)
    text = b""
    try:
        while piece := os.read(screen, 1 << 16):
            text += piece
    except OSError:  # how a terminal ends
        pass
    assert done.wait(300) == 0
    assert b"owned" in text
    assert b"\x1b]0" not in text
    assert b"\xc2\x9b" not in text


def test_commands_tell_paths_without_their_effect(
    evil: tuple[Path, Path, str], tiny_model: Path, tmp_path: Path
) -> None:
    study, out, _ = evil
    key = ["--key", out.parent / "key"]
    empty, nothing = tmp_path / NAME, tmp_path / f"no {NAME}"
    empty.mkdir()
    segment = ["segment", "--model", tiny_model, *key, "--out"]
    commands: list[list[Any]] = [
        [*segment, out, study],
        [*segment, tmp_path / "new", empty, nothing],
        ["segment", study, "--model", f"no{EVIL}", *key],
        ["index", study, *key, "--out", tmp_path / "index"],
        ["index", nothing, *key],
        ["run", f"no{EVIL}", study, "--out", out],
        ["status", out],
        ["status", nothing],
        ["verify", out],
        ["report", out],
        ["join", nothing, "--out", out, *key],
        ["models", "show", f"no{EVIL}"],
        ["models", "show", empty],
        ["doctor", EVIL],
        ["status", out, study],
        [f"no{EVIL}"],
        ["index", study, f"--no{EVIL}"],
    ]
    for command in commands:
        assert_tame(scanloom(*command))


def test_status_names_a_damaged_run_without_its_effect(tmp_path: Path) -> None:
    intact, damaged = tmp_path / "runs" / "1", tmp_path / "runs" / f"2 {NAME}"
    for folder in (intact, damaged):
        folder.mkdir(parents=True)
    with final_status(StatusWriter("1", intact)):
        pass
    (damaged / "status.json").write_text("{")

    ended = scanloom("status", tmp_path)

    assert_tame(ended)
    assert "status.json is damaged" in ended.err


def test_models_show_tells_metadata_without_its_effect(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundles")
    path = bundle / "configs" / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata |= {"description": EVIL, "name": EVIL, "copyright": EVIL, "intended_use": EVIL}
    path.write_text(json.dumps(metadata))

    assert_tame(scanloom("models", "show", bundle))
    assert_tame(scanloom("models", "show", bundle, "--json"))


def test_a_console_shows_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)

    console().print(EVIL, Text(EVIL))

    assert shown.getvalue().count("\\x9b31m") == 2
    assert not [c for c in STEERING if c in shown.getvalue()]


def test_json_says_the_same_after_it_was_made_safe(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"name": f"{EVIL} Zoë \udcff 名"}

    print_json(document)

    text = capsys.readouterr().out
    assert not [c for c in STEERING if c in text]
    assert "Zoë" in text
    assert json.loads(text) == document


def test_lines_and_tabs_of_ours_stay() -> None:
    assert clean("a\tb\n\x1b[0mc\r") == "a\tb\n\\x1b[0mc\\r"
