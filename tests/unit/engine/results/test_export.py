"""`export` copies what may be given away, and nothing that differs from its checksum."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core import ScanError
from scanloom.engine.results.export import export
from scanloom.engine.results.verify import verify
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import fan_out
from scanloom.io.system import regular_files
from support.layouts import both_layouts, case_folders


@pytest.fixture
def out(tmp_path: Path, layout: str) -> Path:
    """Two cases, with a table, the report, what is private, and a file of somebody's own."""
    folder = tmp_path / "out"
    if layout == "fanned":
        fan_out(folder)
    for case in ("aa", "bb"):
        with CaseFolder(folder, case) as draft:
            (draft.path / "dicom").mkdir()
            (draft.path / "dicom" / "segmentation.dcm").write_bytes(b"D" * 1000)
            for name in ("segmentation.nii.gz", "preview.png", "surface.glb"):
                (draft.path / name).write_bytes(name.encode())
            write_document(draft.path / "case.json", {"case": case})
            write_document(draft.path / "timing.json", {"steps": {}})
            draft.publish()
    for name in (
        *("private/crosswalk.csv", "report/index.html", "listen/index.html"),
        "runs/1/status.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "measurements.joined.csv").write_text("Nightingale")
    return folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


DOCUMENTS = {"SHA256SUMS", "case.json", "timing.json", "segmentation.nii.gz", "surface.glb"}


@both_layouts
def test_a_copy_has_what_holds_no_identity(out: Path, tmp_path: Path, layout: str) -> None:
    made = export(out, tmp_path / "copy")

    cases = ("cases/aa", "cases/bb") if layout == "flat" else ("cases/_aa/aa", "cases/_bb/bb")
    marker = {"cases/_folders"} if layout == "fanned" else set()
    of_cases = {f"{case}/{name}" for case in cases for name in DOCUMENTS}
    assert files(tmp_path / "copy") == of_cases | marker | {"runs/1/status.json"}
    assert (made.cases, made.left_out) == (2, ())
    assert list(verify(tmp_path / "copy")) == []
    assert sorted(tmp_path.iterdir()) == [tmp_path / "copy", out]


def test_pictures_on_request(out: Path, tmp_path: Path) -> None:
    export(out, tmp_path / "copy", pictures=True)

    copied = files(tmp_path / "copy")
    assert {"cases/aa/preview.png", "report/index.html"} <= copied
    assert not {name for name in copied if "dicom" in name or "private" in name}
    assert list(verify(tmp_path / "copy")) == []


@both_layouts
def test_a_case_that_was_changed_is_left_out(out: Path, tmp_path: Path) -> None:
    first, second = (case.relative_to(out) for case in case_folders(out))
    (out / first / "segmentation.nii.gz").write_bytes(b"changed")
    (tmp_path / "copy").mkdir()  # an empty one is taken

    made = export(out, tmp_path / "copy")

    assert made.left_out == (str(first),)
    assert not (tmp_path / "copy" / first).exists()
    assert (tmp_path / "copy" / second / "case.json").exists()


@pytest.mark.parametrize("timing", ["{", '{"schema": 99}'])
def test_a_case_whose_timing_is_damaged_is_left_out(timing: str, out: Path, tmp_path: Path) -> None:
    """It has no checksum; what was copied of the case before does not count."""
    (out / "cases/aa/timing.json").write_text(timing)

    made = export(out, tmp_path / "copy")

    assert (made.cases, made.left_out) == (1, ("cases/aa",))
    copied = {name for name in files(tmp_path / "copy") if not name.endswith("SHA256SUMS")}
    assert made.files == len(copied)
    assert made.size == sum((out / name).stat().st_size for name in copied)


def test_a_link_is_not_followed(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "_link_free", set())  # as in a process that wrote no result
    secret = tmp_path / "secret"
    secret.write_text("Nightingale")
    (out / "runs/1/plan.json").symlink_to(secret)
    (out / "cases/bb/surface.glb").unlink()
    (out / "cases/bb/surface.glb").symlink_to(secret)

    made = export(out, tmp_path / "copy")

    assert made.left_out == ("cases/bb", "runs/1/plan.json")
    copied = [tmp_path / "copy" / name for name in files(tmp_path / "copy")]
    assert not [path for path in copied if b"Nightingale" in path.read_bytes()]


@both_layouts
def test_folders_named_by_patients_are_refused(out: Path, tmp_path: Path, layout: str) -> None:
    named = "cases/Nightingale" if layout == "flat" else "cases/_le/Nightingale"
    (out / named).parent.mkdir(exist_ok=True)
    case_folders(out)[1].rename(out / named)

    with pytest.raises(ScanError, match="named by patients"):
        export(out, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_is_overwritten(out: Path, tmp_path: Path, inside: bool) -> None:
    target = out / "copy" if inside else tmp_path / "mine"
    if not inside:
        target.write_text("mine")

    with pytest.raises(ScanError, match="OUTPUT_UNWRITABLE"):
        export(out, target)
    assert inside or target.read_text() == "mine"
    with pytest.raises(ScanError, match="NOT_FOUND"):
        export(out / "nothing", tmp_path / "copy")
