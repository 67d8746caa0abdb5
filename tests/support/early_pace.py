"""An index that waits for the cases that begin while it grows."""

from __future__ import annotations

import threading
from typing import Any

from scanloom.engine import run as running
from scanloom.engine.early_cases import EarlyCases, GrowingIndex
from scanloom.io.index.build import Index, build_index


class Pace:
    """Lets an index go on only when all cases of its parts so far have begun.

    `patch.setattr` replaces attributes, as that of `pytest.MonkeyPatch`.
    """

    def __init__(self, patch: Any) -> None:
        self._stored = self._taken = self._waits = 0
        self._changed = threading.Condition()
        take, find = GrowingIndex.next_part, EarlyCases._find

        def next_part(growing: GrowingIndex, wait_s: float = 0.0) -> Any:
            part = take(growing, wait_s)
            with self._changed:
                self._taken += part is not None
            return part

        def find_one(cases: EarlyCases, wait_s: float = 0.0) -> Any:
            found = find(cases, wait_s)
            if found is None:
                with self._changed:
                    self._waits = self._taken
                    self._changed.notify_all()
            return found

        def build(*arguments: Any, on_part: Any = None, **more: Any) -> Index:
            if on_part is None:  # no case begins early
                return build_index(*arguments, **more)

            def add(part: Any, files: int) -> None:
                on_part(part, files)
                self._stored += 1
                with self._changed:
                    assert self._changed.wait_for(lambda: self._waits == self._stored, 600)

            return build_index(*arguments, on_part=add, **more)

        patch.setattr(GrowingIndex, "next_part", next_part)
        patch.setattr(EarlyCases, "_find", find_one)
        patch.setattr(running, "build_index", build)
