"""Selection of the series of an index by a workflow, and the scope of a run.

Each series that is left out has a reason. The scope is the share of the cases on which a run works,
without those that earlier runs completed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, WorkflowError
from scanloom.engine.outcomes import Outcome
from scanloom.engine.workflow.schema import Policy, Selection, Workflow
from scanloom.io.index.inspection import SeriesInfo
from scanloom.io.index.ranking import SPACING_TOLERANCE, Preference, best_first, preference_of
from scanloom.io.index.storage import IndexedSeries, IndexStore, SortedOnDisk, placed_sorter

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Scope:
    """Cases that a run repeats, and its share of a job array.

    Parameters
    ----------
    replace, retry_failed : bool
        Whether results of another recipe are replaced, and cases that failed are tried again.
    shard : (k, n) or None
        Only the k-th of n parts of the cases, from 1.
    """

    replace: bool = False
    retry_failed: bool = False
    shard: tuple[int, int] | None = None

    def holds(self, case_id: str) -> bool:
        """Return whether a case is in this run's shard."""
        if self.shard is None:
            return True
        index, count = self.shard
        digest = hashlib.blake2b(case_id.encode(), digest_size=8).digest()  # ids are not even
        return int.from_bytes(digest, "big") % count == index - 1


Inputs = tuple[IndexedSeries, ...]
"""The series of a case: one, or one for each input channel of its models, in their order."""


NO_MODALITY = "by select.modality: its files do not state the modality"
"""Detail of a series, such as NIfTI, that a selection of a modality leaves out."""


Criteria = tuple[tuple[str, Callable[[SeriesInfo], bool]], ...]
"""The detail of a series that fails each criterion, and whether a series meets it."""
Leave = Callable[[Outcome], None]
"""Receives the series without a case."""


def select(
    indexed: Iterable[IndexedSeries],
    workflow: Workflow,
    cards: Sequence[ModelCard],
    leave: Leave,
    store: IndexStore | None = None,
) -> Iterator[Inputs]:
    """Yield the series of each case, and hand over those that are left out.

    `select`, `channels` and `policy` of the workflow are applied; the cards of its models decide
    which of several series is the best. Each series is in one case, or left out. A workflow that
    chooses among the series of a study goes through all of them twice.

    Parameters
    ----------
    indexed : iterable of IndexedSeries
    workflow, cards
    leave : callable
    store : IndexStore or None
        For rows of matching series while they are put together by study; None for memory.
    """
    criteria = criteria_of(workflow.select, workflow.policy)
    matching = (
        (number, series)
        for number, series in enumerate(indexed)
        if _matches(series, criteria, workflow.policy, leave)
    )
    if not workflow.channels and workflow.select.choose == "all":
        for _, series in matching:
            yield (series,)
        return
    studies = _studies(matching, store or IndexStore())
    if workflow.channels:
        yield from _channels(indexed, studies, workflow, cards, leave, store or IndexStore())
    else:
        yield from _of_each_study(indexed, studies, workflow.select, cards, leave)


def _matches(series: IndexedSeries, criteria: Criteria, policy: Policy, leave: Leave) -> bool:
    """Return whether a series may have a case; else hand it over with the reason."""
    mismatched = mismatch(series.info, criteria)
    fault = series.reason
    if fault is not None and _allowed(fault, policy):
        fault = None
    # A series that is not selected may be faulty; any other one has failed
    may_be = fault is None or (fault.expects_result and series.info.modality != "")
    if mismatched is not None and may_be:
        leave(Outcome(series.id, Reason.NOT_SELECTED.code, mismatched))
    elif fault is not None:
        leave(Outcome(series.id, fault.code, series.info.detail))
    else:
        return True
    return False


