"""The output folder: whole or not there, whoever dies when."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scanloom.core import Case, Outputs, Reason, ScanError, Series
from scanloom.engine.run_files import hold_run_lock
from scanloom.io.index.build import build_index
from scanloom.io.output import case_folder as case_folder_module
from scanloom.io.output import published
from scanloom.io.output.audit import AuditTrail, read_trail
from scanloom.io.output.case_folder import (
    CaseFolder,
    remove_staged,
    staged_folder,
    staged_name,
    staged_results,
)
from scanloom.io.output.growing_table import read_lines
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import case_folder, fan_out
from scanloom.io.output.private import LEDGER_LINES, private_folder
from scanloom.io.output.published import ResultState, result_state
from scanloom.io.output.work_folder import (
    HANDSHAKE_PREFIX,
    WorkEntry,
    clean_up,
    open_output,
    process_file_name,
)
from scanloom.io.system.scratch_folders import host_id
from scanloom.review.report.page import write_report
from support.layouts import both_layouts, case_folders, folder_of

CASE = "a" * 26
KEY = "0123456789abcdef"


def out_of(folder: Path, layout: str) -> Path:
    """Return an output folder that no case was published in yet."""
    if layout == "fanned":
        fan_out(folder / "out")
    return folder / "out"


def publish(
    out: Path, recipe: str = "one", *, replace: bool = False, text: str = "x", source: str = "s"
) -> Path:
    with CaseFolder(out, CASE, KEY) as folder:
        write_document(folder.path / "case.json", {"recipe": recipe, "source": {"hash": source}})
        (folder.path / "dicom").mkdir()
        (folder.path / "dicom" / "a b.dcm").write_text(text)
        (folder.path / "timing.json").write_text("{}")
        return folder.publish(replace=replace)


def standing(out: Path, recipe: str, source: str = "s", *, replace: bool = False) -> ResultState:
    case = Case(CASE, Series("nifti", ()), Outputs(), source, recipe)
    return result_state(case_folder(out, CASE), case, replace=replace)


def files(out: Path) -> set[str]:
    return {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}


def test_a_staged_result_is_recorded_when_it_is_published(tmp_path: Path) -> None:
    """Until then, OUT is as if it was not there; nobody removes it meanwhile."""
    trail = AuditTrail(tmp_path, bytes(32))
    staged = staged_folder(tmp_path, staged_name(CASE, "digest"))
    with CaseFolder(tmp_path, CASE, target=staged) as folder:
        document = {"case": CASE, "recipe": "one", "source": {"hash": "s"}, "models": []}
        write_document(folder.path / "case.json", document)
        write_document(folder.path / "timing.json", {})
        assert folder.publish() == staged
    content = {path.name: path.read_bytes() for path in staged.iterdir()}
    open_output(tmp_path, KEY)
    clean_up(tmp_path, time.time() + 1)
    assert [path.name for path in tmp_path.iterdir()] == [".work"]
    assert list(staged_results(tmp_path)) == [(CASE, staged.name)]
    inode = staged.stat().st_ino

    with CaseFolder(tmp_path, CASE, KEY, audit=trail, staged=staged) as folder:
        published = folder.publish()

    assert published == case_folder(tmp_path, CASE)
    assert {path.name: path.read_bytes() for path in published.iterdir()} == content
    assert published.stat().st_ino == inode  # as the ledger has it
    [line] = read_trail(tmp_path, bytes(32))
    assert (line["event"], line["case"]) == ("segmented", CASE)
    with (tmp_path / "private" / LEDGER_LINES).open("rb") as file:
        assert [(row["name"], row["inode"]) for row in read_lines(file)] == [(CASE, inode)]
    assert not list((tmp_path / ".work").iterdir())


def test_a_staged_result_that_is_removed_never_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even of a process that was killed before it was deleted."""
    staged = staged_folder(tmp_path, staged_name(CASE, "digest"))
    with CaseFolder(tmp_path, CASE, target=staged) as folder:
        folder.publish()
    monkeypatch.setattr(WorkEntry, "is_abandoned", lambda *_: True)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove_staged(tmp_path, staged.name)
    assert not list(staged_results(tmp_path))
    assert len(list((tmp_path / ".work").iterdir())) == 1
    open_output(tmp_path, KEY)

    assert not list((tmp_path / ".work").iterdir())
    remove_staged(tmp_path, staged.name)  # there is none


