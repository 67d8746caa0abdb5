"""Finds the rows of a column by their value: a million take 12 MB beside the column itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

V = TypeVar("V")
_VALUES_AT_ONCE = 50_000
"""Values that are Python objects at a time."""


class Lookup:
    """The rows of a column of texts, by their value.

    Parameters
    ----------
    column : pyarrow.ChunkedArray
        Without nulls.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column: pa.Array = column.combine_chunks()
        hashes = np.fromiter(map(hash, self), np.int64, len(self.column))
        # Stable, so that the rows of a value stay in order
        order = np.argsort(hashes, kind="stable")
        self._hashes = memoryview(hashes[order])
        self._rows = memoryview(order.astype(np.uint32))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.column)

    def __getitem__(self, row: int) -> str:
        """Return the value of a row."""
        value: str = self.column[int(row)].as_py()
        return value

    def __iter__(self) -> Iterator[str]:
        """Yield the value of each row."""
        for start in range(0, len(self.column), _VALUES_AT_ONCE):
            yield from self.column.slice(start, _VALUES_AT_ONCE).to_pylist()

    def rows(self, value: str) -> list[int]:
        """Return the rows that have a value, in order."""
        hashed, matches = hash(value), list[int]()
        position = bisect_left(self._hashes, hashed)
        while position < len(self._hashes) and self._hashes[position] == hashed:
            row = self._rows[position]
            if self[row] == value:  # else only the hash is equal
                matches.append(row)
            position += 1
        return matches

    def first_row(self, value: str) -> int | None:
        """Return the first row that has a value, or None."""
        return next(iter(self.rows(value)), None)

    def first_rows(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return the first row that has each of many values, or -1."""
        import pyarrow as pa
        from pyarrow import compute

        first = np.full(len(values), -1, np.int64)
        hashes, value_hashes = np.asarray(self._hashes), np.fromiter(map(hash, values), np.int64)
        if not len(hashes):
            return first
        positions = np.searchsorted(hashes, value_hashes).clip(max=len(hashes) - 1)
        alike = np.flatnonzero(hashes[positions] == value_hashes)
        rows = np.asarray(self._rows)[positions[alike]]
        texts = pa.array([values[n] for n in alike.tolist()], pa.string())
        is_same = compute.equal(self.column.take(pa.array(rows)), texts).to_numpy(
            zero_copy_only=False
        )
        first[alike[is_same]] = rows[is_same]
        for n in alike[~is_same].tolist():  # another value has its hash
            first[n] = next(iter(self.rows(values[n])), -1)
        return first


class _ByKey(Mapping[str, V]):
    def __init__(self, keys: pa.ChunkedArray, values: pa.ChunkedArray) -> None:
        self._lookup = Lookup(keys)
        self._values = self._lookup.column if values is keys else values.combine_chunks()

    def _of(self, values: list[str]) -> V:
        raise NotImplementedError

    def __getitem__(self, key: str) -> V:
        if rows := self._lookup.rows(key):
            return self._of([self._values[row].as_py() for row in rows])
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (key.as_py() for key in self._lookup.column.unique())

    def __len__(self) -> int:
        return len(self._lookup.column.unique())

    def __bool__(self) -> bool:
        return len(self._lookup.column) > 0


class LastValues(_ByKey[str]):
    """The value in the last row of each key.

    Parameters
    ----------
    keys, values : pyarrow.ChunkedArray
        Columns of texts.
    """

    def _of(self, values: list[str]) -> str:
        return values[-1]


class ValueSets(_ByKey[set[str]]):
    """The values in all rows of each key; parameters as of `LastValues`."""

    def _of(self, values: list[str]) -> set[str]:
        return set(values)
