"""The run's book in `OUT/private/`: where each case of a plan lies, for the workers.

One line of JSON a case. A worker is told a place in the book, never a path: what Dask shows,
logs or keeps says nothing of a source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from scanloom.core import Case, Outputs, ReadOptions, Series


class CaseBook:
    """The cases of a run, by id; a path and a number for each is all that stays in memory."""

    def __init__(self, path: Path, places: dict[str, int]) -> None:
        self.path, self._places = path, places

    @classmethod
    def write(cls, path: Path, cases: Iterable[Case]) -> Self:
        """Write a new book, readable for its owner alone.

        Raises
        ------
        OSError
            If it can't be written.
        """
        places = {}
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for case in cases:
                places[case.id] = file.tell()
                file.write(json.dumps(_plain(case)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return cls(path, places)

    def offset(self, case_id: str) -> int:
        """Return where a case stands."""
        return self._places[case_id]

    def __len__(self) -> int:
        return len(self._places)

    def case(self, case_id: str) -> Case:
        """Return a case."""
        return self.read(self.path, self._places[case_id])

    @staticmethod
    def read(path: Path, offset: int) -> Case:
        """Return the case at a place of a book.

        Raises
        ------
        OSError
            If the book can't be read.
        ValueError
            If no case stands there.
        """
        with path.open("rb") as file:
            file.seek(offset)
            return _case(json.loads(file.readline()))


def _plain(case: Case) -> dict[str, Any]:
    told = asdict(case)
    for series in (told["series"], *told["others"]):
        series["files"] = [os.fsdecode(file) for file in series["files"]]
    return told


def _case(told: dict[str, Any]) -> Case:
    told["series"] = _series(told["series"])
    told["others"] = tuple(map(_series, told["others"]))
    outputs = told["outputs"]
    lists = {name: tuple(value) for name, value in outputs.items() if isinstance(value, list)}
    told["outputs"], told["read"] = Outputs(**{**outputs, **lists}), ReadOptions(**told["read"])
    return Case(**told)


def _series(told: dict[str, Any]) -> Series:
    return Series(**{**told, "files": tuple(map(Path, told["files"]))})
