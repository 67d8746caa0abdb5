"""Connections to peers: an association as its requestor, or a session with a DICOMweb server.

Each wait has an end: a peer that accepts and stays silent, or sends a byte now and then, is cut
off. Texts of errors are our own: those of peers and libraries may name a patient.
"""

from __future__ import annotations

import errno
import gc
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from pydicom import Dataset
from pydicom.uid import UID
from pynetdicom import AE, _config, evt

from scanloom.core import Reason, ScanError
from scanloom.io.network.commitment import FAILURES
from scanloom.own_python import is_ours

T = TypeVar("T")

VERIFICATION = "1.2.840.10008.1.1"
STUDY_ROOT_FIND = "1.2.840.10008.5.1.4.1.2.2.1"
"""Study Root Query/Retrieve Information Model (PS3.4 C.6.2)."""
PENDING = (0xFF00, 0xFF01)
MIN_PACE = 1 << 16
"""Bytes a second: a peer that takes or gives fewer is cut off."""
GRACE_S = 5.0
"""How much later than pynetdicom's own limits a connection is cut."""
PAUSE_S = 2.0
"""Longest wait for the pause of pynetdicom's reactor."""
RELEASE_S = 10.0
"""Longest wait for the end of an association."""
LOOK_S = 0.05
"""Between two looks whether an answer is late."""
MAX_CREDENTIALS_BYTES = 1 << 14
MAX_MESSAGE_BYTES = 1 << 20
"""Of a DICOM peer, in memory: an answer, or a report about the objects of an association."""
MAX_ANSWER_BYTES = 1 << 27
"""Of a DICOMweb server, in memory: some ignore how many results were asked for."""

