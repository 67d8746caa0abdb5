"""Whether a GPU pays for itself: what the same cases take on it, and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scanloom.core import ScanError, duration
from scanloom.engine.rates import Rates
from scanloom.engine.workflow import Workflow

if TYPE_CHECKING:
    from scanloom.engine.plan import PlannedCase


def elsewhere(workflow: Workflow, device: str) -> Workflow | None:
    """Return the workflow on the CPU where it would run on a GPU, and on a GPU where on the CPU.

    None where there is no GPU.
    """
    from scanloom.inference.device import choose_device

    try:
        choose_device("cuda")
    except ScanError:
        return None
    other = {"device": "cuda" if device == "cpu" else "cpu"}
    return workflow.model_copy(update={"execution": workflow.execution.model_copy(update=other)})


def verdict(cases: Sequence[PlannedCase], gpu: Rates, cpu: Rates, workers: int = 1) -> str:
    """Say what a GPU gains, in all and for single cases.

    Parameters
    ----------
    cases : sequence of PlannedCase
        Those that would be worked on.
    gpu, cpu : Rates
        Of the same models on both.
    workers : int
        GPUs that work beside one another.

    Returns
    -------
    str
        Words for a person.
    """
    pairs = [
        (there, here)
        for one in cases
        if (there := gpu.seconds(one.values, one.voxels)) is not None
        and (here := cpu.seconds(one.values, one.voxels)) is not None
    ]
    if not pairs:
        return "whether a GPU pays could not be measured"
    on_gpu, on_cpu = (sum(column) for column in zip(*pairs, strict=True))
    on_gpu = (gpu.start or 0.0) + on_gpu / workers
    on_cpu += cpu.start or 0.0
    word = "pays" if on_gpu < on_cpu else "does not pay"
    said = f"a GPU {word}: {duration(on_gpu)} on it, {duration(on_cpu)} on the CPU"
    small = sum(here <= there for there, here in pairs)
    if 0 < small < len(pairs):
        said += f"; {small} small cases are done sooner on the CPU"
    return said
