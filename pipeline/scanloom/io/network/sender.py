"""Send objects to a peer, and ask whether it keeps them: DICOM, or DICOMweb.

What a peer says is never taken for more than it is: a C-STORE of status 0000 and the response of a
STOW-RS that names the object *acknowledge* it; a report of storage commitment, or an answer to a
query that names the object, prove it. A status of HTTP proves nothing.

Waits and texts of errors are those of `scanloom.io.network.peer`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydicom import Dataset
from pydicom.uid import UID
from pynetdicom import _config, evt
from pynetdicom.dimse_primitives import N_EVENT_REPORT
from pynetdicom.sop_class import uid_to_service_class

from scanloom.io.network.commitment import (
    COMMITMENT,
    COMMITMENT_INSTANCE,
    FAILURES,
    REQUEST,
    Report,
    take_report,
)
from scanloom.io.network.peer import (
    PENDING,
    RELEASE_S,
    STUDY_ROOT_FIND,
    VERIFICATION,
    DicomAddress,
    DicomConnection,
    NotOfferedError,
    RefusedError,
    WebConnection,
    cut_off,
    refusal,
)

MAX_FOUND = 1000
"""Answers to a question for one object, of which a peer that ignores its keys gives too many."""
MAX_ANSWER_BYTES = 1 << 24
"""Of a DICOMweb server: an answer is about one object."""

_DUPLICATE = 0x0111
"""It has an object of this UID (PS3.7 C.5.9), so these bytes: a UID of ours stands for them."""
_STATUS = {0xA9: "the data set does not match its class"}


@dataclass(frozen=True)
class Reference:
    """An object to be sent: UIDs, transfer syntax and size in bytes."""

    sop_class: str
    instance: str
    series: str
    study: str
    syntax: str
    size: int


# --- DICOM ----------------------------------------------------------------------------------------


class DicomPeer(DicomConnection):
    """An association with a peer to which objects are sent.

    Each of its methods raises UnreachableError if it ends, or is silent.

    Parameters
    ----------
    references : sequence of Reference
        What will be sent, at most 100: classes and syntaxes are agreed on at the beginning.
    report : callable
        Receives a report of commitment on the same association; returns whether it is known.
    """

    def __init__(
        self,
        address: DicomAddress,
        references: Sequence[Reference],
        report: Callable[[Report], bool],
    ) -> None:
        _config.STORE_SEND_CHUNKED_DATASET = True  # the bytes of the file, whatever they are
        services = (VERIFICATION, COMMITMENT, STUDY_ROOT_FIND)
        objects = sorted({(each.sop_class, each.syntax) for each in references})
        super().__init__(address, services, objects)
        self._report, self._reporting = report, threading.Lock()

    def _handlers(self) -> list[Any]:
        """Return the handlers of the association's events."""
        return [*super()._handlers(), (evt.EVT_N_EVENT_REPORT, self._reported)]

    def echo(self) -> None:
        """Ask whether it answers at all."""
        if self._context(VERIFICATION) is None:  # it took the association, which has to be enough
            return
        self._ask(lambda: self._made.send_c_echo())

    def store(self, reference: Reference, path: Path) -> None:
        """Send a file, which is acknowledged then: RefusedError."""
        self._check_context(reference)
        status = int(self._ask(lambda: self._made.send_c_store(path), reference.size).Status)
        if status in (0, _DUPLICATE) or status >> 12 == 0xB:  # a warning: stored, changed perhaps
            return
        cause = "it can't understand the object" if status >> 12 == 0xC else None
        raise refusal(cause or _STATUS.get(status >> 8), "status", status)

    def request_commitment(self, transaction: str, references: Sequence[Reference]) -> None:
        """Ask it to report what it keeps: NotOfferedError, RefusedError."""
        if self._context(COMMITMENT) is None:
            raise NotOfferedError("it offers no storage commitment")
        request = Dataset()
        request.TransactionUID = transaction
        request.ReferencedSOPSequence = []
        for each in references:
            item = Dataset()
            item.ReferencedSOPClassUID = each.sop_class
            item.ReferencedSOPInstanceUID = each.instance
            request.ReferencedSOPSequence.append(item)
        names = (request, REQUEST, COMMITMENT, COMMITMENT_INSTANCE)
        answer = self._ask(lambda: self._made.send_n_action(*names)[0])
        if answer.Status != 0:
            reason = f"it refuses storage commitment (status {answer.Status:04X})"
            raise RefusedError(reason, busy=True)

    def find(self, reference: Reference) -> bool:
        """Return whether an object is there: NotOfferedError, RefusedError."""
        if self._context(STUDY_ROOT_FIND) is None:
            raise NotOfferedError("it offers no queries")
        question = Dataset()
        question.QueryRetrieveLevel = "IMAGE"
        question.StudyInstanceUID = reference.study
        question.SeriesInstanceUID = reference.series
        question.SOPInstanceUID = reference.instance

        def ask() -> Dataset:
            is_there, status = False, Dataset()
            for n, (status, answer) in enumerate(self._made.send_c_find(question, STUDY_ROOT_FIND)):  # noqa: B007
                if answer is not None:
                    is_there |= str(answer.get("SOPInstanceUID", "")) == reference.instance
                if n > MAX_FOUND:
                    self._made.abort()
                    break
            status.is_there = is_there
            return status

        status = self._ask(ask)
        if status.Status not in (0, *PENDING):
            reason = f"it can't be asked for the object (status {status.Status:04X})"
            raise RefusedError(reason, busy=True)
        return bool(status.is_there)

    def _check_context(self, reference: Reference) -> None:
        """Refuse an object of a class, or in a transfer syntax, that the peer does not take."""
        context = reference.sop_class, reference.syntax
        for each in self._made.accepted_contexts:
            if (each.abstract_syntax, each.transfer_syntax[0]) == context:
                return
        for each in self._made.rejected_contexts:
            if each.abstract_syntax == reference.sop_class:
                name, syntax = UID(reference.sop_class).name, UID(reference.syntax).name
                if each.result == 4:
                    raise RefusedError(f"it does not take {name} in {syntax}", final=True)
                raise RefusedError(f"it does not take {name}", final=each.result == 3)
        raise RefusedError("it did not answer for this class")

    def __exit__(self, *error: object) -> None:
        # No answer to a report may follow the release
        if self._reporting.acquire(timeout=min(RELEASE_S, self._address.patience)):
            self._reporting.release()
        super().__exit__(*error)

    def _connected(self, event: Any) -> None:
        super()._connected(event)
        association = event.assoc
        serve = association._serve_request

        def serve_request(message: Any, context: int) -> None:
            if isinstance(message, N_EVENT_REPORT):
                self._serve_report(association, message, context)
            else:
                serve(message, context)

        association._serve_request = serve_request

    def _serve_report(self, association: Any, message: Any, context: int) -> None:
        """Answer a report, in the thread that pynetdicom starts for it.

        At its end, pynetdicom's own method says that the reactor runs, even if that has just paused
        for a request of ours, which then waits for ever for the pause.
        """
        with self._reporting:
            try:
                service = uid_to_service_class(message.AffectedSOPClassUID)(association)
                service.SCP(message, association._accepted_cx[context])
            except Exception:  # noqa: BLE001  # of another class, or in no context
                cut_off(association)

    def _reported(self, event: Any) -> tuple[int, None]:
        """Note a report of commitment; return the status of the answer."""
        return take_report(event, self._report), None


