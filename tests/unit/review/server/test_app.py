"""Routes: answers to reviewers, requests that they may send, and files that nobody gets."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanloom.core import Reason, ScanError
from scanloom.io.identity import key_fingerprint
from scanloom.io.output.audit import read_trail
from scanloom.io.output.crosswalk import SourceRecord, add_sources
from scanloom.io.output.private import private_folder
from scanloom.review.outliers import Finding
from scanloom.review.revisions import read_label_maps, revision_folders
from scanloom.review.server import cases, drafts
from scanloom.review.server.cases import OpenedCase, expected_bytes
from scanloom.review.server.drafts import LabelDraft
from scanloom.review.server.patients import PatientNames
from scanloom.review.server.rows import doubts_of
from scanloom.review.server.security import HEADERS, MAX_BODY_BYTES, Guard
from scanloom.review.verdicts.log import VerdictLog, read_verdicts
from scanloom.review.verdicts.verdict import TAGS
from support.layouts import both_layouts, folder_of
from support.review_cases import KEY, affine_of, change, judged, publish, scan_array, version_of


def about(client: Any, name: str) -> dict[str, Any]:
    answer = client.get(f"/api/case/{name}")
    assert answer.status_code == 200, answer.text
    plain: dict[str, Any] = answer.json()
    return plain


def body_of(client: Any, name: str, decision: str = "accept", **more: Any) -> dict[str, Any]:
    return judged(about(client, name), decision, **more)


def decide(client: Any, name: str, decision: str = "accept", **more: Any) -> Any:
    content = json.dumps(body_of(client, name, decision, **more))
    headers = {"content-type": "application/json"}
    return client.post(f"/api/case/{name}/verdict", content=content, headers=headers)


# --- access ---------------------------------------------------------------------------------------


def test_a_link_works_once_and_its_session_for_one_reviewer(server: Any) -> None:
    client, token = server.client("r2"), server.sessions.tokens["r2"]
    answer = client.get("/api/me")

    assert answer.json()["name"] == "ben"
    assert [tag["id"] for tag in answer.json()["tags"]] == list(TAGS)
    stranger = server.client(None)
    used = stranger.post("/api/session", json={"token": token, "reviewer": "r2"})
    assert (used.status_code, used.json()["reason"]) == (403, "SESSION")
    second = server.sessions.tokens["r1"]
    foreign = stranger.post("/api/session", json={"token": second, "reviewer": "r2"})
    assert foreign.status_code == 403
    assert stranger.post("/api/session", json={"token": second, "reviewer": "r1"}).is_success
    assert client.get("/api/me").json()["name"] == "ben"


def test_no_cookie_is_set_and_none_opens_anything(server: Any) -> None:
    """A cookie of 127.0.0.1 goes to all its ports, so to servers of other users (RFC 6265, 8.5)."""
    client = server.client(None)
    answer = client.post(
        "/api/session", json={"token": server.sessions.tokens["r1"], "reviewer": "r1"}
    )
    session = answer.json()["session"]
    pages = [client.get(path) for path in ("/", "/r1/", "/r1/case/x", "/static/api.js")]

    assert not any("set-cookie" in each.headers for each in (answer, *pages))
    for name in ("scanloom_review", "session", "authorization"):
        client.cookies.set(name, session)
    assert client.get("/api/me").status_code == 403
    assert client.get(f"/api/me?session={session}").status_code == 403


@pytest.mark.parametrize(
    "path", ["/api/me", "/api/worklist", "/api/case/x", "/api/case/x/image/axial/0-0"]
)
@pytest.mark.parametrize("header", [None, "", "Bearer ", "x" * 43, "Bearer " + "x" * 43, "Basic x"])
def test_nothing_without_a_session(server: Any, path: str, header: str | None) -> None:
    client = server.client(None)
    if header is not None:
        client.headers["authorization"] = header
    answer = client.get(path)
    assert answer.status_code == 403
    assert not any(name in answer.text for name in server.cases)


def test_pages_hold_nothing_of_the_results(server: Any) -> None:
    client, name = server.client(None), server.cases[0]
    pages = [client.get("/r1/"), client.get(f"/r1/case/{name}"), client.get("/")]
    assert [each.status_code for each in pages] == [200, 200, 403]
    assert client.get("/r9/").status_code == 403
    assert not any(secret in each.text for each in pages for secret in (*server.cases, "anna"))


def test_other_sites_and_hosts_are_refused(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    body = body_of(client, name)
    path = f"/api/case/{name}/verdict"

    for origin in ("http://evil.example", "null", "http://127.0.0.1:9", ""):
        answer = client.post(path, json=body, headers={"origin": origin})
        assert (answer.status_code, answer.json()["reason"]) == (403, "ORIGIN")
    for host in ("evil.example", "127.0.0.1", "127.0.0.1:8000.evil.example"):
        assert client.get("/api/me", headers={"host": host}).json()["reason"] == "HOST"
    form = client.post(path, content=json.dumps(body), headers={"content-type": "text/plain"})
    assert form.status_code == 415
    assert client.put(path, json=body).status_code == 405
    assert read_verdicts(server.out) == []


def test_every_answer_has_the_policy(server: Any) -> None:
    client = server.client()
    for path in ("/", "/static/case.js", "/api/me", "/nowhere", "/api/case/../x", "/r1/"):
        answer = client.get(path)
        assert all(answer.headers[name] == value for name, value in HEADERS.items())
    assert client.get("/static/list.html").status_code == 404
    assert client.get("/static/..%2fapp.py").status_code == 404


def test_bodies_are_limited_in_size_and_time(server: Any) -> None:
    client = server.client()
    path = f"/api/case/{server.cases[0]}/verdict"
    headers = {"content-type": "application/json"}

    large = client.post(path, content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
    pieces = client.post(path, content=iter([b" " * 65536] * 20), headers=headers)
    claims = [
        client.post(path, content=b"{}", headers={**headers, "content-length": claim})
        for claim in ("1" * 12, "1" * 5000, "-1", "x")
    ]

    assert [each.status_code for each in (large, pieces, *claims)] == [413] * 6


def test_a_body_that_does_not_come_is_not_waited_for(server: Any) -> None:
    sent: list[dict[str, Any]] = []

    async def never() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
    headers["content-type"] = "application/json"
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    scope["headers"] = [(k.encode(), v.encode()) for k, v in headers.items()]
    guard = Guard(server.app.app, ("http://127.0.0.1:8000",), body_seconds=0.05)
    asyncio.run(guard(scope, never, send))

    assert sent[0]["status"] == 408


# --- verdicts -------------------------------------------------------------------------------------


def test_a_verdict_is_kept_shown_and_undone(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    case = about(client, name)
    structure = f"{case['layers'][0]['model']}/{case['layers'][0]['labels'][0]['label']}"

    answer = decide(
        client,
        name,
        "edit",
        structures={structure: "reject"},
        tags=["leak"],
        comment=" why ",
        seconds=3.25,
    )

    assert answer.status_code == 200
    [kept] = read_verdicts(server.out)
    assert (kept.decision, kept.tags, kept.seconds, kept.reviewer) == ("edit", ("leak",), 3.2, "r1")
    shown = about(client, name)
    assert shown["verdict"]["comment"] == "why"
    assert shown["state"] == "edit"
    second_view = about(server.client("r2"), name)
    assert (second_view["verdict"], second_view["others"][0]["reviewer"]) == (None, "anna")
    undone = client.post(f"/api/case/{name}/undo", json={"last": kept.number})
    assert (undone.json()["state"], undone.json()["verdict"]) == ("open", None)
    again = client.post(f"/api/case/{name}/undo", json={"last": undone.json()["last"]})
    assert (again.status_code, again.json()["reason"]) == (409, "NOTHING")


def test_a_verdict_of_another_window_is_neither_replaced_nor_undone(server: Any) -> None:
    """Each window names the verdict that it knew; 0 for none, also after an undo."""
    client, name = server.client(), server.cases[0]
    path, opened = f"/api/case/{name}", about(client, name)
    assert client.post(f"{path}/verdict", json=judged(opened, comment="of one")).is_success

    refused = [
        client.post(f"{path}/verdict", json=judged(opened, "reject")),
        client.post(f"{path}/undo", json={"last": opened["last"]}),
    ]

    reasons = [(each.status_code, each.json()["reason"]) for each in refused]
    assert reasons == [(409, "VERDICT_CHANGED")] * 2
    shown = about(client, name)
    assert (shown["state"], shown["verdict"]["comment"]) == ("accept", "of one")
    second = server.client("r2")
    assert second.post(f"{path}/verdict", json=judged(opened, "edit")).is_success
    undone = client.post(f"{path}/undo", json={"last": shown["last"]})
    assert (undone.json()["verdict"], undone.json()["last"]) == (None, 0)
    assert decide(client, name, "reject").is_success
    assert client.post(f"{path}/undo", json={"last": shown["last"]}).status_code == 409
    kept = [each.decision for each in read_verdicts(server.out)]
    assert kept == ["accept", "edit", None, "reject"]


def test_the_list_follows(server: Any) -> None:
    client, second = server.client("r1"), server.client("r2")
    decide(client, server.cases[0], "accept")
    decide(second, server.cases[0], "reject")
    decide(client, server.cases[1], "accept")

    listed = client.get("/api/worklist").json()

    rows = {row["id"]: row for row in listed["cases"]}
    assert rows[server.cases[0]]["state"] == "disagreed"
    assert rows[server.cases[1]]["state"] == rows[server.cases[1]]["mine"] == "accept"
    counts = listed["counts"]
    assert (counts["all"], counts["mine"], counts["disagreed"], counts["open"]) == (2, 2, 1, 0)
    unchanged = client.get(f"/api/worklist?since={listed['version']}")
    assert (unchanged.status_code, unchanged.content) == (304, b"")


def test_the_list_has_names_for_those_who_hold_the_key(published: Path, serve: Any) -> None:
    """From the private folder, in answers only: no other file has them."""
    server = serve()
    [one, two] = server.cases
    rows = [
        SourceRecord(
            one,
            "dicom",
            "/archive/x",
            3,
            folder=one,
            patient_name="Grau^Mina",
            study_date="20240229",
            series_description="Thorax",
        ),
        SourceRecord(two, "nifti", "/archive/Grau.nii.gz", 1, folder=two),
    ]
    with private_folder(server.out, key_fingerprint(KEY)) as private:
        add_sources(private, rows)
    other = server.out.parent / "other"
    other.write_bytes(b"x" * 32)
    other.chmod(0o600)
    with pytest.raises(ScanError) as caught:
        PatientNames(server.out, other)
    server.state.patients = PatientNames(server.out, published / "key")
    client = server.client()

    listed = client.get("/api/worklist").json()

    who = {row["id"]: row["who"] for row in listed["cases"]}
    assert who == {one: ["Grau Mina", "2024-02-29", "Thorax"], two: ["Grau.nii.gz"]}
    assert caught.value.reason is Reason.KEY_MISMATCH
    server.state.patients = None
    assert "Grau" not in client.get("/api/worklist").text
    public = [p for p in server.out.rglob("*") if p.is_file() and "private" not in p.parts]
    assert not [path for path in public if b"Grau" in path.read_bytes()]


@both_layouts
def test_pictures_are_those_of_the_result_that_is_reviewed(server: Any) -> None:
    """Those of the revision once there is one."""
    client, name = server.client(), server.cases[0]

    def shown() -> list[bytes]:
        return [client.get(f"/api/case/{name}/{each}").content for each in ("thumbnail", "preview")]

    def pictures(folder: Path) -> list[bytes]:
        return [(folder / each).read_bytes() for each in ("thumbnail.png", "preview.png")]

    before = shown()
    assert before == pictures(folder_of(server.out, name))
    assert about(client, name)["folder"] == str(folder_of(server.out, name).relative_to(server.out))
    for index in range(server.state.open_cases.get(name).view.shape[2]):
        paint(client, name, index=index, radius_mm=40.0)
    change(client, name, "draft/save")
    [revision] = revision_folders(server.out, name)
    assert shown() == pictures(revision)
    assert not set(before) & set(shown())
    assert server.client(None).get(f"/api/case/{name}/thumbnail").status_code == 403


def test_structures_at_the_border_are_one_doubt() -> None:
    findings = [
        Finding("border", name, 0.5, "reaches the border of the scan") for name in ("bone", "fat")
    ]
    found = [text for text, _ in doubts_of([*findings, Finding("empty", "lung", 2.0, "not found")])]
    assert found == ["lung: not found", "cut off by the border of the scan: bone, fat"]
    assert [text for text, _ in doubts_of(findings[:1])] == ["bone: reaches the border of the scan"]


WRONG: dict[str, dict[str, Any]] = {
    "no decision": {"decision": None},
    "unknown decision": {"decision": "fine"},
    "unknown tag": {"tags": ["x"]},
    "tags of another type": {"tags": "leak"},
    "nested tags": {"tags": [["leak"]]},
    "unknown structure": {"structures": {"m/none": "accept"}},
    "structures of another type": {"structures": ["a"]},
    "negative time": {"seconds": -1},
    "time that is no number": {"seconds": "1"},
    "endless comment": {"comment": "x" * 20_001},
    "comment of another type": {"comment": {"a": 1}},
    "unknown field": {"reviewer": "r2"},
    "no result": {"version": None},
    "another verdict by its text": {"last": "0"},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_verdicts_are_refused(server: Any, name: str) -> None:
    client, case = server.client(), server.cases[0]
    body = {**body_of(client, case), **WRONG[name]}
    assert client.post(f"/api/case/{case}/verdict", json=body).status_code == 400
    for content in (b"", b"[]", b"{", b'"x"', b"[" * 100_000, b"\xff"):
        answer = client.post(
            f"/api/case/{case}/verdict",
            content=content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
    assert read_verdicts(server.out) == []


def test_comments_are_kept_as_they_are_and_only_in_private(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    comments = ["<script>alert(1)</script>", "=1+1", "x" * 10_000, "\u202egnihton\u202c", "\ud83d"]
    for comment in comments:
        body = json.dumps({**body_of(client, name), "comment": comment})
        headers = {"content-type": "application/json"}
        path = f"/api/case/{name}/verdict"
        assert client.post(path, content=body, headers=headers).status_code == 200
        shown = about(client, name)["verdict"]["comment"]
        assert shown == comment.encode("utf-8", "replace").decode()
    kept = (server.out / "review" / "verdicts.jsonl").read_text()
    assert "script" not in kept


def test_a_full_disk_is_not_answered_as_kept(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, name = server.client(), server.cases[0]
    body = body_of(client, name)
    log = server.state.log
    monkeypatch.setattr(
        type(log), "append", lambda *_: (_ for _ in ()).throw(ScanError(Reason.DISK_FULL, "full"))
    )
    answer = client.post(f"/api/case/{name}/verdict", json=body)
    assert (answer.status_code, answer.json()["reason"]) == (507, "DISK_FULL")


def test_a_second_server_is_refused(server: Any) -> None:
    with pytest.raises(ScanError) as caught:
        VerdictLog(server.out)
    assert caught.value.reason is Reason.REVIEW_OPEN


# --- blind readers --------------------------------------------------------------------------------


def test_no_route_shows_a_blind_reader_the_others_verdict(serve: Any) -> None:
    server = serve(double=1.0)
    first, second, name = server.client("r1"), server.client("r2"), server.cases[0]
    decide(first, name, "reject", tags=["leak"], comment="seen by the first")

    before = [
        second.get(path).text
        for path in ("/api/worklist", f"/api/case/{name}", f"/r2/case/{name}", "/r2/", "/api/me")
    ]

    assert not any(secret in text for text in before for secret in ("seen by", "anna"))
    assert (about(second, name)["state"], about(second, name)["others"]) == ("open", [])
    listed = second.get("/api/worklist").json()
    assert (listed["cases"][0]["state"], listed["counts"]["reject"]) == ("open", 0)
    decide(second, name, "accept")
    assert about(second, name)["others"][0]["comment"] == "seen by the first"
    assert about(first, name)["state"] == "disagreed"


def test_cases_of_others_are_not_served(serve: Any) -> None:
    server = serve(("anna", "ben", "cleo"), double=1e-9)
    clients = {code: server.client(code) for code in ("r1", "r2", "r3")}
    for name in server.cases:
        [reader] = server.state.readers.assigned(name, {})
        for code, client in clients.items():
            answer = client.get(f"/api/case/{name}")
            assert answer.status_code == (200 if code == reader else 404)


# --- corrections ----------------------------------------------------------------------------------


@both_layouts
def test_a_correction_becomes_a_revision(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    case = about(client, name)
    files = sorted(p for p in folder_of(server.out, name).rglob("*") if p.is_file())
    before = {path: path.read_bytes() for path in files}
    label = case["layers"][0]["labels"][1]["value"]
    plane = case["planes"]["coronal"]
    stroke = {"layer": 0, "plane": "coronal", "index": 5, "points": [[4, 4], [6, 4]]}
    stroke |= {"radius_mm": 2.6, "label": label, "only": None}
    decide(client, name, "edit")

    painted = change(client, name, "stroke", **stroke)

    assert painted.json()["changed"] > 0
    drafted = client.get(f"/api/case/{name}/labels/0/coronal/5-5?draft=1").content
    assert drafted != client.get(f"/api/case/{name}/labels/0/coronal/5-5").content
    assert change(client, name, "draft/undo").json()["undo"] == 0
    assert change(client, name, "draft/save").status_code == 409
    change(client, name, "draft/redo")
    saved = change(client, name, "draft/save")
    assert (saved.status_code, saved.json()) == (200, {"revision": 1})
    [revision] = revision_folders(server.out, name)
    file = case["layers"][0]["file"]
    opened = server.state.open_cases.get(name)
    shown = opened.view.of(read_label_maps(revision)[file])
    np.testing.assert_array_equal(shown, opened.layers[0].labels)
    pixels = np.frombuffer(drafted, f"<u{case['layers'][0]['bytes']}")
    pixels = pixels.reshape(plane["height"], plane["width"])
    np.testing.assert_array_equal(pixels, shown[:, 5, :].T)
    assert before == {path: path.read_bytes() for path in files}
    after = about(client, name)
    assert (after["revision"], after["state"], after["verdict"]["decision"]) == (1, "stale", "edit")
    assert decide(client, name, "accept").json()["state"] == "accept"


def paint(client: Any, name: str, version: str | None = None, **more: Any) -> Any:
    label = about(client, name)["layers"][0]["labels"][0]["value"]
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[4, 4]], "radius_mm": 4.0}
    return change(client, name, "stroke", version, **{**stroke, "label": label, **more})


@pytest.mark.thorough
def test_a_reviewer_has_a_correction_of_each_case(server: Any) -> None:
    client, (first, second) = server.client(), server.cases
    assert paint(client, first).json()["undo"] == 1

    assert change(client, second, "draft/undo").json()["changed"] == 0
    assert change(client, second, "draft/save").status_code == 409
    assert paint(client, second).json()["undo"] == 1

    assert client.get(f"/api/case/{first}/draft").json()["undo"] == 1
    assert server.client("r2").get(f"/api/case/{first}/draft").json()["undo"] == 0
    listed = client.get("/api/worklist").json()
    assert all(row["draft"] for row in listed["cases"])
    assert change(client, first, "draft/save").json() == {"revision": 1}
    listed = client.get("/api/worklist").json()
    drafts = {row["id"]: row["draft"] for row in listed["cases"]}
    assert drafts == {first: False, second: True}
    assert change(client, second, "draft/save").json() == {"revision": 1}


@pytest.mark.thorough
def test_two_reviewers_who_correct_one_case_both_keep_their_strokes(server: Any) -> None:
    """The strokes of the second are painted on the revision of the first, and can be undone."""
    anna, ben, name = server.client("r1"), server.client("r2"), server.cases[0]
    paint(anna, name, radius_mm=2.0)
    seen = paint(ben, name, points=[[8, 8]]).json()["version"]
    assert change(anna, name, "draft/save").json() == {"revision": 1}

    late = change(ben, name, "draft/save", seen)
    assert paint(ben, name, seen).json()["reason"] == "STALE"

    assert (late.status_code, late.json()["reason"]) == (409, "STALE")
    labels = f"/api/case/{name}/labels/0/axial/3-3"
    draft = ben.get(f"/api/case/{name}/draft").json()
    assert (draft["undo"], draft["carried"], draft["dropped"]) == (1, 1, 0)
    assert ben.get(f"/api/case/{name}/draft").json()["carried"] == 0
    opened = server.state.open_cases.get(name)
    label = opened.layers[0].structures[0]["number"]
    x, y = np.indices(opened.view.shape[:2])
    spacing = about(ben, name)["spacing"]
    near = ((x - 8) * spacing[0]) ** 2 + ((y - 8) * spacing[1]) ** 2 <= 4.0**2
    expected = opened.layers[0].labels[..., 3].copy()
    expected[near] = label
    drafted = np.frombuffer(ben.get(f"{labels}?draft=1").content, expected.dtype)
    np.testing.assert_array_equal(drafted.reshape(expected.T.shape), expected.T)
    assert change(ben, name, "draft/undo").json()["undo"] == 0
    assert ben.get(f"{labels}?draft=1").content == anna.get(labels).content
    change(ben, name, "draft/redo")
    assert change(ben, name, "draft/save").json() == {"revision": 2}


def test_parts_of_a_result_that_was_replaced_are_not_shown_as_its_own(server: Any) -> None:
    array, affine = scan_array(1), affine_of("LAS", 20.0)
    name = publish(server.out.parent, array, affine, "one", recipe="q" * 64).name
    client = server.client()
    path, version = f"/api/case/{name}", about(client, name)["version"]
    publish(server.out.parent, array, affine, "one", first=2, recipe="s" * 64)
    server.state.worklist.update(name)

    parts = ("image/axial/0-0", "labels/0/axial/0-0", "surface/0", "draft")
    answers = [client.get(f"{path}/{part}?version={version}") for part in parts]

    assert [answer.json()["reason"] for answer in answers] == ["STALE"] * 4
    current = about(client, name)["version"]
    assert all(client.get(f"{path}/{part}?version={current}").is_success for part in parts)
    listed = client.get("/api/worklist").json()["cases"]
    assert current in [row["version"] for row in listed if row["id"] == name]


@pytest.mark.parametrize("first", [1, 2])
def test_strokes_are_not_painted_as_another_structure(server: Any, first: int) -> None:
    """A run may put the result of another model in its place, whose numbers mean others."""
    array, affine = scan_array(1), affine_of("LAS", 20.0)
    name = publish(server.out.parent, array, affine, "one", recipe="q" * 64).name
    client = server.client()
    assert paint(client, name, label=2).json()["changed"]

    publish(server.out.parent, array, affine, "one", first=first, recipe="s" * 64)
    server.state.worklist.update(name)

    draft = client.get(f"/api/case/{name}/draft").json()
    assert (draft["carried"], draft["dropped"]) == ((1, 0) if first == 1 else (0, 1))


def test_a_stroke_on_a_correction_that_another_window_changed_is_refused(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    before = version_of(client, name)
    after = paint(client, name, before).json()["version"]

    late = [
        paint(client, name, before),
        *(change(client, name, f"draft/{step}", before) for step in ("undo", "redo", "discard")),
        change(client, name, "draft/save", before),
    ]

    assert {(each.status_code, each.json()["reason"]) for each in late} == {(409, "DRAFT_CHANGED")}
    assert version_of(client, name) == after
    assert change(client, name, "draft/discard", after).json()["version"] == before
    assert paint(client, name, after).json()["reason"] == "DRAFT_CHANGED"
    paint(client, name, before)
    change(client, name, "draft/save")
    stale = paint(client, name, before)
    assert (stale.status_code, stale.json()["reason"]) == (409, "STALE")
    seen = client.get(f"/api/case/{name}/draft", params={"version": before})
    assert seen.json()["reason"] == "STALE"


@pytest.mark.thorough
def test_strokes_from_two_windows_at_once_are_all_there(server: Any) -> None:
    """Each of two windows repeats refused strokes: the sum is as NumPy paints it."""
    client, name, windows = server.client(), server.cases[0], 2
    case = about(client, name)
    label, shape = case["layers"][0]["labels"][0]["value"], case["shape"]
    opened = server.state.open_cases.get(name)
    expected, spacing = opened.layers[0].labels.copy(), case["spacing"]
    rng = np.random.default_rng(0)
    points = [[int(rng.integers(n)) for n in shape] for _ in range(40)]
    x, y = np.indices(shape[:2])
    for i, j, k in points:
        near = ((x - i) * spacing[0]) ** 2 + ((y - j) * spacing[1]) ** 2 <= 2.0**2
        expected[near, k] = label
    refused = list[str]()

    def window(own: list[list[int]]) -> None:
        version = version_of(client, name)
        for i, j, k in own:
            while True:
                stroke = {"points": [[i, j]], "index": k, "radius_mm": 2.0}
                answer = paint(client, name, version, **stroke).json()
                if "changed" in answer:
                    version = answer["version"]
                    break
                refused.append(answer["reason"])
                version = version_of(client, name)

    threads = [threading.Thread(target=window, args=(points[n::windows],)) for n in range(windows)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert set(refused) <= {"DRAFT_CHANGED"}
    assert change(client, name, "draft/save").json() == {"revision": 1}
    [revision] = revision_folders(server.out, name)
    saved = opened.view.of(read_label_maps(revision)[case["layers"][0]["file"]])
    np.testing.assert_array_equal(saved, expected)


@pytest.mark.thorough
def test_saved_corrections_leave_no_arrays(server: Any) -> None:
    """After many saves there are as many open cases and drafts as after few."""
    client, held = server.client(), list[tuple[int, int]]()
    for n in range(12):
        name = server.cases[n % 2]
        label = server.state.opened(name).layers[0].structures[n % 3]["number"]
        paint(client, name, label=label, points=[[2 + n % 5, 2 + n // 2]])
        paint(client, name, label=label, points=[[9, 2 + n // 2]])
        assert change(client, name, "draft/save").json() == {"revision": 1 + n // 2}
        gc.collect()
        objects = gc.get_objects()
        held.append(tuple(sum(type(o) is t for o in objects) for t in (OpenedCase, LabelDraft)))

    assert max(held[2:]) <= (2, 0)
    assert set(server.state.worklist.cases) == set(server.cases)


def test_a_correction_that_can_t_be_saved_is_kept(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, name = server.client(), server.cases[0]
    painted, labels = paint(client, name).json(), f"/api/case/{name}/labels/0/axial/3-3?draft=1"
    before, publish_it = client.get(labels).content, server.state.publish

    def full(*_: object) -> Path:
        raise ScanError(Reason.DISK_FULL, "the revision was not written")

    server.state.publish = full
    answer = change(client, name, "draft/save")

    assert (answer.status_code, answer.json()["reason"]) == (507, "DISK_FULL")
    assert client.get(labels).content == before
    assert client.get(f"/api/case/{name}/draft").json()["version"] == painted["version"]
    server.state.publish = publish_it
    assert change(client, name, "draft/undo").json()["undo"] == 0
    assert change(client, name, "draft/redo").json()["undo"] == 1
    assert change(client, name, "draft/save").json() == {"revision": 1}
    assert client.get(labels).content == before


def test_no_stroke_is_painted_on_a_correction_that_is_being_saved(server: Any) -> None:
    """A stroke that comes while the correction is written is refused, not answered as painted."""
    client, name, publish_it = server.client(), server.cases[0], server.state.publish
    version = paint(client, name).json()["version"]
    begun, answers = threading.Event(), list[Any]()

    def publish_slowly(*arguments: Any) -> Path:
        begun.set()
        time.sleep(0.3)
        return Path(publish_it(*arguments))

    server.state.publish = publish_slowly
    saving = threading.Thread(target=change, args=(client, name, "draft/save", version))
    saving.start()
    begun.wait()
    stroke = {"layer": 0, "plane": "axial", "index": 4, "points": [[2, 2]], "radius_mm": 2.0}
    label = server.state.open_cases.get(name).layers[0].structures[0]["number"]
    answers.append(change(client, name, "stroke", version, label=label, **stroke))
    saving.join()

    assert answers[0].status_code == 409
    assert answers[0].json()["reason"] in ("DRAFT_CHANGED", "STALE")


def test_drafts_of_many_reviewers_are_kept_with_few_in_whole(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"reader {n}" for n in range(6))
    server = serve(names)
    name = server.cases[0]
    clients = [server.client(code) for code in server.state.names]
    painted = []
    for n, client in enumerate(clients):
        paint(client, name, points=[[2 + n, 4]], radius_mm=2.0)
        if n == 0:
            size = server.state.drafts.find(name, "r1").painted.nbytes
            monkeypatch.setattr(drafts, "MAX_PAINTED_BYTES", 5 * size // 2)
        painted.append(client.get(f"/api/case/{name}/labels/0/axial/3-3?draft=1").content)

    held = [server.state.drafts.find(name, code) for code in server.state.names]
    again = [
        client.get(f"/api/case/{name}/labels/0/axial/3-3?draft=1").content for client in clients
    ]

    assert again == painted
    assert len(set(painted)) == 6
    assert sum(each.painted is not None for each in held) == 3  # that in use, and two more


def test_strokes_on_a_case_that_is_gone_do_not_bar_others(server: Any) -> None:
    client, (first, second) = server.client(), server.cases
    paint(client, first)
    shutil.rmtree(server.out / "cases" / first)
    assert client.get(f"/api/case/{first}").status_code == 404

    assert paint(client, second).json()["undo"] == 1


STROKES: dict[str, dict[str, Any]] = {
    "no plane": {"plane": "oblique"},
    "no layer": {"layer": 9},
    "negative slice": {"index": -1},
    "slice outside": {"index": 999},
    "no points": {"points": []},
    "points without numbers": {"points": [["a", 1]]},
    "infinite points": {"points": [[1e999, 1]]},
    "no radius": {"radius_mm": 0},
    "huge radius": {"radius_mm": 1e6},
    "unknown label": {"label": 77},
    "label that is no number": {"label": True},
    "replaced labels of another type": {"only": 3},
}


@pytest.mark.parametrize("name", STROKES)
def test_wrong_strokes_are_refused(server: Any, name: str) -> None:
    client, case = server.client(), server.cases[0]
    label = about(client, case)["layers"][0]["labels"][0]["value"]
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[1, 1]], "radius_mm": 2.0}
    body = json.dumps({**stroke, "label": label, **STROKES[name]})
    answer = client.post(
        f"/api/case/{case}/stroke", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 404)


# --- what changes under the server ----------------------------------------------------------------


def let_it_look(server: Any) -> None:
    """Let the server look for new cases at the next request."""
    server.state.worklist._next_look = 0.0


@pytest.mark.thorough
@both_layouts
def test_cases_appear_and_go_while_it_runs(
    serve: Any, published: Path, tmp_path: Path, layout: str
) -> None:
    server = serve()
    client, name = server.client(), server.cases[0]
    decide(client, name, "accept")
    (tmp_path / "more").mkdir()
    new = publish(tmp_path / "more", scan_array(7), affine_of(), "three")
    subfolder = "." if layout == "flat" else f"_{new.name[-2:]}"
    shutil.copytree(new, server.out / "cases" / subfolder / new.name, copy_function=shutil.copy2)
    shutil.rmtree(folder_of(server.out, server.cases[1]))
    let_it_look(server)

    listed = client.get("/api/worklist").json()

    assert {row["id"] for row in listed["cases"]} == {name, new.name}
    assert client.get(f"/api/case/{server.cases[1]}").status_code == 404


@both_layouts
def test_a_verdict_on_a_replaced_result_is_stale(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    body = body_of(client, name)
    decide(client, name, "accept")
    folder = folder_of(server.out, name)
    document = json.loads((folder / "case.json").read_text())
    stand_in = server.out / "cases" / "replacing"
    shutil.copytree(folder, stand_in)
    changed = json.dumps({**document, "recipe": "s" * 64})
    (stand_in / "case.json").write_text(changed)
    sums = (stand_in / "SHA256SUMS").read_text().splitlines()
    digest = hashlib.sha256(changed.encode()).hexdigest()
    lines = [f"{digest}  case.json" if line.endswith("  case.json") else line for line in sums]
    (stand_in / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    timing = json.loads((stand_in / "timing.json").read_text())
    for file in timing["files"]:
        state = (stand_in / file).stat()
        timing["files"][file] = [state.st_size, state.st_mtime_ns]
    (stand_in / "timing.json").write_text(json.dumps(timing))
    shutil.rmtree(folder)
    stand_in.rename(folder)
    let_it_look(server)

    answer = client.post(f"/api/case/{name}/verdict", json=body)

    assert (answer.status_code, answer.json()["reason"]) == (409, "STALE")
    assert about(client, name)["state"] == "stale"


def test_a_damaged_case_is_told(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    file = server.out / "cases" / name / "segmentation.nii.gz"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    os.utime(file)

    answer = client.get(f"/api/case/{name}")

    assert (answer.status_code, answer.json()["reason"]) == (409, "RESULT_DAMAGED")


def test_labels_changed_without_a_trace_are_told(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    file = server.out / "cases" / name / "segmentation.nii.gz"
    state = file.stat()
    content = bytearray(file.read_bytes())
    content[4] ^= 1  # the moment in the header of gzip: the labels can still be read
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))

    answer = client.get(f"/api/case/{name}")

    assert (answer.status_code, answer.json()["reason"]) == (409, "RESULT_DAMAGED")


def test_a_case_has_room_ahead_only_beside_those_that_are_shown(server: Any) -> None:
    client, (first, second) = server.client(), server.cases
    open_cases = server.state.open_cases
    about(client, first)
    opened = open_cases.get(first)
    open_cases.limit = opened.nbytes + expected_bytes(server.out, second) - 1

    assert client.get(f"/api/case/{second}?ahead=1").status_code == 204
    assert open_cases.get(first) is opened
    open_cases.limit = 1 << 30
    ahead = client.get(f"/api/case/{second}?ahead=1")
    assert ahead.json() == about(client, second)
    assert open_cases.get(first) is opened


def test_no_reviewer_closes_the_case_of_another(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps the case that he looks at, also if there is room for one only."""
    anna, ben, (first, second) = server.client("r1"), server.client("r2"), server.cases
    open_cases = server.state.open_cases
    open_cases.limit = 1
    about(anna, first)
    of_anna = open_cases.get(first)
    about(ben, second)
    of_ben = open_cases.get(second)
    labels = "labels/0/axial/0-0"
    for client, name in ((anna, first), (ben, second)) * 2:
        assert client.get(f"/api/case/{name}/{labels}").status_code == 200

    assert (open_cases.get(first), open_cases.get(second)) == (of_anna, of_ben)
    ben.get(f"/api/case/{first}/draft")  # he goes to the other case
    open_cases.get(second)
    assert open_cases.get(first) is of_anna
    monkeypatch.setattr(cases, "SHOWN_S", -1.0)
    open_cases.forget(second)
    open_cases.get(second)
    assert open_cases.get(first) is not of_anna  # nobody has looked at it for long


