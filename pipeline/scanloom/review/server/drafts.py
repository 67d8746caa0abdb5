"""Corrections in progress: one of each reviewer, kept until it is saved, discarded or outdated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scanloom.review.corrections.draft import Draft
from scanloom.review.server.opened_case import OpenedCase
from scanloom.review.server.security import RefusedError


@dataclass(frozen=True, eq=False)
class HeldDraft:
    """A correction in progress.

    Parameters
    ----------
    case : OpenedCase
        The result that is corrected, without its scan.
    draft : Draft
    guard : lock
        Held while the draft is changed or saved.
    """

    case: OpenedCase
    draft: Draft
    guard: threading.Lock = field(default_factory=threading.Lock)

    def is_about(self, case: OpenedCase) -> bool:
        """Return whether it corrects the result of an open case."""
        return (self.case.name, self.case.seen) == (case.name, case.seen)


class Drafts:
    """The correction in progress of each reviewer.

    Parameters
    ----------
    can_be_saved : callable
        Whether the result that a draft corrects is still there, and the reviewer's.
    """

    def __init__(self, can_be_saved: Callable[[OpenedCase, str], bool]) -> None:
        self._can_be_saved = can_be_saved
        self._held: dict[str, HeldDraft] = {}
        self._guard = threading.Lock()

    def find(self, name: str, reviewer: str) -> HeldDraft | None:
        """Return the draft of a reviewer for a case, or for a result that it had before."""
        held = self._held.get(reviewer)
        return held if held is not None and held.case.name == name else None

    def begin(self, case: OpenedCase, reviewer: str) -> HeldDraft:
        """Return the draft of a reviewer for a case; a new one if there is none.

        Raises
        ------
        RefusedError
            DRAFT if there are strokes on another case that can be saved.
        """
        with self._guard:
            held = self._held.get(reviewer)
            if held is not None and held.is_about(case):
                return held
            if other := self._other(held, case.name, reviewer):
                text = f"A correction of case {other} is not saved: save or discard it first."
                raise RefusedError(409, "DRAFT", text)
            spacing = tuple(case.view.source.spacing[n] for n in case.view.order)
            layers = [layer.labels for layer in case.layers]
            draft = Draft(layers, spacing)  # type: ignore[arg-type]  # three axes
            held = HeldDraft(replace(case, image=None), draft)
            self._held[reviewer] = held
            return held

    def discard(self, name: str, reviewer: str) -> None:
        """Drop the draft of a reviewer for a case."""
        with self._guard:
            if self.find(name, reviewer):
                del self._held[reviewer]

    def describe(self, case: OpenedCase, reviewer: str) -> dict[str, Any]:
        """Return how far a reviewer's draft of a case is, as JSON.

        An outdated draft, of a result that was replaced since, can't be saved: it is dropped.
        """
        with self._guard:
            held = self.find(case.name, reviewer)
            if held is None:
                return {"undo": 0, "redo": 0, "outdated": False}
            if held.is_about(case):
                draft = held.draft
                return {"undo": draft.can_undo, "redo": draft.can_redo, "outdated": False}
            del self._held[reviewer]
            return {"undo": 0, "redo": 0, "outdated": bool(held.draft.can_undo)}

    def _other(self, held: HeldDraft | None, name: str, reviewer: str) -> str | None:
        """Return the case of a draft that must not be lost for one of another case."""
        if held is None or held.case.name == name or not held.draft.can_undo:
            return None
        return held.case.name if self._can_be_saved(held.case, reviewer) else None
