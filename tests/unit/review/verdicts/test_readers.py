"""Readers of cases: evenly, the same each time, blind until all have decided."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from scanloom.review.verdicts.readers import REPEAT_AFTER, Readers
from scanloom.review.verdicts.verdict import Seen, Verdict

CASES = [f"case{n}" for n in range(2000)]
THREE = Readers(("r1", "r2", "r3"), double=0.2)
SEEN = Seen("r", {})


def verdict(case: str, reviewer: str, decision: str, number: int = 1) -> Verdict:
    return Verdict(case, reviewer, SEEN, decision, number=number)


def test_without_double_reading_all_read_all() -> None:
    readers = Readers(("r1", "r2"))
    judged = {"r1": verdict("case1", "r1", "accept")}

    assert all(readers.reads(case, "r2", {}) for case in CASES)
    assert readers.visible("case1", "r2", judged, SEEN) == judged


def test_cases_are_shared_evenly_and_a_fifth_twice() -> None:
    assigned = [THREE.assigned(case, {}) for case in CASES]

    assert abs(sum(len(each) == 2 for each in assigned) / len(CASES) - 0.2) < 0.03
    counts = Counter(reader for each in assigned for reader in each)
    assert max(counts.values()) / min(counts.values()) < 1.15
    assert all(len(set(each)) == len(each) for each in assigned)


def test_the_share_of_a_case_depends_on_nothing_else() -> None:
    assert [THREE.assigned(case, {}) for case in CASES[::-1]][::-1] == [
        Readers(("r1", "r2", "r3"), 0.2).assigned(case, {}) for case in CASES
    ]


def test_neither_order_nor_a_further_reviewer_moves_other_cases() -> None:
    turned = Readers(("r3", "r1", "r2"), double=0.2)
    four = Readers(("r1", "r2", "r3", "r4"), double=0.2)
    for case in CASES:
        before = THREE.assigned(case, {})
        assert turned.assigned(case, {}) == before
        after = [each for each in four.assigned(case, {}) if each != "r4"]
        assert after == list(before[: len(after)])


def test_a_larger_share_keeps_the_double_cases() -> None:
    more = Readers(THREE.reviewers, double=0.5)
    assert all(more.is_double(case) for case in CASES if THREE.is_double(case))


def test_verdicts_about_a_replaced_result_leave_readers_blind() -> None:
    case = next(case for case in CASES if THREE.is_double(case))
    first, second = THREE.assigned(case, {})
    both = {reader: verdict(case, reader, "accept") for reader in (first, second)}
    new = Seen("another", {})
    again = {**both, first: replace(both[first], seen=new)}

    assert THREE.visible(case, second, again, new) == {second: both[second]}
    assert THREE.visible(case, second, both, SEEN) == both


def test_a_third_reader_comes_when_two_differ() -> None:
    case = next(case for case in CASES if THREE.is_double(case))
    first, second = THREE.assigned(case, {})
    third = ({"r1", "r2", "r3"} - {first, second}).pop()
    agreed = {reader: verdict(case, reader, "accept") for reader in (first, second)}
    differing = {**agreed, second: verdict(case, second, "reject")}

    assert THREE.assigned(case, agreed) == (first, second)
    assert THREE.assigned(case, differing) == (first, second, third)
    assert THREE.reads(case, third, differing)
    assert not THREE.reads(case, third, agreed)
    assert THREE.visible(case, third, differing, SEEN) == {}
    assert THREE.visible(case, first, differing, SEEN) == {first: differing[first]}
    decided = {**differing, third: verdict(case, third, "accept")}
    assert THREE.visible(case, first, decided, SEEN) == decided


def test_readers_are_blind_until_both_have_decided() -> None:
    case = next(case for case in CASES if THREE.is_double(case))
    first, second = THREE.assigned(case, {})
    first_only = {first: verdict(case, first, "accept")}

    assert THREE.visible(case, second, first_only, SEEN) == {}
    assert THREE.visible(case, first, first_only, SEEN) == first_only
    both = {**first_only, second: verdict(case, second, "accept")}
    assert THREE.visible(case, second, both, SEEN) == both


def test_a_verdict_that_was_shown_and_undone_since_was_seen() -> None:
    blind, free = Readers(("r1", "r2"), double=1.0), Readers(("r1", "r2"))
    second = verdict("case1", "r2", "reject")
    undone = replace(second, decision=None, undoes=1, number=2)
    first = verdict("case1", "r1", "accept", 3)
    shown = [second, undone, first, replace(second, number=4), replace(undone, undoes=4, number=5)]

    assert not blind.may_have_seen_others("case1", "r1", shown[:3])
    assert not blind.may_have_seen_others("case1", "r2", shown[:3])
    assert blind.may_have_seen_others("case1", "r1", shown)
    assert free.may_have_seen_others("case1", "r1", shown[:2])


def test_double_reading_needs_two() -> None:
    with pytest.raises(ValueError, match="two reviewers"):
        Readers(("r1",), double=0.1)


def test_cases_come_back_after_others_and_once() -> None:
    readers = Readers(("r1",), repeat=0.3)
    history = {(case, "r1"): [verdict(case, "r1", "accept", n)] for n, case in enumerate(CASES, 1)}

    back = readers.coming_back("r1", history)

    assert abs(len(back) / len(CASES) - 0.3) < 0.04
    assert not back & set(CASES[-REPEAT_AFTER:])
    again = sorted(back)[0]
    history[again, "r1"].append(verdict(again, "r1", "reject", 9999))
    assert again not in readers.coming_back("r1", history)
    assert readers.coming_back("r2", history) == set()
    assert Readers(("r1",)).coming_back("r1", history) == set()


def test_a_removed_reviewer_stays_reader_of_what_was_decided() -> None:
    """Other cases keep their readers; the next reviewer takes those that were not decided."""
    before = Readers(("r1", "r2", "r3"), 0.5)
    after = Readers(("r1", "r3"), 0.5, 0.0, ("r2",))
    decided = {"r2": Verdict("", "r2", Seen("", {}), "accept")}
    for case in map(str, range(100)):
        readers = before.assigned(case, {})
        assert after.assigned(case, decided if "r2" in readers else {}) == readers
        remaining = after.assigned(case, {})
        assert len(remaining) == len(readers)
        assert set(readers) - {"r2"} <= set(remaining) <= {"r1", "r3"}
