"""Codes of reasons that earlier versions wrote, which are still read."""

from __future__ import annotations

from collections.abc import Mapping

from scanloom.core.reasons.reason import Reason

FORMER_CODES: Mapping[str, Reason] = {
    "STUCK": Reason.DECODE_TIMEOUT,
    "TOO_LONG": Reason.CASE_TIMEOUT,
    "LOST": Reason.WORKER_LOST,
    "OUTPUT": Reason.OUTPUT_UNWRITABLE,
    "KEY_OTHER": Reason.KEY_MISMATCH,
    "PACKED": Reason.NESTED_ARCHIVE,
    "LINK": Reason.DUPLICATE_LINK,
    "DEVICE": Reason.DEVICE_UNAVAILABLE,
}
"""Codes that earlier versions wrote into documents, logs and tables."""


def reason_of(code: str) -> Reason:
    """Return the reason of a code, which an earlier version may have written.

    Raises
    ------
    KeyError
        If there is no such reason.
    """
    return FORMER_CODES.get(code) or Reason[code]


def current_code(code: str) -> str:
    """Return today's code for a code that was read; an unknown code is returned unchanged."""
    return FORMER_CODES[code].code if code in FORMER_CODES else code
