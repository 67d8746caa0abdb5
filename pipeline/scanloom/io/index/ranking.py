"""Selection among several series, with one ranking for commands, workflows and Python.

Criteria of the ranking. Each decides only among the series that all previous ones rate as equal:

1. the newest, if that is requested;
2. a modality that the model accepts;
3. original before derived (ImageType);
4. no short series: one that covers less than half of the longest coverage;
5. a slice spacing within the range of the model's card, the smallest of those first; or the one
   nearest to the spacing that a workflow prefers;
6. the longer coverage along the slice normal;
7. a soft or sharp kernel, if the card says which one the model was trained on;
8. the newest;
9. the lower series number, then the order in which the series were found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from scanloom.cards.card import ModelCard, shared_modality
from scanloom.core import ReadOptions, Reason, ScanError, Series, counted
from scanloom.io.index.inspection import MAX_INTEGER_DIGITS, SeriesInfo, describe_as_read
from scanloom.io.index.listing import displayed_name, list_candidates

BEST, ALL = "best", "all"
"""Values of `--series` besides a UID, a number and a name."""

SHORT_COVERAGE = 0.5
"""Share of the longest coverage below which a series is short: bolus tracking, perfusion."""
SPACING_TOLERANCE = 1e-3
"""Relative tolerance: 3.0 mm in a header may be 3.0000001 mm between positions."""
SAME_SPACING_MM = 0.1
"""Slice spacings that differ by less than this many mm are equally good."""
SAME_COVERAGE_MM = 10.0
"""Coverages that differ by less than this many mm are equally good."""

Kernel = Literal["soft", "sharp"]

_KERNEL_NAMES: tuple[tuple[Kernel, tuple[str, ...]], ...] = (
    ("sharp", ("BONE", "LUNG", "EDGE", "DETAIL", "ULTRA", "SHARP")),
    ("soft", ("SOFT", "STANDARD", "STND", "SMOOTH")),
)
_NUMBERED = re.compile(r"([A-Z]{1,2})(\d\d)")
"""Siemens: letters and two digits, the sharper the higher. Canon: FC and two digits."""
_SIEMENS_SHARP = 50
_CANON_SHARP = (range(30, 40), range(50, 60), range(80, 90))
_PHILIPS: dict[str, Kernel] = {
    **dict.fromkeys(("A", "B", "C", "SA", "SB", "SC", "UA", "UB", "UC"), "soft"),
    **dict.fromkeys(("D", "E", "F", "L", "YA", "YB", "YC", "YD", "YE"), "sharp"),
}


@dataclass(frozen=True)
class Preference:
    """Properties that rank a series higher; a field left at its default decides nothing.

    Parameters
    ----------
    modality : str or None
        Modality of the model's input.
    spacing : (low, high) or None
        Range of slice spacing, in mm, that the model was trained on.
    prefer_spacing : float or None
        Slice spacing in mm; takes precedence over `spacing`.
    kernel : "soft", "sharp" or None
    newest : bool
        Whether the date takes precedence over all other criteria.
    """

    modality: str | None = None
    spacing: tuple[float, float] | None = None
    prefer_spacing: float | None = None
    kernel: Kernel | None = None
    newest: bool = False


def preference_of(cards: Sequence[ModelCard]) -> Preference:
    """Return the preferences that several models share; on conflict, none."""
    ranges = [card.checks.spacing for card in cards if card.checks.spacing is not None]
    low = max((spacing.low for spacing in ranges), default=0.0)
    high = min((spacing.high for spacing in ranges), default=float("inf"))
    kernels = {card.kernel for card in cards}
    return Preference(
        modality=shared_modality(cards),
        spacing=(low, high) if ranges and low <= high else None,
        kernel=kernels.pop() if len(kernels) == 1 else None,
    )


def best_first(
    candidates: Sequence[SeriesInfo], preference: Preference = Preference()
) -> list[int]:
    """Return the indices of the candidates, the best first."""
    coverages = [_coverage(info) for info in candidates]
    longest = max(coverages, default=0.0)
    keys = [
        _key(info, preference, short=bool(info.spacing) and coverage < SHORT_COVERAGE * longest)
        for info, coverage in zip(candidates, coverages, strict=True)
    ]
    return sorted(range(len(candidates)), key=lambda n: keys[n])


def select_series(
    candidates: Sequence[Series],
    selection: str | None = None,
    preference: Preference = Preference(),
    options: ReadOptions = ReadOptions(),
    phase: int | None = None,
) -> tuple[Series, ...]:
    """Return the series that `--series` selects.

    Parameters
    ----------
    candidates : sequence of Series
        As `find_series` returns them.
    selection : str or None
        "best"; "all"; a SeriesInstanceUID; the number in the list, from 1; the name in the list, or
        a part of it that no other name has, in any case; or None for the only series that is not
        derived.
    preference : Preference
        Ranks the candidates for "best".
    options : ReadOptions
        How the series will be read; for "best", a series that these refuse is not a candidate.
    phase : int or None
        Index of the volume that will be read, as in `scanloom.load_volume`.

    Returns
    -------
    tuple of Series
        For "all", every series that is not derived; else a single series.

    Raises
    ------
    ScanError
        SERIES_AMBIGUOUS with the list and the values to type; SERIES_UNKNOWN; DERIVED if all
        candidates are derived; for "best", if no candidate gives a volume, the reason of the
        largest.
    """
    if selection == BEST:
        return (_best(candidates, preference, options, phase),)
    if selection is not None and selection != ALL:
        return (_selected_by_text(candidates, selection.strip()),)
    original = tuple(series for series in candidates if not series.derived)
    if original and (selection == ALL or len(original) == 1):
        return original
    listed = list_candidates(candidates)
    if not original:
        detail = f"{counted(len(candidates), 'series', 'series')}, computed from other slices"
        raise ScanError(Reason.DERIVED, detail, listed)
    detail = f"there are {len(candidates)} series at this path"
    raise ScanError(Reason.SERIES_AMBIGUOUS, detail, listed)


def kernel_kind(kernel: str) -> Kernel | None:
    """Return whether a ConvolutionKernel is soft or sharp, or None if its name is not known.

    Names are specific to the manufacturer; the usual ones of Siemens, GE, Philips and Canon are
    known.
    """
    name = kernel.split("\\")[0].strip().upper()
    for kind, substrings in _KERNEL_NAMES:
        if any(substring in name for substring in substrings):
            return kind
    if name in _PHILIPS:
        return _PHILIPS[name]
    numbered = _NUMBERED.match(name)
    if numbered is None:
        return None
    number = int(numbered[2])
    if numbered[1] == "FC":
        return "sharp" if any(number in sharp for sharp in _CANON_SHARP) else "soft"
    return "sharp" if number >= _SIEMENS_SHARP else "soft"


def describe_selection(
    candidates: Sequence[Series], selection: str | None, chosen: Series
) -> tuple[str, ...]:
    """Return other meanings that a selection may have, as sentences without full stop."""
    if selection == BEST:
        studies = len({series.study_uid or series.files for series in candidates})
        if studies == 1:
            return ()
        rivals = f"all {len(candidates)} series at this path, of {studies} studies"
        return (f"best chooses among {rivals}; a workflow's `choose: best`, among each study's",)
    number = _number(selection or "")
    if number is None or chosen.series_uid == selection or chosen.number == number:
        return ()
    alternatives = _listed_numbers(candidates, number)
    if not alternatives:
        return ()
    return (
        f"{number} is the number in the list (#); the SeriesNumber {number} is at # {alternatives}",
    )


def _listed_numbers(candidates: Sequence[Series], series_number: int) -> str:
    """Return the numbers in the list of the series with a SeriesNumber, joined by commas."""
    matches = [n for n, series in enumerate(candidates, 1) if series.number == series_number]
    return ", ".join(map(str, matches))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= MAX_INTEGER_DIGITS else None


def _selected_by_text(candidates: Sequence[Series], text: str) -> Series:
    """Return the series with this UID, number in the list or name."""
    number = _number(text)
    matching = [s for s in candidates if s.series_uid and s.series_uid == text]
    shared = "have this UID"
    if not matching and number is not None and 1 <= number <= len(candidates):
        matching = [candidates[number - 1]]
    if not matching and number is None:  # digits are a number of the list, never part of a name
        matching, shared = _named(candidates, text), "have this name, or this in their names"
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise _unknown(candidates, text)
    detail = f"{len(matching)} of {len(candidates)} series {shared}"
    raise ScanError(Reason.SERIES_AMBIGUOUS, detail, list_candidates(candidates, matching))


def _named(candidates: Sequence[Series], text: str) -> list[Series]:
    """Return the series of this name, in any case; without such, those whose name contains it."""
    requested = " ".join(text.casefold().split())
    if not requested:
        return []
    names = [displayed_name(series).casefold() for series in candidates]
    equal = [series for series, name in zip(candidates, names, strict=True) if name == requested]
    return equal or [
        series for series, name in zip(candidates, names, strict=True) if requested in name
    ]


def _unknown(candidates: Sequence[Series], text: str) -> ScanError:
    expected = f"there {'is' if len(candidates) == 1 else 'are'} {len(candidates)} series here"
    number = _number(text)
    if number is not None:
        detail = f"{expected}, and none is number {number} of the list"
        if alternatives := _listed_numbers(candidates, number):
            detail = f"{detail} (#); the SeriesNumber {number} is at # {alternatives}"
    elif near := get_close_matches(text.lower(), (BEST, ALL), n=1):
        detail = f"did you mean {near[0]}? {expected}"
    else:
        detail = f"{expected}, and none has this UID or name"
    return ScanError(Reason.SERIES_UNKNOWN, detail, list_candidates(candidates))


def _best(
    candidates: Sequence[Series], preference: Preference, options: ReadOptions, phase: int | None
) -> Series:
    described = [describe_as_read(series, phase, options) for series in candidates]
    usable = [n for n, info in enumerate(described) if not info.reason]
    if not usable:
        first = next((n for n, series in enumerate(candidates) if not series.derived), 0)
        summary = f"none of {len(candidates)} series gives a volume"
        detail = described[first].detail
        raise ScanError(
            Reason[described[first].reason], f"{summary}: {detail}" if detail else summary
        )
    scans = [n for n in usable if not candidates[n].derived] or usable
    order = best_first([described[n] for n in scans], preference)
    return candidates[scans[order[0]]]


def _key(info: SeriesInfo, preference: Preference, *, short: bool) -> tuple[object, ...]:
    """Return a sort key that is lower for the better series."""
    newest = tuple(-ord(letter) for letter in info.date.ljust(32)[:32])
    other_modality = bool(
        preference.modality and info.modality and info.modality != preference.modality
    )
    derived = "ORIGINAL" not in info.image_type.upper().split("\\")
    return (
        newest if preference.newest else (),
        other_modality,
        derived,
        short,
        _spacing_key(info, preference),
        -round(_coverage(info) / SAME_COVERAGE_MM),
        _kernel_key(info, preference),
        newest,
        info.number if info.number >= 0 else float("inf"),
    )


def _spacing_key(info: SeriesInfo, preference: Preference) -> tuple[bool, float]:
    """Return whether the slice spacing is unsuitable, and its distance from the best spacing."""
    if not info.spacing:
        return True, float("inf")
    spacing = info.spacing[2]
    if preference.prefer_spacing is not None:
        return False, _rounded(abs(spacing - preference.prefer_spacing))
    if preference.spacing is None:
        return False, _rounded(spacing)
    low, high = preference.spacing
    excess = max(low * (1 - SPACING_TOLERANCE) - spacing, spacing - high * (1 + SPACING_TOLERANCE))
    return (True, _rounded(excess)) if excess > 0 else (False, _rounded(spacing))


def _rounded(mm: float) -> float:
    return round(mm / SAME_SPACING_MM)


def _kernel_key(info: SeriesInfo, preference: Preference) -> int:
    if preference.kernel is None:
        return 0
    return {preference.kernel: 0, None: 1}.get(kernel_kind(info.kernel), 2)


def _coverage(info: SeriesInfo) -> float:
    return info.shape[2] * info.spacing[2] if info.shape and info.spacing else 0.0
