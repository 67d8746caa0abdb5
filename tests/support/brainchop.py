"""The folder of brainchop's trained networks, which are not part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.real_scans import ROOT, scans_folder


def brainchop(relative: str) -> Path:
    """Return a folder or file of them; skip the test by name where it is absent.

    They are in the folder that SCANLOOM_BRAINCHOP names, else in `models/brainchop` beside the
    real scans.
    """
    named, scans = os.environ.get("SCANLOOM_BRAINCHOP"), scans_folder()
    beside = scans.parent if scans is not None else ROOT.parent / "shared" / "data"
    folder = Path(named) if named else beside / "models" / "brainchop"
    if not (folder / relative).exists():
        pytest.skip(f"brainchop's {relative} is not here (SCANLOOM_BRAINCHOP)")
    return folder / relative
