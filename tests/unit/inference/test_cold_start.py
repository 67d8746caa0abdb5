"""What a first scan does not wait for."""

from __future__ import annotations

import subprocess
import sys

ESTIMATE = """
import sys
from scanloom.cards.store import find_model
from scanloom.inference.network.memory import network_bytes
card = find_model("ct_tissue")
network_bytes(card.network, card.window.size)
print("torch._dynamo" in sys.modules)
"""


def test_the_estimate_does_not_import_torchs_compiler() -> None:
    """It takes a second or more, and nothing else here needs it."""
    program = [sys.executable, "-c", ESTIMATE]
    done = subprocess.run(program, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
