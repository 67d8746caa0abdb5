"""Closed lists: `Reason`, why a scan gave no result, and `Flag`, a caveat of a result."""

from scanloom.core.reasons.flag import Flag, known_flags
from scanloom.core.reasons.former_codes import FORMER_CODES, current_code, reason_of
from scanloom.core.reasons.reason import OUTCOMES, Outcome, Reason, Subject

__all__ = [
    "FORMER_CODES",
    "OUTCOMES",
    "Flag",
    "Outcome",
    "Reason",
    "Subject",
    "current_code",
    "known_flags",
    "reason_of",
]
