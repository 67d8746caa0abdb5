"""Processor cores that this process may use."""

from __future__ import annotations

import os


def core_count() -> int:
    """Return the number of cores that this process may use: on Linux, those of its CPU set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
