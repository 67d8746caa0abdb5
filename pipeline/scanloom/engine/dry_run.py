"""Plans what `segment` would do with some scans, from headers and cards; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.cards.check import check_assumed_modality, check_modalities
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.convert.store import find_model
from scanloom.core import Grid, Reason, ScanError, Series, SeriesChoice
from scanloom.engine.case.build import make_case, with_source_hash, workflow_recipe
from scanloom.engine.case.differences import explained_result_state
from scanloom.engine.case.memory_estimate import check_memory, estimate_case
from scanloom.engine.case.models import check_structures, unique_cards
from scanloom.engine.results.case_registry import CaseRegistry
from scanloom.engine.segment import segment_workflow
from scanloom.engine.selected_series import SelectedSeries, choice_of, select_at
from scanloom.io.identity import case_id, read_key
from scanloom.io.output.published import ResultState
from scanloom.io.read import read_outline
from scanloom.io.session import ReadSession
from scanloom.options import SegmentOptions


@dataclass(frozen=True)
class PlannedScan:
    """A scan that would be segmented, or the reason for which it would not be.

    Parameters
    ----------
    path : Path
        As it was given.
    series : Series or None
        The series that is selected.
    choice : SeriesChoice or None
        Its number among the series at the path, and how a person recognises it.
    grid : Grid or None
        Grid of the scan.
    memory : int or None
        Estimated peak memory of the process, in bytes, with a CPU as the device. Estimated only
        with a memory limit, since the estimate needs torch.
    case, folder : str
        The case id, and the name of its folder; empty if there is no key yet.
    state : ResultState or None
        Of an existing result; None if the case id is not known.
    error : ScanError or None
        Why the scan would not be segmented.
    changes : str
        How the models are run otherwise than their cards say; else "".
    """

    path: Path
    series: Series | None = None
    grid: Grid | None = None
    memory: int | None = None
    case: str = ""
    folder: str = ""
    state: ResultState | None = None
    error: ScanError | None = None
    choice: SeriesChoice | None = None
    changes: str = ""


def plan_scans(paths: Sequence[Path], options: SegmentOptions) -> Iterator[PlannedScan]:
    """Yield what `iter_segment` would do with each scan.

    Raises
    ------
    ScanError
        If the models or the key cannot be used.
    """
    cards = unique_cards([find_model(name) for name in options.models])
    check_structures(cards, options.outputs)
    key = _existing_key(options.key)
    registry = CaseRegistry(options.out, "", options.names)  # for names: it writes nothing
    session = ReadSession()
    with closing(session):
        for path in paths:
            with session.active():
                planned = list(_plan_path(path, options, cards, key, registry))
            yield from planned


def _existing_key(file: Path | None) -> bytes | None:
    """Return the key; None if it would be created."""
    try:
        return read_key(file)
    except ScanError as error:
        if error.reason is Reason.KEY_MISMATCH:
            return None
        raise


def _plan_path(
    path: Path,
    options: SegmentOptions,
    cards: Sequence[ModelCard],
    key: bytes | None,
    registry: CaseRegistry,
) -> Iterator[PlannedScan]:
    try:
        selected = select_at(path, options, cards)
    except ScanError as error:
        yield PlannedScan(path, error=error)
        return
    for chosen in selected:
        try:
            planned = _plan_series(chosen, options, cards, key, registry)
        except ScanError as error:
            planned = PlannedScan(path, chosen.series, error=error)
        reason = planned.error.reason if planned.error else None
        yield replace(planned, path=path, choice=choice_of(chosen, options, reason))


def _plan_series(
    chosen: SelectedSeries,
    options: SegmentOptions,
    cards: Sequence[ModelCard],
    key: bytes | None,
    registry: CaseRegistry,
) -> PlannedScan:
    """Return the plan of a series.

    Raises
    ------
    ScanError
        As the segmentation would raise for the scan's headers, the memory limit and OUT.
    """
    series, phase = chosen.series, chosen.phase
    modality = series.modality or options.read.modality
    check_assumed_modality(modality, cards)
    for card in cards:
        check_modalities([modality], card)
    grid, dtype = read_outline(series, options.read, phase=phase)
    number, folder, state = "", "", None
    if key is not None:
        workflow = segment_workflow(options)
        number = case_id(series, key, phase)
        recipe = workflow_recipe(workflow, cards)
        case = make_case(number, series, workflow, recipe, phase=phase)
        folder = registry.folder_name(case)
        state = explained_result_state(
            *(options.out, folder, with_source_hash(case, key)),
            replace=options.replace,
            workflow=workflow,
            cards=cards,
        )
    requested = [requested_card(card, options.compute) for card in cards]
    changed = ", ".join(filter(None, map(describe_changes, cards, requested)))
    memory = None
    if options.memory_limit is not None:
        estimate = estimate_case(grid, dtype, requested, options.outputs)
        check_memory(estimate, options.memory_limit)
        memory = estimate.peak
    return PlannedScan(Path(), series, grid, memory, number, folder, state, changes=changed)
