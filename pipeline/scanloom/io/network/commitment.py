"""Storage commitment (PS3.4 J): what a target says that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scanloom.io.dicom.uids import is_uid

COMMITMENT = "1.2.840.10008.1.20.1"
"""SOP class of the push model."""
COMMITMENT_INSTANCE = "1.2.840.10008.1.20.1.1"
"""Its one instance, which every request names (PS3.4 J.3.5)."""
REQUEST = 1
"""Action type of a request (PS3.4 J.3.2)."""
PROCESSING_FAILURE, INVALID_ARGUMENT, NOT_AUTHORIZED = 0x0110, 0x0115, 0x0124
"""Status of an answer to a report (PS3.7 C.5)."""

FAILURES = {
    0x0110: "processing failed",
    0x0112: "it has no such object",
    0x0119: "its object is of another class",
    0x0122: "it does not keep objects of this class",
    0x0131: "the transaction is not new",
    0x0213: "it has no room",
}
"""Reasons of a failure (PS3.3 C.14.1.1)."""
MAX_OBJECTS = 10_000
"""In a report; it has as many as were asked for."""


@dataclass(frozen=True)
class Report:
    """A report of commitment, N-EVENT-REPORT.

    Parameters
    ----------
    transaction : str
        UID of the request.
    committed : tuple of str
        SOPInstanceUIDs of the objects that are kept.
    failed : dict
        Reason of each other one, by its SOPInstanceUID; 0 if there is none.
    """

    transaction: str
    committed: tuple[str, ...]
    failed: dict[str, int]


def read_report(information: Any) -> Report:
    """Read the data set of an N-EVENT-REPORT.

    Raises
    ------
    ValueError
        If it lacks the UID of its request, or another one is malformed.
    """
    committed = list(information.get("ReferencedSOPSequence") or ())
    failed = list(information.get("FailedSOPSequence") or ())
    transaction = str(information.get("TransactionUID", ""))
    instances = [str(item.get("ReferencedSOPInstanceUID", "")) for item in (*committed, *failed)]
    if len(instances) > MAX_OBJECTS or not all(map(is_uid, (transaction, *instances))):
        raise ValueError("no report of commitment")
    reasons = [int(item.get("FailureReason") or 0) for item in failed]
    causes = dict(zip(instances[len(committed) :], reasons, strict=True))
    kept = tuple(uid for uid in instances[: len(committed)] if uid not in causes)
    return Report(transaction, kept, causes)


def take_report(event: Any, note: Callable[[Report], bool]) -> int:
    """Read and note an N-EVENT-REPORT; return the status of the answer, 0 once it is noted."""
    try:
        report = read_report(event.event_information)
    except Exception:  # noqa: BLE001  # a damaged data set raises errors of many types
        return INVALID_ARGUMENT
    try:
        return 0 if note(report) else INVALID_ARGUMENT
    except OSError:
        return PROCESSING_FAILURE
