"""Selection of the series of an index by a workflow, and the scope of a run.

Each series that is left out has a reason. The scope is the share of the cases on which a run works,
without those that earlier runs completed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, ScanError
from scanloom.engine.workflow.schema import Policy, Selection, Workflow
from scanloom.io.index.inspection import SeriesInfo
from scanloom.io.index.ranking import SPACING_TOLERANCE, Preference, best_first, preference_of
from scanloom.io.index.storage import IndexedSeries


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


@dataclass(frozen=True)
class LeftOut:
    """A series without a case; `detail` holds no text of its headers."""

    series: IndexedSeries
    reason: Reason
    detail: str


def select(
    indexed: Iterable[IndexedSeries], workflow: Workflow, cards: Sequence[ModelCard] = ()
) -> tuple[list[Inputs], list[LeftOut]]:
    """Split the series of an index into inputs of cases and series that are left out.

    `select`, `channels` and `policy` of the workflow are applied; the cards of its models decide
    which of several series is the best. Each series is in exactly one of the two lists.
    """
    matching: list[IndexedSeries] = []
    left_out: list[LeftOut] = []
    for series in indexed:
        mismatched = mismatch(series.info, workflow.select, workflow.policy)
        fault = series.reason
        if fault is not None and _allowed(fault, workflow.policy):
            fault = None
        # A series that is not selected may be faulty; any other one has failed
        may_be = fault is None or (fault.expects_result and series.info.modality != "")
        if mismatched is not None and may_be:
            left_out.append(LeftOut(series, Reason.NOT_SELECTED, mismatched))
        elif fault is not None:
            left_out.append(LeftOut(series, fault, series.info.detail))
        else:
            matching.append(series)
    if workflow.channels:
        chosen, unchosen = _channels(matching, workflow, cards)
        return chosen, left_out + unchosen
    kept = _of_each_study(matching, workflow.select, cards)
    known = {id(series) for series in kept}
    detail = f"another series of its study is the {workflow.select.choose} one"
    left_out += [LeftOut(m, Reason.NOT_SELECTED, detail) for m in matching if id(m) not in known]
    return [(series,) for series in kept], left_out


def check_channels(workflow: Workflow, cards: Sequence[ModelCard]) -> None:
    """Check that a workflow selects a series for each input channel of its models.

    Raises
    ------
    ScanError
        WORKFLOW, with the expected channels.
    """
    inputs = {tuple(channel.name for channel in card.channels) for card in cards}
    if len(inputs) > 1 and max(map(len, inputs)) > 1:
        raise ScanError(Reason.WORKFLOW, "models: all need the same inputs")
    [*names] = min(inputs)
    if len(names) > 1 and names != list(workflow.channels):
        detail = f"channels: the models need a selection each for {', '.join(names)}, in this order"
        raise ScanError(Reason.WORKFLOW, detail)
    if len(names) == 1 and workflow.channels:
        raise ScanError(
            Reason.WORKFLOW, "channels: these models take a single input; use `select` instead"
        )


def mismatch(info: SeriesInfo, selection: Selection, policy: Policy) -> str | None:
    """Return the first criterion of a selection that a series fails, None if it meets all.

    A series without a grid yet (a gap, several volumes) has no shape: criteria on it are skipped.
    """
    spacing = info.spacing[2] if info.spacing else None
    highest = math.inf if selection.max_spacing is None else selection.max_spacing
    image_type = {entry.upper() for entry in selection.image_type}
    # Facts that every header states come before those that follow from its geometry: the first one
    # that fails is reported
    meets = {
        "modality": _among(info.modality or policy.modality or "", selection.modality),
        "body_part": _among(info.body_part, selection.body_part),
        "description": _any_match(selection.description, info.description),
        "not_description": not selection.not_description
        or not _any_match(selection.not_description, info.description),
        "image_type": image_type <= set(info.image_type.upper().split("\\")),
        "kernel": _any_match(selection.kernel, info.kernel),
        "contrast": selection.contrast is None or selection.contrast == info.contrast,
        "orientation": not info.plane or selection.orientation in ("any", info.plane),
        "min_slices": not info.shape or info.shape[2] >= selection.min_slices,
        "min_spacing": spacing is None
        or spacing >= selection.min_spacing * (1 - SPACING_TOLERANCE),
        "max_spacing": spacing is None or spacing <= highest * (1 + SPACING_TOLERANCE),
    }
    failed = next((name for name, is_met in meets.items() if not is_met), None)
    if failed == "modality" and not (info.modality or policy.modality):
        return NO_MODALITY
    return f"by select.{failed}" if failed else None


def _allowed(reason: Reason, policy: Policy) -> bool:
    """Return whether the policy allows a series in spite of this reason."""
    if reason in (Reason.SLICE_GAP, Reason.SLICES_UNREADABLE):
        return policy.gaps == "interpolate"
    if reason in (Reason.PHASES, Reason.FOUR_D):
        return policy.phases != "refuse"
    return reason is Reason.ORIENTATION_UNKNOWN and policy.orientation is not None


def _of_each_study(
    matching: Sequence[IndexedSeries], selection: Selection, cards: Sequence[ModelCard]
) -> list[IndexedSeries]:
    """Return all series, or the best of each study; a series without a study is one by itself."""
    if selection.choose == "all":
        return list(matching)
    preference = _preference(selection, cards)
    best = [
        study[best_first([series.info for series in study], preference)[0]]
        for study in _studies(matching)
    ]
    kept = {id(series) for series in best}
    return [series for series in matching if id(series) in kept]


def _channels(
    matching: Sequence[IndexedSeries], workflow: Workflow, cards: Sequence[ModelCard]
) -> tuple[list[Inputs], list[LeftOut]]:
    """Return the inputs of each complete study, and the series that are left out."""
    chosen: list[Inputs] = []
    left_out: list[LeftOut] = []
    for study in _studies(matching):
        by_channel: dict[str, IndexedSeries] = {}
        for name, selection in workflow.channels.items():
            fit = [
                series
                for series in study
                if mismatch(series.info, selection, workflow.policy) is None
                and series not in by_channel.values()
            ]
            if fit:
                best = best_first([series.info for series in fit], _preference(selection, cards))
                by_channel[name] = fit[best[0]]
        missing = [name for name in workflow.channels if name not in by_channel]
        if not missing:
            chosen.append(tuple(by_channel.values()))
        for series in study:
            if series not in by_channel.values():
                left_out.append(LeftOut(series, Reason.NOT_SELECTED, "by channels"))
            elif missing:
                left_out.append(LeftOut(series, Reason.CHANNEL_MISSING, ", ".join(missing)))
    return chosen, left_out


def _studies(matching: Sequence[IndexedSeries]) -> Iterable[list[IndexedSeries]]:
    studies: dict[str, list[IndexedSeries]] = defaultdict(list)
    for series in matching:
        studies[series.study or series.id].append(series)
    return studies.values()


def _preference(selection: Selection, cards: Sequence[ModelCard]) -> Preference:
    return replace(
        preference_of(cards) if cards else Preference(),
        prefer_spacing=selection.prefer_spacing,
        newest=selection.choose == "newest",
    )


def _among(value: str, allowed: Sequence[str]) -> bool:
    return not allowed or value.upper() in {entry.upper() for entry in allowed}


def _any_match(patterns: Sequence[str], text: str) -> bool:
    return not patterns or any(re.search(p, text, re.IGNORECASE) for p in patterns)
