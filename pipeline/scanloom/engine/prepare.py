"""Prepare cases: decide from headers and earlier results whether a case runs, and what it needs.

`segment`, its dry run, `plan` and the workers of `run` prepare every case by `prepare`, so that all
of them refuse a case for the same reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.cards.check import check_assumed_modality, check_modalities
from scanloom.cards.graph import (
    Node,
    check_relations,
    graph_of,
    needed_parts,
    running_order,
    structures_of_results,
)
from scanloom.cards.requested import requested_card
from scanloom.convert.store import absolute_name, find_model
from scanloom.core import (
    Case,
    CaseRecord,
    ComputeOptions,
    Grid,
    Outputs,
    ReadOptions,
    Reason,
    ScanError,
    Series,
    blame,
    format_bytes,
)
from scanloom.core.relations import NO_RELATIONS, Relations
from scanloom.engine.case.differences import explained_result_state
from scanloom.engine.case.models import check_structures, load_models, unique_cards
from scanloom.engine.case.recipe import recipe_hash
from scanloom.engine.case.writers import check_packages, estimate_writers
from scanloom.engine.workflow.schema import Workflow
from scanloom.inference.graph import Predictor, sharing_groups
from scanloom.io.identity import channels_hash
from scanloom.io.output.layout import case_folder
from scanloom.io.output.published import ResultState, store_source_stamp
from scanloom.io.read import read_outline
from scanloom.io.voxel_values import voxel_limit

if TYPE_CHECKING:
    from scanloom.inference.memory import CaseEstimate, Placement

logger = logging.getLogger(__name__)
"""Logs at DEBUG only: tracebacks may hold foreign text."""

DECODER_BYTES = 96 * 1024**2
"""While a scan is read: headers, and memory of decoders and gunzip."""
MEASUREMENT_BYTES = 128 * 1024**2
"""Histograms and slabs of connected parts."""

Outline = tuple[Grid, np.dtype[Any]]
"""Grid of a scan, and type of its voxels after rescale."""
FileStates = list[tuple[int, int, int] | None]
"""Size, time of change and inode of each file of a case; None for a missing file."""


@dataclass(frozen=True)
class Request:
    """A workflow with its models: everything that the cases of a command share.

    The cards are in the order of the workflow. Folders of models are whole paths: a worker may have
    another working folder.
    """

    workflow: Workflow
    cards: tuple[ModelCard, ...]

    @classmethod
    def of(cls, workflow: Workflow) -> Request:
        """Return the request of a workflow, whose models are found in the store.

        Raises
        ------
        ScanError
            If a model can't be found or used, or has none of the requested structures, or a
            library is missing.
        """
        check_packages(workflow.output_options)
        cards = []
        for n, name in enumerate(workflow.models):
            with workflow.naming_lines("models", n):
                cards.append(find_model(name))
        with workflow.naming_lines("models"):
            unique = unique_cards(cards)
        with workflow.naming_lines("outputs", "structures"):
            workflow = _with_usual_structures(workflow, unique)
            check_structures(unique, workflow.output_options, workflow.relations)
        models = tuple(map(absolute_name, workflow.models))
        return cls(workflow.model_copy(update={"models": models}), unique)

    @cached_property
    def requested(self) -> tuple[ModelCard, ...]:
        """The cards as the options ask to run them."""
        compute = self.workflow.compute_options
        return tuple(requested_card(card, compute) for card in self.cards)

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The `card_digest` of each model."""
        return tuple(card_digest(card) for card in self.cards)

    @cached_property
    def recipe(self) -> str:
        """Hash (SHA-256, hex) over everything in the request that can change a result."""
        outputs, read, relations, compute = self._options
        return recipe_hash(self.cards, (read, compute), outputs, relations)

    def case(
        self,
        number: str,
        series: Series,
        further_channels: tuple[Series, ...] = (),
        *,
        phase: int | None,
        stamp: str = "",
    ) -> Case:
        """Return the case of a series, or of a volume (`phase`) of one with several.

        `number` is its `scanloom.io.identity.case_id`, `stamp` the `source_stamp` of all series.
        """
        outputs, read, relations, compute = self._options
        return Case(
            id=number,
            series=series,
            outputs=outputs,
            source_hash="",  # computed from the files when the case is prepared
            recipe=self.recipe,
            read=read,
            phase=phase,
            further_channels=further_channels,
            stamp=stamp,
            relations=relations,
            compute=compute,
        )

    @cached_property
    def _options(self) -> tuple[Outputs, ReadOptions, Relations, ComputeOptions]:
        """The options of all cases: the workflow makes them anew each time."""
        workflow = self.workflow
        options = workflow.read_options, workflow.relations, workflow.compute_options
        return (workflow.output_options, *options)