@both_layouts
def test_published_folder_is_whole_and_sums_hold(tmp_path: Path, layout: str) -> None:
    """A foreign sha256sum agrees; nothing is left in .work."""
    folder = publish(out_of(tmp_path, layout))
    assert folder == folder_of(tmp_path / "out", CASE)
    assert (folder.parent.name == "_aa") is (layout == "fanned")
    assert files(folder) == {"case.json", "dicom/a b.dcm", "timing.json", "SHA256SUMS"}
    named = {s.split("  ", 1)[1] for s in (folder / "SHA256SUMS").read_text().splitlines()}
    assert named == {"case.json", "dicom/a b.dcm"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    assert not list((tmp_path / "out" / ".work").iterdir())


def test_nothing_is_left_of_a_failed_case(tmp_path: Path) -> None:
    """OUT is made on demand, and gone again if nothing came of it."""
    out = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError, match="boom"), CaseFolder(out, CASE, KEY) as folder:  # noqa: PT012
        (folder.path / "half").write_text("x")
        raise RuntimeError("boom")
    assert not (tmp_path / "deep").exists()


def test_a_failed_case_leaves_others_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out)
    before = files(out)
    with pytest.raises(RuntimeError, match="boom"), CaseFolder(out, "b" * 26, KEY) as folder:  # noqa: PT012
        (folder.path / "half").write_text("x")
        raise RuntimeError("boom")
    assert files(out) == before


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "DISK_FULL"),
        (errno.EDQUOT, "DISK_FULL"),
        (errno.EIO, "OUTPUT_UNWRITABLE"),
        (errno.EACCES, "OUTPUT_UNWRITABLE"),
    ],
)
def test_system_errors_get_their_code(number: int, code: str, tmp_path: Path) -> None:
    """Mapped where the case ends, without the system's text (it holds a path)."""
    with pytest.raises(ScanError) as caught, CaseFolder(tmp_path / "out", CASE):
        raise OSError(number, "some text", "/secret/path")
    assert caught.value.code == code
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ScanError) as caught, CaseFolder(tmp_path / "out", CASE):
        pass
    assert caught.value.code == "OUTPUT_UNWRITABLE"
    assert (tmp_path / "out").read_text() == "x"


def test_private_is_for_the_owner_alone(tmp_path: Path) -> None:
    publish(tmp_path / "out")
    private = tmp_path / "out" / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_files_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        folder = publish(tmp_path / "out")
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder / "SHA256SUMS").stat().st_mode) == 0o640
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_another_key_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    open_output(out, KEY)
    assert not out.exists()  # nothing published: no trace
    publish(out)
    open_output(out, KEY)
    with pytest.raises(ScanError) as caught:
        open_output(out, "another")
    assert caught.value.code == "KEY_MISMATCH"


def test_done_stale_and_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert standing(out, "one") is ResultState.ABSENT
    folder = publish(out, "one")
    assert standing(out, "one") is ResultState.CURRENT
    assert standing(out, "one", replace=True) is ResultState.CURRENT
    with pytest.raises(ScanError) as caught:
        standing(out, "two")
    assert caught.value.code == "STALE"
    assert standing(out, "two", replace=True) is ResultState.REPLACEABLE
    with pytest.raises(ScanError) as caught:
        publish(out, "two", text="y")
    assert caught.value.code == "STALE"
    assert "another process published" in caught.value.detail
    assert (folder / "dicom" / "a b.dcm").read_text() == "x"
    publish(out, "two", replace=True, text="y")
    assert (folder / "dicom" / "a b.dcm").read_text() == "y"
    assert standing(out, "two") is ResultState.CURRENT
    assert not list((out / ".work").iterdir())


