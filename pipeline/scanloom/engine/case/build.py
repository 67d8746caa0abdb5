"""Cases of a workflow, made in the same way for one scan and for an archive."""

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
    return recipe_hash(cards, options, workflow.output_options)


def make_cases(
    index: Index,
    chosen: Iterable[Inputs],
    workflow: Workflow,
    cards: Sequence[ModelCard],
    key: bytes,
    left_out: list[LeftOut],
) -> Iterator[tuple[Inputs, Case]]:
    """Yield the series of each case, and the case.

    `left_out` receives the series without a case, such as an archive that cannot be unpacked.
    """
    recipe = workflow_recipe(workflow, cards)
    for inputs in chosen:
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
            yield inputs, replace(case, others=tuple(channels), stamp=stamp)


def unique_cases(cases: Iterable[Case], key: bytes) -> tuple[list[Case], set[str]]:
    """Return one case of each id: volume files that are equal are one, wherever they lie.

    Returns
    -------
    (cases, taken)
        `taken` are ids of several files that are not equal, since an id is made of samples of a
        file: they are no cases.
    """
    by_id: dict[str, Case] = {}
    taken: set[str] = set()
    for case in cases:
        earlier = by_id.setdefault(case.id, case)
        if earlier is case or case.id in taken:
            continue
        with suppress(ScanError):  # it can't be read: its worker says so
            by_id[case.id] = with_source_hash(earlier, key)
            if with_source_hash(case, key).source_hash != by_id[case.id].source_hash:
                taken.add(case.id)
    return [case for case in by_id.values() if case.id not in taken], taken


def id_conflicts(taken: set[str], series: Iterable[IndexedSeries]) -> list[LeftOut]:
    """Return the series whose ids are those of several files."""
    detail = "another file has the same id, and differs from it between the samples"
    return [LeftOut(entry, Reason.ID_TAKEN, detail) for entry in series if entry.id in taken]


def with_source_hash(case: Case, key: bytes) -> Case:
    """Return a case with the hash over the files of all its input channels.

    Raises
    ------
    ScanError
        UNREADABLE if a file can't be read.
    """
    if case.source_hash:
        return case
    return replace(case, source_hash=channels_hash((case.series, *case.others), key))


def make_case(
    number: str, series: Series, workflow: Workflow, recipe: str, *, phase: int | None
) -> Case:
    """Return the case of a series.

    Parameters
    ----------
    number : str
        Its id, as `scanloom.io.identity.case_id` makes it of series and phase.
    series : Series
        Where it is.
    workflow : Workflow
        What is to be done.
    recipe : str
        Of the workflow.
    phase : int or None
        Which of several volumes.
    """
    return Case(
        id=number,
        series=series,
        outputs=workflow.output_options,
        source_hash="",  # the files are read for it when the case is worked on
        recipe=recipe,
        read=workflow.read_options,
        phase=phase,
    )
