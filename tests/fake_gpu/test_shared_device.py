"""Workers that share a device: each has a share of its memory, and its labels are right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scanloom.cards.card import ModelCard
from scanloom.core import ComputeOptions, Flag, Reason, ScanError, Segmentation, StepTimer, Volume
from scanloom.engine.machine.devices import worker_environment
from scanloom.inference.device import CONTEXT_BYTES, choose_batch
from scanloom.inference.predictor import TorchPredictor
from support.fake_cuda import StandIn, stand_in

FLOAT32 = ComputeOptions(precision="float32", engine="torch")
WORKERS = ["GPU-aa11"] * 4
GIB = 1024**3
SHARE, TOO_LITTLE = 2 * GIB, GIB // 2
"""Bytes of each worker with which the small scan fits the device by its estimate, and not."""


def fake_of(share: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Yield a device for four workers, of which the others hold all of their share."""
    for name, value in worker_environment(WORKERS[0], WORKERS).items():
        monkeypatch.setenv(name, value)
    with stand_in(memory=4 * (share + CONTEXT_BYTES)) as fake:
        fake.others = 3 * share + 4 * CONTEXT_BYTES
        yield fake


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from fake_of(SHARE, monkeypatch)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from fake_of(TOO_LITTLE, monkeypatch)


def test_a_worker_allocates_its_share_at_most(
    shared: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
) -> None:
    window, cuda = (128, 128, 128), torch.device("cuda", 0)
    alone = choose_batch(window, cuda, torch.float16)
    predictor, clock = TorchPredictor(card, FLOAT32, device="cuda"), StepTimer()

    [layer] = predictor.predict(small_volume, clock).layers

    np.testing.assert_array_equal(layer.labels, small_expected.layers[0].labels)
    assert "ladder" not in clock.notes
    assert choose_batch(window, cuda, torch.float16) < alone
    shared.others = 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(SHARE + 1, dtype=torch.uint8, device="cuda")


def test_a_scan_that_ends_on_the_cpu_is_flagged(
    crowded: StandIn,
    card: ModelCard,
    small_volume: Volume,
    small_expected: Segmentation,
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = TorchPredictor(card, FLOAT32).predict(small_volume)

    assert Flag.DEVICE_TOO_SMALL in result.flags
    assert Flag.DEVICE_TOO_SMALL not in small_expected.flags
    assert result.device == "cpu"
    assert "runs on the CPU: cuda:0 is too small" in caplog.text
    np.testing.assert_array_equal(result.layers[0].labels, small_expected.layers[0].labels)


@pytest.mark.thorough
def test_a_scan_that_overflows_the_device_while_it_runs_is_flagged(
    shared: StandIn, card: ModelCard, small_volume: Volume, small_expected: Segmentation
) -> None:
    predictor = TorchPredictor(card, FLOAT32)
    shared.others = shared.memory - shared.allocated - 1000

    result = predictor.predict(small_volume)

    assert Flag.DEVICE_TOO_SMALL in result.flags
    np.testing.assert_array_equal(result.layers[0].labels, small_expected.layers[0].labels)


def test_a_device_that_was_named_is_not_replaced(
    crowded: StandIn, card: ModelCard, small_volume: Volume
) -> None:
    with pytest.raises(ScanError) as caught:
        TorchPredictor(card, FLOAT32, device="cuda").predict(small_volume)

    assert caught.value.reason is Reason.OUT_OF_MEMORY


def test_a_worker_alone_has_the_whole_device(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = ["GPU-aa11", "GPU-bb22"]
    for name, value in worker_environment(workers[0], workers).items():
        monkeypatch.setenv(name, value)
    with stand_in() as fake:
        TorchPredictor(card, FLOAT32, device="cuda")
        assert fake.share[0] == 1.0


START = """
import sys
from pathlib import Path
import numpy as np
from scanloom.core import ComputeOptions, Volume
from scanloom.inference.device import CONTEXT_BYTES
from scanloom.inference.predictor import TorchPredictor
from support import fake_cuda, model_cards

number, memory, weights, scan, counts = sys.argv[1:]
live = np.memmap(counts, np.int64, "r+", shape=4)  # bytes that each process holds


class OneOfFour(fake_cuda.StandIn):
    @property
    def others(self):
        live[int(number)] = self.live[0]
        return int(live.sum()) - self.live[0] + 4 * CONTEXT_BYTES


volume = Volume(np.load(scan), model_cards.grid((48, 48, 10), (1.3, 1.2, 2.6)), "HU", "CT")
with fake_cuda.stand_in(memory=int(memory)) as fake:
    fake.__class__ = OneOfFour
    compute = ComputeOptions(precision="float32", engine="torch")
    predictor = TorchPredictor(model_cards.card(Path(weights)), compute)
    results = [predictor.predict(volume) for _ in range(3)]
print([result.device for result in results])
np.save(f"{counts}.{number}.npy", results[-1].layers[0].labels)
"""


@pytest.mark.thorough
def test_labels_of_four_processes_on_a_device_are_right(
    card: ModelCard, small_volume: Volume, small_expected: Segmentation, tmp_path: Path
) -> None:
    root, memory = Path(__file__).parents[2], 4 * (SHARE + CONTEXT_BYTES)
    np.save(tmp_path / "scan.npy", small_volume.array)
    counts = tmp_path / "counts"
    counts.write_bytes(bytes(4 * 8))
    env = {
        **os.environ,
        **worker_environment(WORKERS[0], WORKERS),
        "PYTHONPATH": os.pathsep.join(str(root / name) for name in ("pipeline", "tests")),
        "XDG_CACHE_HOME": str(tmp_path),
    }

    def start(number: int) -> subprocess.Popen[str]:
        values = [number, memory, card.weights.file, tmp_path / "scan.npy", counts]
        command = [sys.executable, "-c", START, *map(str, values)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    outputs = [process.communicate()[0] for process in [start(n) for n in range(4)]]

    for number, output in enumerate(outputs):
        assert output == "['cuda:0', 'cuda:0', 'cuda:0']\n"
        labels = np.load(f"{counts}.{number}.npy")
        np.testing.assert_array_equal(labels, small_expected.layers[0].labels)
