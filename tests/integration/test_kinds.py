"""Every kind of DICOM series is read, selected, refused or skipped, with its reason code."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread

import scanloom
from scanloom.core import ScanError, Volume
from scanloom.io.dicom.header.header import pydicom_muted
from scanloom.io.dicom.header.parser import parse_plain, parse_with_pydicom, read_first_bytes
from scanloom.io.index.build import build_index
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from support.balls import Ball, deviations
from support.dicom_kinds import KINDS
from support.dicom_kinds.base import Kind
from support.dicom_kinds.chosen import CHOSEN
from support.dicom_kinds.refused import REFUSED
from support.dicom_kinds.single import READ
from support.dicom_kinds.skipped import SKIPPED
from support.real_scans import scans_folder
from support.write_dicom import uid


def code_of(folder: Path, **options: Any) -> str:
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(folder, **options)
    return caught.value.code


def assert_right(volume: Volume, ball: Ball, kind: Kind) -> None:
    assert deviations(volume, ball) == {}
    assert set(kind.flags) <= {flag.code for flag in volume.flags}


TOLD_BY_READING = {"SERIES_AMBIGUOUS": "", "half of one tracer, half of another": ""}
"""Results of indexing, which selects no series and reads no nested sequence, by code or kind."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.thorough if n % 3 else ()) for n, x in enumerate(KINDS)],
)
def test_the_index_agrees_with_reading_for_every_kind(tmp_path, name, monkeypatch):
    """Both header parsers agree on each of its files, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scan = tmp_path / "scan"
    KINDS[name].make(scan)
    index = build_index([scan], bytes(32))
    whole = [entry for entry in index.series if entry.slices] or index.series
    code = KINDS[name].code
    expected = TOLD_BY_READING.get(name, TOLD_BY_READING.get(code, code))
    assert {entry.info.reason for entry in whole} == {expected}
    for entry in (file.entry for file in index.files()):
        with pydicom_muted():
            fast, odd = (
                parse_plain(entry.path, read_first_bytes(entry.path)),
                parse_with_pydicom(Path(entry.path)),
            )
        assert fast in (None, odd)
        assert odd.packed()
    shape = whole[0].info.shape
    if shape and name in READ:
        assert shape == scanloom.load_volume(scan).grid.shape


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", READ)
def test_readable_kinds_are_read_right(tmp_path, name):
    kind = READ[name]
    kind.make(tmp_path)
    volume = scanloom.load_volume(tmp_path)
    assert_right(volume, kind.balls[0], kind)
    if "ATTRIBUTES_CONTRADICT" not in kind.flags:
        assert "ATTRIBUTES_CONTRADICT" not in {flag.code for flag in volume.flags}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [n for n, kind in CHOSEN.items() if kind.code == "PHASES"])
def test_several_volumes_in_a_series_are_refused_until_one_is_selected(tmp_path, name):
    kind = CHOSEN[name]
    kind.make(tmp_path)
    assert code_of(tmp_path) == "PHASES"
    for phase, ball in enumerate(kind.balls):
        assert_right(scanloom.load_volume(tmp_path, phase=phase), ball, kind)
    assert code_of(tmp_path, phase=len(kind.balls)) == "PHASES"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("by EchoTime", "(0: EchoTime 4.6; 1: EchoTime 12)"),
        ("by InstanceNumber", "(0: InstanceNumber 1 to 20; 1: InstanceNumber 101 to 120)"),
        ("by ImageType", "(0: ImageType M; 1: ImageType P)"),
        ("two stacks", "(0: axial 40 x 36; 1: coronal 40 x 36)"),
        ("enhanced, two b-values", "(0: DiffusionBValue 0; 1: DiffusionBValue 1000)"),
        ("times and echoes", "1: TemporalPositionIdentifier 1, EchoTime 30; "),
        ("time point missing in one phase", "(0: TemporalPositionIdentifier none; 1: "),
        ("by SeriesDescription, numbers in any order", ""),  # free text
        ("by AcquisitionTime", ""),
    ],
)
def test_volumes_to_choose_from_are_told_apart(tmp_path, name, values):
    """By numbers, words of lists and planes, since free text and times may name the patient."""
    CHOSEN[name].make(tmp_path)
    with pytest.raises(ScanError) as caught:
        scanloom.load_volume(tmp_path)
    detail = caught.value.detail
    assert values in detail
    assert bool(values) == ("(0: " in detail)
    with pytest.raises(ScanError, match="there is no volume 9: "):
        scanloom.load_volume(tmp_path, phase=9)


@pytest.mark.parametrize("name", ["enhanced, nothing shared", "mosaic"])
@pytest.mark.parametrize("damage", [b"\xff", b"\xff\xff\xff\xff", b"\0\0\0\0"])
def test_damaged_headers_cause_no_internal_error(tmp_path, name, damage):
    """A series with overwritten random bytes is refused with a reason code, or read."""
    READ[name].make(tmp_path)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    data = path.read_bytes()
    for at in range(400, min(len(data) - 8, 12_000), 211):
        path.write_bytes(data[:at] + damage + data[at + len(damage) :])
        with contextlib.suppress(ScanError):
            scanloom.load_volume(tmp_path)


def test_each_of_several_series_is_read_right(tmp_path):
    kind = CHOSEN["two series"]
    kind.make(tmp_path)
    assert code_of(tmp_path) == kind.code
    volumes = [read_scan(series).volume for series in find_series(tmp_path)]
    assert len(volumes) == len(kind.balls)
    assert all(any(not deviations(v, ball) for v in volumes) for ball in kind.balls)


@pytest.mark.parametrize("name", [*REFUSED, *SKIPPED])
def test_refused_kinds_have_their_reason_code(tmp_path, name):
    kind = KINDS[name]
    kind.make(tmp_path)
    assert code_of(tmp_path) == kind.code
    if kind.options:
        assert_right(scanloom.load_volume(tmp_path, **kind.options), kind.balls[0], kind)


def test_a_reformat_does_not_hide_the_original(tmp_path):
    READ["regular"].make(tmp_path / "scan")
    SKIPPED["reformats"].make(tmp_path / "reformat")
    for path in (tmp_path / "reformat").iterdir():
        ds = dcmread(path)
        ds.SeriesInstanceUID = uid("reformat")
        ds.save_as(path)
    assert len(find_series(tmp_path)) == 2
    assert deviations(scanloom.load_volume(tmp_path)) == {}


def test_order_and_names_of_files_do_not_matter(tmp_path):
    """The volume is the same whatever the names of the files."""
    kind = CHOSEN["times and echoes"]
    kind.make(tmp_path)
    before = scanloom.load_volume(tmp_path, phase=3)
    for n, path in enumerate(sorted(tmp_path.rglob("*.dcm"), reverse=True)):
        path.rename(tmp_path / f"{n:04d}")
    after = scanloom.load_volume(tmp_path, phase=3)
    assert before.array.tobytes() == after.array.tobytes()
    assert before.grid.matches(after.grid)


CODES = {
    "missing_slice": "SLICE_GAP",
    "changed_spacing": "SPACING_CHANGES",
    "duplicate_contradicting": "DUPLICATE_SLICES",
    "truncated_slice": "TRUNCATED",
    "other_rows": "SLICE_SIZE",
    "other_pixel_spacing": "SLICE_SPACING",
    "other_orientation": "SLICE_ORIENTATION",
    "no_position": "NO_POSITION",
    "no_position_one": "NO_POSITION",
    "nan_position": "NO_POSITION",
    "too_few": "TOO_FEW_SLICES",
    "localiser_only": "LOCALIZER",
    "secondary_capture": "SECONDARY_CAPTURE",
    "rgb": "COLOR",
    "projection_xray": "PROJECTION",
    "report": "NOT_AN_IMAGE",
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the series written by a third-party generator, by kind."""
    folder = scans_folder()
    script = folder.parents[1] / "kinds" / "make_kinds.py" if folder else None
    if script is None or not script.is_file():
        pytest.skip("kinds/make_kinds.py is not here (SCANLOOM_SCANS)")
    out = tmp_path_factory.mktemp("foreign kinds")
    subprocess.run([sys.executable, script, out], check=True)
    return out


