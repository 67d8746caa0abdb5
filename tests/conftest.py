"""Settings of all tests."""

from __future__ import annotations

import os

# Threads of PyTorch that wait do not spin: two test processes on two cores take half the time
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
