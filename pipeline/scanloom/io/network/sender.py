"""Send objects to a peer, and ask whether it keeps them: DICOM, or DICOMweb.

What a peer says is never taken for more than it is: a C-STORE of status 0000 and the response of a
STOW-RS that names the object *acknowledge* it; a report of storage commitment, or an answer to a
query that names the object, prove it. A status of HTTP proves nothing.

Each wait has an end: a peer that accepts and stays silent, or sends a byte now and then, is cut
off. Texts of errors are our own: those of peers and libraries may name a patient.
"""

from __future__ import annotations

import errno
import gc
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pydicom import Dataset
from pydicom.uid import UID
from pynetdicom import AE, _config, evt
from pynetdicom.dimse_primitives import N_EVENT_REPORT
from pynetdicom.sop_class import uid_to_service_class

from scanloom.core import Reason, ScanError
from scanloom.io.network.commitment import (
    COMMITMENT,
    COMMITMENT_INSTANCE,
    FAILURES,
    REQUEST,
    Report,
    take_report,
)
from scanloom.io.network.query import STUDY_ROOT_FIND
from scanloom.own_python import is_ours

T = TypeVar("T")

VERIFICATION = "1.2.840.10008.1.1"
MIN_PACE = 1 << 16
"""Bytes a second: a peer that takes fewer is cut off."""
GRACE_S = 5.0
"""How much later than pynetdicom's own limits a connection is cut."""
PAUSE_S = 2.0
"""Longest wait for the pause of pynetdicom's reactor."""
RELEASE_S = 10.0
"""Longest wait for the end of an association."""
MAX_FOUND = 1000
"""Answers to a question for one object, of which a peer that ignores its keys gives too many."""
MAX_CREDENTIALS_BYTES = 1 << 14
MAX_MESSAGE_BYTES = 1 << 20
"""Of a DICOM peer: an answer, or a report about the objects of an association, in memory."""
MAX_ANSWER_BYTES = 1 << 24
"""Of a DICOMweb server: an answer is about one object."""

_FINAL = frozenset({0x0117, 0x0122, 0x0124})
"""Status of C-STORE that another attempt won't change; so are those of A9xx (PS3.4 B.2.3)."""
_DUPLICATE = 0x0111
"""It has an object of this UID (PS3.7 C.5.9), so these bytes: a UID of ours stands for them."""
_STATUS = {
    0xA7: "it has no room",
    0xA9: "the data set does not match its class",
    0x01: "it refuses the object",
    0xC0: "it can't understand the object",
}
_REJECTIONS = {
    (1, 2): "it does not know DICOM's application context",
    (1, 3): "it does not know our title",
    (1, 7): "it has another title",
    (3, 1): "it has too much to do",
    (3, 2): "it has too many associations",
}
"""Source and diagnostic of a rejection (PS3.8 9.3.4)."""
_BUSY = frozenset({408, 425, 429, 502, 503, 504, 507})
"""Status of HTTP that tells of the server, not of the object."""


class PeerError(Exception):
    """A peer did not do what it was asked for; `reason` is a phrase of our own."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnreachableError(PeerError):
    """It can't be reached, rejects us, or has ended the association."""


class RefusedError(PeerError):
    """It refuses one object; `final` if another attempt won't change that."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class NotOfferedError(PeerError):
    """It does not offer a service."""


@dataclass(frozen=True)
class Reference:
    """What is sent: UIDs, transfer syntax and size in bytes."""

    sop_class: str
    instance: str
    series: str
    study: str
    syntax: str
    size: int


class Peer(Protocol):
    """A target while it is talked to; a context manager."""

    def __enter__(self) -> Self:
        """Connect: UnreachableError."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def cut(self) -> None:
        """Close the connection, whatever waits for it; another thread may call it."""

    def echo(self) -> None:
        """Ask whether it answers at all: UnreachableError."""

    def store(self, reference: Reference, path: Path) -> None:
        """Send a file; it is acknowledged then: RefusedError, UnreachableError."""

    def request_commitment(self, transaction: str, references: Sequence[Reference]) -> None:
        """Ask it to report what it keeps: NotOfferedError, RefusedError, UnreachableError."""

    def find(self, reference: Reference) -> bool:
        """Return whether an object is there: NotOfferedError, RefusedError, UnreachableError."""


