"""The public names of `import scanloom`, and the cost of the import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata

import pytest

import scanloom

HEAVY = ("torch", "monai", "highdicom", "SimpleITK", "distributed", "numpy")


def test_all_is_sorted_and_there() -> None:
    assert scanloom.__all__ == sorted(scanloom.__all__)
    for name in scanloom.__all__:
        assert getattr(scanloom, name).__name__ == name
        assert name in dir(scanloom)


def test_dir_lists_what_is_public_only() -> None:
    named = [name for name in dir(scanloom) if not name.startswith("__")]
    assert named == scanloom.__all__


def test_version_is_that_of_the_package() -> None:
    assert scanloom.__version__ == metadata.version("scanloom")
    assert "__version__" in dir(scanloom)


def test_private_names_are_not_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_volumes'"):
        _ = scanloom.load_volumes


def test_public_names_are_those_of_their_homes() -> None:
    volume = importlib.import_module("scanloom.io.read").load_volume
    assert scanloom.load_volume is volume


def test_import_loads_nothing_heavy() -> None:
    program = f"import scanloom, sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
