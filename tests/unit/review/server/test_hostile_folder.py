"""An output folder that others may write to: links that they place there lead nowhere."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from scanloom.core import Reason, ScanError
from scanloom.engine.revisions import Correction, publish_revision
from scanloom.io.output.case_folder import check_writable
from scanloom.io.output.layout import published_cases
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.regular_files import (
    check_folder,
    open_descriptor,
    open_regular_file,
    refuse_links_below,
)
from scanloom.review.report.page import write_report
from scanloom.review.revisions import read_label_maps
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.readers import share_cases
from scanloom.review.verdicts.tables import write_review_tables
from scanloom.review.verdicts.verdict import Verdict, seen_of
from scanloom.training.dataset import write_dataset
from support.commands import scanloom
from support.layouts import both_layouts, case_folders, fan_by_hand
from support.review_cases import change, seen

SECRET = b"the diary of the reviewer, in one line"


@pytest.fixture
def hers(tmp_path: Path) -> Path:
    """A folder of the reviewer, outside of the output folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "diary").write_bytes(SECRET)
    return folder


@pytest.fixture
def out(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published / "out", tmp_path / "out", copy_function=shutil.copy2)
    return tmp_path / "out"


def replace(path: Path, target: Path) -> None:
    """Put a link in the place of a file or folder, as another user with the right to write may."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def fit(case: Path) -> None:
    """Make checksums and stamps of a case fit its files: they keep nobody out."""
    names = [line[66:] for line in (case / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{hashlib.sha256((case / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (case / "SHA256SUMS").write_text("".join(lines))
    timing = json.loads((case / "timing.json").read_text())
    for name in timing["files"]:
        state = (case / name).stat()
        timing["files"][name] = [state.st_size, state.st_mtime_ns]
    (case / "timing.json").write_text(json.dumps(timing))


@pytest.mark.parametrize(
    "name", ["verdicts.jsonl", "verdicts.last", "readers.json", ".lock", "review.csv"]
)
def test_files_of_a_review_that_are_links_change_nothing(out: Path, hers: Path, name: str) -> None:
    (out / "review").mkdir()
    (out / "review" / name).symlink_to(hers / "diary")

    with suppress(ScanError, OSError), closing(VerdictLog(out)):
        share_cases(out, ["r1"])
        write_review_tables(out)

    assert (hers / "diary").read_bytes() == SECRET


@pytest.mark.parametrize("folder", ["private", "review", "review/revisions", "cases"])
def test_folders_that_are_links_are_refused(out: Path, hers: Path, folder: str) -> None:
    (out / "review").mkdir()
    replace(out / folder, hers)

    with pytest.raises(ScanError, match="is a link"):
        VerdictLog(out)

    assert [path.name for path in hers.iterdir()] == ["diary"]


def test_a_preview_that_is_a_link_is_not_served(server: Any, hers: Path) -> None:
    case, client = server.out / "cases" / server.cases[0], server.client()
    assert client.get(f"/api/case/{case.name}/preview").status_code == 200
    replace(case / "preview.png", hers / "diary")
    fit(case)

    answer = client.get(f"/api/case/{case.name}/preview")

    assert answer.status_code == 404
    assert SECRET not in answer.content


def test_no_file_outside_a_case_is_read_as_its_label_map(server: Any, hers: Path) -> None:
    case = server.out / "cases" / server.cases[0]
    foreign = Path(shutil.copy2(case / "segmentation.nii.gz", hers / "segmentation.nii.gz"))
    text, client = (case / "segments.json").read_text(), server.client()
    for path in (str(foreign), f"../../../{hers.name}/{foreign.name}"):
        (case / "segments.json").write_text(text.replace('"segmentation.nii.gz"', f'"{path}"'))
        fit(case)
        assert client.get(f"/api/case/{case.name}").json()["reason"] == "RESULT_DAMAGED"
        with pytest.raises(ScanError, match="damaged"):
            read_label_maps(case)


@both_layouts
@pytest.mark.parametrize("name", ["segmentation.nii.gz", "case.json", "image.nii.gz", ""])
def test_results_that_are_links_are_not_opened(server: Any, hers: Path, name: str) -> None:
    """Also where the whole folder of a case is one, and if its checksums are right."""
    case = next(c for c in case_folders(server.out) if (c / "image.nii.gz").exists())
    target = hers / "moved"
    if name:
        shutil.copy2(case / name, target)
    else:
        shutil.copytree(case, target, copy_function=shutil.copy2)
    replace(case / name if name else case, target)
    if name:
        fit(case)

    answer = server.client().get(f"/api/case/{case.name}")

    assert answer.status_code in (404, 409)


def test_a_subfolder_that_is_a_link_is_not_opened(server: Any, hers: Path) -> None:
    """Nor is it listed: its cases are gone for the server."""
    name = server.cases[0]
    fan_by_hand(server.out)
    subfolder = server.out / "cases" / f"_{name[-2:]}"
    subfolder.rename(hers / "moved")
    replace(subfolder, hers / "moved")

    answer = server.client().get(f"/api/case/{name}")

    assert answer.status_code in (404, 409)
    assert name not in published_cases(server.out).names()


def test_a_revision_is_not_written_through_a_link(server: Any, hers: Path, published: Path) -> None:
    name = server.cases[0]
    labels = read_label_maps(server.out / "cases" / name)
    correction = Correction(labels, "r1", "brush", seen_of(server.out / "cases" / name))
    (server.out / "review" / "revisions").mkdir()
    replace(server.out / "review" / "revisions" / name, hers)

    with pytest.raises(ScanError, match="ELOOP"):
        publish_revision(server.out, name, correction, published / "key")

    assert [path.name for path in hers.iterdir()] == ["diary"]


def test_a_stroke_is_not_written_through_a_link(server: Any, hers: Path) -> None:
    client, name = server.client(), server.cases[0]
    drafts = server.out / "private" / "drafts"
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[4, 4]], "radius_mm": 4.0}
    label = server.state.opened(name).layers[0].structures[0]["number"]
    (drafts / name).mkdir(parents=True)
    (drafts / name / "r1.jsonl").symlink_to(hers / "diary")
    assert change(client, name, "stroke", "x", label=label, **stroke).status_code in (409, 503)
    shutil.rmtree(drafts)
    drafts.symlink_to(hers)
    version = client.get(f"/api/case/{name}/draft").json().get("version", "x")

    answer = change(client, name, "stroke", version, label=label, **stroke)

    assert answer.status_code in (409, 503)
    assert (hers / "diary").read_bytes() == SECRET
    assert [path.name for path in hers.iterdir()] == ["diary"]


def test_reports_and_datasets_open_no_links(
    server: Any, published: Path, hers: Path, tmp_path: Path
) -> None:
    picture, [case, second] = hers / "moved", sorted((server.out / "cases").iterdir())
    for each in (case, second):
        server.state.log.append(Verdict(each.name, "r1", seen(each), "accept"))
    shutil.copy2(case / "preview.png", picture)
    replace(case / "preview.png", picture)
    documents = second / "segments.json"
    text = documents.read_text()
    assert '"file": "segmentation.nii.gz"' in text
    documents.write_text(text.replace('"file": "segmentation.nii.gz"', '"file": "preview.png"'))
    fit(case)
    fit(second)
    damaged = set[str]()

    write_report(server.out, damaged)
    dataset = write_dataset(server.out, tmp_path / "data", key=published / "key")

    assert case.name in damaged
    reasons = {name: reason for name, (reason, _) in dataset.left_out.items()}
    assert reasons == dict.fromkeys((case.name, second.name), Reason.RESULT_DAMAGED)


# --- the functions that open ----------------------------------------------------------------------


def opens(call: Callable[[], Any]) -> int | None:
    """Return the number of the error of a call; None if it has none."""
    try:
        opened = call()
    except OSError as exc:
        return exc.errno
    if isinstance(opened, int):
        os.close(opened)
    elif opened is not None:
        opened.close()
    return None


def test_no_part_of_a_path_below_a_guarded_folder_may_be_a_link(tmp_path: Path) -> None:
    real, named = tmp_path / "disk" / "out", tmp_path / "out"
    (real / "a" / "b").mkdir(parents=True)
    (real / "a" / "b" / "file").write_text("x")
    named.symlink_to(real)  # the way to the folder is the user's own
    for link, target in (("l", "a"), ("a/l", "b"), ("a/b/l", "file"), ("gone", "nowhere")):
        (real / link).symlink_to(target)
    links = ["l/b/file", "a/l/file", "a/b/l"]
    assert [opens(lambda n=n: open_regular_file(named / n)) for n in links] == [None] * 3

    refuse_links_below(named)

    assert opens(lambda: open_regular_file(named / "a" / "b" / "file")) is None
    assert opens(lambda: open_regular_file(named / "a" / ".." / "a" / "b" / "file")) is None
    assert [opens(lambda n=n: open_regular_file(named / n)) for n in links] == [errno.ELOOP] * 3
    assert [opens(lambda n=n: open_descriptor(named / n, os.O_WRONLY)) for n in links] == [
        errno.ELOOP
    ] * 3
    assert opens(lambda: check_folder(named / "l" / "b")) == errno.ELOOP
    assert opens(lambda: check_folder(named / "a" / "b" / "later" / "x")) is None
    new = os.O_WRONLY | os.O_CREAT
    assert opens(lambda: open_descriptor(named / "gone", new)) == errno.ELOOP
    assert not (real / "nowhere").exists()
    assert opens(lambda: open_regular_file(named / "missing" / "x")) == errno.ENOENT
    (tmp_path / "outside").symlink_to(real / "a" / "b" / "file")
    assert opens(lambda: open_regular_file(tmp_path / "outside")) is None


def test_a_link_that_is_placed_meanwhile_is_not_followed(tmp_path: Path) -> None:
    """A folder is changed to a link and back as fast as it goes: no open gets through."""
    out, second = tmp_path / "out", tmp_path / "other"
    for folder, text in ((out / "cases", "result"), (second, "secret")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(text)
    (out / "link").symlink_to(second)
    refuse_links_below(out)
    stop, read, refused = threading.Event(), set[str](), 0

    def swap() -> None:
        while not stop.is_set():
            (out / "cases").rename(out / "kept")
            (out / "link").rename(out / "cases")
            (out / "cases").rename(out / "link")
            (out / "kept").rename(out / "cases")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(4000):
            try:
                with open_regular_file(out / "cases" / "file") as file:
                    read.add(file.read().decode())
            except OSError:
                refused += 1
    finally:
        stop.set()
        swapping.join()
    assert read == {"result"}
    assert refused


def test_what_is_written_meanwhile_is_in_folders_that_others_cannot_enter(
    server: Any, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases are built in `.work`, tables and thumbnails in folders of their own, all of mode 0700.

    The published folder and files have the usual modes.
    """
    work, name = server.out / ".work", server.cases[0]
    work.mkdir(exist_ok=True)
    work.chmod(0o777)
    modes = dict[str, set[int]]()
    rename, replaced = os.rename, os.replace

    def note(path: Any, folder: int | None) -> None:
        where = os.stat("." if folder else Path(path).parent, dir_fd=folder)
        modes.setdefault(Path(path).name, set()).add(stat.S_IMODE(where.st_mode))

    def renamed(source: Any, target: Any, **options: Any) -> None:
        note(source, options.get("src_dir_fd"))
        rename(source, target, **options)

    def moved(source: Any, target: Any, **options: Any) -> None:
        note(source, options.get("src_dir_fd"))
        replaced(source, target, **options)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", moved)
    case = server.out / "cases" / name
    correction = Correction(read_label_maps(case), "r1", "brush", seen_of(case))
    folder = publish_revision(server.out, name, correction, published / "key")
    write_report(server.out, set())

    assert len(modes) > 2
    assert set().union(*modes.values()) == {0o700}
    usual = 0o777 & ~current_umask()
    assert stat.S_IMODE(folder.stat().st_mode) == usual
    page = server.out / "report" / "index.html"
    assert stat.S_IMODE(page.stat().st_mode) == usual & 0o666


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_a_work_folder_of_somebody_else_is_refused(out: Path, hers: Path, kind: str) -> None:
    shutil.rmtree(out / ".work", ignore_errors=True)
    if kind == "link":
        (out / ".work").symlink_to(hers)
    elif kind == "file":
        (out / ".work").write_text("x")
    else:
        (out / ".work").mkdir()
        give_away(out / ".work")

    with pytest.raises(ScanError) as caught:
        check_writable(out)

    assert caught.value.code == "OUTPUT_UNWRITABLE"
    assert [path.name for path in hers.iterdir()] == ["diary"]