@pytest.mark.reference
def test_kinds_of_a_third_party_generator(foreign):
    """29 are read or selected, 11 refused and 5 skipped, with their reason codes."""
    truth = json.loads((foreign / "truth.json").read_text())
    verdicts = {name: _verdict(foreign / name, kind) for name, kind in truth.items()}
    expected = {name: CODES.get(name, "right") for name in truth}
    assert verdicts == expected
    assert sorted(map(list(expected.values()).count, ("right",))) == [29]
    assert len(truth) == 45


def _verdict(folder: Path, kind: dict[str, Any]) -> str:
    balls = [
        Ball(
            centre=tuple(-v if n < 2 else v for n, v in enumerate(ball["centre_ras_mm"])),
            radius=ball["radius_mm"],
            inside=ball["hu_in"],
            outside=ball["hu_out"],
        )
        for ball in kind["balls"].values()
    ]
    try:
        all_series = find_series(folder)
        volumes = [v for series in all_series for v in _volumes(series, len(balls))]
    except ScanError as error:
        return error.code
    right = [any(not deviations(v, ball, noise=0.2) for v in volumes) for ball in balls]
    return "right" if all(right) and len(volumes) == len(balls) else "wrong"


def _volumes(series: Any, count: int) -> list[Volume]:
    try:
        return [read_scan(series).volume]
    except ScanError as error:
        if error.code != "PHASES":
            raise
    return [read_scan(series, phase=n).volume for n in range(count)]
