"""Rows are found by the value of a column, as a dictionary finds them."""

from __future__ import annotations

import random
from collections import defaultdict

import pyarrow as pa
import pytest

from scanloom.io.output import lookup
from scanloom.io.output.lookup import LastValues, Lookup, ValueSets


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Some keys have several rows, others one."""
    monkeypatch.setattr(lookup, "_VALUES_AT_ONCE", 7)
    rng = random.Random(0)
    return [(f"é{rng.randrange(60)}", f"{n}") for n in range(100)]


def columns(pairs: list[tuple[str, str]]) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    half = len(pairs) // 2
    keys, values = ([pair[n] for pair in pairs] for n in range(2))
    return (
        pa.chunked_array([keys[:half], keys[half:]], pa.string()),
        pa.chunked_array([values], pa.string()),
    )


def test_it_is_as_a_dictionary(pairs: list[tuple[str, str]]) -> None:
    sets = defaultdict[str, set[str]](set)
    for key, value in pairs:
        sets[key].add(value)

    assert LastValues(*columns(pairs)) == dict(pairs)
    assert ValueSets(*columns(pairs)) == sets
    assert len(LastValues(*columns(pairs))) == len(sets)
    assert LastValues(*columns(pairs)).get("nobody") is None
    assert "nobody" not in ValueSets(*columns(pairs))


def test_keys_are_a_set(pairs: list[tuple[str, str]]) -> None:
    keys, expected = LastValues(*columns(pairs)).keys(), {key for key, _ in pairs}
    assert keys == expected
    assert keys - {"é3"} == expected - {"é3"}
    assert {"é3", "nobody"} - keys == {"nobody"}
    assert keys >= {"é3"}


def test_many_values_are_found_at_once(pairs: list[tuple[str, str]]) -> None:
    wanted = [f"é{n}" for n in range(100)]
    found = Lookup(columns(pairs)[0]).first_rows(wanted).tolist()

    keys = [key for key, _ in pairs]
    assert found == [keys.index(name) if name in keys else -1 for name in wanted]
    assert -1 in found


def test_equal_hashes_are_told_apart() -> None:
    class Same(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return hash("a")

    found = Lookup(pa.chunked_array([["a", "b", "a"]]))
    assert found.rows("a") == [0, 2]
    assert found.rows(Same("b")) == []
    assert found.first_rows(["a", Same("b"), "b", "c", Same("a")]).tolist() == [0, -1, 1, -1, 0]


def test_nothing_has_no_rows() -> None:
    empty = pa.chunked_array([], pa.string())
    assert not LastValues(empty, empty)
    assert dict(LastValues(empty, empty)) == {}
    assert Lookup(empty).rows("a") == []
    assert Lookup(empty).first_rows(["a"]).tolist() == [-1]
