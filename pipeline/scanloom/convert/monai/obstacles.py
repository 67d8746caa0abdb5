"""Collects all that keeps a bundle from becoming a card, so that one refusal lists everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from scanloom.core import Reason, ScanError

_MAX_LISTED: Final = 12
"""Largest number of obstacles that a message lists."""


class Obstacles:
    """Errors of a bundle's parts, which are read one after another."""

    def __init__(self) -> None:
        self._errors: list[ScanError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a ScanError that is raised within this block, instead of raising it."""
        try:
            yield
        except ScanError as exc:
            self.add(exc)

    def add(self, *errors: ScanError) -> None:
        """Note errors; the same detail counts once."""
        known = {error.detail for error in self._errors}
        self._errors += [error for error in errors if error.detail not in known]

    def check(self) -> None:
        """Raise one error that lists all that were noted.

        Raises
        ------
        ScanError
            MODEL_UNSAFE if any error is; otherwise with the reason of the first.
        """
        if not self._errors:
            return
        reasons = [error.reason for error in self._errors]
        reason = Reason.MODEL_UNSAFE if Reason.MODEL_UNSAFE in reasons else reasons[0]
        raise ScanError(reason, _listed(error.detail for error in self._errors))


def _listed(details: Iterable[str]) -> str:
    """Return distinct details as one text."""
    distinct = list(dict.fromkeys(details))
    more = len(distinct) - _MAX_LISTED
    return "; ".join(distinct[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