# --- DICOM ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DicomAddress:
    """A DICOM peer.

    Parameters
    ----------
    own_title, title : str
        AE titles.
    address : str
        IP address.
    port : int
    tls : ssl.SSLContext or None
    host : str or None
        Name in its certificate.
    patience : float
        Seconds; the longest wait for an answer, to which the time for a file is added.
    """

    own_title: str
    title: str
    address: str
    port: int
    tls: ssl.SSLContext | None = None
    host: str | None = None
    patience: float = 60.0


def client_tls(
    authorities: str, certificate: str | None, key: str | None, host: str | None
) -> ssl.SSLContext:
    """Return a context that takes peers with a certificate of `authorities` only (PS3.15 B.9).

    Raises
    ------
    ScanError
        ENVIRONMENT if a file can't be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Certificates of DICOM devices mostly name none: the authority is the site's own
    context.check_hostname = host is not None
    try:
        context.load_verify_locations(authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as exc:  # ssl.SSLError is one
        detail = f"a certificate of a target, or its key, can't be read ({type(exc).__name__})"
        raise ScanError(Reason.ENVIRONMENT, detail) from exc
    return context


class DicomPeer:
    """An association with a peer; see `Peer`.

    Parameters
    ----------
    address : DicomAddress
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
        _config.LOG_HANDLER_LEVEL = "none"  # it would format each PDU, and name patients
        _config.STORE_SEND_CHUNKED_DATASET = True  # the bytes of the file, whatever they are
        self._address, self._report = address, report
        self._entity = AE(address.own_title)
        self._entity.acse_timeout = self._entity.connection_timeout = address.patience
        self._entity.dimse_timeout = address.patience
        self._entity.network_timeout = None  # `_deadline` is for each part
        for service in (VERIFICATION, COMMITMENT, STUDY_ROOT_FIND):
            self._entity.add_requested_context(service)
        for sop_class, syntax in sorted({(each.sop_class, each.syntax) for each in references}):
            self._entity.add_requested_context(sop_class, UID(syntax))
        self._made: Any = None
        self._opened: list[Any] = []
        self._reporting = threading.Lock()

    def __enter__(self) -> Self:
        address = self._address
        handlers = [
            (evt.EVT_CONN_OPEN, self._connected),
            (evt.EVT_N_EVENT_REPORT, self._reported),
        ]
        tls = None if address.tls is None else (address.tls, address.host or address.address)
        with _deadline(2 * address.patience + GRACE_S, self.cut):
            try:
                made = self._entity.associate(
                    address.address,
                    address.port,
                    ae_title=address.title,
                    tls_args=tls,
                    evt_handlers=handlers,  # type: ignore[arg-type]
                )
            except (RuntimeError, ValueError, OSError) as exc:
                raise UnreachableError(f"no association ({type(exc).__name__})") from exc
        self._made = made
        if made.is_established:
            return self
        if not self._opened:
            gc.collect()  # pynetdicom leaves sockets of failed connections open, in cycles
            also = "" if tls is None else ", or TLS failed"
            raise UnreachableError(f"it can't be reached{also}")
        if not made.is_rejected:
            raise UnreachableError("it answers no request for an association")
        answer: Any = made.acceptor.primitive
        cause = (answer.result_source, answer.diagnostic)
        raise UnreachableError(f"it rejects us: {_REJECTIONS.get(cause, 'no reason given')}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = self._made.acse_timeout = min(RELEASE_S, self._address.patience)
        with _deadline(RELEASE_S + GRACE_S, self.cut), suppress(Exception):
            if self._reporting.acquire(timeout=seconds):  # no answer may follow the release
                self._reporting.release()
            if self._made.is_established:
                self._made.release()
        _cut(self._made)

    def cut(self) -> None:
        """See `Peer`."""
        for each in self._opened:
            _cut(each)

    def echo(self) -> None:
        """See `Peer`."""
        if self._context(VERIFICATION) is None:  # it took the association, which has to be enough
            return
        self._ask(lambda: self._made.send_c_echo())

    def store(self, reference: Reference, path: Path) -> None:
        """See `Peer`."""
        self._check_context(reference)
        status = int(self._ask(lambda: self._made.send_c_store(path), reference.size).Status)
        if status in (0, _DUPLICATE) or status >> 12 == 0xB:  # a warning: stored, changed perhaps
            return
        cause = _STATUS.get(status >> 8, "it refuses the object")
        cause = "it can't understand the object" if status >> 12 == 0xC else cause
        final = status in _FINAL or status >> 8 == 0xA9
        raise RefusedError(f"{cause} (status {status:04X})", final=final)

    def request_commitment(self, transaction: str, references: Sequence[Reference]) -> None:
        """See `Peer`."""
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
            raise RefusedError(f"it refuses storage commitment (status {answer.Status:04X})")

    def find(self, reference: Reference) -> bool:
        """See `Peer`."""
        if self._context(STUDY_ROOT_FIND) is None:
            raise NotOfferedError("it offers no queries")
        question = Dataset()
        question.QueryRetrieveLevel = "IMAGE"
        question.StudyInstanceUID = reference.study
        question.SeriesInstanceUID = reference.series
        question.SOPInstanceUID = reference.instance

        def ask() -> Dataset:
            found, status = False, Dataset()
            for n, (status, answer) in enumerate(self._made.send_c_find(question, STUDY_ROOT_FIND)):  # noqa: B007
                if answer is not None:
                    found |= str(answer.get("SOPInstanceUID", "")) == reference.instance
                if n > MAX_FOUND:
                    self._made.abort()
                    break
            status.found = found
            return status

        status = self._ask(ask)
        if status.Status not in (0, 0xFF00, 0xFF01):
            raise RefusedError(f"it can't be asked for the object (status {status.Status:04X})")
        return bool(status.found)

    def _ask(self, request: Callable[[], Dataset], size: int = 0) -> Dataset:
        """Return the answer to a request that sends so many bytes."""
        seconds = self._address.patience + size / MIN_PACE
        self._made.dimse_timeout = seconds
        with _deadline(seconds + GRACE_S, self.cut):
            try:
                answer = request()
            except (RuntimeError, ValueError, AttributeError, OSError) as exc:
                raise UnreachableError(f"the association ended ({type(exc).__name__})") from exc
        if "Status" not in answer:
            reason = f"it ended the association, or did not answer within {seconds:.0f} s"
            raise UnreachableError(reason)
        return answer

    def _context(self, service: str) -> Any:
        """Return the accepted context of a service; None if it is not offered."""
        accepted = [c for c in self._made.accepted_contexts if c.abstract_syntax == service]
        return accepted[0] if accepted else None

    def _check_context(self, reference: Reference) -> None:
        """Refuse an object of a class, or in a transfer syntax, that the peer does not take."""
        wanted = reference.sop_class, reference.syntax
        for each in self._made.accepted_contexts:
            if (each.abstract_syntax, each.transfer_syntax[0]) == wanted:
                return
        for each in self._made.rejected_contexts:
            if each.abstract_syntax == reference.sop_class:
                name, syntax = UID(reference.sop_class).name, UID(reference.syntax).name
                if each.result == 4:
                    raise RefusedError(f"it does not take {name} in {syntax}", final=True)
                raise RefusedError(f"it does not take {name}", final=each.result == 3)
        raise RefusedError("it did not answer for this class")

    def _connected(self, event: Any) -> None:
        """Note a connection, before anything has come through it."""
        association = event.assoc
        self._opened.append(association)
        association._reactor_checkpoint = Checkpoint()
        serve = association._serve_request

        def serve_request(message: Any, context: int) -> None:
            if isinstance(message, N_EVENT_REPORT):
                self._serve_report(association, message, context)
            else:
                serve(message, context)

        association._serve_request = serve_request
        read = association.dul.socket.recv

        def recv(count: int) -> Any:
            message = association.dimse.message
            parts = () if message is None else (message.encoded_command_set, message.data_set)
            if count + sum(part.tell() for part in parts if part) > MAX_MESSAGE_BYTES:
                raise OSError(errno.EMSGSIZE, "a message is too long")
            return read(count)

        association.dul.socket.recv = recv

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
                _cut(association)

    def _reported(self, event: Any) -> tuple[int, None]:
        """Note a report of commitment; return the status of the answer."""
        return take_report(event, self._report), None


class Checkpoint:
    """Stands for the event at which pynetdicom's reactor pauses for a request.

    With an event, a request may begin although the reactor goes on, and takes the answer to it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open, self._waits = True, False

    def wait(self) -> None:
        """Pause until `set`; called by the reactor."""
        with self._changed:
            while not self._is_open:
                self._waits = True
                self._changed.notify_all()
                self._changed.wait()
            self._waits = False

    def clear(self) -> None:
        """Return once the reactor pauses; or after some time, if it has ended."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: self._waits, PAUSE_S)

    def set(self) -> None:
        """Let the reactor go on."""
        with self._changed:
            self._is_open, self._waits = True, False
            self._changed.notify_all()


def _cut(association: Any) -> None:
    """Close the connection of an association, whatever waits for it, or for its threads."""
    association._is_paused = True  # a request waits for that, even if the thread has died
    with suppress(Exception):
        association.dul.socket.socket.shutdown(socket.SHUT_RDWR)


@contextmanager
def _deadline(seconds: float, cut: Callable[[], object]) -> Iterator[None]:
    """Call `cut` if the block has not ended by then."""
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- DICOMweb -------------------------------------------------------------------------------------


def read_credentials(file: str | None, variable: str | None, value: str | None) -> str:
    """Return `user:password` or `Bearer TOKEN` of a file, or the value of a variable.

    Raises
    ------
    ScanError
        ENVIRONMENT if there are none, or others can read them.
    """
    if file is not None:
        try:
            if Path(file).stat().st_mode & 0o077 or not is_ours(Path(file)):
                detail = "the file of a target's credentials can be read by others: chmod 600"
                raise ScanError(Reason.ENVIRONMENT, detail, file)
            with Path(file).open("rb") as stream:
                value = stream.read(MAX_CREDENTIALS_BYTES).decode()
        except (OSError, UnicodeDecodeError) as exc:
            detail = f"the file of a target's credentials can't be read ({type(exc).__name__})"
            raise ScanError(Reason.ENVIRONMENT, detail, file) from exc
    text = (value or "").strip()
    if "\n" in text or (":" not in text and not text.startswith("Bearer ")):
        where = "the file" if file is not None else f"the variable {variable}"
        detail = f"{where} of a target's credentials holds no `user:password` or `Bearer TOKEN`"
        raise ScanError(Reason.ENVIRONMENT, detail, file or "")
    return text


class WebPeer:
    """A DICOMweb server; see `Peer`. There is no connection before a request.

    Parameters
    ----------
    url : str
        Ends before `/studies`.
    credentials : str or None
        `user:password` or `Bearer TOKEN`.
    authorities : str or None
        Certificates of the authorities that sign the server's.
    patience : float
        Seconds; the longest wait for an answer, to which the time for a file is added.
    """

    def __init__(
        self, url: str, credentials: str | None, authorities: str | None, patience: float
    ) -> None:
        import requests
        from dicomweb_client import DICOMwebClient

        self._requests, self._patience = requests, patience
        session = requests.Session()
        session.max_redirects = 0  # patients' data go where the page says
        session.verify = authorities or True
        session.hooks["response"] = [_read_answer]
        if credentials is not None:
            session.auth = _Authorization(credentials)
        self._client = DICOMwebClient(url.rstrip("/"), session=session, timeout=patience)
        self._client.set_http_retry_params(retry=False)
        self._client.host = url.split("/")[2]  # with its port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client._session.close()

    def cut(self) -> None:
        """See `Peer`: its thread is left alone."""

    def echo(self) -> None:
        """See `Peer`."""
        with suppress(RefusedError, NotOfferedError):
            self._ask(lambda: self._client.search_for_studies(limit=1))

    def store(self, reference: Reference, path: Path) -> None:
        """See `Peer`."""
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
            cause = FAILURES.get(failed, "it refuses the object")
            raise RefusedError(f"{cause} (reason {failed:04X})", final=failed in _FINAL)
        if stored is None and failed is None:
            raise RefusedError("it answered, but did not say that it stored the object")

    def request_commitment(self, transaction: str, references: Sequence[Reference]) -> None:
        """See `Peer`."""
        raise NotOfferedError("DICOMweb has no storage commitment")

    def find(self, reference: Reference) -> bool:
        """See `Peer`."""
        keys = {"SOPInstanceUID": reference.instance}
        series = (reference.study, reference.series)

        def ask() -> bool:
            answers = self._client.search_for_instances(*series, search_filters=keys)
            values = [each.get("00080018", {}).get("Value", []) for each in answers]
            return any(reference.instance in value for value in values)

        return self._ask(ask, missing=False)

    def _ask(self, request: Callable[[], T], size: int = 0, missing: T | None = None) -> T:
        """Return the answer to a request that sends so many bytes; `missing` for status 404."""
        requests = self._requests
        try:
            return _in_time(request, self._patience + size / MIN_PACE + GRACE_S)
        except requests.HTTPError as exc:
            status = exc.response.status_code
            if status == 404 and missing is not None:
                return missing
            raise _http_error(status, exc.response, sends=size > 0) from exc
        except requests.TooManyRedirects as exc:
            raise UnreachableError("it redirects to another address") from exc
        except requests.exceptions.SSLError as exc:
            raise UnreachableError("TLS failed: its certificate, or its authority") from exc
        except requests.Timeout as exc:
            raise UnreachableError(f"it did not answer within {self._patience:.0f} s") from exc
        except (requests.RequestException, OSError) as exc:
            raise UnreachableError(f"it can't be reached ({type(exc).__name__})") from exc
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError) as exc:
            raise RefusedError(f"its answer can't be read ({type(exc).__name__})") from exc


