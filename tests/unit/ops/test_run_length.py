"""Counts of label maps, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from scanloom.ops import run_length
from scanloom.ops.run_length import counts_by_slice


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("slab", [1, 150, 1 << 21])
def test_counts_agree_with_numpy(kind: type, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per slice, whatever the slabs, for distant numbers and empty slices."""
    monkeypatch.setattr(run_length.iter_slabs, "__defaults__", (slab,))
    numbers = np.array([0, 3, np.iinfo(kind).max], kind)
    labels = np.asfortranarray(numbers[np.random.RandomState(2).randint(0, 3, (7, 5, 11))])
    labels[..., 4] = 0

    counts = counts_by_slice(labels)

    assert counts.shape == (11, int(numbers[-1]) + 1)
    for k in range(11):
        values, expected = np.unique(labels[..., k], return_counts=True)
        np.testing.assert_array_equal(np.flatnonzero(counts[k]), values)
        np.testing.assert_array_equal(counts[k, values], expected)


def test_an_empty_label_map_is_all_background() -> None:
    assert counts_by_slice(np.zeros((2, 3, 4), np.uint8)).tolist() == [[6]] * 4
