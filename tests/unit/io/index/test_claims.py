"""Processes that index one archive share the work, and one that dies leaves nothing undone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scanloom.io.index import claims, parts
from scanloom.io.index.build import build_index
from scanloom.io.index.claims import Claims
from scanloom.io.output.folder_lock import Holder
from scanloom.io.output.private import PRIVATE
from scanloom.io.output.work_folder import HOLDER
from support import shared_index
from support.archives import series
from support.shared_index import KEY, PART_FILES, digest

TESTS = Path(__file__).parents[3]
SERIES = "pqrstuv"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven series, each in two folders; a broken file; a link to a file of these, another link."""
    root = tmp_path_factory.mktemp("archive")
    for name in (*SERIES, "z"):
        (root / name).mkdir()
    for number, name in enumerate(SERIES):
        for file in series(root / name, name, count=4)[:2]:
            file.rename(root / (SERIES[-number], "z")[number % 2] / file.name)
    (root / "q" / "broken.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\0" * 30)
    (root / "p" / "again").symlink_to(next((root / "p").glob("p*")))
    outside = series(tmp_path_factory.mktemp("outside"), "w", count=1)
    (root / "p" / "outside").symlink_to(outside[0])
    return root


def together(archive: Path, out: Path, processes: int, kills: int = 0) -> dict[str, list[Any]]:
    """Return what each process says, by the folder in `out`."""
    told = {
        "archive": str(archive),
        "out": str(out),
        "processes": processes,
        "kills": kills,
    }
    done = subprocess.run(
        [sys.executable, "-m", "support.shared_index", json.dumps(told)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def left_in(out: Path) -> list[str]:
    """Return what is neither a part nor a draft of one, which stays for an hour."""
    names = [path.name for path in (out / PRIVATE / "index").iterdir()]
    return [name for name in names if not re.fullmatch(r"[0-9a-f]{32}\.parquet|\..+", name)]


def check_each_file_was_opened_once(archive: Path, answers: list[Any]) -> None:
    files = sorted(str(path) for path in archive.rglob("*") if path.is_file())
    files.remove(str(archive / "p" / "again"))
    assert sorted(path for paths, _, _ in answers for path in paths) == files
    assert sum(opened for _, opened, _ in answers) == len(files)


def test_four_processes_open_each_file_once(archive: Path, tmp_path: Path) -> None:
    answers = together(archive, tmp_path, 4)["whole"]

    check_each_file_was_opened_once(archive, answers)
    expected = digest(build_index([archive], KEY, tmp_path / "alone"))
    assert [told for *_, told in answers] == [expected] * 4
    assert not left_in(tmp_path / "whole")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.thorough)])
def test_the_work_of_a_killed_process_is_done_by_the_other(
    archive: Path, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = together(archive, tmp_path, 2, kills)

    check_each_file_was_opened_once(archive, answers["whole"])
    expected = digest(build_index([archive], KEY, tmp_path / "alone"))
    monkeypatch.setattr(parts, "PART_FILES", PART_FILES)
    assert len(answers) == kills + 1
    for name, of_processes in answers.items():
        assert {told for *_, told in of_processes} == {expected}
        again = build_index([archive], KEY, tmp_path / name)
        assert (again.opened, digest(again)) == (0, expected)
        assert not left_in(tmp_path / name)


def test_one_process_has_a_claim_at_a_time(tmp_path: Path) -> None:
    ours, others = Claims(tmp_path), Claims(tmp_path)
    with ours.claim("a") as first, others.claim("a") as second, others.claim("b") as third:
        assert (first, second, third) == (True, False, True)
    with others.claim("a") as first:
        assert first
    assert not list(tmp_path.iterdir())


def test_what_only_this_process_sees_needs_no_claim() -> None:
    with Claims(None).claim("a") as first, Claims(None).claim("a") as second:
        assert first
        assert second


def claimed_elsewhere(folder: Path, name: str) -> Path:
    """Make a claim as another host does."""
    path = folder / f"{name}.claim"
    path.mkdir()
    (path / HOLDER).write_text(str(Holder.of_this_process()._replace(host="elsewhere")))
    return path


def test_the_claim_of_another_host_is_taken_when_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the share: those of the machines may say what they want."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    path, ours = claimed_elsewhere(tmp_path, "a"), Claims(tmp_path)
    with ours.claim("a") as taken:
        assert not taken
    state = path.stat()
    os.utime(path, (state.st_atime, state.st_mtime - claims.SILENT_AFTER_S - 1))
    with ours.claim("a") as taken:
        assert taken
    assert not list(tmp_path.iterdir())


def test_a_claim_is_touched_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    ours = Claims(tmp_path)
    with ours.claim("a"):
        [path] = tmp_path.iterdir()
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 120
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
    ours.close()


def test_claims_that_the_dead_left_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from scanloom.io.index.claims import Claims\n"
        "with Claims(Path(sys.argv[1])).claim('a'): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    claimed_elsewhere(tmp_path, "b")
    assert len(list(tmp_path.iterdir())) == 2

    Claims(tmp_path).close()

    assert [path.name for path in tmp_path.iterdir()] == ["b.claim"]


def test_voxels_that_may_follow_are_waited_for(tmp_path: Path) -> None:
    """A part with a header ends where its reader ends it, whoever that is."""
    assert shared_index.PART_FILES == 4
    root = tmp_path / "archive"
    for n in range(3):
        (root / f"{n}" / "below").mkdir(parents=True)
        lines = ("ObjectType = Image", "NDims = 3", "DimSize = 2 2 2", "ElementType = MET_UCHAR")
        text = "\n".join((*lines, "ElementSpacing = 1 1 1", "ElementDataFile = below/v.raw\n"))
        (root / f"{n}" / "v.mhd").write_text(text)
        for name in "abc":
            (root / f"{n}" / f"{name}.txt").write_text("a note of some length" * 10)
        (root / f"{n}" / "below" / "v.raw").write_bytes(bytes(8))

    answers = together(root, tmp_path, 3)["whole"]

    opened = [path for paths, _, _ in answers for path in paths if path.endswith(".txt")]
    assert sorted(opened) == sorted(map(str, root.rglob("*.txt")))
    assert {told for *_, told in answers} == {digest(build_index([root], KEY, tmp_path / "alone"))}
