"""With SCANLOOM_STAND_IN=1 these tests run on a stand-in device, on a machine without a GPU."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

_STACK = ExitStack()

if os.environ.get("SCANLOOM_STAND_IN") == "1":  # before modules ask whether a device is here
    from support.fake_cuda import stand_in

    _STACK.enter_context(stand_in())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the stand-in."""
    _STACK.close()
