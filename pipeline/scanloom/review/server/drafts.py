"""Corrections in progress: one of each reviewer, kept until it is saved, discarded or outdated."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.review.corrections.draft import Draft
from scanloom.review.server.opened_case import OpenedCase
from scanloom.review.server.security import RefusedError
from scanloom.review.verdicts.verdict import Seen

CHANGED = "The correction was changed in another window."
MAX_UNPACKED = 3
"""Drafts with arrays of the size of their case; of others, only changed voxels are in memory."""


@dataclass(eq=False)
class HeldDraft:
    """A correction in progress, which several windows of a reviewer may change.

    Parameters
    ----------
    name : str
        Name of the case.
    seen : Seen
        The result that is corrected.
    draft : Draft
    guard : lock
        Held while the draft is used.
    number : str
        Random: no other draft has it.
    closed : bool
        Whether it was saved or dropped.
    """

    name: str
    seen: Seen
    draft: Draft
    guard: threading.Lock = field(default_factory=threading.Lock)
    number: str = field(default_factory=lambda: secrets.token_hex(4))
    closed: bool = False

    @property
    def version(self) -> str:
        """Text that changes with every stroke; equal for all drafts of a result without strokes."""
        changes = self.draft.changes
        return f"{_digest(self.seen)}.{f'{self.number}.{changes}' if changes else '0'}"

    @property
    def state(self) -> dict[str, Any]:
        """Numbers of strokes to undo and redo, as JSON; read it while the draft is used."""
        return {
            "undo": self.draft.can_undo,
            "redo": self.draft.can_redo,
            "strokes": self.draft.has_strokes,
            "outdated": False,
            "version": self.version,
        }

    def is_about(self, case: OpenedCase) -> bool:
        """Return whether it corrects the result of an open case."""
        return (self.name, self.seen) == (case.name, case.seen)

    @contextmanager
    def using(self, case: OpenedCase) -> Iterator[Draft]:
        """Hold the draft, with the label maps of the case that it is about."""
        with self.guard:
            self.draft.unpack([layer.labels for layer in case.layers])
            del case  # it may be closed while the draft is in use
            yield self.draft

    @contextmanager
    def changing(self, case: OpenedCase, version: str) -> Iterator[Draft]:
        """Hold the draft as of `using`, if it has the version that was seen.

        Raises
        ------
        ScanError
            STALE if another result was seen.
        RefusedError
            DRAFT_CHANGED if another window changed, saved or dropped the draft since.
        """
        check_result(case, version)
        with self.using(case) as draft:
            del case
            if self.closed or version != self.version:
                raise RefusedError(409, "DRAFT_CHANGED", CHANGED)
            yield draft

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
                self._held[reviewer] = held = _new(case)
            self._used(reviewer)
            return held

    def of(self, case: OpenedCase, reviewer: str) -> HeldDraft:
        """Return the draft of a reviewer for a case, or one without strokes that is not kept."""
        held = self.find(case.name, reviewer)
        return held if held is not None and held.is_about(case) else _new(case)

    def drop(self, held: HeldDraft, reviewer: str) -> None:
        """Drop a draft that is in use."""
        held.closed = True
        with self._guard:
            if self._held.get(reviewer) is held:
                del self._held[reviewer]

    def describe(self, case: OpenedCase, reviewer: str) -> dict[str, Any]:
        """Return how far a reviewer's draft of a case is, as JSON.

        An outdated draft, of a result that was replaced since, can't be saved: it is dropped.
        """
        outdated = False
        with self._guard:
            held = self._of(case.name, reviewer)
            if held is not None and not held.is_about(case):
                del self._held[reviewer]
                outdated, held = held.draft.has_strokes, None
        held = held or _new(case)
        with held.guard:
            return {**held.state, "outdated": outdated}

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
        if held is None or held.name == name or not held.draft.has_strokes:
            return None
        return held.name if self._can_be_saved(held.name, held.seen, reviewer) else None


def check_result(case: OpenedCase, version: str) -> None:
    """Refuse a version of a draft of another result than that of an open case.

    Raises
    ------
    ScanError
        STALE.
    """
    if version.partition(".")[0] != _digest(case.seen):
        raise ScanError(Reason.STALE, "the result was replaced since it was opened")


def _new(case: OpenedCase) -> HeldDraft:
    spacing = tuple(case.view.source.spacing[n] for n in case.view.order)
    layers = [layer.labels for layer in case.layers]
    draft = Draft(layers, spacing)  # type: ignore[arg-type]  # three axes
    return HeldDraft(case.name, case.seen, draft)


def _digest(seen: Seen) -> str:
    plain = json.dumps([seen.recipe, dict(seen.labels)], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]