def check_channels(workflow: Workflow, cards: Sequence[ModelCard]) -> None:
    """Check that a workflow selects a series for each input channel of its models.

    Raises
    ------
    ScanError
        WORKFLOW, with the expected channels, at their line.
    """
    inputs = {tuple(channel.name for channel in card.channels) for card in cards}
    [*names] = min(inputs)
    with workflow.naming_lines():
        if len(inputs) > 1 and max(map(len, inputs)) > 1:
            raise WorkflowError(("models",), "all need the same inputs")
        if len(names) > 1 and names != list(workflow.channels):
            problem = f"the models need a selection each for {', '.join(names)}, in this order"
            raise WorkflowError(("channels",), problem)
        if len(names) == 1 and workflow.channels:
            problem = "these models take a single input; use `select` instead"
            raise WorkflowError(("channels",), problem)


def criteria_of(selection: Selection, policy: Policy) -> Criteria:
    """Return the criteria of a selection that not every series meets.

    A series without a grid yet (a gap, several volumes) has no shape: it meets criteria on it.
    """
    criteria: list[tuple[str, Callable[[SeriesInfo], bool]]] = []

    def add(name: str, setting: object, is_met: Callable[[SeriesInfo], bool]) -> None:
        if setting:
            criteria.append((f"by select.{name}", is_met))

    modalities, body_parts, image_type = (
        {entry.upper() for entry in entries}
        for entries in (selection.modality, selection.body_part, selection.image_type)
    )
    description, not_description, kernel = (
        [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
        for patterns in (selection.description, selection.not_description, selection.kernel)
    )
    assumed, contrast, plane = policy.modality or "", selection.contrast, selection.orientation
    lowest, least = selection.min_spacing * (1 - SPACING_TOLERANCE), selection.min_slices
    highest = (selection.max_spacing or math.inf) * (1 + SPACING_TOLERANCE)
    # Facts that every header states come before those that follow from its geometry: the first one
    # that fails is reported
    if modalities and not assumed:
        criteria.append((NO_MODALITY, lambda info: info.modality != ""))
    add("modality", modalities, lambda info: (info.modality or assumed).upper() in modalities)
    add("body_part", body_parts, lambda info: info.body_part.upper() in body_parts)
    add("description", description, lambda info: _any(description, info.description))
    add("not_description", not_description, lambda i: not _any(not_description, i.description))
    add("image_type", image_type, lambda i: image_type <= set(i.image_type.upper().split("\\")))
    add("kernel", kernel, lambda info: _any(kernel, info.kernel))
    add("contrast", contrast is not None, lambda info: info.contrast == contrast)
    add("orientation", plane != "any", lambda info: info.plane in ("", plane))
    add("min_slices", True, lambda info: not info.shape or info.shape[2] >= least)
    add("min_spacing", lowest, lambda info: not info.spacing or info.spacing[2] >= lowest)
    add("max_spacing", highest < math.inf, lambda i: not i.spacing or i.spacing[2] <= highest)
    return tuple(criteria)


def mismatch(info: SeriesInfo, criteria: Criteria) -> str | None:
    """Return the detail of the first criterion that a series fails, None if it meets all."""
    return next((detail for detail, is_met in criteria if not is_met(info)), None)


def _allowed(reason: Reason, policy: Policy) -> bool:
    """Return whether the policy allows a series in spite of this reason."""
    if reason in (Reason.SLICE_GAP, Reason.SLICES_UNREADABLE):
        return policy.gaps == "interpolate"
    if reason in (Reason.PHASES, Reason.FOUR_D):
        return policy.phases != "refuse"
    return reason is Reason.ORIENTATION_UNKNOWN and policy.orientation is not None


_Numbered = tuple[int, SeriesInfo]
"""The number of a series among all, and what it is chosen by."""
_OTHER, _CHOSEN, _REST = 0, 1, 2


def _studies(
    matching: Iterable[tuple[int, IndexedSeries]], store: IndexStore
) -> Iterator[list[_Numbered]]:
    """Yield the matching series of each study; a series without a study is one by itself."""
    import pyarrow as pa

    schema = pa.schema({"study": pa.string(), "number": pa.int64(), "info": pa.string()})

    def to_table(rows: list[tuple[str, int, str]]) -> pa.Table:
        columns = {name: [row[n] for row in rows] for n, name in enumerate(schema.names)}
        return pa.table(columns, schema)

    def to_rows(batch: pa.RecordBatch) -> Iterable[tuple[str, int, str]]:
        return zip(*(batch[name].to_pylist() for name in schema.names), strict=True)

    ordered = SortedOnDisk(store, lambda row: row[:2], to_table, to_rows)
    for number, series in matching:
        ordered.add((series.study or series.id, number, json.dumps(series.info)))
    for _, rows in itertools.groupby(ordered.rows(), key=itemgetter(0)):
        yield [(number, SeriesInfo(*json.loads(info))) for _, number, info in rows]


def _of_each_study(
    indexed: Iterable[IndexedSeries],
    studies: Iterable[list[_Numbered]],
    selection: Selection,
    cards: Sequence[ModelCard],
    leave: Leave,
) -> Iterator[Inputs]:
    """Yield the best series of each study, in the order of the index."""
    preference = _preference(selection, cards)
    detail = f"another series of its study is the {selection.choose} one"
    kinds = bytearray()
    for study in studies:
        best = best_first([info for _, info in study], preference)[0]
        for n, (number, _) in enumerate(study):
            kinds.extend(bytes(max(0, number + 1 - len(kinds))))
            kinds[number] = _CHOSEN if n == best else _REST
    for series, kind in zip(indexed, kinds):  # noqa: B905  # the last ones may be of no study
        if kind == _CHOSEN:
            yield (series,)
        elif kind == _REST:
            leave(Outcome(series.id, Reason.NOT_SELECTED.code, detail))


def _channels(
    indexed: Iterable[IndexedSeries],
    studies: Iterable[list[_Numbered]],
    workflow: Workflow,
    cards: Sequence[ModelCard],
    leave: Leave,
    store: IndexStore,
) -> Iterator[Inputs]:
    """Yield the inputs of each complete study, in the order of the studies' first series."""
    # Four numbers of each matching series: its own, the first of its study, its place in the case
    # (behind all places if it has none), and that of the text which says what its study lacks
    numbers = array("q")
    texts = {"": 0}
    channels = {
        name: (selection, criteria_of(selection, workflow.policy))
        for name, selection in workflow.channels.items()
    }
    for study in studies:
        by_channel: dict[str, int] = {}
        infos = dict(study)
        for name, (selection, criteria) in channels.items():
            fit = [
                number
                for number, info in study
                if mismatch(info, criteria) is None and number not in by_channel.values()
            ]
            if fit:
                best = best_first([infos[n] for n in fit], _preference(selection, cards))
                by_channel[name] = fit[best[0]]
        missing = ", ".join(name for name in workflow.channels if name not in by_channel)
        text = texts.setdefault(missing, len(texts))
        order = {} if missing else {number: n for n, number in enumerate(by_channel.values())}
        for number, _ in study:
            unused = number not in by_channel.values()
            position = order.get(number, len(by_channel) + number)
            numbers.extend((number, study[0][0], position, -1 if unused else text))
    ordered = placed_sorter(store, 3)
    rows = np.frombuffer(numbers, np.int64).reshape(-1, 4)
    following = map(tuple, rows[np.argsort(rows[:, 0])])
    first, *where = next(following, (-1,))
    for n, series in enumerate(indexed):
        if n == first:
            ordered.add((*where, series))
            first, *where = next(following, (-1,))
    details = list(texts)
    for _, study_rows in itertools.groupby(ordered.rows(), key=itemgetter(0)):
        inputs: list[IndexedSeries] = []
        for _, _, lacking, series in study_rows:
            if lacking == 0:
                inputs.append(series)
                if len(inputs) == len(workflow.channels):
                    yield tuple(inputs)
            elif lacking < 0:
                leave(Outcome(series.id, Reason.NOT_SELECTED.code, "by channels"))
            else:
                leave(Outcome(series.id, Reason.CHANNEL_MISSING.code, details[lacking]))


def _preference(selection: Selection, cards: Sequence[ModelCard]) -> Preference:
    return replace(
        preference_of(cards) if cards else Preference(),
        prefer_spacing=selection.prefer_spacing,
        newest=selection.choose == "newest",
    )


def _any(patterns: Iterable[re.Pattern[str]], text: str) -> bool:
    return any(pattern.search(text) for pattern in patterns)