def _http_error(status: int, response: Any, *, sends: bool) -> PeerError:
    """Return the error of a status of HTTP, for one object or for the server."""
    if status in (401, 403):
        return UnreachableError(f"it does not take our credentials (HTTP {status})")
    if status in _BUSY:
        return UnreachableError(f"it has too much to do, or is away (HTTP {status})")
    if not sends:
        return NotOfferedError(f"it offers no queries (HTTP {status})")
    if status in (404, 405, 501):
        return UnreachableError(f"it takes no objects at this address (HTTP {status})")
    with suppress(Exception):  # the reason in its answer, if there is one
        answer = Dataset.from_json(response.json())
        reason = int(answer.FailedSOPSequence[0].FailureReason)
        cause = FAILURES.get(reason, "it refuses the object")
        return RefusedError(f"{cause} (reason {reason:04X})", final=reason in _FINAL)
    return RefusedError(f"it refuses the object (HTTP {status})", final=status in (413, 415))


def _reason(answer: Dataset, sequence: str, reference: Reference) -> int | None:
    """Return the reason of an object in a response of STOW-RS, or 0; None if it isn't there."""
    for item in answer.get(sequence) or ():
        if str(item.get("ReferencedSOPInstanceUID", "")) == reference.instance:
            return int(item.get("FailureReason") or 0)
    return None


