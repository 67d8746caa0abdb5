"""Several models of equal structures and network grid, whose scores are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from scanloom.core import Reason, ScanError, Segmentation, StepTimer, Volume
from scanloom.core.engines import EngineChoice, all_engines
from scanloom.inference.device import PrecisionChoice
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.memory_estimate import Budget, estimate_network
from scanloom.inference.memory_fallback import MemoryPlan
from scanloom.inference.predictor import TorchPredictor
from scanloom.inference.resampling.shared import SharedScan
from scanloom.inference.sliding_window import ScorePlanes
from scanloom.inference.task import Task


class Ensemble(TorchPredictor):
    """Models on one device whose scores, after activation, are averaged on the network grid.

    Networks, windows and intensity steps after resampling may differ. The mean is decided and
    brought back to the scan's grid in the way that the models have in common.

    Parameters
    ----------
    name : str
        Name of the result.
    members : sequence of TorchPredictor
        The models; `scanloom.engine.case.relations.check_relations` tells whether they fit.
    """

    def __init__(self, name: str, members: Sequence[TorchPredictor]) -> None:
        first, self.members = members[0], members
        versions = ", ".join(f"{member.card.name} {member.card.version}" for member in members)
        flags = dict.fromkeys(flag for member in members for flag in member.card.flags)
        self.card = replace(first.card, name=name, version=versions, flags=tuple(flags))
        self.compute, self.device, self._stage = first.compute, first.device, None
        self.memory_limit, self.skip_air = first.memory_limit, first.skip_air
        self.precision, self.changes = first.precision, first.changes
        if any(member.precision.dtype is not first.precision.dtype for member in members):
            self.precision = PrecisionChoice(torch.float32, "the models have different precisions")
        self.overflows = any(member.overflows for member in members)

    @property
    def engine(self) -> EngineChoice:
        """The libraries that run its networks, and the reasons."""
        return all_engines([member.engine for member in self.members])

    def departs(self, precision: str) -> bool:
        """Return whether a member was run otherwise than OUT's record says, or requested.

        The precision of the ensemble follows from that of its members.
        """
        return any(member.departs(member.precision_name) for member in self.members)

    @property
    def n_members(self) -> int:
        """Number of models, each with the mean of its folds."""
        return len(self.members)

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        shared: SharedScan | None = None,
        uncertainty: bool = False,
    ) -> Segmentation:
        """Label a scan, as `TorchPredictor.predict`."""
        segmentation = super().predict(
            *(volume, clock),
            further_channels=further_channels,
            shared=shared,
            uncertainty=uncertainty,
        )
        if shared is not None:
            for member in self.members[1:]:
                shared.finish(member.card, self.device_name)
        return replace(segmentation, sources=tuple(member.name for member in self.members))

    def memory_plans(
        self,
        volume: Volume,
        plan: NetworkPlan,
        dtype: torch.dtype | None = None,
        reserved: int = 0,
    ) -> tuple[list[MemoryPlan], list[str]]:
        """Return the memory plans as `TorchPredictor.memory_plans`, with room for all models."""
        dtype = dtype or self.precision.dtype
        for member in self.members[1:]:
            device = self.device.device
            need = estimate_network(member.card, plan, device, dtype, Budget())
            reserved += need.host_peak if device.type == "cpu" else need.device_peak
        return super().memory_plans(volume, plan, dtype, reserved)

    def scores(
        self, task: Task, plan: NetworkPlan, memory_plan: MemoryPlan
    ) -> Iterator[ScorePlanes]:
        """Return an iterator over the mean scores of all models."""
        streams = [member.scores(task, plan, memory_plan) for member in self.members]
        return mean_of_planes(streams, self.card.n_outputs)


def mean_of_planes(
    streams: Sequence[Iterator[ScorePlanes]], channels: int
) -> Iterator[ScorePlanes]:
    """Yield the mean of the scores of several models, whose blocks of planes may differ.

    Parameters
    ----------
    streams : sequence of iterator of ScorePlanes
        Each yields the planes of the whole network grid, ascending.
    channels : int
        Number of classes; further channels are left out.

    Raises
    ------
    ScanError
        MODEL_NETWORK if a model has fewer channels.
    """
    blocks = [next(stream, None) for stream in streams]
    first = 0
    while present := [block for block in blocks if block is not None]:
        ends = [block.first + len(block.scores) for block in present]
        stop = min(ends)
        parts = [slice(first - block.first, stop - block.first) for block in present]
        members = []
        for block, part in zip(present, parts, strict=True):
            if block.scores.shape[1] < channels:
                detail = f"a network has {block.scores.shape[1]} output channels, not {channels}"
                raise ScanError(Reason.MODEL_NETWORK, detail)
            members.append(block.scores[part, :channels])
        total = members[0].clone()
        for scores in members[1:]:
            total.add_(scores)
        known = [b.known[p] for b, p in zip(present, parts, strict=True) if b.known is not None]
        together = torch.cat(known, dim=1).all(dim=1, keepdim=True) if known else None
        yield ScorePlanes(first, total.div_(len(present)), tuple(members), together)
        for n, end in enumerate(ends):
            if end == stop:
                blocks[n] = next(streams[n], None)
        first = stop
