from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanloom.review.preview.content import choose_slices

SPAN = st.tuples(st.integers(10, 300), st.integers(0, 200)).map(
    lambda s: (s[0], min(300, s[0] + s[1]))
)


@given(st.lists(SPAN, max_size=118))
@settings(max_examples=200)
def test_first_last_and_every_structure_are_shown(spans):
    """No slice twice, in order, and not fewer than asked for."""
    slices = choose_slices((10, 300), spans, 16)

    assert slices[0] == 10
    assert slices[-1] == 300
    assert slices == sorted(set(slices))
    assert len(slices) >= 16
    assert all(any(a <= n <= b for n in slices) for a, b in spans)


def test_slices_are_spread_over_the_structures():
    """Of a long scan, those between its ends lie where the structures are."""
    slices = choose_slices((0, 999), [(400, 499)], 16)

    assert sum(400 <= n <= 499 for n in slices) == 14


def test_few_small_structures_do_not_need_more_tiles():
    """A slice through each takes the place of one of the others."""
    slices = choose_slices((0, 99), [(0, 99), (17, 17), (52, 52), (53, 53)], 16)

    assert len(slices) == 16
    assert {17, 52, 53} <= set(slices)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_few_slices_are_all_shown(count):
    """A scan of fewer slices than tiles shows every one."""
    assert choose_slices((5, 4 + count), [], 16) == list(range(5, 5 + count))
