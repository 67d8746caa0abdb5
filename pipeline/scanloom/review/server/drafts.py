"""Corrections in progress: one of each reviewer, kept until it is saved, discarded or outdated."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scanloom.review.corrections.draft import Draft
from scanloom.review.server.opened_case import OpenedCase
from scanloom.review.server.security import RefusedError
from scanloom.review.verdicts.verdict import Seen

MAX_UNPACKED = 3
"""Drafts with arrays of the size of their case; of others, only changed voxels are in memory."""


@dataclass(frozen=True, eq=False)
class HeldDraft:
    """A correction in progress.

    Parameters
    ----------
    name : str
        Name of the case.
    seen : Seen
        The result that is corrected.
    draft : Draft
    guard : lock
        Held while the draft is used.
    """

    name: str
    seen: Seen
    draft: Draft
    guard: threading.Lock = field(default_factory=threading.Lock)

    def is_about(self, case: OpenedCase) -> bool:
        """Return whether it corrects the result of an open case."""
        return (self.name, self.seen) == (case.name, case.seen)

    @contextmanager
    def using(self, case: OpenedCase) -> Iterator[Draft]:
        """Hold the draft, with the label maps of the case that it is about."""
        with self.guard:
            self.draft.unpack([layer.labels for layer in case.layers])
            yield self.draft

    def pack(self) -> None:
        """Let go of arrays, unless the draft is in use."""
        if self.guard.acquire(blocking=False):
            try:
                self.draft.pack()
            finally:
                self.guard.release()


class Drafts:
    """The correction in progress of each reviewer.

    Parameters
    ----------
    can_be_saved : callable
        Whether a result is still that of a case (its name), and the case a reviewer's.
    """

    def __init__(self, can_be_saved: Callable[[str, Seen, str], bool]) -> None:
        self._can_be_saved = can_be_saved
        self._held: OrderedDict[str, HeldDraft] = OrderedDict()
        self._guard = threading.Lock()

    def find(self, name: str, reviewer: str) -> HeldDraft | None:
        """Return the draft of a reviewer for a case, or for a result that it had before."""
        with self._guard:
            held = self._of(name, reviewer)
            if held is not None:
                self._used(reviewer)
            return held

    def begin(self, case: OpenedCase, reviewer: str) -> HeldDraft:
        """Return the draft of a reviewer for a case; a new one if there is none.

        Raises
        ------
        RefusedError
            DRAFT if there are strokes on another case that can be saved.
        """
        with self._guard:
            held = self._held.get(reviewer)
            if held is None or not held.is_about(case):
                if other := self._other(held, case.name, reviewer):
                    text = f"A correction of case {other} is not saved: save or discard it first."
                    raise RefusedError(409, "DRAFT", text)
                spacing = tuple(case.view.source.spacing[n] for n in case.view.order)
                layers = [layer.labels for layer in case.layers]
                draft = Draft(layers, spacing)  # type: ignore[arg-type]  # three axes
                self._held[reviewer] = held = HeldDraft(case.name, case.seen, draft)
            self._used(reviewer)
            return held

    def discard(self, name: str, reviewer: str) -> None:
        """Drop the draft of a reviewer for a case."""
        with self._guard:
            if self._of(name, reviewer):
                del self._held[reviewer]

    def describe(self, case: OpenedCase, reviewer: str) -> dict[str, Any]:
        """Return how far a reviewer's draft of a case is, as JSON.

        An outdated draft, of a result that was replaced since, can't be saved: it is dropped.
        """
        with self._guard:
            held = self._of(case.name, reviewer)
            if held is None:
                return {"undo": 0, "redo": 0, "outdated": False}
            if held.is_about(case):
                draft = held.draft
                return {"undo": draft.can_undo, "redo": draft.can_redo, "outdated": False}
            del self._held[reviewer]
            return {"undo": 0, "redo": 0, "outdated": bool(held.draft.can_undo)}

    def _of(self, name: str, reviewer: str) -> HeldDraft | None:
        held = self._held.get(reviewer)
        return held if held is not None and held.name == name else None

    def _used(self, reviewer: str) -> None:
        """Note that a draft is used, and pack those that were used longest ago."""
        self._held.move_to_end(reviewer)
        for other in list(self._held.values())[:-MAX_UNPACKED]:
            other.pack()

    def _other(self, held: HeldDraft | None, name: str, reviewer: str) -> str | None:
        """Return the case of a draft that must not be lost for one of another case."""
        if held is None or held.name == name or not held.draft.can_undo:
            return None
        return held.name if self._can_be_saved(held.name, held.seen, reviewer) else None
