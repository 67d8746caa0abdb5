"""One output folder per command: two that differ are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from scanloom.cli.options import ResultsOptions
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
