"""Cleaning of label maps by connected components, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeepLargest:
    """Keep the largest connected components (MONAI KeepLargestConnectedComponent).

    Parameters
    ----------
    numbers : tuple of int
        Numbers of the structures; empty for all.
    together : bool
        Whether the structures are merged before components are found (`independent=False`).
    parts : int
        Number of components to keep.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.
    when : "before" or "after"
        Before labels are mapped to the source grid (on the network grid), or after.
    ties : "last" or "all"
        Components kept of those as large as the smallest that is kept: as many as `parts` allows,
        the last ones (MONAI), or all (nnU-Net).
    """

    numbers: tuple[int, ...] = ()
    together: bool = False
    parts: int = 1
    connectivity: Literal[6, 18, 26] = 26
    when: Literal["before", "after"] = "after"
    ties: Literal["last", "all"] = "last"


@dataclass(frozen=True)
class RemoveSmall:
    """Remove connected components of at most a volume, of each structure by itself.

    Parameters
    ----------
    numbers : tuple of int
        Numbers of the structures; empty for all.
    volume : float
        Largest volume that is removed, mm^3.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.
    when : "before" or "after"
        Before labels are mapped to the source grid (on the network grid), or after.
    """

    numbers: tuple[int, ...] = ()
    volume: float = 200.0
    connectivity: Literal[6, 18, 26] = 6
    when: Literal["before", "after"] = "before"


Cleaning = KeepLargest | RemoveSmall


def with_small_removed(
    rules: tuple[Cleaning, ...], volume: float, when: Literal["before", "after"]
) -> tuple[Cleaning, ...]:
    """Return rules of cleaning and then, on request, the removal of components up to a volume."""
    return (*rules, RemoveSmall((), volume, when=when)) if volume > 0 else rules
