"""Outcomes in columns say what a list of them would, and sets of names what a set would."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scanloom.engine import outcomes
from scanloom.engine.outcomes import NameSet, Outcome, Outcomes


@pytest.mark.parametrize("at_once", [3, 1000])
def test_rows_are_found_by_id_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Ids of any length, of several rows, and the empty one of series that can't be read."""
    monkeypatch.setattr(outcomes, "FOLDED_AT_ONCE", at_once)
    names = ["b", "a" * 26, "", "b", "c", "a", "", "ö", "b"]
    rows = [Outcome(name, "DAMAGED" if n % 2 else "", f"{n % 4}") for n, name in enumerate(names)]

    columns = Outcomes(rows)

    assert (len(columns), list(columns)) == (len(rows), rows)
    find = columns.finder()
    for name in (*names, "none", "a" * 27, "zzz"):
        assert find(name) == [row for row in rows if row.id == name]
    last = list(columns.decided(lambda of_one: of_one[-1]))
    assert {row.id: row for row in last} == {row.id: row for row in rows}
    assert [row.id.encode() for row in last] == sorted({name.encode() for name in names})


def test_no_rows_are_no_outcomes() -> None:
    empty = Outcomes()
    assert (list(empty), len(empty), empty.finder()("a")) == ([], 0, [])


def test_a_set_of_names_tells_what_came_before() -> None:
    """In batches of any size, among names that come up to three times."""
    draw = random.Random(1)
    names = [f"name{draw.randrange(2000)}" for _ in range(3000)]
    known, before, seen = NameSet(), [], Counter[str]()
    start = 0
    while start < len(names):
        batch = names[start : start + draw.randrange(1, 300)]
        before += known.add_all(batch)
        start += len(batch)

    for name, is_known in zip(names, before, strict=True):
        assert is_known == (seen[name] > 0)
        seen[name] += 1
    known.add("another")
    assert "another" in known
    assert names[0] in known
    assert "none" not in known
    assert known.missing(["none", *names, "ö", "another"]) == ["none", "ö"]
    assert NameSet().missing(["none"]) == ["none"]