def _read_answer(response: Any, **options: object) -> None:
    """Read an answer up to a limit, before `requests` reads all of it; called by `requests`.

    Of its type only the first part is left: dicomweb-client does not know that of a character set
    behind it, and would take the answer for an empty one.

    Raises
    ------
    RefusedError
        If it is longer.
    """
    content = bytearray()
    for part in response.iter_content(1 << 16):
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            response.close()
            raise RefusedError("its answer has no end")
    response._content = bytes(content)
    kind = response.headers.get("Content-Type", "")
    response.headers["Content-Type"] = kind.partition(";")[0].strip().lower()


class _Authorization:
    """Adds credentials to each request, whatever a file of the user's home says."""

    def __init__(self, credentials: str) -> None:
        self._credentials = credentials

    def __call__(self, request: Any) -> Any:
        if self._credentials.startswith("Bearer "):
            request.headers["Authorization"] = self._credentials
            return request
        from requests.auth import HTTPBasicAuth

        user, _, password = self._credentials.partition(":")
        return HTTPBasicAuth(user.encode(), password.encode())(request)


def _in_time(request: Callable[[], T], seconds: float) -> T:
    """Return the answer to a request; its thread is left alone if that takes longer.

    Raises
    ------
    UnreachableError
        If it takes longer: `requests` limits each part of an answer, not all of them together.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(request())
        except Exception as exc:  # noqa: BLE001  # raised by the thread that waits
            errors.append(exc)

    thread = threading.Thread(target=ask, name="request", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise UnreachableError(f"it did not answer within {seconds:.0f} s")
    return answers[0]