FINAL = frozenset({0x0117, 0x0122, 0x0124})
"""Status of C-STORE that another attempt won't change; so are those of A9xx (PS3.4 B.2.3)."""
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
    """A peer did not do what it was asked for.

    Parameters
    ----------
    reason : str
        A phrase of our own.
    busy : bool
        Whether it has no room, too much to do, or does not let us: no object is to blame.
    final : bool
        Whether another attempt won't change that.
    """

    def __init__(self, reason: str, *, busy: bool = False, final: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.busy, self.final = reason, busy, final


class UnreachableError(PeerError):
    """It can't be reached, rejects us, or has ended the association."""


class RefusedError(PeerError):
    """It refuses one object."""


class NotOfferedError(PeerError):
    """It does not offer a service."""


def is_busy(number: int) -> bool:
    """Return whether a status or reason says that the peer has no room (PS3.4 B.2.3, C.14.1.1)."""
    return number == 0x0213 or number >> 8 == 0xA7


def refusal(cause: str | None, kind: Literal["status", "reason"], number: int) -> RefusedError:
    """Return the error of a number by which a peer refuses an object."""
    busy = is_busy(number)
    cause = cause or ("it has no room" if busy else "it refuses the object")
    final = number in FINAL or number >> 8 == 0xA9
    return RefusedError(f"{cause} ({kind} {number:04X})", final=final, busy=busy)


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
    # Certificates of DICOM devices mostly name none: the authority is the site's own
    context.check_hostname = host is not None
    load_certificates(context, "a peer", authorities, certificate, key)
    return context


def load_certificates(
    context: ssl.SSLContext, whose: str, authorities: str, certificate: str | None, key: str | None
) -> None:
    """Load what a context trusts and shows; ENVIRONMENT if a file can't be read."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as exc:  # ssl.SSLError is one
        detail = f"a certificate of {whose}, or its key, can't be read ({type(exc).__name__})"
        raise ScanError(Reason.ENVIRONMENT, detail) from exc


def tls_failure(error: BaseException | None) -> str:
    """Return why TLS failed, in OpenSSL's words, by an error or what led to it; or ""."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        if isinstance(error, ssl.SSLError) and error.reason:
            return error.reason.lower().replace("_", " ")
        error = error.__context__
    return ""


class _Tls:
    """Stands for a context of one connection, and knows why its handshake failed.

    pynetdicom only tells that there is no connection.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context, self.failure = context, ""

    def wrap_socket(self, connection: socket.socket, **options: Any) -> ssl.SSLSocket:
        """Return a connection with TLS, which is negotiated once it is connected."""
        wrapped: Any = self._context.wrap_socket(connection, **options)
        negotiate = wrapped.do_handshake

        def do_handshake(*arguments: bool) -> None:
            try:
                negotiate(*arguments)
            except OSError as exc:
                self.failure = tls_failure(exc) or type(exc).__name__
                wrapped.close()  # which its caller can't any more
                raise

        wrapped.do_handshake = do_handshake
        return cast("ssl.SSLSocket", wrapped)


class DicomConnection:
    """An association with a peer; a context manager, which raises UnreachableError.

    Parameters
    ----------
    services : sequence of str
        Abstract syntaxes that are asked for, in the syntaxes that every peer has.
    objects : sequence of (str, str)
        Storage classes, each with a transfer syntax of its own context.
    """

    def __init__(
        self,
        address: DicomAddress,
        services: Sequence[str],
        objects: Sequence[tuple[str, str]] = (),
    ) -> None:
        _config.LOG_HANDLER_LEVEL = "none"  # it would format each PDU, and name patients
        self._address = address
        self._entity = AE(address.own_title)
        self._entity.acse_timeout = self._entity.connection_timeout = address.patience
        self._entity.dimse_timeout = address.patience
        self._entity.network_timeout = None  # `deadline` is for each part
        for service in services:
            self._entity.add_requested_context(service)
        for sop_class, syntax in objects:
            self._entity.add_requested_context(sop_class, UID(syntax))
        self._made: Any = None
        self._opened: list[Any] = []
        self._connections: list[socket.socket] = []

    def _handlers(self) -> list[Any]:
        """Return the handlers of the association's events."""
        return [(evt.EVT_CONN_OPEN, self._connected)]

    def _connected(self, event: Any) -> None:
        """Note a connection, and limit its messages, before anything has come through it."""
        association = event.assoc
        association._reactor_checkpoint = ReactorCheckpoint()
        self._opened.append(association)
        self._connections.append(association.dul.socket.socket)
        read = association.dul.socket.recv

        def recv(count: int) -> Any:
            message = association.dimse.message
            sets = () if message is None else (message.encoded_command_set, message.data_set)
            if count + sum(each.tell() for each in sets if each) > MAX_MESSAGE_BYTES:
                raise OSError(errno.EMSGSIZE, "a message is too long")
            return read(count)

        association.dul.socket.recv = recv

    def _roles(self) -> list[Any]:
        """Return the roles that are asked for."""
        return []

    def __enter__(self) -> Self:
        address = self._address
        context = None if address.tls is None else _Tls(address.tls)
        tls: Any = None if context is None else (context, address.host or address.address)
        with deadline(2 * address.patience + GRACE_S, self.cut):
            try:
                made = self._entity.associate(
                    address.address,
                    address.port,
                    ae_title=address.title,
                    tls_args=tls,
                    evt_handlers=self._handlers(),
                    ext_neg=self._roles(),
                )
            except (RuntimeError, ValueError, OSError) as exc:
                raise UnreachableError(f"no association ({type(exc).__name__})") from exc
        self._made = made
        if made.is_established:
            return self
        self._close()
        if not self._opened:
            gc.collect()  # pynetdicom leaves sockets of failed connections open, in cycles
            if context is not None and context.failure:
                raise UnreachableError(f"TLS failed: {context.failure}")
            raise UnreachableError("it can't be reached")
        if not made.is_rejected:
            # By TLS 1.3, a peer judges our certificate after the handshake
            hint = "" if context is None else ", or does not take our certificate"
            raise UnreachableError(f"it answers no request for an association{hint}")
        answer: Any = made.acceptor.primitive
        cause = (answer.result_source, answer.diagnostic)
        raise UnreachableError(f"it rejects us: {_REJECTIONS.get(cause, 'no reason given')}")

    def __exit__(self, *error: object) -> None:
        self._made.acse_timeout = min(RELEASE_S, self._address.patience)
        with deadline(RELEASE_S + GRACE_S, self.cut), suppress(Exception):
            if self._made.is_established:
                self._made.release()
        self._close()

    def _close(self) -> None:
        """Cut the connection off, and close it: pynetdicom closes none that the peer ended."""
        for each in self._opened:
            cut_off(each)
            each.dul.join(GRACE_S)  # it reads: another connection may get the same descriptor
        for connection in self._connections:
            connection.close()

    def cut(self) -> None:
        """Close the connection, whatever waits for it; another thread may call it."""
        for each in self._opened:
            cut_off(each)

    def _ask(self, request: Callable[[], Dataset], size: int = 0) -> Dataset:
        """Return the answer to a request that sends so many bytes."""
        seconds = self._address.patience + size / MIN_PACE
        self._made.dimse_timeout = seconds
        with deadline(seconds + GRACE_S, self.cut):
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


class ReactorCheckpoint:
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


def cut_off(association: Any) -> None:
    """Close the connection of an association, whatever waits for it, or for its threads."""
    association._is_paused = True  # a request waits for that, even if the thread has died
    with suppress(Exception):
        association.dul.socket.socket.shutdown(socket.SHUT_RDWR)


@contextmanager
def deadline(seconds: float, cut: Callable[[], object]) -> Iterator[None]:
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
                detail = "the file of a peer's credentials can be read by others: chmod 600"
                raise ScanError(Reason.ENVIRONMENT, detail, file)
            with Path(file).open("rb") as stream:
                value = stream.read(MAX_CREDENTIALS_BYTES).decode()
        except (OSError, UnicodeDecodeError) as exc:
            detail = f"the file of a peer's credentials can't be read ({type(exc).__name__})"
            raise ScanError(Reason.ENVIRONMENT, detail, file) from exc
    text = (value or "").strip()
    if "\n" in text or (":" not in text and not text.startswith("Bearer ")):
        where = "the file" if file is not None else f"the variable {variable}"
        detail = f"{where} of a peer's credentials holds no `user:password` or `Bearer TOKEN`"
        raise ScanError(Reason.ENVIRONMENT, detail, file or "")
    return text


class WebConnection:
    """A session with a DICOMweb server; a context manager. There is no connection before a request.

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

    max_answer_bytes = MAX_ANSWER_BYTES

    def __init__(
        self, url: str, credentials: str | None, authorities: str | None, patience: float
    ) -> None:
        import requests
        from dicomweb_client import DICOMwebClient

        self._requests, self._patience, self._until = requests, patience, math.inf
        session: Any = requests.Session()
        session.max_redirects = 0  # patients' data go where the page says
        merge = session.merge_environment_settings
        # A bundle that the environment names would replace `session.verify`
        session.merge_environment_settings = lambda url, proxies, stream, verify, cert: merge(
            url, proxies, stream, authorities or verify, cert
        )
        session.hooks = {"response": [self._read_answer]}
        if credentials is not None:
            session.auth = _authorization(credentials)
        self._client = DICOMwebClient(url.rstrip("/"), session=session, timeout=patience)
        self._client.set_http_retry_params(retry=False)
        self._client.host = url.split("/")[2]  # with its port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client._session.close()

    def cut(self) -> None:
        """Do nothing: the thread of a request is left alone."""

    def _ask(self, request: Callable[[], T], size: int = 0, missing: T | None = None) -> T:
        """Return the answer to a request that sends so many bytes; `missing` for status 404."""

        def ask() -> T:
            try:
                return request()
            except self._requests.HTTPError as exc:
                if exc.response.status_code != 404 or missing is None:
                    raise
                return missing

        self._until = until = time.monotonic() + self._patience + size / MIN_PACE + GRACE_S
        try:
            with self._explained("store" if size else "query"):
                return in_time(ask, lambda: time.monotonic() > until)
        except LateError as exc:
            raise UnreachableError(f"it did not answer within {self._patience:.0f} s") from exc

    def _read_answer(self, response: Any, *, stream: bool = False, **options: object) -> None:
        """Read an answer up to a limit, before `requests` reads all of it; called by `requests`.

        The thread of an answer that is late ends here. Of the answer's type only the first part is
        left: dicomweb-client does not know that of a character set behind it, and would take the
        answer for an empty one.

        Raises
        ------
        RefusedError
            If it is longer.
        LateError
            If it is late.
        """
        if stream:  # objects, which are not kept in memory
            return
        content, until = bytearray(), self._until
        for part in response.iter_content(1 << 16):
            content += part
            late = time.monotonic() > until
            if late or len(content) > self.max_answer_bytes:
                response.close()
                raise LateError if late else RefusedError("its answer has no end")
        response._content = bytes(content)
        kind = response.headers.get("Content-Type", "")
        response.headers["Content-Type"] = kind.partition(";")[0].strip().lower()

    @contextmanager
    def _explained(self, service: Literal["store", "query", "retrieve"]) -> Iterator[None]:
        """Convert the errors of a request: UnreachableError, RefusedError, NotOfferedError."""
        requests = self._requests
        try:
            yield
        except (PeerError, LateError):
            raise
        except requests.HTTPError as exc:
            error = _http_error(exc.response.status_code, exc.response, service)
            exc.response.close()
            raise error from exc
        except requests.TooManyRedirects as exc:
            raise UnreachableError("it redirects to another address", busy=True) from exc
        except requests.exceptions.SSLError as exc:
            why = tls_failure(exc) or "its certificate, or its authority"
            raise UnreachableError(f"TLS failed: {why}") from exc
        except requests.exceptions.ChunkedEncodingError as exc:
            raise UnreachableError("its answer was cut short") from exc
        except (requests.RequestException, OSError) as exc:
            # Of a wait amid an answer, `requests` makes a ConnectionError
            kinds = {type(each).__name__ for each in exc.args}
            if isinstance(exc, requests.Timeout) or "ReadTimeoutError" in kinds:
                raise UnreachableError(f"it did not answer within {self._patience:.0f} s") from exc
            raise UnreachableError(f"it can't be reached ({type(exc).__name__})") from exc
        except Exception as exc:  # foreign data raise errors of many types
            raise RefusedError(f"its answer can't be read ({type(exc).__name__})") from exc


def _http_error(status: int, response: Any, service: str) -> PeerError:
    """Return the error of a status of HTTP, for one object or for the server."""
    if status in (401, 403):
        return UnreachableError(f"it does not take our credentials (HTTP {status})", busy=True)
    if status in _BUSY:
        return UnreachableError(f"it has too much to do, or is away (HTTP {status})", busy=True)
    if service == "query":
        return NotOfferedError(f"it offers no queries (HTTP {status})")
    if service == "retrieve":
        return RefusedError(f"it does not give them (HTTP {status})")
    if status in (404, 405, 501):
        return UnreachableError(f"it takes no objects at this address (HTTP {status})", busy=True)
    with suppress(Exception):  # the reason in its answer, if there is one
        answer = Dataset.from_json(response.json())
        reason = int(answer.FailedSOPSequence[0].FailureReason)
        return refusal(FAILURES.get(reason), "reason", reason)
    return RefusedError(f"it refuses the object (HTTP {status})", final=status in (413, 415))


def _authorization(credentials: str) -> Callable[[Any], Any]:
    """Return what adds credentials to a request, whatever a file of the user's home says."""
    from requests.auth import HTTPBasicAuth

    def add_token(request: Any) -> Any:
        request.headers["Authorization"] = credentials
        return request

    user, _, password = credentials.partition(":")
    is_token = credentials.startswith("Bearer ")
    return add_token if is_token else HTTPBasicAuth(user.encode(), password.encode())


class LateError(Exception):
    """An answer did not come in time."""


def in_time(request: Callable[[], T], is_late: Callable[[], bool]) -> T:
    """Return the answer to a request; its thread is left alone once it is late.

    Raises
    ------
    LateError
        `requests` limits each part of an answer, not all of them together.
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
    while thread.is_alive() and not is_late():
        thread.join(LOOK_S)
    if errors:
        raise errors[0]
    if not answers:
        raise LateError
    return answers[0]
