"""Measures an engine beside torch, on windows of a real scan."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scanloom.cards.card import Decision, ModelCard, Window
from scanloom.core import format_duration
from scanloom.inference.engines.protocol import Engine, EngineUnfitError, NetworkRequest, Run
from scanloom.inference.engines.verdicts import Verdict
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.network.final_layer import FinalLayer
from scanloom.inference.network.loading import LoadedNetwork
from scanloom.inference.restore.decisions import decide_on_grid
from scanloom.inference.windows.layout import (
    WindowLayout,
    pad_to_window,
    window_layout,
    window_slices,
)

logger = logging.getLogger(__name__)

MIN_VOLUME_ML = 1.0
"""Volume above which a structure is compared by Dice."""


@dataclass(frozen=True, eq=False)
class ScanWindows:
    """The windows of a scan, with which an engine is measured.

    Parameters
    ----------
    image : (channels, X, Y, Z) float32 tensor
        The scan on the network grid, or a part of it.
    window : Window
        From the model card.
    plan : NetworkPlan
        The network grid.
    batch : int
        Number of windows in a batch.
    """

    image: torch.Tensor
    window: Window
    plan: NetworkPlan
    batch: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape (N, channels, x, y, z) of a batch."""
        return (self.batch, len(self.image), *self._layout.size)

    @property
    def count(self) -> int:
        """Number of windows."""
        return self._layout.count

    @property
    def voxel_ml(self) -> float:
        """Volume of a voxel of the network grid, in ml."""
        return math.prod(self.plan.network.spacing) / 1000

    @property
    def _layout(self) -> WindowLayout:
        _, x, y, z = self.image.shape
        axis = self.plan.network_axis(self.plan.lead)
        return window_layout(self.window, (x, y, z), axis, self.batch)

    def probes(self) -> list[torch.Tensor]:
        """Return up to two batches, each of one window many times: those that vary most."""
        size = self._layout.size
        padded, _ = pad_to_window(self.image, size, self.window)
        corners = [corner for row in self._layout.rows() for corner in row.corners]
        views = [padded[:, *window_slices(corner, size)] for corner in corners]
        spread = [float(view[:, ::4, ::4, ::4].std(correction=0)) for view in views]
        order = sorted(range(len(views)), key=lambda n: -spread[n])
        return [views[n].expand(self.shape).contiguous() for n in order[:2]]


@dataclass(frozen=True, eq=False)
class TorchModel:
    """A model as torch runs it.

    Parameters
    ----------
    card : ModelCard
        The model.
    loaded : LoadedNetwork
        Its networks, in the type in which they calculate.
    runs : sequence of callable
        How each of them is run.
    device : torch.device
        Their device.
    """

    card: ModelCard
    loaded: LoadedNetwork
    runs: Sequence[Run]
    device: torch.device


@dataclass(frozen=True, eq=False)
class LabelRule:
    """Steps from a network's output to labels.

    Parameters
    ----------
    decision : Decision
        From the card.
    activation : "softmax", "sigmoid" or None
        From the card.
    head : FinalLayer or None
        The final layer, if detached.
    classes : int
        Number of output channels.
    """

    decision: Decision
    activation: str | None
    head: FinalLayer | None
    classes: int

    def labels(self, output: torch.Tensor) -> torch.Tensor:
        """Return the labels (maps, x, y, z) of the output (1, C, x, y, z) for one window."""
        planes = output[0].to(torch.float32).transpose(0, 1).contiguous()
        scores = planes if self.head is None else self.head(planes)
        if self.activation == "sigmoid":
            scores = torch.sigmoid(scores)
        elif self.activation == "softmax":
            scores = torch.softmax(scores, dim=1)
        return decide_on_grid(scores[:, : self.classes], self.decision)


@dataclass(frozen=True)
class Agreement:
    """Agreement of two label maps.

    Parameters
    ----------
    equal : float
        Fraction of voxels with equal labels.
    dice : float or None
        Smallest Dice of a structure above `MIN_VOLUME_ML`; None without such structure.
    """

    equal: float
    dice: float | None


