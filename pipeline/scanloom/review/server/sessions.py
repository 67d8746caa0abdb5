"""Access to the review server: a link for each reviewer works once, and becomes a session.

A session is a secret that the page keeps and sends in a header with each request. It is no cookie:
browsers send a cookie of 127.0.0.1 to every port of it, so to servers of other users too.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence

SCHEME = "Bearer "
_BYTES = 32


class Sessions:
    """Tokens of links that were not used yet, and sessions of reviewers; kept as hashes.

    Parameters
    ----------
    reviewers : sequence of str
        Codes of the reviewers.
    """

    def __init__(self, reviewers: Sequence[str]) -> None:
        self._guard = threading.Lock()
        self._sessions: dict[bytes, str] = {}
        self._tokens: dict[bytes, str] = {}
        self.tokens = {reviewer: self._new(self._tokens, reviewer) for reviewer in reviewers}
        """The token of each reviewer's link."""

    def enter(self, token: str, reviewer: str) -> str | None:
        """Use the token of a reviewer's link: return a new session; None if it is not that."""
        with self._guard:
            if self._tokens.get(_hashed(token)) != reviewer:
                return None
            del self._tokens[_hashed(token)]
            return self._new(self._sessions, reviewer)

    def reviewer(self, authorization: str) -> str | None:
        """Return the code of the reviewer with a session, as of the header; None without one."""
        with self._guard:
            session = authorization.removeprefix(SCHEME)
            return self._sessions.get(_hashed(session)) if session != authorization else None

    @staticmethod
    def _new(known: dict[bytes, str], reviewer: str) -> str:
        value = secrets.token_urlsafe(_BYTES)
        known[_hashed(value)] = reviewer
        return value


def _hashed(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()
