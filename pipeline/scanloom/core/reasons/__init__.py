"""Closed lists: `Reason`, why a scan gave no result, and `Flag`, a caveat of a result."""

from scanloom.core.reasons.flag import Flag, known_flags
from scanloom.core.reasons.reason import OUTCOMES, Outcome, Reason, Subject

__all__ = [
    "OUTCOMES",
    "Flag",
    "Outcome",
    "Reason",
    "Subject",
    "known_flags",
]