@pytest.mark.parametrize("cause", ["moved", "other key", "no key"])
def test_without_the_scan_labels_are_shown(
    server: Any, published: Path, tmp_path: Path, cause: str
) -> None:
    client = server.client()
    name = next(n for n in server.cases if not (server.out / "cases" / n / "image.nii.gz").exists())
    key = tmp_path / "key"
    if cause == "other key":
        key.write_bytes(b"o" * 32)
        key.chmod(0o600)
    server.state.open_cases.key = published / "key" if cause == "moved" else key
    scans = published / "scans"
    if cause == "moved":
        scans.rename(published / "elsewhere")
    try:
        case = about(client, name)
    finally:
        if cause == "moved":
            (published / "elsewhere").rename(scans)

    assert case["image"] is None
    assert case["image_reason"].startswith("The scan is not shown" if cause != "no key" else "The")
    assert str(tmp_path) not in json.dumps(case)
    assert client.get(f"/api/case/{name}/image/axial/0-0").status_code == 404
    assert client.get(f"/api/case/{name}/labels/0/axial/0-0").status_code == 200
    assert client.get(f"/api/case/{name}/preview").headers["content-type"] == "image/png"


# --- anything at all ------------------------------------------------------------------------------

SEGMENTS = st.sampled_from(
    [
        "api",
        "case",
        "image",
        "labels",
        "axial",
        "coronal",
        "verdict",
        "undo",
        "stroke",
        "draft",
        "save",
        "0",
        "0-0",
        "1-3",
        "9-2",
        "-1",
        "99999999999",
        "..",
        "%2e%2e",
        "..%2f..%2fprivate",
        "static",
        "case.js",
        "login",
        "worklist",
        "preview",
        "\u202e",
        "%00",
        "%F0%90",
        "a" * 300,
        "a" * 9_000,
        "9" * 6_000,
        "session",
        "r1",
        "me",
    ]
)
HUGE = st.sampled_from([10**400, -(10**400), 1e999, -1e999, 1e308, 2**63, 2**64, -1, 0, -0.0])
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=8)  # halves of characters too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | HUGE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        [
            "decision",
            "tags",
            "structures",
            "comment",
            "seconds",
            "layer",
            "plane",
            "index",
            "points",
            "radius_mm",
            "label",
            "only",
            "version",
            "token",
            "reviewer",
        ]
    )
    | TEXTS,
    JSON,
    max_size=8,
)


