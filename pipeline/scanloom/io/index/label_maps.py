"""Files that look like label maps of a scan beside them.

A label map has the size of its scan, and nothing in most formats says that it is none. It is read
as a scan if it is chosen: lists of series only say what it looks like.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scanloom.core import DICOM, ReadOptions, ScanError, Series
from scanloom.io.formats import FORMATS
from scanloom.io.index.inspection import SeriesInfo

MAX_VOXELS: Final = 1 << 27
"""Voxels that are read for one list, of the smallest files: label maps are compressed best."""
_LARGEST_LABEL: Final = 1 << 15
"""FreeSurfer's largest label is 14175."""
_EQUAL_NEIGHBOURS: Final = 0.3
"""Share of equal neighbours from which voxels are labels: at least 0.47 in real label maps of three
values and more, at most 0.11 in real scans of whole numbers."""

SeriesSize = tuple[str, str, SeriesInfo]
"""Format of a series, path of its only file or its folder, and description."""


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
    alike: dict[object, list[int]] = {}
    for n, (_, _, info) in enumerate(sizes):
        if info.shape:  # axes may be stored in another order
            rounded = (round(mm, 2) for mm in info.spacing)
            alike.setdefault(tuple(sorted(zip(info.shape, rounded, strict=True))), []).append(n)
    near = {
        n: [m for m in group if m != n and _is_near(sizes[n][1], sizes[m][1])]
        for group in alike.values()
        for n in group
    }
    left, labels = MAX_VOXELS, set[int]()
    candidates = [n for n, others in near.items() if others and sizes[n][0] != DICOM]
    for n in sorted(candidates, key=lambda n: _file_size(sizes[n][1])):
        left -= int(np.prod(sizes[n][2].shape))
        if left < 0:
            break
        if _has_labels(series_of, n):
            labels.add(n)
    return frozenset(n for n in labels if not labels.issuperset(near[n]))


def looks_like_labels(array: NDArray[Any]) -> bool:
    """Return whether voxels are small whole numbers that mostly equal their neighbours.

    Background beside background does not count. Two values are labels in any case, and so is
    background alone.
    """
    if array.dtype.kind not in "iu" or array.size == 0:
        return False
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _LARGEST_LABEL:
        return False
    if low == 0 and not ((array != 0) & (array != high)).any():
        return True
    first, second = array[:-1], array[1:]
    inside = (first != 0) | (second != 0)
    return bool(np.mean((first == second)[inside]) >= _EQUAL_NEIGHBOURS)


def _has_labels(series_of: Callable[[int], Series], n: int) -> bool:
    try:
        series = series_of(n)
        kind = FORMATS[series.kind]
        if kind.probe(series.files)[1].kind not in "iu":
            return False
        return looks_like_labels(kind.read(series.files, None, ReadOptions()).volume.array)
    except ScanError:  # its list says why
        return False


def _is_near(first: str, second: str) -> bool:
    """Return whether two paths are at most one folder apart from a folder that both are in."""
    common = os.path.commonpath([first, second]) if first and second else ""
    return all(os.path.relpath(path, common).count(os.sep) <= 1 for path in (first, second))


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