@pytest.mark.parametrize(("recipe", "code"), [("one", None), ("two", "STALE")])
def test_a_result_that_appears_while_files_are_synced_is_not_replaced(
    recipe: str, code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands with different options end at the same time: one of them says STALE."""
    out, sync = tmp_path / "out", case_folder_module._sync_tree

    def meanwhile(path: Path) -> None:
        monkeypatch.setattr(case_folder_module, "_sync_tree", sync)
        publish(out, "one", text="first")
        sync(path)

    monkeypatch.setattr(case_folder_module, "_sync_tree", meanwhile)
    if code is None:
        publish(out, recipe, text="second")
    else:
        with pytest.raises(ScanError) as caught:
            publish(out, recipe, text="second")
        assert caught.value.code == code
    assert (folder_of(out, CASE) / "dicom" / "a b.dcm").read_text() == "first"
    assert len((out / "private" / LEDGER_LINES).read_text().splitlines()) == 1
    assert not list(out.glob(".work/*"))


@pytest.mark.parametrize("replace", [False, True])
def test_of_two_cases_with_the_name_of_one_source_the_first_stays(
    replace: bool, tmp_path: Path
) -> None:
    """Two processes saw that no case has it: PatientID and series number of two studies, say."""

    def publish_as(case: str, *, replace: bool) -> Path:
        with CaseFolder(tmp_path, "P1_2", KEY) as folder:
            document = {"case": case, "recipe": "one", "source": {"hash": case}}
            write_document(folder.path / "case.json", document)
            (folder.path / "timing.json").write_text("{}")
            return folder.publish(replace=replace)

    published = publish_as("a" * 26, replace=False)
    with pytest.raises(ScanError) as caught:
        publish_as("b" * 26, replace=replace)

    assert caught.value.code == "ID_TAKEN"
    assert json.loads((published / "case.json").read_text())["case"] == "a" * 26
    assert publish_as("a" * 26, replace=replace) == published


def test_other_content_of_the_source_replaces_a_result_of_the_same_recipe(tmp_path: Path) -> None:
    """Without being asked to; the same content leaves the first result as it is."""
    out = tmp_path / "out"
    folder = publish(out, source="ten slices")
    assert standing(out, "one", "twenty slices") is ResultState.CHANGED
    publish(out, source="ten slices", text="made at the same time elsewhere")
    assert (folder / "dicom" / "a b.dcm").read_text() == "x"
    publish(out, source="twenty slices", text="y")
    assert (folder / "dicom" / "a b.dcm").read_text() == "y"
    assert standing(out, "one", "twenty slices") is ResultState.CURRENT
    assert not list((out / ".work").iterdir())


@pytest.mark.parametrize("harm", ["cut", "gone", "rewritten", "no stamp"])
def test_a_damaged_file_is_seen_before_a_result_is_used_again(tmp_path: Path, harm: str) -> None:
    folder = publish(tmp_path / "out")
    file = folder / "dicom" / "a b.dcm"
    if harm == "cut":
        file.write_text("")
    elif harm == "gone":
        file.unlink()
    elif harm == "no stamp":
        write_document(folder / "timing.json", {"files": {"dicom/a b.dcm": []}})
    else:
        file.write_text("z")  # of the same size
    with pytest.raises(ScanError) as caught:
        standing(tmp_path / "out", "one")
    assert caught.value.code == "RESULT_DAMAGED"
    assert CASE not in caught.value.detail  # which may be a patient's name
    assert standing(tmp_path / "out", "one", replace=True) is ResultState.REPLACEABLE


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_result_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would never be tried again, and the advice is to remove it."""
    publish(tmp_path / "out")

    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(published, "read_json", fail)
    with pytest.raises(ScanError) as caught:
        standing(tmp_path / "out", "one")
    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE


def test_files_that_were_only_touched_are_compared_once(tmp_path: Path) -> None:
    """As after a copy of the output folder: the content is the same, the times are not."""
    folder = publish(tmp_path / "out")
    os.utime(folder / "dicom" / "a b.dcm", (0, 0))
    assert standing(tmp_path / "out", "one") is ResultState.CURRENT
    (folder / "SHA256SUMS").rename(tmp_path / "sums")  # nothing to compare with any more
    (folder / "SHA256SUMS").touch()
    os.truncate(folder / "SHA256SUMS", (tmp_path / "sums").stat().st_size)
    assert standing(tmp_path / "out", "one") is ResultState.CURRENT


def test_a_damaged_record_is_told_from_one_of_another_recipe(tmp_path: Path) -> None:
    folder = publish(tmp_path / "out")
    (folder / "case.json").write_text("[]")
    with pytest.raises(ScanError) as caught:
        standing(tmp_path / "out", "one")
    assert caught.value.code == "RESULT_DAMAGED"


KILLED = """
    import os, signal
    from pathlib import Path
    from scanloom.io.output import case_folder
    from scanloom.io.output.case_folder import CaseFolder
    from scanloom.io.output.json_file import write_document

    renames = 0
    rename = Path.rename
    def counted(self, target):
        global renames
        if renames == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
        renames += 1
        return rename(self, target)

    with CaseFolder(Path({out!r}), {case!r}, {key!r}) as folder:
        write_document(folder.path / "case.json", {{"recipe": "two", "source": {{"hash": "s"}}}})
        (folder.path / "timing.json").write_text("{{}}")
        (folder.path / "dicom").mkdir()
        (folder.path / "dicom" / "a b.dcm").write_text("y")
        Path.rename = counted
        folder.publish(replace=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(out: Path, at: int) -> None:
    """Run a replacement that is killed (SIGKILL) before its rename number `at`."""
    code = textwrap.dedent(KILLED).format(at=at, out=str(out), case=CASE, key=KEY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


@both_layouts
@pytest.mark.parametrize(("at", "kept"), [(0, "one"), (1, "one"), (2, "two"), (3, "two")])
def test_interrupted_replacement_is_finished_or_taken_back(
    at: int, kept: str, tmp_path: Path, layout: str
) -> None:
    """Between any two renames: the next start finds the old result or the new one, whole."""
    out = out_of(tmp_path, layout)
    folder = publish(out, "one")
    killed(out, at)
    open_output(out, KEY)
    assert standing(out, kept) is ResultState.CURRENT
    assert (folder / "dicom" / "a b.dcm").read_text() == ("x" if kept == "one" else "y")
    assert not list((out / ".work").iterdir())
    assert case_folders(out) == [folder]


def test_what_a_living_process_builds_is_left_alone(tmp_path: Path) -> None:
    """Only entries of dead processes are cleared: not this process, not another host."""
    out = tmp_path / "out"
    publish(out)
    with CaseFolder(out, "b" * 26, KEY) as folder:
        host = folder.path.name.split(".")
        host[1] = "ffffffff"
        elsewhere = folder.path.with_name(".".join(host))
        elsewhere.mkdir()
        (out / ".work" / "notes").mkdir()
        open_output(out, KEY)
        assert folder.path.is_dir()
        assert elsewhere.is_dir()
        assert (out / ".work" / "notes").is_dir()


def test_a_work_folder_that_another_process_removes_just_now_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, is_dir = tmp_path / ".work", Path.is_dir

    def removed_then(path: Path) -> bool:
        found = is_dir(path)
        if path == work and found:
            work.rmdir()
        return found

    monkeypatch.setattr(Path, "is_dir", removed_then)
    for look in (lambda: open_output(tmp_path, KEY), lambda: clean_up(tmp_path, 2000)):
        work.mkdir(exist_ok=True)
        look()


def test_of_two_that_recover_a_result_the_second_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = WorkEntry(CASE, host_id(), 1, "0", "0" * 8, "old")
    left, rename = tmp_path / ".work" / str(old), Path.rename
    left.mkdir(parents=True)
    (left / "file").touch()

    def rename_after_another(path: Path, target: Path) -> Path:
        if path.exists():
            rename(path, target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_after_another)
    open_output(tmp_path, KEY)

    assert files(tmp_path) == {f"cases/{CASE}/file"}


def test_failed_last_rename_gives_the_old_result_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle of a replacement undoes it at once."""
    out = tmp_path / "out"
    folder = publish(out, "one")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".ready":
            raise OSError(errno.EIO, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ScanError) as caught:
        publish(out, "two", replace=True)
    assert caught.value.code == "OUTPUT_UNWRITABLE"
    assert (folder / "dicom" / "a b.dcm").read_text() == "x"
    assert not list((out / ".work").iterdir())


@both_layouts
def test_of_two_who_do_the_same_case_the_second_agrees(tmp_path: Path, layout: str) -> None:
    """A worker that was thought lost may have published a case that another one was then given."""
    out = out_of(tmp_path, layout)
    folder = publish(out, text="first")
    assert publish(out, text="second") == folder == folder_of(out, CASE)
    assert (folder / "dicom" / "a b.dcm").read_text() == "first"
    assert not list((out / ".work").iterdir())


def test_tidy_leaves_what_other_shards_prove_themselves_by(tmp_path: Path) -> None:
    work = tmp_path / ".work"
    work.mkdir()
    code = 'import scanloom.io.output.work_folder as w; print(w.process_file_name("handshake"))'
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    alive = work / process_file_name(HANDSHAKE_PREFIX)
    for path in (alive, work / dead.stdout.strip()):
        path.touch()
        os.utime(path, (1000, 1000))

    clean_up(tmp_path, since=2000)

    assert list(work.iterdir()) == [alive]


def test_tidy_takes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out)
    before = files(out)
    (out / "failed").mkdir()
    work = out / ".work"
    dead = work / f"{CASE}.{'0' * 8}.1.2.{'3' * 8}.new"  # of another host, and a day old
    dead.mkdir()
    drafts = [out / ".manifest.csv.0123abcd", out / "failed" / ".x.json.0123abcd"]
    for folder in ("private/index", "private/runs/1", "runs/1"):
        (out / folder).mkdir(parents=True)
        drafts.append(out / folder / ".x.parquet.0123abcd")
    drafts += [out / "private" / ".index.parquet.0123abcd", work / f"lock.{'0' * 8}.1.2.{'3' * 8}"]
    for path in (*drafts, work / "run-1-of-2.lock", out / ".hidden"):
        path.touch()
    (work / "bids-0123abcd-old" / "sub-1").mkdir(parents=True)
    lost = work / f"lock.{'0' * 8}.1.2.{'4' * 8}"  # of a process that died while it let go
    lost.mkdir()
    (lost / "holder.json").touch()
    mine = work / "notes.txt"
    mine.touch()
    kept = {*before, ".work/run-1-of-2.lock", ".work/notes.txt", ".hidden"}
    for path in (*drafts, dead, mine, lost, work / "bids-0123abcd-old"):
        os.utime(path, (1000, 1000))
    (out / ".manifest.csv.89abcdef").touch()  # being written

    clean_up(out, since=2000)

    assert files(out) == {*kept, ".manifest.csv.89abcdef"}
    assert {path.name for path in work.iterdir()} == {"run-1-of-2.lock", "notes.txt"}


