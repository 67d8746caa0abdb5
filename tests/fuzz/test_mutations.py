"""Damaged files end as a ScanError or are read; never as a crash, a hang or another exception.

10,000 damaged files and 2,000 damaged compressed streams, by number, with `make test-slow`; some
hundred of them always. `python -m fuzz.worker KIND NUMBER 1 FOLDER` (from tests/) does one again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.mutate import damaged
from fuzz.seeds import seeds

TESTS = Path(__file__).parents[1]
QUICK = {"dicom": 120, "nifti": 120, "nrrd": 120, "mha": 120, "stream": 60}
WHOLE = {"dicom": 4000, "nifti": 2000, "nrrd": 2000, "mha": 2000, "stream": 2000}
PIECE = 500


def run_worker(kind: str, first: int, count: int, folder: Path) -> list[dict]:
    """Read the scans of these numbers; return the faults, and print the outcomes."""
    wrong: list[dict] = []
    codes: dict[str, int] = {}
    end = first + count
    while first < end:
        command = [sys.executable, "-m", "fuzz.worker", kind, str(first), str(end - first)]
        folder.mkdir(parents=True)
        done = subprocess.run(
            [*command, str(folder)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS), "XDG_CACHE_HOME": str(folder / "cache")},
            timeout=3000,
        )
        reported = [json.loads(line) for line in done.stdout.splitlines()]
        wrong += [report for report in reported if report.get("error") or report.get("batch")]
        for report in reported:
            if "code" in report:
                codes[report["code"] or "read"] = codes.get(report["code"] or "read", 0) + 1
        first = end
        if done.returncode != 0:
            number = int((folder / "now").read_text())
            wrong.append({"number": number, "crash": done.returncode, "said": done.stderr[-3000:]})
            first = number + 1
        folder = folder.with_name(folder.name + "x")
    print(kind, dict(sorted(codes.items())))
    assert sum(codes.values()) + sum("error" in w or "crash" in w for w in wrong) >= count
    return wrong


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", QUICK)
def test_damaged_files_are_refused_or_read(kind, tmp_path):
    assert run_worker(kind, 0, QUICK[kind], tmp_path / "work") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first"), [(k, n) for k, count in WHOLE.items() for n in range(0, count, PIECE)]
)
def test_all_damaged_files_are_refused_or_read(kind, first, tmp_path):
    assert run_worker(kind, first, PIECE, tmp_path / "work") == []


@pytest.mark.parametrize("kind", QUICK)
def test_a_number_always_gives_the_same_damage(kind):
    for number in range(20):
        assert damaged(kind, number) == damaged(kind, number)
    changed = sum(damaged(kind, n).files not in [s.files for s in seeds(kind)] for n in range(50))
    assert changed > 40


@pytest.mark.parametrize("kind", QUICK)
def test_undamaged_files_are_read(kind, tmp_path):
    import scanloom

    for n, seed in enumerate(seeds(kind)):
        folder = tmp_path / str(n)
        folder.mkdir()
        for name, data in seed.files.items():
            (folder / name).write_bytes(data)
        assert scanloom.load_volume(folder, phase=0 if kind == "nifti" else None).array.std() > 0
