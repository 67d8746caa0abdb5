"""Series that every other reader reads are read right; similar ones have a reason code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

import scanloom
from scanloom.core import Grid, ScanError, Volume
from scanloom.io.dicom.geometry.slices import Slice, single_slice
from scanloom.io.dicom.geometry.stack import is_rounded_stack, stack_slices
from scanloom.io.dicom.header.elements import decode_elements
from scanloom.io.dicom.header.header import Header, pydicom_muted, read_headers
from scanloom.io.dicom.header.parser import parse_plain, parse_with_pydicom, read_first_bytes
from scanloom.io.index.build import build_index
from support.balls import deviations
from support.dicom_kinds.base import Kind
from support.dicom_kinds.once_refused import KINDS
from support.write_dicom import PLANES, noise, write_series

Turn = NDArray[np.float64]
READ = {name: kind for name, kind in KINDS.items() if not kind.code}
REFUSED = {name: kind for name, kind in KINDS.items() if kind.code}


def code_of(folder: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(folder, **options)
    return caught.value.code


def flags_of(volume: Volume) -> set[str]:
    return {flag.code for flag in volume.flags}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
def test_the_index_agrees_with_reading_for_every_kind(tmp_path, name, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scan = tmp_path / "scan"
    KINDS[name].make(scan)
    index = build_index([scan], bytes(32))
    whole = [entry for entry in index.series if entry.slices] or index.series
    assert {entry.info.reason for entry in whole} == {KINDS[name].code}
    for entry in (file.entry for file in index.files()):
        with pydicom_muted():
            fast, odd = (
                parse_plain(entry.path, read_first_bytes(entry.path)),
                parse_with_pydicom(Path(entry.path)),
            )
        assert fast in (None, odd)
        assert decode_elements(odd.packed()) == odd


@pytest.mark.parametrize("name", READ)
def test_readable_kinds_are_read_right(tmp_path, name):
    kind = READ[name]
    kind.make(tmp_path)
    volume = scanloom.load_volume(tmp_path)
    assert deviations(volume, kind.balls[0]) == {}
    assert set(kind.flags) <= flags_of(volume)
    if "tilted" not in name:
        assert not volume.grid.sheared


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_kinds_are_refused_with_their_reason_code(tmp_path, name):
    kind: Kind = REFUSED[name]
    kind.make(tmp_path)
    assert code_of(tmp_path) == kind.code
    if kind.options:
        assert deviations(scanloom.load_volume(tmp_path, **kind.options), kind.balls[0]) == {}
    if kind.code == "PHASES":
        for phase, ball in enumerate(kind.balls):
            assert deviations(scanloom.load_volume(tmp_path, phase=phase), ball) == {}


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Slice:
    """Return a slice of a file, as a template for other positions."""
    folder = tmp_path_factory.mktemp("pattern")
    write_series(folder, noise((4, 4, 1)))
    [header] = read_headers(folder.iterdir())
    assert isinstance(header, Header)
    return replace(single_slice(header), shared=None)


def placed(pattern: Slice, turn: Turn, positions: NDArray[np.float64]) -> list[Slice]:
    """Return slices at these positions, in random order."""
    orientation = tuple(float(f"{v:.9f}") for v in np.ravel(turn))
    order = np.random.default_rng(len(positions)).permutation(len(positions))
    return [
        replace(pattern, position=tuple(map(float, positions[k])), orientation=orientation)
        for k in order
    ]


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Draw row and column directions: axis-aligned, or rotated by any angles."""
    if draw(st.booleans()):
        across, down = PLANES[draw(st.sampled_from(sorted(PLANES)))]
        return np.array((across, down), float)
    angles = [draw(st.floats(0, 2 * np.pi)) for _ in range(3)]
    return np.array(Rotation.from_euler("xyz", angles).as_matrix()[:2])


@pytest.mark.thorough
@settings(max_examples=300)
@given(
    turn=turns(),
    digits=st.sampled_from((1, 2)),
    step=st.floats(0.6, 5),
    count=st.integers(10, 400),
    origin=st.tuples(*[st.floats(-500, 500)] * 3),
)
def test_rounded_positions_are_restored(pattern, turn, digits, step, count, origin):
    """Corners are right within 0.11 mm for tenths, 0.011 mm for hundredths, without shear.

    Rounding moves a corner by up to 0.087 mm (0.05 along each axis), which is undetectable; the
    slope of the line through all slices adds up to 0.03 mm along the normal.
    """
    normal = np.cross(*turn)
    true = np.array(origin) + np.outer(np.arange(count), step * normal)
    stack = stack_slices(placed(pattern, turn, np.round(true, digits)))
    first, last = stack.affine[:3, 3], stack.affine[:3, 3] + (count - 1) * stack.affine[:3, 2]
    off = [np.linalg.norm(a - b * (-1, -1, 1)) for a, b in ((first, true[0]), (last, true[-1]))]
    assert max(off) < 1.1 * 10.0**-digits
    assert not Grid((4, 4, count), stack.affine).sheared


@settings(max_examples=300)
@given(
    turn=turns(),
    step=st.floats(0.6, 5),
    count=st.integers(12, 200),
    where=st.floats(0.1, 0.9),
    fault=st.sampled_from(("a slice is missing", "the spacing changes", "the table jumps")),
    origin=st.tuples(*[st.floats(-500, 500)] * 3),
)
def test_rounding_hides_no_missing_slice_and_no_other_spacing(
    pattern, turn, step, count, where, fault, origin
):
    k, middle = np.arange(count), min(count - 4, max(4, int(where * count)))
    depth = {
        "a slice is missing": step * (k + (k >= middle)),
        "the spacing changes": step * k + 0.1 * np.maximum(0, k - middle),
        "the table jumps": step * k + 0.45 * (k == middle),
    }[fault]
    true = np.array(origin) + np.outer(depth, np.cross(*turn))
    slices = placed(pattern, turn, np.round(true, 1))
    if fault == "the spacing changes" and is_rounded_stack(np.round(true, 1)):
        # So close to an end that rounding could explain the deviation of every slice
        stack = stack_slices(slices)
        lines = stack.affine[:3, 3] + np.outer(k, stack.affine[:3, 2])
        assert np.linalg.norm(lines * (-1, -1, 1) - true, axis=1).max() < 0.2
        return
    with pytest.raises(ScanError) as caught:
        stack_slices(slices)
    codes = {"a slice is missing": ("SLICE_GAP",)}
    assert caught.value.code in codes.get(fault, ("SPACING_CHANGES", "SLICE_GAP"))
