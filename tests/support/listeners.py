"""A site that segments what it receives, by a tiny network, and what becomes of its studies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from numpy.typing import NDArray

from scanloom.engine.listen.studies import Queue, StudyState
from scanloom.io.system.scratch_folders import process_start_ticks
from support.commands import write_tiny_bundle
from support.write_dicom import Words, noise, write_series

PATIENT = "CANARY^NAME"
SHAPE = (32, 24, 20)


def write_workflow(folder: Path, **keys: Any) -> Path:
    """Write a workflow of a tiny network that takes every CT."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = write_tiny_bundle(folder / "bundles")
    page = {
        "name": "tiny",
        "models": [str(bundle)],
        "select": {"modality": "CT"},
        "execution": {"device": "cpu", "threads": 1, "engine": "torch", "in_flight": 2},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(page | keys))
    return path


def write_study(folder: Path, name: str, modality: str = "CT") -> list[Path]:
    """Write a study of one series; its files in the order of the slices."""
    stored: NDArray[Any] = noise(SHAPE, seed=len(name))
    more = {"PatientName": PATIENT, "PatientID": "CANARY-ID"}
    words = Words(modality=modality, name=name, study=name, more=more)
    numbered: dict[int, Path] = {}
    files = write_series(folder / name, stored, words=words)
    for path in files:
        numbered[position(path)] = path
    return [numbered[key] for key in sorted(numbered)]


def position(path: Path) -> int:
    """Return the z of a slice, in hundredths of a millimetre."""
    from pydicom import dcmread

    return round(100 * float(dcmread(path, stop_before_pixels=True).ImagePositionPatient[2]))


def wait_for(what: Callable[[], Any], seconds: float = 120) -> Any:
    """Return what a function returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def states(spool: Path) -> dict[str, StudyState]:
    """Return the states of the queue by StudyInstanceUID."""
    return Queue(spool).states()


def processes(mark: str) -> dict[int, str]:
    """Return the command lines of live processes with a text in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if process_start_ticks(int(folder.name)) != "0":
                    found[int(folder.name)] = command
        except OSError:
            continue
    return found
