"""Readers of a server: blind again once a result was replaced, and cases that come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import scanloom.review.verdicts.readers as readers_module
from scanloom.review.revisions import latest_result, read_label_maps
from scanloom.review.verdicts.log import read_verdicts
from scanloom.review.verdicts.tables import agreements
from scanloom.review.verdicts.verdict import seen_of
from support.review_cases import change, judged


def decide(client: Any, name: str, decision: str, **more: Any) -> dict[str, Any]:
    form = {"structures": {}, "tags": [], "comment": "", "seconds": 1.0, **more}
    body = judged(client.get(f"/api/case/{name}").json(), decision, **form)
    answer = client.post(f"/api/case/{name}/verdict", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def about(client: Any, name: str) -> dict[str, Any]:
    return dict(client.get(f"/api/case/{name}").json())


def revise(server: Any, name: str) -> None:
    """Publish a correction of a case, as another program would."""
    latest = latest_result(server.out, name)
    [file, labels] = next(iter(read_label_maps(latest).items()))
    changed = np.where(labels == labels.max(), 0, labels).astype(labels.dtype)
    server.state.publish(name, seen_of(latest), {file: changed}, "r1")
    server.state.worklist._read_changes()


def test_readers_are_blind_again_once_the_result_was_replaced(serve: Any) -> None:
    server = serve(double=1.0)
    first, second, name = server.client("r1"), server.client("r2"), server.cases[0]
    decide(first, name, "reject")
    decide(second, name, "reject")
    assert len(about(first, name)["others"]) == 1
    revise(server, name)

    decide(first, name, "accept", comment="seen by the first")

    seen = about(second, name)
    assert (seen["state"], seen["others"]) == ("stale", [])
    assert "seen by the first" not in second.get(f"/api/case/{name}").text
    decide(second, name, "accept")
    assert [each["decision"] for each in about(second, name)["others"]] == ["accept"]
    kept = read_verdicts(server.out)
    assert [each.independent for each in kept] == [True, True, False, False]
    [agreement] = [each for each in agreements(kept) if each.measure == "alpha"]
    assert agreement.cases == 1  # the result that both read without knowing of each other


@pytest.mark.thorough
def test_a_verdict_on_a_correction_is_independent_of_one_that_was_not_shown(serve: Any) -> None:
    """With double reading; else verdicts on replaced results are shown, too."""
    for double, independent in ((1.0, [True, True, True]), (0.0, [True, False, False])):
        server = serve(double=double)
        first, second, name = server.client("r1"), server.client("r2"), server.cases[0]
        decide(first, name, "reject")
        revise(server, name)
        decide(second, name, "accept")
        decide(first, name, "accept")
        assert [each.independent for each in read_verdicts(server.out)] == independent
        (server.out / "review" / "verdicts.jsonl").unlink()


def test_a_verdict_that_changes_after_the_others_was_seen_is_not_independent(serve: Any) -> None:
    server = serve(double=1.0)
    first, second, name = server.client("r1"), server.client("r2"), server.cases[0]
    decide(first, name, "edit")
    decide(first, name, "reject")
    decide(second, name, "accept")
    last = decide(first, name, "accept")["last"]
    for _ in range(3):
        undone = first.post(f"/api/case/{name}/undo", json={"last": last})
        assert undone.status_code == 200
        last = undone.json()["last"]

    decide(first, name, "accept")  # blind, but the other's verdict was shown before

    kept = [each for each in read_verdicts(server.out) if each.undoes is None]
    assert [each.independent for each in kept] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("double", "independent"),
    [(1.0, [True, True, True, False]), (0.0, [True, False, False, False])],
)
def test_a_verdict_that_another_undid_may_have_been_seen(
    serve: Any, double: float, independent: list[bool]
) -> None:
    server = serve(double=double)
    first, second, name = server.client("r1"), server.client("r2"), server.cases[0]

    def undo(client: Any, last: int) -> None:
        assert client.post(f"/api/case/{name}/undo", json={"last": last}).status_code == 200

    undo(second, decide(second, name, "accept")["last"])
    decide(first, name, "reject")  # with double reading, blind all along
    undo(second, decide(second, name, "accept")["last"])
    decide(first, name, "accept")  # after the other's verdict was shown, which is undone now

    kept = [each for each in read_verdicts(server.out) if each.undoes is None]
    assert [each.independent for each in kept] == independent


def test_the_list_and_the_page_have_one_state_of_a_correction(serve: Any) -> None:
    """A verdict on the result that was corrected since disagrees with nobody."""
    server = serve()
    first, second, name = server.client("r1"), server.client("r2"), server.cases[0]
    decide(first, name, "reject")
    revise(server, name)
    decide(second, name, "accept")

    for client in (first, second):
        listed = client.get("/api/worklist").json()
        rows = {row["id"]: row for row in listed["cases"]}
        assert rows[name]["state"] == about(client, name)["state"] == "accept"


def test_without_double_reading_the_second_is_not_independent(serve: Any) -> None:
    server = serve()
    name = server.cases[0]
    decide(server.client("r1"), name, "accept")
    decide(server.client("r2"), name, "accept")

    assert [each.independent for each in read_verdicts(server.out)] == [True, False]


def test_a_blind_reader_corrects_once_all_have_decided(serve: Any) -> None:
    server = serve(double=1.0)
    first, second, name = server.client("r1"), server.client("r2"), server.cases[0]
    layer = about(first, name)["layers"][0]
    stroke = {"layer": 0, "plane": "axial", "index": 4, "points": [[5, 5]], "radius_mm": 4}
    stroke |= {"label": layer["labels"][0]["value"], "only": None}
    decide(first, name, "edit")
    assert change(first, name, "stroke", **stroke).json()["changed"]

    refused = change(first, name, "draft/save")
    assert (refused.status_code, refused.json()["reason"]) == (409, "BLIND")
    assert about(second, name)["revision"] == 0
    decide(second, name, "edit")
    assert change(first, name, "draft/save").json() == {"revision": 1}


def test_a_case_comes_back_once_without_the_own_verdict(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_module, "REPEAT_AFTER", 1)
    server = serve(repeat=1.0)
    client, (name, second) = server.client(), server.cases
    decide(client, name, "reject", tags=["leak"])
    assert not about(client, name)["again"]
    decide(client, second, "accept")

    back = about(client, name)
    assert (back["again"], back["verdict"], back["state"]) == (True, None, "open")
    decide(client, name, "accept")

    assert not about(client, name)["again"]
    kept = [(each.case, each.reading) for each in read_verdicts(server.out)]
    assert kept == [(name, 1), (second, 1), (name, 2)]