@settings(max_examples=400)
@given(st.data())
def test_no_request_is_a_fault(server: Any, data: st.DataObject) -> None:
    client = getattr(server, "kept", None) or server.client()
    server.kept = client
    known = st.sampled_from(server.cases)
    segments = data.draw(st.lists(SEGMENTS | known, min_size=1, max_size=6))
    path = "/" + "/".join(segments)
    if data.draw(st.booleans()):
        name = data.draw(known)
        path = f"/api/case/{name}/" + "/".join(data.draw(st.lists(SEGMENTS, max_size=4)))
    if data.draw(st.booleans()):
        answer = client.get(path)
    else:
        content = json.dumps(data.draw(FIELDS | JSON))
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=content, headers=headers)
    assert answer.status_code < 500, (path, answer.text)


def test_values_beyond_all_sizes_are_refused(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    stroke = {"layer": 0, "plane": "axial", "index": 3, "points": [[1, 1]], "radius_mm": 2.0}
    stroke |= {"label": about(client, name)["layers"][0]["labels"][0]["value"]}
    for field, value in (
        ("points", [[10**400, 1]]),
        ("points", [[1, -(10**400)]]),
        ("radius_mm", 10**400),
        ("label", 10**400),
        ("index", 10**400),
        ("only", [10**400]),
    ):
        answer = change(client, name, "stroke", "x", **{**stroke, field: value})
        assert answer.status_code == 400, (field, answer.text)
    assert decide(client, name, seconds=10**400).status_code == 200
    assert decide(client, name, **{"\ud800": 1}).status_code == 400
    body = {"token": "\ud800", "reviewer": "r1"}
    headers = {"content-type": "application/json"}
    answer = client.post("/api/session", content=json.dumps(body), headers=headers)
    assert answer.status_code == 403
    for path in (
        f"/api/case/{'a' * 60_000}",
        f"/api/case/{'a' * 60_000}/draft",
        f"/api/case/{name}/labels/{'9' * 6_000}/axial/0-0",
        f"/api/case/{name}/image/axial/{'9' * 6_000}-0",
    ):
        assert client.get(path).status_code == 404, path[:40]


STROKE = st.fixed_dictionaries(
    {
        "layer": st.integers(-1, 2),
        "plane": st.sampled_from(["axial", "coronal", "sagittal", "oblique"]),
        "index": st.integers(-1, 20),
        "points": st.lists(
            st.lists(st.floats(width=32) | st.integers(-5, 20) | HUGE, min_size=1, max_size=3),
            max_size=4,
        ),
        "radius_mm": st.floats(0, 250) | st.none() | HUGE,
        "label": st.integers(-1, 310) | HUGE,
        "only": st.none() | st.lists(st.integers(-1, 310) | HUGE, max_size=3),
    }
)


@pytest.mark.thorough
@settings(max_examples=200)
@given(st.data())
def test_no_step_of_a_correction_is_a_fault(server: Any, data: st.DataObject) -> None:
    """Strokes, undone and saved ones in any order, some of an old version."""
    client = getattr(server, "kept", None) or server.client()
    server.kept, name = client, data.draw(st.sampled_from(server.cases))
    step = data.draw(
        st.sampled_from(["stroke"] * 6 + [f"draft/{n}" for n in ("undo", "redo", "discard")])
        | st.sampled_from(["draft/save"] if data.draw(st.integers(0, 9)) == 0 else ["stroke"])
    )
    version = data.draw(st.sampled_from([None, None, None, "", "0.0", "\u202e", "a" * 300]))
    body = data.draw(STROKE) if step == "stroke" else {}
    content = json.dumps(
        {**body, "version": version_of(client, name) if version is None else version}
    )
    headers = {"content-type": "application/json"}
    answer = client.post(f"/api/case/{name}/{step}", content=content, headers=headers)
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200 and "version" in answer.json():
        assert answer.json()["version"] == version_of(client, name)


@pytest.mark.thorough
def test_torch_is_not_loaded() -> None:
    code = "import sys, scanloom.review.server.serve; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


def test_a_case_that_was_fetched_ahead_is_viewed_once_it_is_shown(server: Any) -> None:
    """Its page asks for the draft then, and for nothing else that it has already."""
    name, client = server.cases[0], server.client("r2")
    client.get(f"/api/case/{name}?ahead=1")
    assert "viewed" not in [each["event"] for each in read_trail(server.out, KEY)]

    client.get(f"/api/case/{name}/draft")

    [*_, line] = read_trail(server.out, KEY)
    assert (line["event"], line["case"], line["reviewer"]) == ("viewed", name, "r2")


def test_the_audit_trail_tells_who_saw_and_judged(server: Any) -> None:
    name, client = server.cases[0], server.client("r2")
    about(client, name)
    about(client, name)  # once for each start of the server
    client.get(f"/api/case/{name}?ahead=1")
    kept = decide(client, name, "reject").json()
    assert client.post(f"/api/case/{name}/undo", json={"last": kept["last"]}).status_code == 200

    lines = list(read_trail(server.out, KEY))
    told = [{n: each[n] for n in ("event", "reviewer") if n in each} for each in lines]
    assert told[-3:] == [
        {"event": "viewed", "reviewer": "r2"},
        {"event": "judged", "reviewer": "r2"},
        {"event": "judged", "reviewer": "r2"},
    ]
    assert [each["decision"] for each in lines[-2:-1]] == ["reject"]
    assert lines[-1]["undoes"] == 1
