"""Access to the review server: a link for each reviewer works once, and becomes a cookie."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence

COOKIE = "scanloom_review"
_BYTES = 32


class Sessions:
    """Tokens of links that were not used yet, and cookies of reviewers; kept as hashes.

    Parameters
    ----------
    reviewers : sequence of str
        Codes of the reviewers.
    """

    def __init__(self, reviewers: Sequence[str]) -> None:
        self._guard = threading.Lock()
        self._cookies: dict[bytes, str] = {}
        self._tokens: dict[bytes, str] = {}
        self.tokens = {reviewer: self._new(self._tokens, reviewer) for reviewer in reviewers}
        """The token of each reviewer's link."""

    def enter(self, token: str) -> str | None:
        """Use a token: return the value of a new cookie; None if it is unknown or was used."""
        with self._guard:
            reviewer = self._tokens.pop(_hashed(token), None)
            return None if reviewer is None else self._new(self._cookies, reviewer)

    def reviewer(self, cookie: str | None) -> str | None:
        """Return the code of the reviewer with a cookie; None if there is none."""
        with self._guard:
            return self._cookies.get(_hashed(cookie)) if cookie else None

    @staticmethod
    def _new(known: dict[bytes, str], reviewer: str) -> str:
        value = secrets.token_urlsafe(_BYTES)
        known[_hashed(value)] = reviewer
        return value


def _hashed(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()
