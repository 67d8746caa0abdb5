"""One output folder per command: two that differ are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from scanloom.cli.commands.status import status_table
from scanloom.cli.console import console
from scanloom.cli.options import ResultsOptions
from scanloom.engine.monitor import Status
from scanloom.options import DEFAULT_OUT


@pytest.mark.parametrize(
    ("folder", "out", "path"),
    [
        (None, DEFAULT_OUT, DEFAULT_OUT),
        (Path("a"), DEFAULT_OUT, Path("a")),
        (None, Path("b"), Path("b")),
        (Path("a"), Path("a"), Path("a")),
    ],
)
def test_the_folder_is_the_argument_or_out(folder: Path | None, out: Path, path: Path) -> None:
    assert ResultsOptions(folder, out).path == path


def test_two_folders_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="OUT is a, but --out is b"):
        _ = ResultsOptions(Path("a"), Path("b")).path


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("indexing", "2 cases ended; recorded with the whole index"),
        ("stopped", "2 cases ended; the next run takes their results"),
        ("died", "2 cases ended; the next run takes their results"),
    ],
)
def test_early_cases_of_a_run_that_is_over_wait_for_the_next(
    capsys: pytest.CaptureFixture[str], state: str, text: str
) -> None:
    console().print(status_table(Status("r", state, early=2)))
    assert text in capsys.readouterr().out
