"""Cases in flight never need more than there is, and each has its turn."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from scanloom.core import Case, Outputs, ReadOptions, Reason, Series
from scanloom.core.process import SHARED_DEVICES
from scanloom.engine.prepare import OutputTarget, placement_of, prepare
from scanloom.engine.worker.memory_admission import memory_gate
from scanloom.engine.worker.messages import ChildSetup
from scanloom.engine.worker.supervisor import WorkerSupervisor
from scanloom.inference.memory import base_bytes
from support import engine_models as em

GIB = 2**30


@pytest.fixture
def models(tmp_path: Path) -> Sequence[em.Threshold]:
    weights = tmp_path / "model.pt"
    weights.write_bytes(b"none")
    return em.threshold_models(weights)


def only_header(folder: Path, slices: int) -> Case:
    """Return the case of a file whose header promises 512 x 512 x `slices`, without voxels."""
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape((512, 512, slices))
    header.set_sform(np.diag((1.0, 1.0, 1.0, 1.0)), 1)
    path = folder / f"{slices}.nii"
    with path.open("wb") as file:
        header["magic"], header["vox_offset"] = b"n+1", 352
        header.write_to(file)
        file.truncate(352 + 2 * 512 * 512 * slices)
    return Case(
        f"{slices}", Series("nifti", (path,)), Outputs(), "", "", ReadOptions(modality="CT")
    )


def need(models: Sequence[em.Threshold], case: Case, limit: int | None) -> int:
    """Return the bytes that a case needs in addition to the models."""
    cards = [model.card for model in models]
    placement = placement_of(models)
    estimate = prepare(case, cards, None, memory_limit=limit, placement=placement).estimate
    assert estimate is not None
    return estimate.peak - estimate.base


def test_admitted_cases_fit_in_memory_in_order_of_arrival(
    tmp_path: Path, models: Sequence[em.Threshold]
) -> None:
    """A large one among many small ones gets its turn before those that came after it."""
    limit = 9 * GIB // 5
    gate = memory_gate(models, limit, places=3)
    needs = {n: need(models, only_header(tmp_path, n), limit) for n in (20, 100, 800)}
    free = limit - base_bytes([model.card for model in models])
    assert needs[20] < needs[100] < needs[800] < free < needs[800] + needs[100]
    inside: list[float] = []
    most, order, lock, go = [0.0, 0], [], threading.Lock(), threading.Event()

    def visit(slices: int) -> None:
        with gate.shared(needs[slices]):
            with lock:
                inside.append(needs[slices])
                order.append(slices)
                most[:] = max(most[0], sum(inside)), max(most[1], len(inside))
            go.wait()
            time.sleep(0.001)
            with lock:
                inside.remove(needs[slices])

    with ThreadPoolExecutor(40) as pool:
        cases = [20] * 10 + [800] + [100] * 5 + [20] * 10 + [800] + [20] * 10
        for number, slices in enumerate(cases, 1):
            pool.submit(visit, slices)
            while len(order) + len(gate._queue) < number:  # each has come before the next
                time.sleep(0.001)
        go.set()

    assert len(order) == 37
    assert most[0] <= free
    assert most[1] == 3
    places = [n for n, slices in enumerate(order) if slices == 800]
    np.testing.assert_allclose(places, [10, 26], atol=2)  # two may come in at once


def test_a_case_that_would_not_fit_alone_is_refused_by_its_header(
    tmp_path: Path, models: Sequence[em.Threshold]
) -> None:
    cards = [model.card for model in models]
    prepared = prepare(only_header(tmp_path, 1000), cards, None, memory_limit=GIB)
    assert prepared.refusal is not None
    assert prepared.refusal.reason is Reason.OUT_OF_MEMORY
    assert re.search(r"needs .* GiB in the step .*, limit 1 GiB", prepared.refusal.detail)
    assert prepared.is_too_large
    assert need(models, only_header(tmp_path, 1000), None) > GIB


def test_the_workers_of_a_machine_share_its_memory(
    models: Sequence[em.Threshold], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a host of a cluster, which tells them how many they are."""
    cards = [model.card for model in models]
    alone = memory_gate(models, None, 3)._capacity + base_bytes(cards)
    monkeypatch.setenv(SHARED_DEVICES, "cpu:4 gpu:1")

    assert memory_gate(models, None, 3)._capacity + base_bytes(cards) == pytest.approx(alone / 4)


@pytest.mark.thorough
def test_a_refused_case_does_not_delay_its_neighbours(tmp_path: Path) -> None:
    """It is no reason to start another child, and nothing of it is read: it holds no voxels."""
    (tmp_path / "w.pt").write_bytes(b"none")
    make = partial(em.threshold_models, tmp_path / "w.pt", tmp_path / "starts")
    setup = ChildSetup(OutputTarget(tmp_path / "out", bytes(32)), make, 3, memory_limit=2 * GIB)
    engine = WorkerSupervisor(setup, time_limit=60.0, log=tmp_path / "log")
    engine.warm_up()  # the child goes with the thread that started it
    large = only_header(tmp_path, 2000)
    cases = [em.make_case(tmp_path, "a"), large, em.make_case(tmp_path, "b")]
    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(engine.run, cases))
    outcomes.append(engine.run(replace(large, id="again")))
    engine.stop()

    reasons = [o.record.reason for o in outcomes if o.record]
    assert reasons == [None, Reason.OUT_OF_MEMORY, None, Reason.OUT_OF_MEMORY]
    assert [[t.end for t in o.tries] for o in outcomes] == [["done"], ["refused"]] * 2
    assert len({line.split()[1] for line in (tmp_path / "starts").read_text().splitlines()}) == 1
