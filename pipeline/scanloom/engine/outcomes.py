"""Outcomes of series and cases by their ids, in columns: an archive has a million of them."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason

FOLDED_AT_ONCE = 10_000
"""Rows that become columns together."""


class Outcome(NamedTuple):
    """Outcome of a series or case.

    Parameters
    ----------
    id : str
    code : str
        Code of its reason; empty if it has a result.
    detail : str
        Without text of headers.
    """

    id: str
    code: str
    detail: str

    @property
    def reason(self) -> Reason | None:
        """The reason without a result."""
        return Reason[self.code] if self.code else None

    @property
    def is_failure(self) -> bool:
        """Whether a result was expected."""
        return bool(self.code) and Reason[self.code].expects_result


class Outcomes:
    """Outcomes in the order in which they were added; an id may have several.

    A row takes the length of its id and 4 bytes; what equal rows say is there once.
    """

    def __init__(self, rows: Iterable[Outcome] = ()) -> None:
        self._kinds: dict[tuple[str, str], int] = {}
        self._folded: list[tuple[NDArray[np.bytes_], NDArray[np.int32]]] = []
        self._last: list[tuple[str, int]] = []
        for row in rows:
            self.append(row)

    def append(self, row: Outcome) -> None:
        """Add an outcome."""
        self._last.append((row.id, self._kinds.setdefault(row[1:], len(self._kinds))))
        if len(self._last) >= FOLDED_AT_ONCE:
            self._folded.append(_columns(self._last))
            self._last = []

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self._folded) + len(self._last)

    def __iter__(self) -> Iterator[Outcome]:
        kinds = list(self._kinds)
        for ids, of_ids in self._folded:
            for id_, kind in zip(ids.tolist(), of_ids.tolist(), strict=True):
                yield Outcome(id_.decode(), *kinds[kind])
        for name, kind in self._last:
            yield Outcome(name, *kinds[kind])

    def finder(self) -> Callable[[str], list[Outcome]]:
        """Return a function that gives the outcomes of an id, in their order."""
        ids, of_ids, kinds = self._by_id()

        def find(name: str) -> list[Outcome]:
            sought = name.encode()
            if len(sought) > ids.itemsize:  # NumPy would copy all ids
                return []
            first = int(np.searchsorted(ids, np.bytes_(sought)))
            same = itertools.takewhile(lambda n: ids[n] == sought, range(first, len(ids)))
            return [Outcome(name, *kinds[of_ids[n]]) for n in same]

        return find

    def decided(self, decide: Callable[[list[Outcome]], Outcome]) -> Iterator[Outcome]:
        """Yield one outcome of each id, in the order of the ids; `decide` chooses it."""
        ids, of_ids, kinds = self._by_id()
        starts = range(0, len(ids), FOLDED_AT_ONCE)
        pieces = ((ids[n : n + FOLDED_AT_ONCE], of_ids[n : n + FOLDED_AT_ONCE]) for n in starts)
        rows = (row for piece in pieces for row in zip(*(c.tolist() for c in piece), strict=True))
        for name, same in itertools.groupby(rows, key=itemgetter(0)):
            yield decide([Outcome(name.decode(), *kinds[kind]) for _, kind in same])

    def _by_id(self) -> tuple[NDArray[np.bytes_], NDArray[np.int32], list[tuple[str, str]]]:
        """Return ids in order, and what each row says, as a number in the list."""
        blocks = [*self._folded, _columns(self._last)]
        ids, of_ids = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
        order = np.argsort(ids, kind="stable")
        return ids[order], of_ids[order], list(self._kinds)


def _columns(rows: list[tuple[str, int]]) -> tuple[NDArray[np.bytes_], NDArray[np.int32]]:
    ids = np.array([name.encode() for name, _ in rows], np.bytes_)
    return ids, np.array([kind for _, kind in rows], np.int32)


class NameSet:
    """Names of which 8 bytes each are in memory, instead of some 100.

    Another name is taken for one of a million of them once in 10^13 times.
    """

    def __init__(self) -> None:
        self._added, self._sorted = array("q"), [np.empty(0, np.int64)]

    def add(self, name: str) -> None:
        """Add a name."""
        self._added.append(hash(name))

    def __contains__(self, name: str) -> bool:
        return not self.missing([name])

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return those of many names that were not added."""
        are_known = self._hold(np.fromiter(map(hash, names), np.int64, len(names)))
        return list(itertools.compress(names, (~are_known).tolist()))

    def add_all(self, names: Sequence[str]) -> list[bool]:
        """Add names; return for each whether it was there, or stands among them, before it."""
        hashes = np.fromiter(map(hash, names), np.int64, len(names))
        firsts = np.zeros(len(names), np.bool_)
        firsts[np.unique(hashes, return_index=True)[1]] = True
        before = ~firsts | self._hold(hashes)
        self._added.extend(hashes[~before].tolist())
        again: list[bool] = before.tolist()
        return again

    def _hold(self, hashes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of some hashes were added."""
        self._sort()
        are_known = np.zeros(len(hashes), np.bool_)
        for block in filter(len, self._sorted):
            are_known |= block[np.searchsorted(block, hashes).clip(max=len(block) - 1)] == hashes
        return are_known

    def _sort(self) -> None:
        """Sort what was added; parts at least double in size, so that each is merged seldom."""
        if not self._added:
            return
        self._sorted.append(np.sort(np.array(self._added, np.int64)))
        self._added = array("q")
        while len(self._sorted) > 1 and len(self._sorted[-2]) <= 2 * len(self._sorted[-1]):
            last = self._sorted.pop()
            self._sorted[-1] = np.sort(np.concatenate([self._sorted[-1], last]))