def give_away(*paths: Path) -> None:
    """Give files to another user, as whom this test does not run."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for path in paths:
        os.chown(path, 54321, -1)


def test_a_draft_that_is_swapped_for_a_link_overwrites_nothing(tmp_path: Path, hers: Path) -> None:
    """Neither if the file is swapped (whose name nobody knows), nor if its folder is."""
    target = tmp_path / "review.csv"
    target.write_text("old")

    def swapped(draft: Path) -> None:
        assert stat.S_IMODE(draft.parent.stat().st_mode) == 0o700
        draft.parent.rename(tmp_path / "stolen")
        draft.parent.symlink_to(hers)
        draft.write_text("new")

    with pytest.raises(OSError, match=r".") as caught:
        atomic_write(target, swapped)

    assert caught.value.errno == errno.ELOOP
    assert target.read_text() == "old"
    assert (hers / "diary").read_bytes() == SECRET


def test_private_files_of_another_user_are_not_filled(out: Path) -> None:
    """A comment in a file that he may read would be his; so would one in a folder of his."""
    name = next((out / "cases").iterdir()).name
    verdict = Verdict(name, "r1", seen(out / "cases" / name), "reject")
    with closing(VerdictLog(out)) as log:
        log.append(verdict, "about Mr Roe's kidney")
        private = out / "private"
        private.rename(out / "moved")
        private.mkdir(mode=0o777)
        comments = private / "review.jsonl"
        comments.write_bytes((out / "moved" / "review.jsonl").read_bytes())
        for theirs in ([private], [comments], [private, comments]):
            for path in (private, comments):
                os.chown(path, os.geteuid(), -1)
            give_away(*theirs)
            with pytest.raises(ScanError) as caught:
                log.append(verdict, "SECRET")
            assert caught.value.code == "OUTPUT_UNWRITABLE"
            assert b"SECRET" not in comments.read_bytes()
        os.chown(out, 54321, -1)  # the owner of OUT may read it all anyway
        log.append(verdict, "SECRET")
        assert b"SECRET" in comments.read_bytes()


def test_strokes_are_not_kept_in_a_folder_of_another_user(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[4, 4]], "radius_mm": 4.0}
    label = server.state.opened(name).layers[0].structures[0]["number"]
    version = client.get(f"/api/case/{name}/draft").json()["version"]
    give_away(server.out / "private")

    answer = change(client, name, "stroke", version, label=label, **stroke)

    assert answer.status_code == 503
    assert not list((server.out / "private").rglob("r1.jsonl"))


def test_two_dots_after_a_link_lead_to_where_the_system_goes(tmp_path: Path) -> None:
    """`link/../out` is next to the link's target; links in it are not followed by any name."""
    right, wrong = tmp_path / "disk" / "out", tmp_path / "out"
    for folder in (right, wrong):
        (folder / "a").mkdir(parents=True)
        (folder / "a" / "file").write_text(folder.parent.name)
    (right / "b").symlink_to("a")
    (tmp_path / "disk" / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "far")
    named = tmp_path / "link" / ".." / "out"

    refuse_links_below(named)

    with open_regular_file(named / "a" / "file") as file:
        assert file.read() == b"disk"
    with open_regular_file(named / "a" / ".." / "a" / "file") as file:
        assert file.read() == b"disk"
    for out in (named, right):
        assert opens(lambda out=out: open_regular_file(out / "b" / "file")) == errno.ELOOP
        assert opens(lambda out=out: open_descriptor(out / "b" / ".." / "x", os.O_RDONLY)) == 2
    os.close(open_descriptor(named / "new", os.O_WRONLY | os.O_CREAT))
    assert (right / "new").exists()
    assert not (wrong / "new").exists()


@pytest.mark.parametrize("command", ["where", "join"])
def test_a_key_s_fingerprint_is_not_read_through_a_link(
    out: Path, hers: Path, published: Path, command: str
) -> None:
    shutil.move(out / "private" / "key.fingerprint", hers / "fingerprint")
    (out / "private" / "key.fingerprint").symlink_to(hers / "fingerprint")
    case = next((out / "cases").iterdir()).name
    table = hers / "table.csv"
    table.write_text(f"case\n{case}\n")

    argument = case if command == "where" else table
    result = scanloom(command, argument, "--out", out, "--key", published / "key")

    assert (result.code, result.out) == (74, "")
    assert "OUTPUT_UNWRITABLE" in result.err
