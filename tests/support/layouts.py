"""The two layouts of `OUT/cases`, by literal paths: the product's functions are no witness."""

from __future__ import annotations

from pathlib import Path

import pytest

both_layouts = pytest.mark.parametrize("layout", ["flat", "fanned"], indirect=True)
"""Runs a test in an output folder without subfolders of `cases/`, and in one with them."""


def case_folders(out: Path) -> list[Path]:
    """Return the folders of all cases, sorted by name."""
    cases = out / "cases"
    found = [*cases.glob("[!_]*/"), *cases.glob("_??/*/")]
    return sorted((p for p in found if p.is_dir()), key=lambda folder: folder.name)


def folder_of(out: Path, name: str) -> Path:
    """Return the folder of a case, which is in one place only."""
    [folder] = [folder for folder in case_folders(out) if folder.name == name]
    return folder


def fan_by_hand(out: Path) -> None:
    """Move all cases to the subfolders in which a run with many of them publishes them."""
    for folder in case_folders(out):
        target = out / "cases" / f"_{folder.name[-2:]}" / folder.name
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
    (out / "cases" / "_folders").touch()
