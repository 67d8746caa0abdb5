"""Helpers of the benchmarks: a peer that fails or hangs must not stop the others."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from support.listeners import wait_for

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STARTS_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def meter(monkeypatch):  # and its folder on the path
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("meter")


def test_the_last_line_is_the_answer(meter):
    spent = meter.run([sys.executable, "-c", "print('words'); print('{\"a\": 1}')"])

    assert spent.answer == {"a": 1}
    assert spent.cpu > 0
    assert spent.peak > 1 << 20


def test_the_output_of_a_failed_command_is_in_the_error(meter):
    with pytest.raises(meter.Failed, match=r"(?s)ended with 3.*out of luck"):
        meter.run(
            [sys.executable, "-c", "import sys; sys.stderr.write('out of luck'); sys.exit(3)"]
        )


def test_a_command_that_hangs_is_ended_with_all_that_it_started(meter, tmp_path):
    known, limits = tmp_path / "child", iter((2, 10, 60))  # a busy machine may start it late

    while not (known.exists() and known.read_text()):
        limit = next(limits)
        with pytest.raises(meter.Failed, match=f"did not end within {limit} s"):
            meter.run([sys.executable, "-c", STARTS_A_CHILD, known], limit=limit)

    child = int(known.read_text())
    wait_for(lambda: not _runs(child))


def test_others_go_on_after_one_has_failed(meter, monkeypatch):
    one_scan = importlib.import_module("one_scan")
    answer = '{"warm": [{"steps": {"network": [2, 2], "load": [1, 1]}, "labels": "none"}]}'
    good = one_scan.Way("good", 1, 1, lambda: [sys.executable, "-c", f"print('{answer}')"])

    def never() -> list[str]:
        raise meter.Failed("its environment can't be made")

    todo = [one_scan.Way("bad", 1, 1, never), good]
    results, failed = one_scan.run_all(todo, 300, 60)

    assert [r.name for r in results] == ["good"]
    assert results[0].around(1) == 1
    assert failed == {"bad": "its environment can't be made"}


def test_agreement_of_labels_counts_voxels_and_dice(meter):
    agree = importlib.import_module("agree")
    first = np.zeros((10, 10, 10), np.uint8)
    first[:5], first[9, 9, 9] = 1, 2  # 2 is too small to count
    second = first.copy()
    second[4] = 0

    agreement = agree.agreement(first, second, voxel_ml=0.01)

    assert agreement.voxels == pytest.approx(0.9)
    assert agreement.dice_mean == agreement.dice_least == pytest.approx(2 * 400 / 900)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
