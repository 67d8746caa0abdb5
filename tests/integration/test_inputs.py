"""Runs over every kind of input: published, verified, found again, made anew when it changes."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from support.commands import scanloom
from support.faults import run_with_deadline
from support.input_kinds import header_of, write_analyze, write_archive, write_mgh, write_nifti
from support.make_run import GOOD, Runs, write_study
from support.write_dicom import noise

Writer = Callable[[Path, NDArray[np.int16], int], Path]


def scan_of(brightest: int) -> NDArray[np.int16]:
    values = (noise((12, 10, 6), brightest) % 900 - 1000).astype(np.int16)
    values[3:6, 3:6, 1:4] = brightest
    return values


def several(header: str, kind: str, **fields: str) -> Writer:
    def write(folder: Path, values: NDArray[np.int16], _: int) -> Path:
        (folder / header).write_bytes(header_of(kind, values, **fields))
        for n in range(values.shape[2]):
            (folder / f"{n}.raw").write_bytes(values[..., n].tobytes("F"))
        return folder / header

    return write


def archive(name: str, inside: str) -> Writer:
    """Write an archive with a volume, or with a DICOM series, and something else."""

    def write(folder: Path, values: NDArray[np.int16], brightest: int) -> Path:
        with tempfile.TemporaryDirectory() as source:
            if inside == "dicom":
                files = write_study(Path(source), name, brightest)
            else:
                files = [write_nifti(Path(source, inside), values)]
            members = {f"x/{path.name}": path.read_bytes() for path in files}
        return write_archive(folder / name, {**members, "read me": b"text"})

    return write


KINDS: dict[str, Writer] = {
    "mgz": lambda folder, values, _: write_mgh(folder / "a.mgz", values),
    "nii.bz2": lambda folder, values, _: write_nifti(folder / "a.nii.bz2", values),
    "nii.xz": lambda folder, values, _: write_nifti(folder / "a.nii.xz", values),
    "nii.zst": lambda folder, values, _: write_nifti(folder / "a.nii.zst", values),
    "analyze": lambda folder, values, _: write_analyze(folder / "a.hdr", values),
    "MetaImage": several("a.mhd", "metaimage", ElementDataFile="%d.raw 0"),
    "NRRD": several("a.nhdr", "nrrd", data_file="%d.raw 0 5 1"),
    "zip of DICOM": archive("a.zip", "dicom"),
    "tar of DICOM": archive("a.tar", "dicom"),
    "zip of a volume": archive("a.zip", "a.nii.gz"),
    "tgz of a volume": archive("a.tgz", "a.mgz.nii.xz"),
}


@pytest.fixture
def runs(runs: Runs) -> Runs:
    runs.write("modality: CT", "policy: {modality: CT, orientation: RAS}\n")
    return runs


def write_all(archive: Path, first: int) -> dict[int, Path]:
    """Write a scan of each kind into a folder of its own; return the files by brightness."""
    written = {}
    for n, (kind, write) in enumerate(KINDS.items(), first):
        (archive / kind).mkdir(exist_ok=True)
        written[n] = write(archive / kind, scan_of(n), n)
    return written


@pytest.mark.slow
def test_a_run_publishes_each_kind_finds_it_again_and_makes_it_anew(runs: Runs) -> None:
    written = write_all(runs.archive, 3000)

    first = runs("--archives")
    assert first.code == 0, first.err
    before = runs.cases()
    files = first.document["files"]
    assert files["found"] == files["used"] + files["skipped"] + files["failed"]
    assert len(runs.rows("manifest")) == files["found"]
    assert runs.started == dict.fromkeys(written, 1)
    assert len(before) == len(KINDS)
    assert scanloom("verify", runs.out).code == 0
    where = scanloom("where", *before, "--out", runs.out, "--json").out
    for path in written.values():
        assert str(path if path.name in where else path.parent) in where

    assert runs("--archives").code == 0
    assert runs.started == dict.fromkeys(written, 1)  # all were there already
    assert runs.cases() == before

    changed = write_all(runs.archive, 3000 + len(KINDS))
    again = runs("--archives")
    assert runs.started == dict.fromkeys([*written, *changed], 1), again.err
    assert scanloom("verify", runs.out).code == 0
    check_outdated(runs, set(before))


def check_outdated(runs: Runs, before: set[str]) -> None:
    """Check that results of scans that are no longer there say that they are old."""
    flags = {row["case"]: row["flags"] for row in runs.rows("measurements")}
    old = [case for case in before if "OUTDATED" in flags[case]]
    made_anew = len(("zip of DICOM", "tar of DICOM"))  # by their UIDs
    assert len(old) == len(KINDS) - made_anew


@pytest.mark.parametrize("command", ["index", "plan", "segment"])
def test_each_command_looks_into_archives_where_it_is_told_to(
    runs: Runs, model: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    KINDS["tgz of a volume"](runs.archive, scan_of(GOOD[0]), GOOD[0])
    if command == "plan":
        runs.write("modality: MR", "policy: {modality: CT}\n")  # nothing to be tried
    commands: dict[str, list[str | Path]] = {
        "index": ["index", runs.archive, "--json"],
        "plan": ["plan", runs.workflow, runs.archive, "--out", runs.out, "--json"],
        "segment": ["segment", runs.archive, "--model", model, "--out", runs.out, "--json"],
    }
    commands["segment"] += ["--modality", "CT", "--device", "cpu"]
    without, looked = scanloom(*commands[command]), scanloom(*commands[command], "--archives")
    if command == "index":
        assert (without.code, without.document["reasons"]) == (65, {"NESTED_ARCHIVE": 1})
        assert (looked.code, looked.document["files"]["used"]) == (0, 1)
    elif command == "plan":
        used = [ended.document["plan"]["files"]["used"] for ended in (without, looked)]
        assert used == [0, 1], looked.err
    else:
        assert (without.code, looked.code) == (65, 0), looked.err
        assert looked.document["cases"][0]["outcome"] == "used"


@pytest.mark.parametrize("command", ["index", "plan", "run"])
def test_a_damaged_archive_stops_none_of_the_others(
    runs: Runs, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    KINDS["mgz"](runs.archive, scan_of(GOOD[0]), GOOD[0])
    whole = write_archive(tmp_path / "a.zip", {"ü.nii": b"text"}).read_bytes()
    (tmp_path / "a.zip").write_bytes(whole.replace("ü".encode(), b"\xff\xfe"))
    paths = [runs.archive, tmp_path / "a.zip"]
    if command == "plan":
        runs.write("modality: MR", "policy: {modality: CT}\n")  # nothing to be tried
    commands: dict[str, list[str | Path]] = {
        "index": ["index", *paths],
        "plan": ["plan", runs.workflow, *paths, "--out", runs.out],
        "run": ["run", runs.workflow, *paths, "--out", runs.out, "--cluster", "none"],
    }
    ended = scanloom(*commands[command], "--json")
    files = (ended.document["plan"] if command == "plan" else ended.document)["files"]
    assert (files["found"], files["used"], files["failed"]) == (2, 1, 1)
    if command == "run":
        assert len(runs.cases()) == 1
        assert ended.code == 0  # of the selected cases
        assert scanloom(*commands[command], "--strict").code == 1


VOXEL_FILES = {
    "a.hdr": "a.img",
    "b.hdr.gz": "b.img.gz",
    "c.mhd": "c.raw",
    "d.nhdr": "d.raw",
    "e.mha": "e.raw",
    "f.nrrd": "f.raw",
    "g.mhd": "3.raw",
    "h.nhdr": "3.raw",
}


def test_no_format_waits_for_voxel_files_that_are_pipes(tmp_path: Path) -> None:
    root = tmp_path / "scans"
    for name, voxels in VOXEL_FILES.items():
        folder = root / name
        folder.mkdir(parents=True)
        if ".hdr" in name:
            header = write_analyze(tmp_path / "a.hdr", noise()).read_bytes()
            (folder / name).write_bytes(gzip.compress(header) if name.endswith("gz") else header)
        else:
            kind = "nrrd" if "n" in name else "metaimage"
            field = "data_file" if kind == "nrrd" else "ElementDataFile"
            file = {"g.mhd": "%d.raw 1", "h.nhdr": "%d.raw 1 6 1"}.get(name, voxels)
            (folder / name).write_bytes(header_of(kind, noise(), **{field: file}))
            for n in range(1, 7):
                (folder / f"{n}.raw").write_bytes(bytes(960))
            (folder / voxels).unlink(missing_ok=True)
        os.mkfifo(folder / voxels)
    ended = run_with_deadline(
        "index", root, "--json", deadline=60, XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert ended.code == 65, ended.err
    files = ended.document["files"]
    assert files["used"] == 0
    assert files["found"] == files["skipped"] + files["failed"]
    failed = {entry["reason"] for entry in ended.document["series"]}
    assert failed <= {"UNREADABLE", "NOT_FOUND", "ORIENTATION_UNKNOWN"}
