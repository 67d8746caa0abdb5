"""Slices on a disk or share that fails: no part of a scan is published as the whole."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from pydicom import dcmread

from support.commands import Ended, scanloom_process, write_tiny_bundle
from support.write_dicom import Words, noise, write_series

SHIM = Path(__file__).parents[1] / "support" / "io_faults.c"
EIO, ESTALE, ENOENT, SHORT = 5, 116, 2, 0


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here, to build a library whose reads fail")
    library = tmp_path_factory.mktemp("shim") / "io_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SHIM, "-ldl"], check=True)
    return library


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Return a folder of two studies; slices are named by their order in space."""
    for n, name in enumerate(("sick", "well")):
        folder = tmp_path / "scans" / name
        files = write_series(folder, noise((16, 14, 8), n), words=Words(name=name, study=name))
        files.sort(key=lambda file: float(dcmread(file).ImagePositionPatient[2]))
        for k, file in enumerate(files):
            file.rename(folder / f"IM{k}")
    return tmp_path / "scans"


class Disk:
    """A disk of which one file fails, for the processes of a command."""

    def __init__(self, shim: Path, tmp_path: Path) -> None:
        self.shim, self.folder = shim, tmp_path
        self.model = write_tiny_bundle(tmp_path / "models")
        self.workflow = tmp_path / "workflow.yaml"
        self.workflow.write_text(f"name: t\nmodels: [{self.model}]\nexecution: {{device: cpu}}\n")

    def __call__(
        self, file: str, errno: int, *arguments: str | Path, at: str = "open", after: int = 0
    ) -> Ended:
        return scanloom_process(
            *arguments,
            environment={
                "LD_PRELOAD": str(self.shim),
                "FAULT_PATH": file,
                "FAULT_ERRNO": str(errno),
                "FAULT_AT": at,
                "FAULT_AFTER": str(after),
                "FAULT_COUNTER": str(self.folder / "counter"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                "SCANLOOM_KEY": str(self.folder / "key"),
            },
        )

    def segment(self, folder: Path, *more: str) -> tuple[str | Path, ...]:
        arguments = ("segment", folder, "--model", self.model, "--out", self.folder / "out")
        return *arguments, "--device", "cpu", *more


@pytest.fixture
def disk(shim: Path, tmp_path: Path) -> Disk:
    return Disk(shim, tmp_path)


@pytest.mark.parametrize(
    ("slice_", "errno", "at", "code"),
    [
        ("IM7", EIO, "open", "SLICES_UNREADABLE"),
        pytest.param("IM0", EIO, "read", "SLICES_UNREADABLE", marks=pytest.mark.thorough),
        pytest.param("IM0", ESTALE, "read", "SLICES_UNREADABLE", marks=pytest.mark.thorough),
        pytest.param("IM4", EIO, "open", "SLICE_GAP", marks=pytest.mark.thorough),
    ],
)
def test_a_scan_with_a_slice_that_can_not_be_read_is_refused(
    scans: Path, disk: Disk, slice_: str, errno: int, at: str, code: str
) -> None:
    ended = disk(f"sick/{slice_}", errno, *disk.segment(scans / "sick"), at=at)
    assert ended.code == 65, ended.err
    assert f"({code})" in ended.err
    assert "1 file next to its slices can't be read: check permissions, disk and links" in ended.err
    assert not list((disk.folder / "out").glob("cases/*"))


@pytest.mark.thorough
@pytest.mark.parametrize(("slice_", "errno"), [("IM7", EIO), ("IM0", ESTALE), ("IM4", ENOENT)])
def test_a_slice_that_fails_after_it_was_found_fails_its_scan(
    scans: Path, disk: Disk, slice_: str, errno: int
) -> None:
    ended = disk(f"sick/{slice_}", errno, *disk.segment(scans / "sick"), after=1)
    assert ended.code == 65, ended.err
    assert "(UNREADABLE)" in ended.err
    assert not list((disk.folder / "out").glob("cases/*"))


@pytest.mark.thorough
def test_the_loss_of_slices_can_be_accepted(scans: Path, disk: Disk) -> None:
    arguments = disk.segment(scans / "sick", "--gaps", "interpolate")
    ended = disk("sick/IM7", EIO, *arguments)
    assert ended.code == 0, ended.err
    assert "FILES_LOST" in ended.out + ended.err
    [case] = (disk.folder / "out").glob("cases/*/case.json")
    assert '"FILES_LOST"' in case.read_text()


@pytest.mark.thorough
def test_a_run_is_incomplete_without_the_scan_and_does_its_neighbours(
    scans: Path, disk: Disk
) -> None:
    out = disk.folder / "out"
    arguments = ("run", disk.workflow, scans, "--out", out, "--cluster", "none")
    ended = disk("sick/IM7", EIO, *arguments)
    assert ended.code == 1, ended.err
    assert len(list(out.glob("cases/*"))) == 1
    [failure] = out.glob("failed/*.json")
    assert '"SLICES_UNREADABLE"' in failure.read_text()
    healed = disk("none", EIO, *arguments)
    assert healed.code == 0, healed.err
    assert len(list(out.glob("cases/*"))) == 2
    assert not list(out.glob("failed/*.json"))


def test_a_share_that_returns_few_bytes_at_a_time_loses_nothing(scans: Path, disk: Disk) -> None:
    ended = disk("sick/IM", SHORT, "index", scans, "--json")
    assert ended.code == 0, ended.err
    assert ended.document["files"]["used"] == 16


@pytest.mark.thorough
def test_a_slice_of_zeros_is_no_note_for_any_command(scans: Path, tmp_path: Path) -> None:
    """A copy that failed has the size of the slice, and no content."""
    last = scans / "sick" / "IM7"
    last.write_bytes(bytes(last.stat().st_size))
    model = write_tiny_bundle(tmp_path / "models")
    workflow = tmp_path / "workflow.yaml"
    workflow.write_text(f"name: t\nmodels: [{model}]\nexecution: {{device: cpu}}\n")
    environment = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "SCANLOOM_KEY": str(tmp_path / "key"),
    }

    def command(*arguments: str | Path) -> Ended:
        return scanloom_process(*arguments, environment=environment)

    index = command("index", scans, "--json")
    reasons = [series["reason"] for series in index.document["series"]]
    assert sorted(reasons, key=str) == [None, "SLICES_UNREADABLE"]
    out = tmp_path / "out"
    arguments = ("segment", scans / "sick", "--model", model, "--out", out, "--device", "cpu")
    refused = command(*arguments)
    assert refused.code == 65, refused.err
    assert "(SLICES_UNREADABLE)" in refused.err
    run = command("run", workflow, scans, "--out", tmp_path / "run", "--cluster", "none")
    assert run.code == 1, run.err
    assert len(list((tmp_path / "run").glob("cases/*"))) == 1
    [failure] = (tmp_path / "run").glob("failed/*.json")
    assert '"SLICES_UNREADABLE"' in failure.read_text()
    accepted = command(*arguments, "--gaps", "interpolate")
    assert accepted.code == 0, accepted.err
    assert "FILES_LOST" in accepted.out + accepted.err
