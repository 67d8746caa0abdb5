"""Which of several series is the best one: the same order for commands, workflows and Python.

What decides, one after the other, each only among those that are equal so far:

1. the newest, where that is asked for;
2. a modality that the model takes;
3. original before computed (ImageType);
4. no short piece: one that covers less than half of what the longest of them does;
5. a distance of slices within the range of the model's card, and of those the smallest; or the one
   nearest to what a workflow prefers;
6. the longer coverage along the slices;
7. a soft or sharp kernel, where the card says which the model was made for;
8. the newest;
9. the lower series number, then the order in which they were found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scanloom.core import Gaps, Reason, ScanError, Series
from scanloom.io.survey import Description, describe_series

if TYPE_CHECKING:
    from scanloom.cards.card import ModelCard

BEST, ALL = "best", "all"
"""What `--series` takes beside a UID and a number."""

SHORT = 0.5
"""Share of the longest coverage below which a series is a piece: a bolus tracked, a perfusion."""
SPACING_SLACK = 1e-3
"""Relative: 3.0 mm in a header may be 3.0000001 between positions."""
SAME_STEP = 0.1
"""mm: distances of slices that differ by less are equally good."""
SAME_COVERAGE = 10.0
"""mm, likewise."""

Kernel = Literal["soft", "sharp"]

_WORDS: tuple[tuple[Kernel, tuple[str, ...]], ...] = (
    ("sharp", ("BONE", "LUNG", "EDGE", "DETAIL", "ULTRA", "SHARP")),
    ("soft", ("SOFT", "STANDARD", "STND", "SMOOTH")),
)
_NUMBERED = re.compile(r"([A-Z]{1,2})(\d\d)")
"""Siemens: letters and two digits, the sharper the higher; Canon: FC and two digits."""
_SIEMENS_SHARP = 50
_CANON_SHARP = (range(30, 40), range(50, 60), range(80, 90))
_PHILIPS: dict[str, Kernel] = {
    **dict.fromkeys(("A", "B", "C", "SA", "SB", "SC", "UA", "UB", "UC"), "soft"),
    **dict.fromkeys(("D", "E", "F", "L", "YA", "YB", "YC", "YD", "YE"), "sharp"),
}


@dataclass(frozen=True)
class Preference:
    """What makes one series better than another; what is left out decides nothing.

    Parameters
    ----------
    modality : str or None
        Of the model's input.
    spacing : (low, high) or None
        mm between slices that the model was made for.
    prefer_spacing : float or None
        mm; goes before `spacing`.
    kernel : "soft", "sharp" or None
    newest : bool
        Whether the date goes before all else.
    """

    modality: str | None = None
    spacing: tuple[float, float] | None = None
    prefer_spacing: float | None = None
    kernel: Kernel | None = None
    newest: bool = False


@dataclass(frozen=True)
class Reading:
    """With which options of `load_volume` series will be read: what they let in can be chosen."""

    phase: int | None = None
    gaps: Gaps = "refuse"
    orientation: str | None = None


def preference_of(cards: Sequence[ModelCard]) -> Preference:
    """Return what several models agree on; where they differ, nothing is preferred."""
    ranges = [card.checks.spacing for card in cards if card.checks.spacing is not None]
    low = max((one.low for one in ranges), default=0.0)
    high = min((one.high for one in ranges), default=float("inf"))
    modalities = {card.channels[0].modality for card in cards}
    kernels = {card.kernel for card in cards}
    return Preference(
        modality=modalities.pop() if len(modalities) == 1 else None,
        spacing=(low, high) if ranges and low <= high else None,
        kernel=kernels.pop() if len(kernels) == 1 else None,
    )


def best_first(found: Sequence[Description], wanted: Preference = Preference()) -> list[int]:
    """Return the places of descriptions in their list, the best one first."""
    covered = [_coverage(what) for what in found]
    longest = max(covered, default=0.0)
    keys = [
        _key(what, wanted, short=bool(what.spacing) and mm < SHORT * longest)
        for what, mm in zip(found, covered, strict=True)
    ]
    return sorted(range(len(found)), key=lambda n: keys[n])


def series_meant(
    found: Sequence[Series],
    wanted: str | None = None,
    preference: Preference = Preference(),
    reading: Reading = Reading(),
) -> tuple[Series, ...]:
    """Return the series that are meant.

    Parameters
    ----------
    found : sequence of Series
        As `find_series` gave it.
    wanted : str or None
        "best"; "all"; or as in `scanloom.io.find.choose_series`.
    preference : Preference
        What makes the best one.
    reading : Reading

    Returns
    -------
    tuple of Series
        All but those that were computed from others for "all", else one.

    Raises
    ------
    ScanError
        As `choose_series`; for "best" the reason of the largest series if none gives a volume;
        DERIVED for "all" if all were computed from others.
    """
    from scanloom.io.find import choose_series

    if wanted == BEST:
        return (_best(found, preference, reading),)
    if wanted == ALL:
        original = tuple(one for one in found if not one.derived)
        return original or (choose_series(found),)
    return (choose_series(found, wanted),)


def kernel_kind(kernel: str) -> Kernel | None:
    """Return whether a ConvolutionKernel is soft or sharp, None where its name does not tell.

    Names are the manufacturers' own; these are the usual ones of Siemens, GE, Philips and Canon.
    """
    name = kernel.split("\\")[0].strip().upper()
    for kind, words in _WORDS:
        if any(word in name for word in words):
            return kind
    if name in _PHILIPS:
        return _PHILIPS[name]
    numbered = _NUMBERED.match(name)
    if numbered is None:
        return None
    number = int(numbered[2])
    if numbered[1] == "FC":
        return "sharp" if any(number in some for some in _CANON_SHARP) else "soft"
    return "sharp" if number >= _SIEMENS_SHARP else "soft"


def _best(found: Sequence[Series], preference: Preference, reading: Reading) -> Series:
    described = [
        describe_series(one, reading.phase, reading.gaps, reading.orientation) for one in found
    ]
    usable = [n for n, what in enumerate(described) if not what.reason]
    if not usable:
        first = next((n for n, one in enumerate(found) if not one.derived), 0)
        detail = f"none of {len(found)} series gives a volume"
        said = described[first].detail
        raise ScanError(Reason[described[first].reason], f"{detail}: {said}" if said else detail)
    order = best_first([described[n] for n in usable], preference)
    return found[usable[order[0]]]


def _key(what: Description, wanted: Preference, *, short: bool) -> tuple[object, ...]:
    """Return what the better series has less of."""
    newest = tuple(-ord(letter) for letter in what.date.ljust(32)[:32])
    strange = bool(wanted.modality and what.modality and what.modality != wanted.modality)
    computed = "ORIGINAL" not in what.image_type.upper().split("\\")
    return (
        newest if wanted.newest else (),
        strange,
        computed,
        short,
        _step_key(what, wanted),
        -round(_coverage(what) / SAME_COVERAGE),
        _kernel_key(what, wanted),
        newest,
        what.number if what.number >= 0 else float("inf"),
    )


def _step_key(what: Description, wanted: Preference) -> tuple[bool, float]:
    """Return whether the distance of slices is unfit, and how far it is from the best."""
    if not what.spacing:
        return True, float("inf")
    step = what.spacing[2]
    if wanted.prefer_spacing is not None:
        return False, _steps(abs(step - wanted.prefer_spacing))
    if wanted.spacing is None:
        return False, _steps(step)
    low, high = wanted.spacing
    off = max(low * (1 - SPACING_SLACK) - step, step - high * (1 + SPACING_SLACK))
    return (True, _steps(off)) if off > 0 else (False, _steps(step))


def _steps(mm: float) -> float:
    return round(mm / SAME_STEP)


def _kernel_key(what: Description, wanted: Preference) -> int:
    if wanted.kernel is None:
        return 0
    return {wanted.kernel: 0, None: 1}.get(kernel_kind(what.kernel), 2)


def _coverage(what: Description) -> float:
    return what.shape[2] * what.spacing[2] if what.shape and what.spacing else 0.0