@pytest.mark.parametrize(
    "name", ["measurements.csv", "manifest.parquet", "report/index.html", "bids/x", "cases/7/scan"]
)
def test_a_folder_of_the_users_own_files_is_not_claimed(name: str, tmp_path: Path) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(ScanError, match="use another `out=`") as caught:
        open_output(tmp_path, KEY)
    assert caught.value.code == "OUTPUT_UNWRITABLE"
    with pytest.raises(ScanError, match="use another `out=`"):
        build_index([tmp_path], bytes(32), tmp_path)
    assert files(tmp_path) == {name}


def test_what_a_run_left_that_died_early_is_claimed(tmp_path: Path) -> None:
    for folder in (".work", "runs/1", "private/runs/1", "cases", "failed"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scan.nii").write_text("an input")
    open_output(tmp_path, KEY)


def test_a_fingerprint_that_was_taken_away_is_written_anew(tmp_path: Path) -> None:
    """As the words of a damaged one advise: the crosswalk says whose folder it is."""
    publish(tmp_path)
    (tmp_path / "private" / "key.fingerprint").unlink()
    (tmp_path / "private" / "crosswalk.parquet").write_text("x")
    open_output(tmp_path, KEY)


@pytest.mark.parametrize("name", [".work", "private", "report", "bids"])
def test_a_part_of_out_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    """It could lead to a folder of the user's own, whose old files would be cleared away."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir(mode=0o755)
    (mine / f"{HANDSHAKE_PREFIX}.0").touch()
    os.utime(mine / f"{HANDSHAKE_PREFIX}.0", (1000, 1000))
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(mine)

    def lock() -> None:
        with hold_run_lock(out):
            pass

    def close() -> None:
        with private_folder(out, KEY):
            pass

    tried = (lambda: open_output(out, KEY), lambda: clean_up(out, 2000), lock, close)
    for attempt in (*tried, lambda: write_report(out), lambda: build_index([mine], bytes(32), out)):
        with pytest.raises(ScanError, match="is a link") as caught:
            attempt()
        assert caught.value.code == "OUTPUT_UNWRITABLE"
        assert name in caught.value.detail
    assert files(mine) == {f"{HANDSHAKE_PREFIX}.0"}
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755
