"""The folder of the real scans, which are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def scans_folder() -> Path | None:
    """Return the folder of real scans: SCANLOOM_SCANS, or shared data beside the checkout."""
    named = os.environ.get("SCANLOOM_SCANS")
    folder = Path(named) if named else ROOT.parent / "shared" / "data" / "scans"
    return folder if folder.is_dir() else None


def scans(relative: str) -> Path:
    """Return a real scan's path; skip the test by name where it is absent."""
    folder = scans_folder()
    if folder is None or not (folder / relative).exists():
        pytest.skip(f"real scan {relative} is not here (SCANLOOM_SCANS)")
    return folder / relative
