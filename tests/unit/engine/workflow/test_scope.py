"""A job array's parts are equally large, and no case is in two of them or in none."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core import Series
from scanloom.engine.workflow.selection import Scope
from scanloom.io.identity import case_id

CASES = 4000


@pytest.mark.parametrize("shards", [2, 3, 16, 100])
def test_parts_are_equally_large(shards: int) -> None:
    ids = [
        case_id(Series("dicom", (Path("a"),), "1.2", f"1.3.{n}"), bytes(32)) for n in range(CASES)
    ]

    counts = [sum(Scope(shard=(k + 1, shards)).holds(case) for case in ids) for k in range(shards)]

    assert sum(counts) == CASES
    assert min(counts) > CASES / shards / 2
    assert max(counts) < CASES / shards * 2
