"""Choice of the slices that a mosaic shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Span = tuple[int, int]
"""First and last slice of a structure, both included."""


def choose_slices(body: Span, spans: Sequence[Span], count: int) -> list[int]:
    """Choose slices: the first and the last, others evenly, and some through every structure.

    Parameters
    ----------
    body : (first, last)
        Slices of the body and of all structures.
    spans : sequence of (first, last)
        Slices of each structure.
    count : int
        Number of slices to choose; more are chosen only if the structures need more.

    Returns
    -------
    list of int
        Slices in ascending order, none twice.
    """
    first, last = body
    if last - first < count:
        return list(range(first, last + 1))
    ends = {first, last}
    low, high = min((s[0] for s in spans), default=first), max((s[1] for s in spans), default=last)
    needed: set[int] = set()
    for room in range(count - 2, -1, -1):
        even = {int(low + (n + 0.5) / room * (high - low + 1)) for n in range(room)}
        shown = ends | {min(n, last) for n in even}
        needed = _piercing([s for s in spans if not any(s[0] <= n <= s[1] for n in shown)])
        if len(shown | needed) <= count:
            return _filled(shown | needed, count)
    return sorted(ends | needed)


def _piercing(spans: Sequence[Span]) -> set[int]:
    """Return few slices such that each span has one of them."""
    chosen: set[int] = set()
    waiting = sorted(spans, key=lambda s: s[1])
    while waiting:
        end = waiting[0][1]
        group = [s for s in waiting if s[0] <= end]
        chosen.add((max(s[0] for s in group) + end) // 2)
        waiting = [s for s in waiting if s[0] > end]
    return chosen


def _filled(shown: set[int], count: int) -> list[int]:
    """Return the slices with further ones in the widest gaps, up to `count`."""
    chosen = sorted(shown)
    while len(chosen) < count:
        gaps = np.diff(chosen)
        widest = int(np.argmax(gaps))
        chosen.insert(widest + 1, (chosen[widest] + chosen[widest + 1]) // 2)
    return chosen
