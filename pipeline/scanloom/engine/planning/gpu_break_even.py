"""Whether a GPU pays: compare the expected time of the same cases on a GPU and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from scanloom.core import ScanError, format_duration
from scanloom.engine.planning.cost_model import CostModel
from scanloom.engine.planning.model import PlannedCase
from scanloom.engine.workflow.schema import Workflow


def on_other_device(workflow: Workflow, device: str) -> Workflow | None:
    """Return a workflow for the other kind of device: the CPU instead of a GPU, or vice versa.

    None if this machine has no GPU.
    """
    from scanloom.inference.device import choose_device

    try:
        choose_device("cuda")
    except ScanError:
        return None
    update = {"device": "cuda" if device == "cpu" else "cpu"}
    return workflow.model_copy(update={"execution": workflow.execution.model_copy(update=update)})


def gpu_advice(
    cases: Sequence[PlannedCase], gpu: CostModel, cpu: CostModel, workers: int = 1
) -> str:
    """Return a sentence on how much a GPU gains, in all and for single cases.

    Parameters
    ----------
    cases : sequence of PlannedCase
        The cases that would run.
    gpu, cpu : CostModel
        Cost models of the same models on both devices.
    workers : int
        Number of GPUs that work concurrently.
    """
    pairs = [
        (gpu_seconds, cpu_seconds)
        for case in cases
        if (gpu_seconds := gpu.seconds(case.values, case.voxels)) is not None
        and (cpu_seconds := cpu.seconds(case.values, case.voxels)) is not None
    ]
    if not pairs:
        return "whether a GPU pays could not be measured"
    on_gpu, on_cpu = (sum(column) for column in zip(*pairs, strict=True))
    on_gpu = (gpu.start or 0.0) + on_gpu / workers
    on_cpu += cpu.start or 0.0
    verb = "pays" if on_gpu < on_cpu else "does not pay"
    sentence = (
        f"a GPU {verb}: {format_duration(on_gpu)} on it, {format_duration(on_cpu)} on the CPU"
    )
    small = sum(cpu_seconds <= gpu_seconds for gpu_seconds, cpu_seconds in pairs)
    if 0 < small < len(pairs):
        sentence += f"; {small} small cases are done sooner on the CPU"
    return sentence
