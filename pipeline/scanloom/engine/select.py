"""Which series of an index a workflow wants, and why the others are left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, ScanError
from scanloom.engine.workflow import Policy, Selection, Workflow
from scanloom.io.index_file import IndexedSeries
from scanloom.io.ranking import SPACING_SLACK, Preference, best_first, preference_of
from scanloom.io.survey import Description

Inputs = tuple[IndexedSeries, ...]
"""The series of a case: one, or one for each input channel of its models, in their order."""


@dataclass(frozen=True)
class LeftOut:
    """A series that no case is made of; `detail` is in words of ours."""

    series: IndexedSeries
    reason: Reason
    detail: str


def select(
    found: Iterable[IndexedSeries], workflow: Workflow, cards: Sequence[ModelCard] = ()
) -> tuple[list[Inputs], list[LeftOut]]:
    """Tell the series that become cases from those that don't.

    Parameters
    ----------
    found : iterable of IndexedSeries
        All series of an index.
    workflow : Workflow
        Its `select`, `channels` and `policy` count.
    cards : sequence of ModelCard
        Of its models: they tell which of several series is the best.

    Returns
    -------
    (chosen, left_out)
        Each series is in one of them.
    """
    matching: list[IndexedSeries] = []
    left: list[LeftOut] = []
    for one in found:
        reason = one.reason
        said = mismatch(one.what, workflow.select, workflow.policy)
        if reason is not None and not _allowed(reason, workflow.policy):
            # What nobody wants need not be right; what may have been wanted failed
            unwanted = said is not None and reason.wanted and one.what.modality != ""
            why = (Reason.NOT_SELECTED, said or "") if unwanted else (reason, one.what.detail)
            left.append(LeftOut(one, *why))
        elif said is None:
            matching.append(one)
        else:
            left.append(LeftOut(one, Reason.NOT_SELECTED, said))
    if workflow.channels:
        chosen, others = _channels(matching, workflow, cards)
        return chosen, left + others
    kept = _of_each_study(matching, workflow.select, cards)
    known = {id(one) for one in kept}
    detail = f"another series of its study is the {workflow.select.choose} one"
    left += [LeftOut(m, Reason.NOT_SELECTED, detail) for m in matching if id(m) not in known]
    return [(one,) for one in kept], left


def check_channels(workflow: Workflow, cards: Sequence[ModelCard]) -> None:
    """Check that a workflow says which series each input channel of its models is.

    Raises
    ------
    ScanError
        WORKFLOW, with what is expected.
    """
    wanted = {tuple(channel.name for channel in card.channels) for card in cards}
    if len(wanted) > 1 and max(map(len, wanted)) > 1:
        raise ScanError(Reason.WORKFLOW, "models: all need the same inputs")
    [*names] = min(wanted)
    if len(names) > 1 and names != list(workflow.channels):
        detail = f"channels: the models need a selection each for {', '.join(names)}, in this order"
        raise ScanError(Reason.WORKFLOW, detail)
    if len(names) == 1 and workflow.channels:
        raise ScanError(Reason.WORKFLOW, "channels: the models take one input; say it by `select`")


def mismatch(what: Description, wanted: Selection, policy: Policy) -> str | None:
    """Return which part of a selection a series does not meet, None if it meets all.

    A series that could not be placed yet (a gap, several volumes) has no shape: what is asked of
    it does not count then.
    """
    tests: Sequence[tuple[str, Callable[[], bool]]] = (
        ("modality", lambda: _among(what.modality or policy.modality or "", wanted.modality)),
        ("body_part", lambda: _among(what.body_part, wanted.body_part)),
        ("description", lambda: _any_found(wanted.description, what.description)),
        (
            "not_description",
            lambda: (
                not wanted.not_description
                or not _any_found(wanted.not_description, what.description)
            ),
        ),
        ("image_type", lambda: _has_words(what.image_type, wanted.image_type)),
        ("kernel", lambda: _any_found(wanted.kernel, what.kernel)),
        ("contrast", lambda: wanted.contrast is None or wanted.contrast == what.contrast),
        (
            "orientation",
            lambda: not what.plane or wanted.orientation in ("any", what.plane),
        ),
        ("min_slices", lambda: not what.shape or _slices(what) >= wanted.min_slices),
        (
            "min_spacing",
            lambda: not what.spacing or _step(what) >= wanted.min_spacing * (1 - SPACING_SLACK),
        ),
        (
            "max_spacing",
            lambda: (
                wanted.max_spacing is None
                or not what.spacing
                or _step(what) <= wanted.max_spacing * (1 + SPACING_SLACK)
            ),
        ),
    )
    return next((f"by select.{name}" for name, test in tests if not test()), None)


def _allowed(reason: Reason, policy: Policy) -> bool:
    """Whether the policy says what is to be done about it."""
    if reason is Reason.SLICE_GAP:
        return policy.gaps == "interpolate"
    if reason in (Reason.PHASES, Reason.FOUR_D):
        return policy.phases != "refuse"
    return reason is Reason.ORIENTATION_UNKNOWN and policy.orientation is not None


def _of_each_study(
    matching: Sequence[IndexedSeries], wanted: Selection, cards: Sequence[ModelCard]
) -> list[IndexedSeries]:
    """Return all of them, or the one of each study that comes first; no study: a study each."""
    if wanted.choose == "all":
        return list(matching)
    preference = _preference(wanted, cards)
    studies: dict[str, list[IndexedSeries]] = defaultdict(list)
    for one in matching:
        studies[one.study or one.id].append(one)
    best = [those[best_first([o.what for o in those], preference)[0]] for those in studies.values()]
    kept = {id(one) for one in best}
    return [one for one in matching if id(one) in kept]


def _channels(
    matching: Sequence[IndexedSeries], workflow: Workflow, cards: Sequence[ModelCard]
) -> tuple[list[Inputs], list[LeftOut]]:
    """Return the inputs of each study that has all, and what is left out."""
    chosen: list[Inputs] = []
    left: list[LeftOut] = []
    studies: dict[str, list[IndexedSeries]] = defaultdict(list)
    for one in matching:
        studies[one.study or one.id].append(one)
    for those in studies.values():
        found: dict[str, IndexedSeries] = {}
        for name, wanted in workflow.channels.items():
            fit = [one for one in those if mismatch(one.what, wanted, workflow.policy) is None]
            fit = [one for one in fit if one not in found.values()]
            if fit:
                best = best_first([one.what for one in fit], _preference(wanted, cards))
                found[name] = fit[best[0]]
        missing = [name for name in workflow.channels if name not in found]
        if not missing:
            chosen.append(tuple(found.values()))
        for one in those:
            if one not in found.values():
                left.append(LeftOut(one, Reason.NOT_SELECTED, "by channels"))
            elif missing:
                left.append(LeftOut(one, Reason.CHANNEL_MISSING, ", ".join(missing)))
    return chosen, left


def _preference(wanted: Selection, cards: Sequence[ModelCard]) -> Preference:
    return replace(
        preference_of(cards) if cards else Preference(),
        prefer_spacing=wanted.prefer_spacing,
        newest=wanted.choose == "newest",
    )


def _among(value: str, wanted: Sequence[str]) -> bool:
    return not wanted or value.upper() in {word.upper() for word in wanted}


def _any_found(patterns: Sequence[str], text: str) -> bool:
    return not patterns or any(re.search(p, text, re.IGNORECASE) for p in patterns)


def _has_words(image_type: str, wanted: Sequence[str]) -> bool:
    return {w.upper() for w in wanted} <= set(image_type.upper().split("\\"))


def _slices(what: Description) -> int:
    return what.shape[2] if what.shape else 0


def _step(what: Description) -> float:
    return what.spacing[2]
