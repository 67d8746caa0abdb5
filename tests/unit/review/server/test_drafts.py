"""Corrections in progress are on the disk, stroke by stroke."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from scanloom.io.system import regular_files
from scanloom.review.server import drafts
from support.review_cases import change, judged

LABELS = "labels/0/axial/3-3"


def paint(client: Any, name: str, n: int = 0, **more: Any) -> Any:
    about = client.get(f"/api/case/{name}").json()
    label = about["layers"][0]["labels"][0]["value"]
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[3 + n, 4]], "radius_mm": 3.0}
    return change(client, name, "stroke", **{**stroke, "label": label, **more})


def drafted(client: Any, name: str) -> tuple[dict[str, Any], bytes]:
    draft = client.get(f"/api/case/{name}/draft").json()
    return draft, client.get(f"/api/case/{name}/{LABELS}?draft=1").content


def test_strokes_are_there_again_after_a_restart(serve: Any) -> None:
    server = serve()
    client, (name, second) = server.client(), server.cases
    for n in range(3):
        assert paint(client, name, n).json()["changed"] > 0
    erased = paint(client, name, 1, label=0)
    assert erased.json()["changed"] > 0
    change(client, name, "draft/undo")
    paint(client, second)
    before = [drafted(client, each) for each in (name, second)]

    server = serve()
    client = server.client()

    assert [drafted(client, each) for each in (name, second)] == before
    assert (before[0][0]["undo"], before[0][0]["redo"]) == (3, 1)
    assert server.state.drafts.kept() == {(name, "r1"): 3, (second, "r1"): 1}
    assert drafted(server.client("r2"), name)[0]["undo"] == 0
    assert change(client, name, "draft/redo").json()["undo"] == 4
    assert change(client, name, "draft/save").json() == {"revision": 1}
    assert server.state.drafts.kept() == {(second, "r1"): 1}


def test_only_their_owner_may_read_drafts(server: Any) -> None:
    paint(server.client(), server.cases[0])
    folder = server.out / "private" / "drafts"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert [mode for path, mode in modes.items() if path.is_file()] == [0o600]


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_half_a_line_is_the_stroke_that_was_not_answered(serve: Any, lost: int) -> None:
    server = serve()
    client, name = server.client(), server.cases[0]
    paint(client, name)
    before = drafted(client, name)
    paint(client, name, 3)
    [file] = (server.out / "private" / "drafts").rglob("*.jsonl")
    os.truncate(file, file.stat().st_size - lost)

    client = serve().client()

    assert drafted(client, name) == before
    assert paint(client, name, 3).json()["undo"] == 2
    assert change(client, name, "draft/save").json() == {"revision": 1}


def test_a_damaged_draft_is_named_and_kept(serve: Any) -> None:
    server = serve()
    client, name = server.client(), server.cases[0]
    paint(client, name)
    [file] = (server.out / "private" / "drafts").rglob("*.jsonl")
    damaged = file.read_bytes().replace(b'"points"', b'"point"')
    file.write_bytes(damaged)

    client = serve().client()

    answer = client.get(f"/api/case/{name}/draft")
    assert (answer.status_code, answer.json()["reason"]) == (409, "REVIEW_DAMAGED")
    assert client.get("/api/worklist").status_code == 200
    assert client.get(f"/api/case/{name}").status_code == 200
    assert file.read_bytes() == damaged


def test_a_stroke_that_does_not_reach_the_disk_is_not_painted(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, name = server.client(), server.cases[0]
    paint(client, name)
    before = drafted(client, name)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        answer = paint(client, name, 3)

    assert (answer.status_code, answer.json()["reason"]) == (507, "DISK_FULL")
    assert drafted(client, name) == before
    assert paint(client, name, 3).json()["undo"] == 2


def test_blind_readers_save_later_and_lose_nothing(serve: Any) -> None:
    """With double reading the strokes wait on the disk until the other has decided."""
    server = serve(double=1.0)
    client, second, name = server.client(), server.client("r2"), server.cases[0]
    paint(client, name)
    before = drafted(client, name)
    refused = change(client, name, "draft/save")
    assert (refused.status_code, refused.json()["reason"]) == (409, "BLIND")

    server = serve(double=1.0)
    client, second = server.client(), server.client("r2")

    assert drafted(client, name) == before
    for each in (client, second):
        body = judged(each.get(f"/api/case/{name}").json(), "edit")
        assert each.post(f"/api/case/{name}/verdict", json=body).status_code == 200
    assert change(client, name, "draft/save").json() == {"revision": 1}


def test_a_draft_of_a_revision_that_was_published_before_a_kill_is_over(
    serve: Any,
) -> None:
    """The server dies after the revision is published, before the draft is removed."""
    server = serve()
    client, name = server.client(), server.cases[0]
    paint(client, name)
    [file] = (server.out / "private" / "drafts").rglob("*.jsonl")
    content = file.read_bytes()
    change(client, name, "draft/save")
    file.parent.mkdir()
    file.write_bytes(content)

    client = serve().client()

    draft = client.get(f"/api/case/{name}/draft").json()
    assert (draft["undo"], draft["carried"], draft["dropped"]) == (0, 0, 0)
    assert not file.exists()


# --- files that can't be read for a moment --------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let each open of a file in a case fail, as with too many open files."""
    number, opened = [0], os.open

    def refuse(path: Any, *arguments: Any, **more: Any) -> int:
        if number[0] and str(path) in ("case.json", "timing.json", "segments.json"):
            raise OSError(number[0], os.strerror(number[0]))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(regular_files.os, "open", refuse)
    return number


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_case_that_can_t_be_read_for_a_moment_is_not_gone(
    server: Any, failing: list[int], number: int
) -> None:
    """Strokes, list and verdict: nothing is lost, and the answer says that it passes."""
    client, (name, second) = server.client(), server.cases
    body = judged(client.get(f"/api/case/{name}").json())
    paint(client, name)
    before = drafted(client, name)
    server.state.opened(second)
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[3, 4]], "radius_mm": 3.0}
    label = server.state.opened(second).layers[0].structures[0]["number"]
    version = client.get(f"/api/case/{second}/draft").json()["version"]
    failing[0] = number

    verdict = client.post(f"/api/case/{name}/verdict", json=body)
    shown = client.get(f"/api/case/{name}")
    painted = change(client, second, "stroke", version, label=label, **stroke)
    server.state.worklist._read_changes()

    listed = client.get("/api/worklist").json()
    assert {(each.status_code, each.json()["reason"]) for each in (verdict, shown)} == {
        (503, "BUSY")
    }
    assert errno.errorcode[number] in verdict.json()["text"]
    assert painted.json()["undo"] == 1
    assert (len(listed["cases"]), listed["damaged"]) == (2, 0)
    failing[0] = 0
    assert drafted(client, name) == before
    assert client.post(f"/api/case/{name}/verdict", json=body).status_code == 200


