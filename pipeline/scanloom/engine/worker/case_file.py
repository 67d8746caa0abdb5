"""`CaseFile`: file of a run's cases in `OUT/private/`, for the workers.

It holds one line of JSON per case. Dask tasks carry an offset in this file, never the path of a
scan: Dask's logs and pages therefore show nothing about a source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from scanloom.core import Case, ComputeOptions, Outputs, ReadOptions, Series
from scanloom.core.relations import relations_from_json


class CaseFile:
    """Cases of a run by id; only their offsets in the file stay in memory."""

    def __init__(self, path: Path, offsets: dict[str, int]) -> None:
        self.path, self._offsets = path, offsets

    @classmethod
    def write(cls, path: Path, cases: Iterable[Case]) -> Self:
        """Write a new file that only its owner can read.

        Raises
        ------
        OSError
            If it can't be written.
        """
        offsets = {}
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for case in cases:
                offsets[case.id] = file.tell()
                file.write(json.dumps(_plain(case)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return cls(path, offsets)

    def offset(self, case_id: str) -> int:
        """Return the offset of a case in the file."""
        return self._offsets[case_id]

    def __len__(self) -> int:
        return len(self._offsets)

    def case(self, case_id: str) -> Case:
        """Return a case."""
        return self.read(self.path, self._offsets[case_id])

    @staticmethod
    def read(path: Path, offset: int) -> Case:
        """Return the case at an offset of a file.

        Raises
        ------
        OSError
            If the file can't be read.
        ValueError
            If the offset is not that of a case.
        """
        with path.open("rb") as file:
            file.seek(offset)
            return _case(json.loads(file.readline()))


def _plain(case: Case) -> dict[str, Any]:
    document = asdict(case)
    for series in (document["series"], *document["further_channels"]):
        series["files"] = [os.fsdecode(file) for file in series["files"]]
    return document


def _case(document: dict[str, Any]) -> Case:
    document["series"] = _series(document["series"])
    document["further_channels"] = tuple(map(_series, document["further_channels"]))
    outputs = document["outputs"]
    lists = {name: tuple(value) for name, value in outputs.items() if isinstance(value, list)}
    document["outputs"] = Outputs(**{**outputs, **lists})
    document["read"] = ReadOptions(**document["read"])
    document["compute"] = ComputeOptions(**document["compute"])
    document["relations"] = relations_from_json(document["relations"])
    return Case(**document)


def _series(document: dict[str, Any]) -> Series:
    return Series(**{**document, "files": tuple(map(Path, document["files"]))})
