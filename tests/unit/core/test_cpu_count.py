"""The limits of a container, or of a job in a group of its own, bound cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scanloom.core import process
from scanloom.core.process import container_limit, core_count, cpu_flags, memory_limits


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


GIB = 1 << 30
JOB = "slurm/uid_7/job_3/step_0"


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (f"0::/{JOB}\n", {"slurm/uid_7/job_3/memory.max": GIB, "memory.max": 9 * GIB}),
        (
            f"4:memory:/{JOB}\n3:cpu,cpuacct:/\n0::/\n",
            {
                "memory/slurm/uid_7/job_3/memory.limit_in_bytes": GIB,
                "memory/memory.limit_in_bytes": 9223372036854771712,
            },
        ),
        ("0::/of/the/host\n", {"memory.max": GIB}),  # a container that shows its own group only
        ("damaged", {"memory.max": GIB}),
    ],
)
def test_the_smallest_memory_of_all_groups_counts(
    groups: str, files: dict[str, int], tmp_path: Path
) -> None:
    for name, limit in files.items():
        folder = (tmp_path / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n")
        used = "memory.current" if name.endswith("max") else "memory.usage_in_bytes"
        (folder / used).write_text("4096\n")
    own = tmp_path / "own"
    own.write_text(groups)

    assert min(memory_limits(tmp_path, own)) == (GIB, 4096)


def test_a_jobs_limit_of_processor_time_counts(tmp_path: Path) -> None:
    (tmp_path / JOB).mkdir(parents=True)
    (tmp_path / "slurm" / "cpu.max").write_text("300000 100000\n")
    (tmp_path / JOB / "cpu.max").write_text("max 100000\n")
    (tmp_path / "own").write_text(f"0::/{JOB}\n")

    assert container_limit(tmp_path, tmp_path / "own") == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only on Linux")
def test_the_smaller_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = len(os.sched_getaffinity(0))
    for limit in (1, usable + 7, None):
        monkeypatch.setattr(process, "container_limit", lambda limit=limit: limit)
        assert core_count() == min(limit or usable, usable)


def test_flags_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name : x\nflags\t\t: fpu avx512f amx_bf16\n")
    assert cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx512f", "amx_bf16"}
    assert cpu_flags(tmp_path / "none") == frozenset()