def model_loader(
    request: Request, planned_cases: int, out: Path
) -> Callable[[], tuple[Predictor, ...]]:
    """Return the function that loads the models of a request, in this process or in another.

    For the scans of a command, whose number is `planned_cases`, and the output folder `out`.
    """
    workflow = request.workflow
    return partial(
        load_models,
        workflow.models,
        request.digests,
        workflow.execution,
        workflow.computed_labels,
        planned_cases,
        out,
    )


def _with_usual_structures(workflow: Workflow, cards: tuple[ModelCard, ...]) -> Workflow:
    """Return a workflow without structures that are on request only, if its outputs name none.

    Those that its relations measure or unite by name are requested, too.
    """
    if workflow.outputs.structures or not any(card.on_request for card in cards):
        return workflow
    relations = workflow.relations
    check_relations(cards, relations)
    nodes = graph_of([card.name for card in cards], relations)
    on_request = {label for node in nodes for label in node.on_request(cards)}
    results = structures_of_results(cards, relations).values()
    labels = {each.label for structures in results for each in structures}
    usual = labels - (on_request - relations.named_labels)
    outputs = workflow.outputs.model_copy(update={"structures": tuple(sorted(usual))})
    return workflow.model_copy(update={"outputs": outputs})


def with_source_hash(case: Case, key: bytes) -> Case:
    """Return a case with the hash over the files of all its input channels.

    Raises
    ------
    ScanError
        UNREADABLE if a file can't be read.
    """
    if case.source_hash:
        return case
    return replace(case, source_hash=channels_hash((case.series, *case.further_channels), key))