def test_a_revision_that_can_t_be_read_for_a_moment_does_not_give_way_to_the_result(
    server: Any, failing: list[int], published: Path
) -> None:
    client, name = server.client(), server.cases[0]
    paint(client, name)
    change(client, name, "draft/save")
    server.state.open_cases.forget(name)
    failing[0] = errno.EMFILE

    answers = [client.get(f"/api/case/{name}/{LABELS}"), client.get(f"/api/case/{name}")]

    assert [each.status_code for each in answers] == [503, 503]
    failing[0] = 0
    assert client.get(f"/api/case/{name}").json()["revision"] == 1


@pytest.mark.parametrize("loss", ["file", "folder", "half", "all"])
def test_strokes_outlive_a_file_that_another_program_took(serve: Any, loss: str) -> None:
    """Those before it and after it are there after a restart: each was answered as kept."""
    server = serve()
    client, name = server.client(), server.cases[0]
    for n in range(3):
        paint(client, name, n)
    change(client, name, "draft/undo")
    [file] = (server.out / "private" / "drafts").rglob("*.jsonl")
    if loss in ("file", "folder"):
        file.unlink()
        if loss == "folder":
            file.parent.rmdir()
    else:
        os.truncate(file, file.stat().st_size // 2 if loss == "half" else 0)

    assert paint(client, name, 5).json()["undo"] == 3
    before = drafted(client, name)

    assert drafted(serve().client(), name) == before


def test_a_correction_is_saved_whose_file_another_program_took(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    paint(client, name)
    shutil.rmtree(server.out / "private" / "drafts" / name)
    assert change(client, name, "draft/save").json() == {"revision": 1}


def test_corrections_side_by_side_stay_painted(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they take too much memory: those that were used longest ago are let go of then."""
    clients = [server.client(code) for code in ("r1", "r2")]
    for name in server.cases:
        for client in clients:
            assert paint(client, name).json()["changed"] > 0
    held = list(server.state.drafts._held.values())
    assert len(held) == 4
    assert all(each.painted for each in held)

    monkeypatch.setattr(drafts, "MAX_PAINTED_BYTES", 1)
    assert paint(clients[1], server.cases[1], 2).json()["undo"] == 2
    assert [bool(each.painted) for each in held] == [False, False, False, True]