# --- DICOMweb -------------------------------------------------------------------------------------


class WebPeer(WebConnection):
    """A DICOMweb server to which objects are sent."""

    max_answer_bytes = MAX_ANSWER_BYTES

    def echo(self) -> None:
        """See `DicomPeer`."""
        with suppress(RefusedError, NotOfferedError):
            self._ask(lambda: self._client.search_for_studies(limit=1))

    def store(self, reference: Reference, path: Path) -> None:
        """See `DicomPeer`."""
        content = path.read_bytes()
        client = self._client
        # Its `store_instances` writes data sets anew: these are the bytes of the file
        url, post = f"{client.base_url}/studies", client._http_post_multipart_application_dicom

        def ask() -> tuple[int | None, int | None]:
            answer = post(url, [content])
            names = ("FailedSOPSequence", "ReferencedSOPSequence")
            failed, stored = (_reason(answer, name, reference) for name in names)
            return failed, stored

        failed, stored = self._ask(ask, reference.size)
        if failed is not None and failed != _DUPLICATE:
            raise refusal(FAILURES.get(failed), "reason", failed)
        if stored is None and failed is None:
            raise RefusedError("it answered, but did not say that it stored the object")

    def request_commitment(self, transaction: str, references: Sequence[Reference]) -> None:
        """See `DicomPeer`."""
        raise NotOfferedError("DICOMweb has no storage commitment")

    def find(self, reference: Reference) -> bool:
        """See `DicomPeer`."""
        keys = {"SOPInstanceUID": reference.instance}
        series = (reference.study, reference.series)

        def ask() -> bool:
            answers = self._client.search_for_instances(*series, search_filters=keys)
            values = [each.get("00080018", {}).get("Value", []) for each in answers]
            return any(reference.instance in value for value in values)

        return self._ask(ask, missing=False)


Peer = DicomPeer | WebPeer
"""A target while it is talked to; a context manager."""


def _reason(answer: Dataset, sequence: str, reference: Reference) -> int | None:
    """Return the reason of an object in a response of STOW-RS, or 0; None if it isn't there."""
    for item in answer.get(sequence) or ():
        if str(item.get("ReferencedSOPInstanceUID", "")) == reference.instance:
            return int(item.get("FailureReason") or 0)
    return None
