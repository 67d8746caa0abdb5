"""Models for the engine's tests: a threshold that behaves as a scan's brightest voxel selects."""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np

from scanloom.cards.card import Checks, ModelCard
from scanloom.core import (
    Case,
    Layer,
    Outputs,
    ReadOptions,
    Reason,
    ScanError,
    Segmentation,
    Series,
    StepTimer,
    Volume,
)
from scanloom.inference.engines.selection import torch_choice
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.system.scratch_folders import process_start_ticks
from support.model_cards import card, structures

# Brightest voxels, each of which makes the model behave in its own way; see `behave`
SUCCEED = 1000
ABORT = 1001
HANG_WITH_GIL = 1002
SLEEP_FOREVER = 1003
TAKE_ALL_MEMORY = 1004
SLEEP_3_S = 1005
RAISE = 1006
FILL_DEVICE_ONCE = 1007  # the device is full at the first try
KILL_ITSELF = 1008
PANIC = 1009  # as libraries in Rust do


class Panic(BaseException):
    """Derives from no Exception, as the one of PyO3."""


class Threshold:
    """Labels voxels above 500 as the first structure, after it behaved as the scan selects."""

    device_name = "cpu"
    precision_name, changes = "float32", ""
    engine = torch_choice("the test's own formula")

    def __init__(self, weights: Path, starts: Path | None, seconds: float) -> None:
        self.card: ModelCard = card(
            weights,
            name="threshold",
            structures=structures(1),
            checks=Checks(hounsfield=False),  # each scan has a value of its own
        )
        self._starts, self._seconds = starts, seconds

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        with (clock or StepTimer()).step("network"):
            task = int(volume.array.max())
            if self._starts is not None:
                with self._starts.open("a") as file:
                    file.write(f"{task} {os.getpid()} {time.time():.4f}\n")
            behave(task, self._seconds)
            if task == FILL_DEVICE_ONCE and self._starts is not None:
                fill_device(self._starts)
        labels = (volume.array > 500).astype(np.uint8)
        layer = Layer(np.asfortranarray(labels), self.card.structures)
        return Segmentation("threshold", (layer,), volume.grid, "1")


def behave(task: int, seconds: float) -> None:
    time.sleep(seconds)
    if task == ABORT:
        os.abort()
    elif task == HANG_WITH_GIL:
        ctypes.PyDLL(None).sleep(3600)  # a PyDLL keeps the GIL
    elif task == SLEEP_FOREVER:
        time.sleep(3600)
    elif task == TAKE_ALL_MEMORY:
        kept = [np.ones(1 << 24) for _ in range(1 << 12)]  # 512 GiB, by and by
        raise AssertionError(len(kept))
    elif task == SLEEP_3_S:
        time.sleep(3.0)
    elif task == KILL_ITSELF:
        os.kill(os.getpid(), signal.SIGKILL)
    elif task == RAISE:
        raise RuntimeError("a fault of the model")
    elif task == PANIC:
        raise Panic


class Formula(Threshold):
    """A threshold that notes which scans it works on, and since when: see `formula_run.py`."""

    def __init__(self, weights: Path, notes: Path, seconds: float) -> None:
        super().__init__(weights, notes / "starts", seconds)
        self._notes = notes

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        mark = self._notes / f"at-{os.getpid()}-{int(volume.array.max())}"
        mark.touch()
        try:
            return super().predict(volume, clock)
        finally:
            mark.unlink(missing_ok=True)  # another scan may be as bright


def formula_models(_: int = 1) -> Sequence[Threshold]:
    """Load models, in a child process."""
    if os.environ.get("FORMULA_BROKEN"):
        CaseFolder.publish = publish_bit_by_bit
    notes = Path(os.environ["FORMULA"])
    note_process(notes)
    weights = notes / "weights"
    weights.touch()
    return (Formula(weights, notes, float(os.environ["FORMULA_SECONDS"])),)


def formula_loader(_: object, planned_cases: int, out: Path) -> Callable[[], Sequence[Threshold]]:
    """Stand in for `scanloom.engine.prepare.model_loader`."""
    return partial(formula_models, planned_cases)


def note_process(notes: Path) -> None:
    """Note this process: root alone can read the environment of a process without dumps."""
    with (notes / "processes").open("a") as file:
        file.write(f"{os.getpid()} {process_start_ticks(os.getpid())}\n")


def publish_bit_by_bit(folder: CaseFolder, **_: object) -> Path:
    """Publish as nobody should: file by file, so that who is killed meanwhile leaves a part."""
    target = folder.out / "cases" / folder.name
    (folder.path / "SHA256SUMS").touch()
    for file in sorted(p for p in folder.path.rglob("*") if p.is_file()):
        copy = target / file.relative_to(folder.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        time.sleep(0.01)
    return target


def fill_device(starts: Path) -> None:
    """Raise torch's error for a full device, unless the scan was started before."""
    if sum(line.startswith(f"{FILL_DEVICE_ONCE} ") for line in starts.read_text().splitlines()) < 2:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory")


def threshold_models(
    weights: Path, starts: Path | None = None, seconds: float = 0.0
) -> Sequence[Threshold]:
    return (Threshold(weights, starts, seconds),)


def unfit_models(notes: Path, how: str, times: int) -> Sequence[Threshold]:
    """Fail in the first `times` processes that load them, then give a threshold."""
    with notes.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(notes.read_text().splitlines()) <= times:
        if how == "exit":
            os._exit(3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "library":
            importlib.import_module("scanloom_has_no_such_module")
        if how == "memory":
            raise MemoryError
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are no PyTorch file")
    weights = notes.with_name("weights")
    weights.touch()
    return threshold_models(weights)


class FullWorker(Threshold):
    """Finds no room for temporary files, if it is an engine of the worker that came first."""

    def __init__(self, weights: Path, first: Path, seconds: float) -> None:
        super().__init__(weights, None, seconds)
        self._first, self._worker = first, str(os.getppid())

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        with suppress(FileExistsError):
            self._first.symlink_to(self._worker)
        if self._first.readlink().name == self._worker:
            raise ScanError(Reason.SCRATCH_FULL, "no room")
        return super().predict(volume, clock)


def full_worker_models(weights: Path, first: Path, seconds: float) -> Sequence[Threshold]:
    return (FullWorker(weights, first, seconds),)


def tiring_models() -> Sequence[Threshold]:
    """Use up the processor time that the process may have."""
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    until = time.process_time() + 60.0
    while time.process_time() < until:
        pass
    raise AssertionError("there is no limit")


def make_case(folder: Path, name: str, task: int = SUCCEED) -> Case:
    """Write a small CT as NIfTI, with a bright block, and return its case."""
    array = np.full((12, 11, 10), -900, np.int16)
    array[4:8, 4:8, 4:8] = task
    path = folder / f"{name}.nii.gz"
    nib.save(nib.Nifti1Image(array, np.diag((2.0, 2.0, 2.0, 1.0))), path)
    series = Series("nifti", (path,))
    return Case(
        name.ljust(26, "a"), series, Outputs(), "source", "recipe", ReadOptions(modality="CT")
    )
