"""Chooses the engine of a model: by request, by OUT's record, or by measurements here.

"auto" depends on a stopwatch, so it is asked once: for the first scan of an output folder, whose
record all later cases keep on all machines.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from scanloom.cards.card import ModelCard, Window
from scanloom.cards.networks import ONNX_GRAPH
from scanloom.core import Reason, ScanError, StepTimer, format_duration
from scanloom.core.engines import EngineChoice, EngineRecord, EngineRecords
from scanloom.core.packages import package_versions
from scanloom.inference.device import dtype_name, is_out_of_memory
from scanloom.inference.engines.cache import (
    EngineTrial,
    export_key,
    one_at_a_time,
    place_of,
    read_trial,
    save_measurement,
    trial_file,
)
from scanloom.inference.engines.protocol import Engine, EngineUnfitError, NetworkRequest, Run
from scanloom.inference.geometry import NetworkPlan
from scanloom.inference.network.loading import LoadedNetwork
from scanloom.inference.restore.decisions import decide_on_grid
from scanloom.inference.sliding_window import (
    WindowLayout,
    pad_to_window,
    window_layout,
    window_slices,
)
from scanloom.options import Engine as EngineName


def _engine(name: str) -> Engine:
    """Return the engine of a name in `scanloom.options`, from its module."""
    engine: Engine = importlib.import_module(f"scanloom.inference.engines.{name}_engine").ENGINE
    return engine


TORCH = "torch"
ENGINES: dict[str, Engine] = {
    name: _engine(name) for name in get_args(EngineName) if name not in ("auto", TORCH)
}
"""All engines but torch itself, in the order in which "auto" measures them."""
GRAPH_ENGINES = ("openvino", "onnxruntime")
"""Engines that run ONNX graphs; the first one does without a request."""

logger = logging.getLogger(__name__)
LEAST_WINDOWS = 20
"""Windows that are to be run, at least, before an engine is measured: it costs about 5 of them."""
MIN_VOLUME_ML = 1.0
"""Volume above which a structure is compared by Dice."""


def torch_choice(why: str, measured: str = "") -> EngineChoice:
    """Return torch as the engine, and the reason."""
    return EngineChoice(TORCH, torch.__version__, why, measured)


@dataclass(eq=False)
class EngineSelector:
    """Chooses the engine of a model's networks, once for all scans, and prepares it.

    Parameters
    ----------
    requested : str
        "auto", "torch", or a name of `ENGINES`.
    load : callable
        Returns the model's networks in float32 on the CPU.
    precision : tuple of str
        Precision as requested ("auto"), and as chosen for this model on this machine ("float32").
    planned_cases : int
        Scans that this process is to segment, among which a preparation is spread.
    records : EngineRecords or None
        Decisions for the output folder; None if results go to no folder.

    Attributes
    ----------
    choice : EngineChoice
        What ran the network for the last scan.

    Raises
    ------
    ScanError
        DEVICE_UNAVAILABLE if the requested engine is not installed, or runs no ONNX graph.
    """

    card: ModelCard
    requested: str
    load: Callable[[], LoadedNetwork]
    precision: tuple[str, str]
    planned_cases: int = 1
    records: EngineRecords | None = None
    choice: EngineChoice = field(init=False)
    _decision: EngineRecord | None = field(default=None, init=False)
    _measured: str = field(default="", init=False)
    _trials: dict[Path, EngineTrial] = field(default_factory=dict, init=False)
    _prepared: dict[object, tuple[EngineChoice, list[Run] | None]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        if self._is_graph and self.requested not in ("auto", *GRAPH_ENGINES):
            detail = f"an ONNX network is run by {' or '.join(GRAPH_ENGINES)}, not {self.requested}"
            raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)
        self.choice = self._own_choice("requested" if self.requested == TORCH else "not used yet")
        engine = ENGINES.get(self.requested)
        if engine is not None and engine.version() is None:
            detail = f"the engine {engine.name} is not installed: pip install {engine.package}"
            raise ScanError(Reason.DEVICE_UNAVAILABLE, detail)

    @property
    def _is_graph(self) -> bool:
        return self.card.network.name == ONNX_GRAPH

    def _own_choice(self, why: str) -> EngineChoice:
        """Return what runs the network without a further engine: torch, OpenVINO a graph."""
        if not self._is_graph:
            return torch_choice(why)
        return EngineChoice(GRAPH_ENGINES[0], str(ENGINES[GRAPH_ENGINES[0]].version()), why)

    def departs(self, precision: str) -> bool:
        """Return whether the last scan was run otherwise than decided, in a numeric type."""
        decision = self._decision
        return decision is not None and decision != EngineRecord(self.choice.name, precision)

    def run_by_torch(self, why: str) -> None:
        """Note that torch runs the network for this scan, whatever was decided."""
        self._decide(lambda: GRAPH_ENGINES[0] if self._is_graph else TORCH)
        self.choice = self._own_choice(why)

    def forget_prepared(self) -> None:
        """Free what an engine keeps for windows of earlier scans: it is prepared again for them.

        An engine that failed for such windows is not asked again.
        """
        self._prepared = {key: kept for key, kept in self._prepared.items() if kept[1] is None}

    def prepared_runs(
        self, scan: ScanWindows, dtype: torch.dtype, device: torch.device
    ) -> list[Run] | None:
        """Return the networks that an engine has prepared before for such windows; else None."""
        choice, runs = self._prepared.get((scan.shape, dtype, device), (self.choice, None))
        if runs is not None:
            self.choice = choice
        return runs

    def runs(self, model: TorchModel, scan: ScanWindows, clock: StepTimer) -> list[Run] | None:
        """Return how each network of the model is run; None for torch.

        Parameters
        ----------
        scan : ScanWindows
            The scan to be labelled, with which an engine is measured if necessary.
        """
        key = (scan.shape, model.loaded.dtype, model.device)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(model, scan, clock)
        self.choice, runs = self._prepared[key]
        return runs

    def _decide(self, choose: Callable[[], str]) -> str:
        """Return the engine for all scans: as requested, as recorded in OUT, or chosen now."""
        if self._decision is None:
            requested, chosen = self.precision
            weights = self.card.weights
            subject = {"weights": weights.sha256, "asked": [self.requested, requested]}
            network = f"{self.card.name}-{export_key(subject)[:16]}"
            decision = self.records.recorded(network) if self.records else None
            # Asked once: all cases of an output folder have the same engine
            if decision is None:
                engine = choose() if self.requested == "auto" else self.requested
                decision = EngineRecord(engine, chosen)
                if self.records:  # of another process, if it was faster
                    decision = self.records.record(network, decision)
            self._decision = decision
        return self._decision.engine

    def _prepare(
        self, model: TorchModel, scan: ScanWindows, clock: StepTimer
    ) -> tuple[EngineChoice, list[Run] | None]:
        """Return the engine for such windows with the networks that it prepared; None for torch.

        An engine that was decided for all scans is followed although it may be slower here, but not
        if its labels differ: speed is of this machine, labels are of the whole folder.
        """
        if self._is_graph:
            return self._prepare_graph(model, scan, clock)
        # Engines are prepared for windows of one size
        if self.card.window.size is None:
            self._decide(lambda: TORCH)
            return torch_choice("the model's window is the whole scan"), None
        name = self._decide(lambda: self._fastest(model, scan, clock))
        why = "requested"
        if self.requested == "auto":
            why = "chosen for all cases of the output folder" if self.records else "measured here"
        if name == TORCH:
            return torch_choice(why, self._measured), None
        # From the cheapest test to the dearest; any fault leaves the scan to torch, with a warning
        engine = ENGINES.get(name)
        if engine is None or engine.version() is None:
            fault = "it is not installed here"
        elif not engine.supports(model.device, model.loaded.dtype):
            precision = dtype_name(model.loaded.dtype)
            fault = f"it does not run on {model.device.type} in {precision}"
        else:
            requests = self._requests(model, scan)
            try:
                trial = self._trial(engine, requests[0], model, scan, clock)
                self._measured = str(trial)
                if trial.as_torch:
                    with clock.step("engine"):
                        runs = [
                            self._guarded(engine.prepare(request), request, n)
                            for n, request in enumerate(requests)
                        ]
                    choice = EngineChoice(name, str(engine.version()), why, self._measured)
                    return choice, runs
                fault = trial.failed or "its labels differ from torch's"
            except EngineUnfitError as exc:
                fault = str(exc)
        logger.warning("torch is used instead of %s: %s", name, fault)
        return torch_choice(f"instead of {name}: {fault}", self._measured), None

    def _prepare_graph(
        self, model: TorchModel, scan: ScanWindows, clock: StepTimer
    ) -> tuple[EngineChoice, list[Run] | None]:
        """Return what runs an ONNX graph: OpenVINO on the CPU, ONNX Runtime on request."""
        name = self._decide(lambda: GRAPH_ENGINES[0])
        why = "requested" if self.requested != "auto" else "runs ONNX networks"
        if name not in GRAPH_ENGINES[1:]:
            return self._own_choice(why), None
        engine = ENGINES[name]
        fault = "it is not installed here"
        if engine.version() is not None:
            try:
                with clock.step("engine"):
                    requests = self._requests(model, scan)
                    runs = [engine.prepare(request) for request in requests]
                return EngineChoice(name, str(engine.version()), why), runs
            except EngineUnfitError as exc:
                fault = str(exc)
        logger.warning("%s is used instead of %s: %s", GRAPH_ENGINES[0], name, fault)
        return self._own_choice(f"instead of {name}: {fault}"), None

    def _guarded(self, run: Run, request: NetworkRequest, number: int) -> Run:
        """Return a network as an engine runs it, or torch for good once the engine has failed.

        `number` is the network's, among those of the model.
        """
        substitute: nn.Module | None = None

        def build() -> nn.Module:
            first = self.load()  # again: weights that an engine has taken over are not kept
            return (first, *first.folds)[number].network

        again = replace(request, build=build)

        def guarded(windows: torch.Tensor) -> torch.Tensor:  # keeps no `request`, which has weights
            nonlocal substitute
            if substitute is None:
                try:
                    return run(windows)
                except Exception as exc:  # its library has errors of its own
                    if is_out_of_memory(exc):
                        raise  # fewer windows may do
                    fault = f"{type(exc).__name__} while it ran"
                name = self.choice.name
                logger.warning("torch is used instead of %s: %s", name, fault)
                self.choice = torch_choice(f"instead of {name}: {fault}", self._measured)
                # Later scans are torch's from the first window on
                self._prepared[again.shape, again.dtype, again.device] = self.choice, None
                substitute = again.torch_network()
            scores: torch.Tensor = substitute(windows)
            return scores

        return guarded

    def _fastest(self, model: TorchModel, scan: ScanWindows, clock: StepTimer) -> str:
        """Return the first engine that is faster than torch here with its labels; else torch."""
        installed = [e for e in ENGINES.values() if e.automatic and e.version() is not None]
        self._measured = "no other engine " + ("fits" if installed else "is installed")
        # Each subset of the flipped axes is a pass of its own
        flips = 1 << len(self.card.window.mirror)
        planned = scan.count * len(model.runs) * flips * self.planned_cases
        for engine in installed:
            if not engine.supports(model.device, model.loaded.dtype):
                continue
            request = self._requests(model, scan)[0]
            path = trial_file(engine, request, self.card)
            # Measuring costs some windows, which few windows do not repay
            if read_trial(path) is None and planned < LEAST_WINDOWS:
                self._measured = "too few windows to measure another engine"
                return TORCH
            try:
                trial = self._trial(engine, request, model, scan, clock)
            except EngineUnfitError as exc:
                self._measured = f"{engine.name}: {exc}"
                continue
            self._measured = str(trial)
            if trial.used:
                return engine.name
        return TORCH

    def _trial(
        self,
        engine: Engine,
        request: NetworkRequest,
        model: TorchModel,
        scan: ScanWindows,
        clock: StepTimer,
    ) -> EngineTrial:
        """Return the trial of an engine, measured now if it is not known."""
        path = trial_file(engine, request, self.card)
        trial = self._trials.get(path) or read_trial(path)
        if trial is None:
            with clock.step("engine"), one_at_a_time(path):
                if (trial := read_trial(path)) is None:
                    trial = measure(engine, request, model, scan)
                    save_measurement(path, asdict(trial))
        self._trials[path] = trial  # kept here where the cache can't be written
        return trial

    def _requests(self, model: TorchModel, scan: ScanWindows) -> list[NetworkRequest]:
        """Return what an engine prepares: a request for each network of the model."""
        card = self.card
        arguments = json.dumps(dict(card.network.args), sort_keys=True, default=str)
        versions = package_versions(["monai"]).values()
        window = (str(card.window.plane), str(card.window.sums_features))
        identity = (card.network.name, arguments, *window, *versions)
        networks: list[nn.Module] = []
        # A network in half precision is not the one to convert: it is loaded again
        exact = model.loaded.dtype is torch.float32 and model.device.type == "cpu"

        def build(n: int) -> nn.Module:
            if not networks:
                first = model.loaded if exact else self.load()
                networks.extend(each.network for each in (first, *first.folds))
            return networks[n]

        return [
            NetworkRequest(
                build=functools.partial(build, n),
                identity=(*identity, weights.sha256),
                shape=scan.shape,
                dtype=model.loaded.dtype,
                device=model.device,
                threads=torch.get_num_threads(),
            )
            for n, weights in enumerate((card.weights, *card.folds))
        ]


@dataclass(frozen=True, eq=False)
class ScanWindows:
    """The windows of a scan, with which an engine is measured.

    Parameters
    ----------
    image : (channels, X, Y, Z) float32 tensor
        The scan on the network grid, or a part of it.
    most : int
        Largest number of windows in a batch.
    """

    image: torch.Tensor
    window: Window
    plan: NetworkPlan
    most: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape (N, channels, x, y, z) of a batch."""
        return (self._layout.batch(self.most), len(self.image), *self._layout.size)

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
        return window_layout(self.window, (x, y, z), axis, self.most)

    def probes(self) -> list[torch.Tensor]:
        """Return up to two batches, each of one window many times: those that vary most."""
        size = self._layout.size
        padded, _ = pad_to_window(self.image, size, self.window)
        corners = [corner for row in self._layout.rows() for corner in row.corners]
        views = [padded[:, *window_slices(corner, size)] for corner in corners]
        spread = [float(view[:, ::4, ::4, ::4].std(correction=0)) for view in views]
        # A window of air would be labelled alike by any engine
        order = sorted(range(len(views)), key=lambda n: -spread[n])
        return [views[n].expand(self.shape).contiguous() for n in order[:2]]


