"""What a first scan does not wait for."""

from __future__ import annotations

import subprocess
import sys

import pytest

ESTIMATE = """
import sys
import torch
from scanloom.cards.store import find_model
from scanloom.engine.machine.lean_imports import without_optional_imports
from scanloom.inference.network.loading import load_network
from scanloom.inference.network.memory import network_bytes
dtype = getattr(torch, sys.argv[1])
card = find_model("ct_tissue")
with without_optional_imports():
    load_network(card, dtype)
    network_bytes(card.network, card.window.size, dtype)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_loading_nor_the_estimate_imports_torchs_compiler(dtype: str) -> None:
    """It takes a second or more, and nothing else here needs it."""
    program = [sys.executable, "-c", ESTIMATE, dtype]
    done = subprocess.run(program, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
