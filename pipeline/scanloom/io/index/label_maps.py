"""Files that look like label maps of a scan beside them.

A label map has the size of its scan, and most formats have no mark that tells them apart. It is
read as a scan if it is chosen: lists of series only say what it looks like.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from scanloom.cards.check import looks_like_labels
from scanloom.core import DICOM, ReadOptions, ScanError, Series
from scanloom.io.formats import FORMATS
from scanloom.io.index.inspection import SeriesInfo

MAX_VOXELS: Final = 1 << 27
"""Voxels that are read for one list, of the smallest files: label maps are compressed best."""

SeriesSize = tuple[str, str, SeriesInfo]
"""Format of a series, path as in `SeriesLine`, and description."""


def find_label_maps(
    sizes: Sequence[SeriesSize], series_of: Callable[[int], Series]
) -> frozenset[int]:
    """Return which series look like label maps of others.

    They are volume files of the size and spacing of a series nearby that does not look like one:
    in the same folder, in one of its folders, or in the folder next to its own.

    Parameters
    ----------
    sizes : sequence of (kind, path, SeriesInfo)
        All series of the list.
    series_of : callable
        Returns the files of a series by its place in `sizes`, to read its voxels.
    """
    groups: dict[object, list[int]] = defaultdict(list)  # of one size, below one folder
    groups_of: dict[int, list[list[int]]] = {}
    for n, (_, path, info) in enumerate(sizes):
        if not info.shape:
            continue
        # axes may be stored in another order
        rounded = (round(mm, 2) for mm in info.spacing)
        size = tuple(sorted(zip(info.shape, rounded, strict=True)))
        folder = os.path.dirname(path)
        groups_of[n] = [groups[size, key] for key in (folder, os.path.dirname(folder))]
        for group in groups_of[n]:
            group.append(n)
    candidates = [
        n
        for n, own in groups_of.items()
        if sizes[n][0] != DICOM and any(len(group) > 1 for group in own)
    ]
    remaining, labels = MAX_VOXELS, set[int]()
    for n in sorted(candidates, key=lambda n: _file_size(sizes[n][1])):
        remaining -= math.prod(sizes[n][2].shape)
        if remaining < 0:
            break
        if _has_labels(series_of, n):
            labels.add(n)
    with_scan = {id(group) for group in groups.values() if not labels.issuperset(group)}
    return frozenset(n for n in labels if any(id(group) in with_scan for group in groups_of[n]))


def _has_labels(series_of: Callable[[int], Series], n: int) -> bool:
    try:
        series = series_of(n)
        volume = FORMATS[series.kind].read(series.files, None, ReadOptions()).volume
        return looks_like_labels(volume.array)
    except ScanError:  # its list says why
        return False


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
