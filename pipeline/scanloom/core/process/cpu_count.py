"""Processor cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
"""Limits of a container, as Linux shows them in it."""


def core_count() -> int:
    """Return the number of cores that this process may use.

    On Linux, these are the cores of its CPU set, and at most as many as a container's limit of
    processor time allows: more threads would wait for each other.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
        return min(usable, container_limit() or usable)
    return os.cpu_count() or 1


def container_limit(folder: Path = CGROUPS) -> int | None:
    """Return the cores that a container's limit allows, rounded up; None without a limit.

    Parameters
    ----------
    folder : Path
        Mount of the control groups: version 2 has `cpu.max`, version 1 a folder `cpu`.
    """
    files = ((("cpu.max",),), (("cpu", "cpu.cfs_quota_us"), ("cpu", "cpu.cfs_period_us")))
    for names in files:
        try:
            texts = [folder.joinpath(*name).read_text(encoding="ascii") for name in names]
            quota, period = (float(number) for number in " ".join(texts).split())
        except (OSError, ValueError):  # "max" in version 2
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return None
