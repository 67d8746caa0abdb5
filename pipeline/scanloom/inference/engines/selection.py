"""Chooses the engine of a model: by request, or by measurements on this machine."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from scanloom.cards.card import ModelCard
from scanloom.core import StepTimer
from scanloom.core.packages import package_versions
from scanloom.inference.device import EngineChoice
from scanloom.inference.engines.measurement import ScanWindows, TorchModel, measure
from scanloom.inference.engines.protocol import (
    Engine,
    EngineUnfitError,
    NetworkRequest,
    Run,
)
from scanloom.inference.engines.registry import AUTOMATIC, ENGINES, find_engine
from scanloom.inference.engines.verdicts import (
    Verdict,
    one_at_a_time,
    read_verdict,
    save_verdict,
    verdict_file,
)
from scanloom.inference.network.loading import LoadedNetwork

logger = logging.getLogger(__name__)

TORCH = "torch"
LEAST_WINDOWS = 20
"""Windows that are to be run, at least, before an engine is measured: it costs about 5 of them."""


def torch_choice(why: str) -> EngineChoice:
    """Return torch as the engine, and the reason."""
    return EngineChoice(TORCH, torch.__version__, why)


@dataclass(eq=False)
class EngineSelector:
    """Chooses and prepares the engine of a model's networks, once for each shape and type.

    Parameters
    ----------
    card : ModelCard
        The model.
    requested : str
        "auto", "torch", or a name of `ENGINES`.
    load : callable
        Returns the model's networks in float32 on the CPU.
    planned_cases : int
        Scans that this process is to segment, among which a preparation is spread.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if the requested engine is not installed.
    """

    card: ModelCard
    requested: str
    load: Callable[[], LoadedNetwork]
    planned_cases: int = 1
    choice: EngineChoice = field(init=False)
    _decided: dict[object, tuple[EngineChoice, list[Run] | None]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        self.choice = torch_choice("requested" if self.requested == TORCH else "not measured")
        if self.requested not in ("auto", TORCH):
            find_engine(self.requested)

    def prepared_runs(
        self, scan: ScanWindows, dtype: torch.dtype, device: torch.device
    ) -> list[Run] | None:
        """Return the networks that an engine has prepared before for such windows; else None."""
        choice, runs = self._decided.get((scan.shape, dtype, device), (self.choice, None))
        if runs is not None:
            self.choice = choice
        return runs

    def runs(self, model: TorchModel, scan: ScanWindows, clock: StepTimer) -> list[Run] | None:
        """Return how each network of the model is run; None for torch.

        Parameters
        ----------
        model : TorchModel
            The model's networks as torch runs them.
        scan : ScanWindows
            The scan to be labelled, with which an engine is measured if necessary.
        clock : StepTimer
            Times the step "engine".
        """
        if self.requested == TORCH:
            return None
        if self.card.window.size is None:
            self.choice = torch_choice("the model's window is the whole scan")
            return None
        key = (scan.shape, model.loaded.dtype, model.device)
        if key not in self._decided:
            decision = self._decide(model, scan, clock)
            if decision is None:  # asked again for the next scan
                self.choice = torch_choice("too few windows to measure another engine")
                return None
            self._decided[key] = decision
        self.choice, runs = self._decided[key]
        return runs

    def _decide(
        self, model: TorchModel, scan: ScanWindows, clock: StepTimer
    ) -> tuple[EngineChoice, list[Run] | None] | None:
        """Return an engine with the networks that it prepared; None if it is not measured yet."""
        names = AUTOMATIC if self.requested == "auto" else (self.requested,)
        installed = [ENGINES[name] for name in names if ENGINES[name].version() is not None]
        why = "no other engine is installed" if not installed else "no other engine fits"
        for engine in installed:
            if not engine.supports(model.device, model.loaded.dtype):
                continue
            requests = self._requests(model, scan)
            try:
                verdict = self._verdict(engine, requests[0], model, scan, clock)
                if verdict is None:
                    return None
                if verdict.used or (self.requested != "auto" and verdict.as_torch):
                    with clock.step("engine"):
                        runs = [engine.prepare(request).run for request in requests]
                    version = str(engine.version())
                    return EngineChoice(engine.name, version, verdict.why), runs
                why = f"{engine.name}: {verdict.why}"
            except EngineUnfitError as exc:
                why = f"{engine.name}: {exc}"
        if self.requested != "auto":
            logger.warning("torch is used instead of %s", why)
        return torch_choice(why), None

    def _verdict(
        self,
        engine: Engine,
        request: NetworkRequest,
        model: TorchModel,
        scan: ScanWindows,
        clock: StepTimer,
    ) -> Verdict | None:
        """Return the verdict on an engine, measured now if it pays; None if it does not."""
        path = verdict_file(engine, request)
        if (verdict := read_verdict(path)) is not None:
            return verdict
        passes = len(model.runs) * 2 ** len(self.card.window.mirror)
        planned = scan.count * passes * self.planned_cases
        if self.requested == "auto" and planned < LEAST_WINDOWS:
            return None
        with clock.step("engine"), one_at_a_time(path):
            if (verdict := read_verdict(path)) is None:
                verdict = measure(engine, request, model, scan)
                save_verdict(path, verdict)
        return verdict

    def _requests(self, model: TorchModel, scan: ScanWindows) -> list[NetworkRequest]:
        """Return what an engine prepares: a request for each network of the model."""
        networks: list[nn.Module] = []
        exact = model.loaded.dtype is torch.float32 and model.device.type == "cpu"

        def build(n: int) -> nn.Module:
            if not networks:
                first = model.loaded if exact else self.load()
                networks.extend(each.network for each in (first, *first.folds))
            return networks[n]

        return [
            NetworkRequest(
                build=functools.partial(build, n),
                identity=(*_identity(self.card), weights.sha256, weights.key or ""),
                shape=scan.shape,
                dtype=model.loaded.dtype,
                device=model.device,
                threads=torch.get_num_threads(),
            )
            for n, weights in enumerate((self.card.weights, *self.card.folds))
        ]


def _identity(card: ModelCard) -> tuple[str, ...]:
    """Return everything but the weights from which a card's networks follow."""
    arguments = json.dumps(dict(card.network.args), sort_keys=True, default=str)
    versions = package_versions(["monai"]).values()
    return (card.network.name, arguments, str(card.window.plane), card.window.sums, *versions)