@dataclass(frozen=True, eq=False)
class TorchModel:
    """A model as torch runs it.

    Parameters
    ----------
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


def measure(
    engine: Engine, request: NetworkRequest, model: TorchModel, scan: ScanWindows
) -> EngineTrial:
    """Compare an engine with torch on windows of a scan: labels and time.

    Labels are compared with those of torch in float32, the time with torch in the same type.
    """
    measured = functools.partial(
        EngineTrial,
        model.card.name,
        engine.name,
        str(engine.version()),
        request.precision,
        weights=request.identity[-1],
        place=place_of(request),
    )
    probes = scan.probes()
    own_labels, own_s = _timed(model.runs[0], probes, model)
    reference = own_labels
    half = request.dtype is not torch.float32
    if half:
        # Half precision is judged by float32, not by torch in half precision
        exact = copy.deepcopy(request.build()).to(request.device)
        reference = [_labels_of(exact(probe), model) for probe in probes]
        del exact  # the engine needs the memory
    try:  # after torch has freed its memory
        began = time.perf_counter()
        run = engine.prepare(request)
        prepare_s = time.perf_counter() - began
        labels, engine_s = _timed(run, probes, model)
    except EngineUnfitError as exc:
        return measured(failed=str(exc))
    except Exception as exc:  # its library has errors of its own
        if is_out_of_memory(exc):
            raise
        return measured(failed=f"{type(exc).__name__} while it ran")
    equal, dice = compare_labels(reference, labels, scan.voxel_ml)
    trial = measured(
        windows=len(probes),
        equal=equal,
        dice=dice,
        torch_dice=compare_labels(reference, own_labels, scan.voxel_ml)[1] if half else None,
        torch_s=own_s,
        engine_s=engine_s,
        prepare_s=prepare_s,
    )
    logger.info(
        "%s with %s: %s, prepared in %s",
        model.card.name,
        engine.name,
        trial.why,
        format_duration(prepare_s),
    )
    return trial


def _timed(
    run: Run, probes: Sequence[torch.Tensor], model: TorchModel
) -> tuple[list[torch.Tensor], float]:
    """Return the labels of all probes, and the least wall time of a batch, in s."""
    typed = [probe.to(model.loaded.takes) for probe in probes]
    labels: list[torch.Tensor] = []
    seconds = math.inf
    for probe in (*typed, typed[0]):  # once more, since the first pass takes longer
        windows = probe.clone()  # a network may work in place
        _wait(model.device)
        began = time.perf_counter()
        output = run(windows)
        _wait(model.device)
        seconds = min(seconds, time.perf_counter() - began)
        if len(labels) < len(typed):
            labels.append(_labels_of(output, model))
    return labels, seconds


def _wait(device: torch.device) -> None:
    """Wait until a device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _labels_of(output: torch.Tensor, model: TorchModel) -> torch.Tensor:
    """Return the labels (maps, x, y, z) of the output (N, C, x, y, z) for the first window."""
    card, head = model.card, model.loaded.head
    scores = output[0].to(torch.float32).transpose(0, 1).contiguous()
    if head is not None:
        scores = head(scores)
    if card.activation == "sigmoid":
        scores = torch.sigmoid(scores)
    elif card.activation == "softmax":
        scores = torch.softmax(scores, dim=1)
    return decide_on_grid(scores[:, : card.n_outputs], card.decision)


def compare_labels(
    reference: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], voxel_ml: float
) -> tuple[float, float | None]:
    """Return how far the labels of several windows agree with a reference.

    Parameters
    ----------
    reference, labels : sequence of (maps, x, y, z) tensors
        Labels; 0 is background.
    voxel_ml : float
        Volume of a voxel, in ml.

    Returns
    -------
    (equal, dice)
        Fraction of voxels with equal labels in all maps, and the smallest Dice of a structure above
        `MIN_VOLUME_ML`; None without such structure.
    """
    same = total = 0
    sizes: dict[tuple[int, int], list[int]] = {}
    for first, second in zip(reference, labels, strict=True):
        same += int((first == second).all(dim=0).sum())
        total += first[0].numel()
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
        if max(first, second) * voxel_ml > MIN_VOLUME_ML  # of few voxels it says nothing
    ]
    return same / max(total, 1), min(dice, default=None)