@dataclass(frozen=True)
class OutputTarget:
    """Output folder, with the key of its ids.

    Parameters
    ----------
    out : Path
        The output folder.
    key : bytes
        That of its ids.
    replace : bool
        Whether a result that is there is replaced.
    left_out : collection of str
        Names of writers whose files nobody will see.
    """

    out: Path
    key: bytes = field(repr=False)
    replace: bool = False
    left_out: Collection[str] = ()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case that can be run, that has its result already, or that is refused.

    Parameters
    ----------
    case : Case
        The case, with its source hash.
    folder : Path or None
        Folder of its result; None if no output folder was given.
    state : ResultState or None
        State of an earlier result; None if it was not compared.
    outline : (Grid, dtype) or None
        Grid of the scan, and type of its voxels; None if its headers were not read.
    estimate : CaseEstimate or None
        Memory and work; None if neither a limit nor a device was given.
    refusal : ScanError or None
        Why the case can't be run.
    files : list
        States of its files before anything was read.
    """

    case: Case
    folder: Path | None = None
    state: ResultState | None = None
    outline: Outline | None = None
    estimate: CaseEstimate | None = None
    refusal: ScanError | None = None
    files: FileStates = field(default_factory=list)

    @property
    def is_too_large(self) -> bool:
        """Whether the case is refused since it exceeds the memory limit."""
        return self.refusal is not None and self.estimate is not None

    def ended(self) -> CaseRecord | None:
        """Return the record of a case that is refused or has its result; None if it is to run.

        The result gets the case's source stamp, by which the next run knows it without reading the
        scan.
        """
        if self.refusal is not None:
            return failed_record(self.case.id, self.refusal)
        if self.state is not ResultState.CURRENT or self.folder is None:
            return None
        # such as the result of copied files, or of a run that died before it was recorded
        store_source_stamp(self.folder, self.case.stamp)
        return CaseRecord(self.case.id, None, "", (), self.folder, reused=True)


def prepare(
    case: Case,
    cards: Sequence[ModelCard],
    target: OutputTarget | None,
    *,
    memory_limit: int | None = None,
    placement: Placement | None = None,
    outline: Outline | None = None,
) -> Prepared:
    """Decide whether a case runs: from its earlier result, its headers, and its memory.

    Parameters
    ----------
    case : Case
        The case.
    cards : sequence of ModelCard
        The models; what the case's options change of them is applied here.
    target : OutputTarget or None
        The output folder, whose earlier result is compared; nothing is written to it. None if it
        was compared already, or can't be since there is no key yet.
    memory_limit : int or None
        Bytes for the whole process, in which the smallest plan must fit.
    placement : Placement or None
        Device and precision for the estimate, if they are known.
    outline : (Grid, dtype) or None
        Grid and type of the voxels if an index knows them; by default, they are read.

    Returns
    -------
    Prepared
        No exception is raised: a fault is its `refusal`.
    """
    prepared = Prepared(case)
    # From cheap to costly, and a result before everything else: it answers even if its scan would
    # be refused today. Then the index's facts, before files are opened; headers; and last the
    # estimate, since torch is imported for it.
    try:
        if target is not None:
            folder = case_folder(target.out, case.folder_name)
            prepared = replace(prepared, folder=folder, files=file_states(case))
            case = with_source_hash(case, target.key)
            prepared = replace(prepared, case=case)
            state = explained_result_state(target.out, case, cards, replace=target.replace)
            prepared = replace(prepared, state=state)
            if state is ResultState.CURRENT:
                return prepared
        series = (case.series, *case.further_channels)
        modalities = [each.modality or case.read.modality for each in series]
        check_assumed_modality(modalities[0], cards)
        for card in cards:
            check_modalities(modalities, card)
        if outline is None:
            outline = read_outline(case.series, case.read, phase=case.phase)
        else:
            _check_size(outline, case.read)
        prepared = replace(prepared, outline=outline)
        requested = [requested_card(card, case.compute) for card in cards]
        if memory_limit is not None:
            least = estimate_case(*outline, requested, case.outputs, None, case.relations)
            prepared = replace(prepared, estimate=least)
            check_memory(least, memory_limit)
        if placement is not None:
            estimate = estimate_case(*outline, requested, case.outputs, placement, case.relations)
            prepared = replace(prepared, estimate=estimate)
    except Exception as error:  # a fault in one case must not stop the others
        logger.debug("case refused", exc_info=True)
        return replace(prepared, refusal=blame(error))
    return prepared


def _check_size(outline: Outline, options: ReadOptions) -> None:
    """Refuse a scan that is larger than reading it allows: TOO_LARGE."""
    size = math.prod(outline[0].shape) * outline[1].itemsize
    if size > voxel_limit(options):
        raise ScanError(Reason.TOO_LARGE, f"{size >> 20} MiB of voxels")


def failed_record(case: str, error: BaseException) -> CaseRecord:
    """Return the record of a case that ended with an error: its reason and a safe detail."""
    fault = blame(error)
    return CaseRecord(case, fault.reason, fault.detail, (), None, private=fault.private)


def file_states(case: Case) -> FileStates:
    """Return the states of all files of a case."""
    states: FileStates = []
    for series in (case.series, *case.further_channels):
        for file in series.files:
            try:
                state = file.stat()
                states.append((state.st_size, state.st_mtime_ns, state.st_ino))
            except OSError:
                states.append(None)
    return states


def estimate_case(
    grid: Grid,
    dtype: DTypeLike,
    cards: Sequence[ModelCard],
    outputs: Outputs | None = None,
    placement: Placement | None = None,
    relations: Relations = NO_RELATIONS,
) -> CaseEstimate:
    """Estimate memory and work of a case, from the scan's header and the models' cards alone.

    No array of the scan's size is allocated. Each stage holds the scan and, from restore on, label
    maps; other data live in one stage only. The peak is the largest stage, plus the interpreter and
    libraries.

    `grid` and `dtype` are those of the voxels after rescale. Without a `placement`, it is the
    smallest plan on a CPU. A model sees the largest crop that its card does not refuse.
    """
    from scanloom.inference import memory  # torch comes in here

    outputs = outputs or Outputs()
    voxels, stored = math.prod(grid.shape), np.dtype(dtype).itemsize
    scan = voxels * stored
    raw = 2 * voxels if np.dtype(dtype).kind == "f" else 0  # before rescale
    host, device = {"load": scan + raw + DECODER_BYTES}, dict[str, int]()
    labels = relations.labels_to_compute(outputs.structures)
    reduced = [needed_parts(card, labels) for card in cards]
    uncertainty = "uncertainty" in outputs.also
    nodes = graph_of([card.name for card in reduced], relations)
    groups = sharing_groups(nodes, reduced)
    ordered = running_order(nodes, groups)
    seen = {node.name: _largest_view(node, grid, reduced) for node in ordered}
    first_of = {
        groups[node.name]: (reduced[node.members[0]], seen[node.name]) for node in reversed(ordered)
    }
    held = 0  # label maps of the previous models
    for n, node in enumerate(ordered):
        before, after = (
            {groups[other.name] for other in each} for each in (ordered[: n + 1], ordered[n + 1 :])
        )
        need = memory.estimate_prediction(
            [reduced[member] for member in node.members],
            seen[node.name],
            stored,
            placement,
            [first_of[group] for group in before & after],
            uncertainty=uncertainty,
        )
        crop = 0 if node.crop is None else math.prod(seen[node.name].shape) * stored
        for step, count in need.host.items():
            host[step] = max(host.get(step, 0), scan + held + crop + count)
        for step, count in need.device.items():
            device[step] = max(device.get(step, 0), count)
        first = reduced[node.members[0]]
        held += first.n_maps * voxels * first.label_bytes + 2 * voxels * uncertainty
    if relations:  # a restricted copy of a model's label maps, and united ones
        held += 2 * voxels * len(relations.unite)
        largest = max(card.n_maps * card.label_bytes for card in cards)
        host["relate"] = scan + held + voxels * (largest if relations.restrict_to else 0)
    host["measure"] = scan + held + MEASUREMENT_BYTES
    host["write"] = scan + held + estimate_writers(grid, cards, outputs)
    host["readback"] = host["write"]
    values = sum(
        memory.window_values(reduced[member], seen[node.name])
        for node in ordered
        for member in node.members
    )
    return memory.CaseEstimate(host, device, memory.base_bytes(cards), values, placement)


def _largest_view(node: Node, grid: Grid, cards: Sequence[ModelCard]) -> Grid:
    """Return the grid of the largest part of a scan that a node may see.

    A crop around the structures of another model, with its margin, is as large as the scan, unless
    a card of the node refuses that.
    """
    checks = [cards[member].checks for member in node.members]
    limits = [each.extent.high for each in checks if each.extent and "extent" in each.refuse]
    if node.crop is None or not limits:
        return grid
    i, j, k = (
        min(n, max(1, math.ceil(min(limits) / s)))
        for n, s in zip(grid.shape, grid.spacing, strict=True)
    )
    return Grid((i, j, k), grid.affine)


def placement_of(predictors: Sequence[Predictor]) -> Placement:
    """Return where loaded models run: an estimate takes the first model's place for all."""
    from scanloom.inference.memory import Placement

    return Placement(predictors[0].device_name, predictors[0].precision_name)


def check_memory(estimate: CaseEstimate, limit: int) -> None:
    """Refuse a case whose smallest plan exceeds `limit`, in bytes: OUT_OF_MEMORY, with both."""
    if estimate.peak > limit:
        step = max(estimate.host, key=lambda name: estimate.host[name])
        limited = f"limit {format_bytes(limit)} by `segment --memory-limit`"
        detail = f"needs {format_bytes(estimate.peak)} in the step {step}, {limited}"
        raise ScanError(Reason.OUT_OF_MEMORY, f"{detail} or a workflow's `memory_limit`")
