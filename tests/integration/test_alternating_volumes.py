"""Volumes that share a series, in any order and with times that lie: right, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom import Dataset

import scanloom
from scanloom.core import ScanError
from scanloom.io.dicom.header.header import Header, read_headers
from scanloom.io.dicom.series import probe_headers, read_dicom
from support.write_dicom import MR, Coding, Geometry, Words, uid, write_series

PLACES = 9
RAW = Coding(intercept="0")
FIRST, SECOND = 1000, 2000

# When each slice of a volume was made: a number for (volume, place)
Order = Callable[[int, int], int]
ORDERS: dict[str, Order] = {
    "volume by volume": lambda v, k: v * PLACES + k,
    "slice by slice": lambda v, k: 2 * k + v,
    "there and back": lambda v, k: 2 * k + (v if k % 2 == 0 else 1 - v),
    "odd slices of both, then even ones": lambda v, k: (
        (1 - k % 2) * 2 * PLACES + v * PLACES + k // 2
    ),
    "the second backwards": lambda v, k: k if v == 0 else 2 * PLACES - 1 - k,
    "in any order": lambda v, k: 2 * k + (v if k * k % 3 else 1 - v),
}
Times = Callable[[int, int, int], str | None]
TIMES: dict[str, Times] = {
    "no times": lambda v, k, n: None,
    "equal times": lambda v, k, n: "101500",
    "times in order": lambda v, k, n: f"1015{n:02d}",
    "a time of each volume": lambda v, k, n: f"1015{v:02d}",
    "a time is missing": lambda v, k, n: None if (v, k) == (1, 4) else f"1015{n:02d}",
    "a volume without times": lambda v, k, n: None if v else "101500",
    "times of two slices are swapped": lambda v, k, n: f"1015{v if k != 4 else 1 - v:02d}",
}
RIGHT = {
    (order, times)
    for order in ("volume by volume", "the second backwards")
    for times in TIMES
    if times != "times of two slices are swapped"
} | {("slice by slice", "a time of each volume"), ("slice by slice", "a volume without times")}
"""What can be told for certain: passes, and times that all slices of a volume have, where numbers
do not say otherwise."""


def write_volumes(folder: Path, order: Order, times: Times, keyword: str = "ContentTime") -> None:
    """Write two volumes; each voxel names its volume."""
    for v, value in enumerate((FIRST, SECOND)):

        def edit(k: int, ds: Dataset, v: int = v) -> None:
            number = order(v, k)
            ds.InstanceNumber = 1 + number
            ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid("order", v, k)
            for name in ("ContentTime", "AcquisitionTime", "TriggerTime"):
                ds.pop(name, None)
            time = times(v, k, number)
            if time is not None:
                setattr(ds, keyword, time)

        stored = np.full((8, 6, PLACES), value)
        write_series(folder / str(v), stored, Geometry(), RAW, Words("MR"), edit)


def values_of(folder: Path, phase: int | None) -> set[float] | str:
    try:
        return set(np.unique(scanloom.load_volume(folder, phase=phase).array).tolist())
    except ScanError as error:
        return error.code


@pytest.mark.sampled(5)
@pytest.mark.parametrize("keyword", ["ContentTime", "AcquisitionTime", "TriggerTime"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("order", ORDERS)
def test_volumes_that_alternate_are_never_mixed(tmp_path, order, times, keyword):
    write_volumes(tmp_path, ORDERS[order], TIMES[times], keyword)
    assert values_of(tmp_path, None) in ("PHASES", "DUPLICATE_SLICES")
    volumes = [values_of(tmp_path, phase) for phase in (0, 1)]
    assert all(isinstance(values, str) or len(values) == 1 for values in volumes)
    if (order, times) in RIGHT:
        assert {FIRST} in volumes
        assert {SECOND} in volumes


# --- a slice is missing ---------------------------------------------------------------------------

Say = Callable[[int, int], dict[str, Any]]
SCANS: dict[str, tuple[int, int, Say]] = {
    "gated": (10, 34, lambda v, k: {"TriggerTime": f"{35 * v}"}),
    "gated, beats of other lengths": (
        10,
        34,
        lambda v, k: {"TriggerTime": f"{(30 + k % 7) * v:.1f}"},
    ),
    "diffusion": (
        11,
        31,
        lambda v, k: {
            "DiffusionBValue": 1000.0 if v else 0.0,
            "DiffusionGradientOrientation": [np.cos(v), np.sin(v), 0.0] if v else None,
        },
    ),
    "several echoes": (8, 42, lambda v, k: {"EchoTime": f"{2.3 * (v + 1):.1f}"}),
    "several echoes, numbers alone": (8, 42, lambda v, k: {"EchoNumbers": v + 1}),
}
"""Volumes, places, and what each slice says."""


def headers_of(folder: Path, volumes: int, places: int, say: Say) -> list[Header]:
    """Write a scan, and return its headers: all places of a volume, then of the next one."""
    paths: list[Path] = []
    for v in range(volumes):

        def edit(k: int, ds: Dataset, v: int = v) -> None:
            ds.SOPClassUID, ds.InstanceNumber = MR, 1 + k * volumes + v
            ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = uid("scan", v, k)
            for name, value in say(v, k).items():
                if value is not None:
                    setattr(ds, name, value)

        stored = np.full((4, 4, places), v)
        paths += write_series(folder / str(v), stored, Geometry(), RAW, Words("MR"), edit)
    headers = read_headers(paths)
    assert all(isinstance(header, Header) for header in headers)
    return [header for header in headers if isinstance(header, Header)]


def code_of(headers: Sequence[Header], phase: int | None) -> str:
    try:
        probe_headers(headers, phase)
    except ScanError as error:
        return error.code
    return ""


def read_code(headers: Sequence[Header]) -> str:
    """Return by which code a series is refused, pixels and all."""
    with pytest.raises(ScanError) as caught:
        read_dicom([header.path for header in headers])
    return caught.value.code


def assert_gap_is_named(name: str, folder: Path, every: int) -> None:
    volumes, places, say = SCANS[name]
    headers = headers_of(folder, volumes, places, say)
    whole = [code_of(headers, phase) for phase in range(volumes)]
    assert whole == [""] * volumes
    for lost in range(0, len(headers), every):
        rest = [header for n, header in enumerate(headers) if n != lost]
        if read_code(rest) == "SLICE_GAP":  # whichever volume is asked for
            continue
        assert code_of(rest, None) == "PHASES"
        codes = [code_of(rest, phase) for phase in range(volumes)]
        assert sorted(codes) == [""] * (volumes - 1) + ["SLICE_GAP"], (lost, codes)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("every", [109, pytest.param(33, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SCANS)
def test_a_missing_slice_is_refused_by_the_name_of_the_gap(tmp_path, name, every):
    assert_gap_is_named(name, tmp_path, every)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANS)
def test_each_missing_slice_is_refused_by_the_name_of_the_gap(tmp_path, name):
    """Each of some 340 slices of a scan in turn."""
    assert_gap_is_named(name, tmp_path, every=1)
