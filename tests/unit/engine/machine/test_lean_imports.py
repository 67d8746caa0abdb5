"""Modules that are hidden from imports in processes of our own."""

from __future__ import annotations

import subprocess
import sys

import pytest

NETWORKS = """
import importlib
from scanloom.cards.networks import NETWORKS
from scanloom.engine.machine.lean_imports import (
    leave_out_unused_modules, without_optional_imports
)
leave_out_unused_modules()
leave_out_unused_modules()
with without_optional_imports():
    for name, allowed in NETWORKS.items():
        assert getattr(importlib.import_module(allowed.module), name)
"""


@pytest.mark.thorough
def test_every_network_can_be_imported_without_the_modules_that_are_left_out() -> None:
    subprocess.run([sys.executable, "-c", NETWORKS], check=True)
