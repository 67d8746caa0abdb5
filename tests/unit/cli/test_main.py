"""The command line as a whole: help, version, imported modules, refusals."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest

from support.commands import scanloom, scanloom_process

HEAVY = (
    "torch",
    "monai",
    "highdicom",
    "SimpleITK",
    "distributed",
    "dask",
    "pydicom",
    "pyarrow",
    "numpy",
)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["segment", "--help"], ["models", "--help"], ["--version"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """No torch, no NumPy: help is there at once. The figure is printed, not judged."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "scanloom", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    print(f"{' '.join(arguments)}: {time.perf_counter() - started:.2f} s")

    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_help_names_every_command() -> None:
    ended = scanloom("--help")

    assert ended.code == 0
    for command in ("segment", "models", "doctor", "demo", "where", "join"):
        assert re.search(rf"\b{command}\b", ended.out)
    assert "not a medical device" in ended.out


def test_paragraphs_of_help_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks of the source, at 100 columns, do not break lines of the help."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("plan", "report", "join"):
        text = scanloom(command, "--help").out.split("\u256d")[0]
        for line, after in pairwise(text.strip().splitlines()):
            if line.strip() and after.strip():
                assert len(line.rstrip()) + len(after.split()[0]) >= 78, line


def test_version_is_that_of_the_package() -> None:
    assert scanloom("--version").out == f"scanloom {version('scanloom')}\n"


def test_python_m_scanloom_is_the_same() -> None:
    assert scanloom_process("--version").out == scanloom("--version").out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["segmant"], "segment"),
        (["segment", "x", "--modle", "ct_tissue"], "--model"),
        (["segment"], "PATH"),
        (["run", "ct_tissue", "x", "--shard", "5/4"], "--shard"),
        (["run", "ct_tissue", "x", "--shard", "5/4"], "such as 1/4"),
        (["segment", "--model", "ct_tissue"], "PATH"),
        (["segment", "x", "--model", "m", "--orientation", "RAP"], "RAS"),
        (["segment", "x", "--model", "m", "--orientation", "RRS"], "RAS"),
        (["segment", "x", "--model", "m", "--device", "gpu"], "cuda"),
        (["segment", "x", "--model", "m", "--also", "picture"], "masks"),
        (["segment", "x", "--model", "m", "--also", "masks,rtstrct"], "rtstruct"),
        (["segment", "x", "--model", "m", "--seg", "fractional"], "labelmap"),
        (["segment", "x", "--model", "m", "--phase", "-1"], "phase"),
        (["models", "show"], "NAME"),
    ],
)
def test_wrong_usage_says_what_was_meant(arguments: list[str], hint: str) -> None:
    ended = scanloom(*arguments)

    assert ended.code == 2
    assert hint.lower() in ended.err.lower()
    assert ended.out == ""


COMMANDS = (
    *("segment", "index", "plan", "run", "status", "report", "verify", "doctor", "demo"),
    *(
        "fetch",
        "listen",
        "send",
        "where",
        "join",
        "models",
        "models add",
        "models show",
        "models verify",
        "",
    ),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_no_types(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = scanloom(*command.split(), "-h").out.splitlines()

    assert 10 <= len(lines) <= 62
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for trace in ("<bool>", "list[", "}...", "env var"):
        assert trace not in text
    assert text == "\n".join(scanloom(*command.split(), "--help").out.splitlines())


def test_help_of_segment_is_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = scanloom("segment", "--help").out

    titles = re.findall(r"\u256d\u2500 (\w+) \u2500", text)
    assert titles == ["Arguments", "Input", "Model", "Output", "Device", "Expert", "General"]


@pytest.mark.parametrize("group", [[], ["models"]])
def test_a_group_alone_prints_its_help(group: list[str]) -> None:
    ended = scanloom(*group)
    assert "Usage: scanloom" in ended.out + ended.err
    assert "Commands" in ended.out + ended.err


def test_short_version() -> None:
    assert scanloom("-V").out == scanloom("--version").out


def test_swapped_words_of_a_run_are_noticed(tmp_path: Path) -> None:
    ended = scanloom("run", tmp_path, "ct_tissue", "-o", tmp_path / "out")

    assert ended.code == 65
    assert "'ct_tissue' is: swap them" in ended.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["segment", "x", "--out="], "--out"),
        (["segment", "x", "-o", ""], "-o"),
        (["segment", "x", "--out", " "], "--out"),
        (["segment", "x", "--key="], "--key"),
        (["segment", "x", "--log", ""], "--log"),
        (["segment", ""], "PATH"),
        (["run", "ct_tissue", " "], "PATH"),
        (["run", "ct_tissue", "x", "--metrics="], "--metrics"),
        (["index", "x", "--out="], "--out"),
        (["status", ""], "PATH"),
        (["report", "--out="], "--out"),
        (["join", "x.csv", "--to="], "--to"),
        (["models", "add", "x", "--name="], "--name"),
    ],
)
def test_an_empty_path_is_refused_by_name(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = scanloom(*arguments)

    assert ended.code == 2
    assert f"'{name}': the text is empty" in ended.err
    assert not list(tmp_path.iterdir())


def test_a_blank_variable_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCANLOOM_OUT", " ")
    ended = scanloom("segment", "x")

    assert ended.code == 2
    assert "'SCANLOOM_OUT': the text is empty" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--gpu", "use --device cuda"),
        ("--ml", "use -o labels.nii.gz"),
        ("--roi_subset=liver", "use --structures liver,spleen"),
        ("--disable_tta", "use --mirror no"),
    ],
)
def test_an_option_of_another_tool_is_translated(option: str, hint: str, tmp_path: Path) -> None:
    ended = scanloom("segment", tmp_path, option)

    assert ended.code == 2
    assert hint in ended.err
    assert "Possible options" not in ended.err


def test_an_option_that_the_workflow_has_is_named_there(tmp_path: Path) -> None:
    ended = scanloom("run", "ct_tissue", tmp_path, "--gpu")

    assert ended.code == 2
    assert "execution: {device: cuda}" in " ".join(ended.err.replace("│", " ").split())