def compare_labels(
    reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor], voxel_ml: float
) -> Agreement:
    """Return the agreement of the labels of several windows with a reference.

    Parameters
    ----------
    reference, other : sequence of (maps, x, y, z) tensors
        Labels; 0 is background.
    voxel_ml : float
        Volume of a voxel, in ml.
    """
    same = total = 0
    sizes: dict[tuple[int, int], list[int]] = {}
    for first, second in zip(reference, other, strict=True):
        same += int((first == second).sum())
        total += first.numel()
        for which, (a, b) in enumerate(zip(first, second, strict=True)):
            for label in torch.unique(torch.cat([a.flatten(), b.flatten()])).tolist():
                if label:
                    counts = sizes.setdefault((which, int(label)), [0, 0, 0])
                    in_a, in_b = a == label, b == label
                    counts[0] += int(in_a.sum())
                    counts[1] += int(in_b.sum())
                    counts[2] += int((in_a & in_b).sum())
    dice = [
        2 * both / (first + second)
        for first, second, both in sizes.values()
        if max(first, second) * voxel_ml > MIN_VOLUME_ML
    ]
    return Agreement(same / max(total, 1), min(dice, default=None))


class TimedRun:
    """A network whose least wall time of a batch is recorded.

    Parameters
    ----------
    run : callable
        The network.
    wait : callable
        Waits for the device.
    """

    def __init__(self, run: Run, wait: Callable[[], None]) -> None:
        self._run, self._wait = run, wait
        self.seconds = float("inf")

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the network's output for a batch, which is left unchanged."""
        copy = batch.clone()
        self._wait()
        began = time.perf_counter()
        output = self._run(copy)
        self._wait()
        self.seconds = min(self.seconds, time.perf_counter() - began)
        return output


def measure(
    engine: Engine, request: NetworkRequest, model: TorchModel, scan: ScanWindows
) -> Verdict:
    """Compare an engine with torch on windows of a scan: labels and time.

    Labels are compared with those of torch in float32, the time with torch in the same type.

    Parameters
    ----------
    engine : Engine
        The engine.
    request : NetworkRequest
        The first of the model's networks.
    model : TorchModel
        The model.
    scan : ScanWindows
        A real scan.
    """
    names = (model.card.name, engine.name, str(engine.version()), request.precision)

    def wait() -> None:
        if request.device.type == "cuda":
            torch.cuda.synchronize(request.device)

    card, loaded = model.card, model.loaded
    rule = LabelRule(card.decision, card.activation, loaded.head, card.n_outputs)
    probes = scan.probes()
    typed = [probe.to(loaded.takes) for probe in probes]
    own = TimedRun(model.runs[0], wait)
    reference = own_labels = [rule.labels(own(probe)) for probe in typed]
    own(typed[0])  # the first pass takes longer
    half = request.dtype is not torch.float32
    if half:
        exact = request.build().to(request.device)
        reference = [rule.labels(exact(probe)) for probe in probes]
    try:  # after torch has freed its memory
        prepared = engine.prepare(request)
    except EngineUnfitError as exc:
        return Verdict(*names, failed=str(exc))
    other = TimedRun(prepared.run, wait)
    found = [rule.labels(other(probe)) for probe in typed]
    other(typed[0])
    agreement = compare_labels(reference, found, scan.voxel_ml)
    torch_dice = compare_labels(reference, own_labels, scan.voxel_ml).dice if half else None
    compared = (len(probes), agreement.equal, agreement.dice, torch_dice)
    verdict = Verdict(*names, *compared, own.seconds, other.seconds, prepared.seconds)
    logger.info(
        "%s with %s: %s, prepared in %s",
        *(card.name, engine.name, verdict.why, format_duration(prepared.seconds)),
    )
    return verdict
