"""Cases of a workflow, built in the same way for one scan and for an archive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from scanloom.cards.card import ModelCard
from scanloom.core import Case, Reason, ScanError, Series
from scanloom.engine.case.recipe import recipe_hash
from scanloom.engine.workflow.schema import Workflow
from scanloom.engine.workflow.selection import Inputs, LeftOut
from scanloom.io.identity import case_id, channels_hash, source_stamp
from scanloom.io.index.build import Index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.probe import count_volumes


def workflow_recipe(workflow: Workflow, cards: Sequence[ModelCard]) -> str:
    """Return the hash (SHA-256, hex) over everything in a workflow that can change a result."""
    options = (workflow.read_options, workflow.compute_options)
    return recipe_hash(cards, options, workflow.output_options, workflow.relations)


def make_cases(
    index: Index,
    selected: Iterable[Inputs],
    workflow: Workflow,
    cards: Sequence[ModelCard],
    key: bytes,
    left_out: list[LeftOut],
) -> Iterator[tuple[Inputs, Case]]:
    """Yield the index entries of each case, and the case.

    Series without a case, such as an archive that cannot be unpacked, are added to `left_out`.
    """
    recipe = workflow_recipe(workflow, cards)
    for inputs in selected:
        first = inputs[0]
        try:
            series, *channels = map(index.as_series, inputs)
            several = first.reason in (Reason.PHASES, Reason.FOUR_D)
            count = count_volumes(series) if several and workflow.policy.phases == "all" else 1
        except ScanError as error:
            left_out += [LeftOut(entry, error.reason, error.detail) for entry in inputs]
            continue
        for phase in range(count) if several else (None,):
            number = first.id if phase is None else case_id(series, key, phase)
            case = make_case(number, series, workflow, recipe, phase=phase)
            stamp = source_stamp([entry.stamp for entry in (series, *channels)], key)
            yield inputs, replace(case, further_channels=tuple(channels), stamp=stamp)


def unique_cases(cases: Iterable[Case], key: bytes) -> tuple[list[Case], set[str]]:
    """Return one case for each id: equal volume files are one case, whatever their paths.

    Returns
    -------
    (cases, conflicts)
        `conflicts` are ids of several files that are not equal: ids are computed from samples of
        a file. They get no case.
    """
    by_id: dict[str, Case] = {}
    conflicts: set[str] = set()
    for case in cases:
        earlier = by_id.setdefault(case.id, case)
        if earlier is case or case.id in conflicts:
            continue
        with suppress(ScanError):  # unreadable: its worker reports that
            by_id[case.id] = with_source_hash(earlier, key)
            if with_source_hash(case, key).source_hash != by_id[case.id].source_hash:
                conflicts.add(case.id)
    return [case for case in by_id.values() if case.id not in conflicts], conflicts


def id_conflicts(conflicts: set[str], series: Iterable[IndexedSeries]) -> list[LeftOut]:
    """Return the series whose id several files share."""
    detail = "another file has the same id but different content between the samples"
    return [LeftOut(entry, Reason.ID_TAKEN, detail) for entry in series if entry.id in conflicts]


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


def make_case(
    number: str, series: Series, workflow: Workflow, recipe: str, *, phase: int | None
) -> Case:
    """Return the case of a series.

    Parameters
    ----------
    number : str
        Its id: `scanloom.io.identity.case_id` of series and phase.
    series : Series
        The files of the scan.
    workflow : Workflow
        Options and outputs.
    recipe : str
        Recipe hash of the workflow.
    phase : int or None
        Index of the volume, if there are several.
    """
    return Case(
        id=number,
        series=series,
        outputs=workflow.output_options,
        source_hash="",  # computed from the files when the case is processed
        recipe=recipe,
        read=workflow.read_options,
        phase=phase,
        relations=workflow.relations,
        compute=workflow.compute_options,
    )
