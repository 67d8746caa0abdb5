"""A container's limit of processor time bounds the number of cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scanloom.core import process
from scanloom.core.process import container_limit, core_count


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "damaged"}, None),
        ({}, None),
    ],
)
def test_limits_of_both_versions(files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert container_limit(tmp_path) == limit


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only on Linux")
def test_the_smaller_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = len(os.sched_getaffinity(0))
    for limit in (1, usable + 7, None):
        monkeypatch.setattr(process, "container_limit", lambda limit=limit: limit)
        assert core_count() == min(limit or usable, usable)
