"""`Receiver`: a storage SCP (PS3.4 B) that answers 0x0000 only for what its store has kept.

It also takes the reports of storage commitment of those to whom results were sent.

pynetdicom speaks the protocol. What it leaves open is closed here:

- A data set goes to a file of the store as it comes: see `DataSets`.
- TLS is negotiated in the thread of an association, with a deadline, instead of in the loop that
  accepts connections, where one silent socket stops all others.
- A PDU has a largest size and a deadline as a whole, not for each of its bytes.
- Connections that have not asked for an association count apart, so that they bar no peer.

Nothing here is logged but titles, addresses and counts: data sets and commands name patients.
"""

from __future__ import annotations

import errno
import gc
import logging
import select
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from pynetdicom import AE, build_context, evt
from pynetdicom.acse import ACSE
from pynetdicom.association import Association
from pynetdicom.transport import AddressInformation, AssociationSocket

from scanloom.core import Reason, ScanError, printable
from scanloom.io.network.commitment import COMMITMENT, NOT_AUTHORIZED, Report, take_report
from scanloom.io.network.data_sets import DataSets, Store, configure_pynetdicom
from scanloom.io.network.peer import VERIFICATION, load_certificates, tls_failure

LOG = logging.getLogger(__name__)

# Rejections of an association (PS3.8 9.3.4): result, source, diagnostic
CALLING_UNKNOWN, CALLED_UNKNOWN = (1, 1, 3), (1, 1, 7)
CONGESTED, LIMIT_EXCEEDED = (2, 3, 1), (2, 3, 2)

MAX_WAITING, MAX_WAITING_OF_ONE = 128, 32
"""Connections that have not asked for an association yet, at a time: of all addresses, of one."""
MAX_REQUEST_BYTES = 1 << 18
"""A request for an association, which comes before sizes are agreed on, may have 128 contexts."""
MAX_MESSAGE_BYTES = 1 << 18
"""Commands, and data sets of other services than storage, are kept in memory."""
MIN_PACE = 1024
"""Bytes a second of a data set, after the deadline of a PDU: a slower sender is cut off."""
BACKLOG = 128
QUIET_AFTER_S, QUIET_LOOK_S = 0.5, 0.5
"""pynetdicom looks 1000 times a second whether there is something to do, in two threads: 20 idle
associations take half a core. After some silence its threads wait for bytes, and look in between
whether the association is to end."""


@dataclass(frozen=True)
class Sender:
    """A peer: its AE title and its networks, any if there are none.

    Parameters
    ----------
    networks : tuple of str
    target : str
        Name of the target that it is, which may report commitment and store nothing; empty for one
        that may store.
    """

    title: str
    networks: tuple[str, ...] = ()
    target: str = ""

    def is_at(self, address: str) -> bool:
        """Return whether the peer may send from an address."""
        host = ip_address(address.partition("%")[0])
        host = getattr(host, "ipv4_mapped", None) or host
        return not self.networks or any(host in ip_network(each) for each in self.networks)


@dataclass(frozen=True)
class ReceiverOptions:
    """Address and limits of a receiver.

    Parameters
    ----------
    title, address, port
        Own AE title, IP address and TCP port.
    senders : sequence of Sender
    tls : ssl.SSLContext or None
    associations : int
        At a time.
    pdu : int
        Largest PDU, in bytes.
    idle, handshake : float
        Seconds until the next PDU is complete; for TLS, and then for the request.
    report : callable, optional
        Receives a report of commitment, and the names of the targets that may have sent it; returns
        whether its request is known. OSError if it can't be noted.
    """

    title: str
    address: str
    port: int
    senders: Sequence[Sender]
    tls: ssl.SSLContext | None = None
    associations: int = 25
    pdu: int = 1 << 17
    idle: float = 60.0
    handshake: float = 15.0
    report: Callable[[Report, Sequence[str]], bool] | None = None


def tls_context(certificate: str, key: str, clients: str) -> ssl.SSLContext:
    """Return a context that takes senders with a certificate of `clients` only (PS3.15 B.9).

    Raises
    ------
    ScanError
        ENVIRONMENT if a file can't be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    load_certificates(context, "the site", clients, certificate, key)
    return context


class Receiver:
    """A storage SCP in threads of its own, from its making until `stop`.

    Its `tls` may be replaced, for the connections from then on.

    Raises
    ------
    ScanError
        ENVIRONMENT if the address can't be used.
    """

    def __init__(self, options: ReceiverOptions, store: Store) -> None:
        configure_pynetdicom()
        self.options, self.store, self.tls = options, store, options.tls
        self.entity = AE(options.title)
        self.entity.maximum_pdu_size = options.pdu
        self.entity.acse_timeout = options.handshake
        self.entity.network_timeout = self.entity.dimse_timeout = options.idle
        self.entity.maximum_associations = 1 << 30  # counted here: silent sockets would count
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[_Association] = set()
        self._established: set[_Association] = set()
        try:
            self.server = _Server(self)
        except OSError as exc:
            why = _NOT_USABLE.get(exc.errno or 0, type(exc).__name__)
            detail = f"{options.address} port {options.port} can't be used: {why}"
            raise ScanError(Reason.ENVIRONMENT, detail) from exc
        self.port: int = self.server.server_address[1]
        self._accepting = threading.Thread(target=self.server.serve_forever, name="accept")
        self._accepting.daemon = True
        self._accepting.start()

    @property
    def is_alive(self) -> bool:
        """Whether connections are accepted."""
        return self._accepting.is_alive()

    def stop(self, grace: float) -> None:
        """Accept nothing more; end each association after its running data set.

        Parameters
        ----------
        grace : float
            Seconds for the running data sets; those that take longer are cut off.
        """
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        deadline = time.monotonic() + grace
        with self._lock:
            waiting, running = list(self._waiting), list(self._established)
        for association in waiting:
            association.cut_off()
        for association in running:
            association.join(max(0.0, deadline - time.monotonic()))
        for association in running:
            association.cut_off()
        for association in (*waiting, *running):
            association.join(2.0)

    def is_known(self, address: str) -> bool:
        """Return whether any peer may send from an address."""
        return any(sender.is_at(address) for sender in self.options.senders)

    def has_place(self, address: str) -> bool:
        """Return whether one more connection from an address may wait for its request."""
        with self._lock:
            of_one = sum(each.address == address for each in self._waiting)
            return len(self._waiting) < MAX_WAITING and of_one < MAX_WAITING_OF_ONE

    def enter(self, association: _Association) -> None:
        """Count a connection."""
        with self._lock:
            self._waiting.add(association)

    def leave(self, association: _Association) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._waiting.discard(association)
            self._established.discard(association)

    def refusal(self, association: _Association) -> tuple[int, int, int] | None:
        """Return why an association is rejected; None if it may begin, and it is counted then."""
        calling = association.title
        named = [sender for sender in self.options.senders if sender.title == calling]
        known = [sender for sender in named if sender.is_at(association.address)]
        if not known:
            return CALLING_UNKNOWN
        if association.called != self.options.title:
            return CALLED_UNKNOWN
        association.targets = [sender.target for sender in known if sender.target]
        may_store = len(association.targets) < len(known)
        association.data_sets.may_store = may_store
        try:
            has_room = not may_store or self.store.has_room()
        except OSError:  # a share that is away
            has_room = False
        if self.stopping.is_set() or not has_room:
            return CONGESTED
        with self._lock:
            if len(self._established) >= self.options.associations:
                return LIMIT_EXCEEDED
            self._waiting.discard(association)
            self._established.add(association)
        return None


class _Server(socketserver.TCPServer):
    """Accepts connections, and does nothing else in its loop: no byte is read or written."""

    allow_reuse_address = True  # else a receiver that was stopped just now bars the port
    request_queue_size = BACKLOG

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.address_family = socket.AF_INET6 if ":" in receiver.options.address else socket.AF_INET
        self._rounds = 0
        address = receiver.options.address, receiver.options.port
        super().__init__(address, socketserver.BaseRequestHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection is taken; else it is closed at once."""
        if not self.receiver.is_known(client_address[0]):
            LOG.warning("refused a connection from %s: no peer has this address", client_address[0])
            return False
        if not self.receiver.has_place(client_address[0]):
            LOG.warning("refused a connection from %s: too many are silent", client_address[0])
            return False
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin the thread of an association."""
        association = _Association(self.receiver, request, client_address)
        self.receiver.enter(association)
        try:
            association.start()
        except RuntimeError:  # no more threads
            self.receiver.leave(association)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a connection could not be taken; it is closed."""
        LOG.error("a connection from %s could not be taken", client_address[0])

    def service_actions(self) -> None:
        """Free what pynetdicom's threads leave in cycles; called twice a second."""
        self._rounds += 1
        if self._rounds % 20 == 0:
            gc.collect()


class _Association(Association):
    """An association of a peer: the limits, and the data sets that are on their way."""

    def __init__(self, receiver: Receiver, connection: socket.socket, address: Any) -> None:
        super().__init__(receiver.entity, "acceptor")
        self.receiver, self.connection, self.address = receiver, connection, str(address[0])
        self.daemon, self.name = True, "association"
        self.heard, self.hears = time.monotonic(), threading.Event()
        self.data_sets = DataSets(
            receiver.store, lambda: self.title, receiver.options.title, may_store=False
        )
        self.targets = list[str]()
        self.is_answering = self.has_heard = False
        self._server = receiver.server  # type: ignore[assignment]  # closes the connection
        self.acse = _Admission(self)
        self.set_socket(_Socket(self, client_socket=connection))
        self.acceptor.maximum_length = receiver.options.pdu
        self.acceptor.ae_title = receiver.options.title
        self.acceptor.address_info = AddressInformation.from_tuple(connection.getsockname())
        self.acceptor.implementation_class_uid = self.ae.implementation_class_uid
        self.acceptor.implementation_version_name = self.ae.implementation_version_name
        # Storage needs none. A target that reports is SCP of commitment, and some forget to say so
        commitment = build_context(COMMITMENT)
        commitment.scu_role = commitment.scp_role = True
        self.acceptor.supported_contexts = [build_context(VERIFICATION), commitment]
        self.requestor.address_info = AddressInformation.from_tuple(address)
        self.bind(evt.EVT_C_STORE, _store)
        self.bind(evt.EVT_N_EVENT_REPORT, _report)

    @property
    def title(self) -> str:
        """Calling AE title; empty before the request."""
        request = self.requestor.primitive
        return "" if request is None else str(request.calling_ae_title).strip()

    @property
    def called(self) -> str:
        """Called AE title; empty before the request."""
        request = self.requestor.primitive
        return "" if request is None else str(request.called_ae_title).strip()

    def run_reactor(self) -> None:
        """Negotiate TLS, wait for the request, and serve the association until it ends."""
        options = self.receiver.options
        try:
            self.connection.settimeout(options.handshake)  # of the handshake as a whole
            if (tls := self.receiver.tls) is not None:
                self.connection = tls.wrap_socket(self.connection, server_side=True)
                self.dul.socket.socket = self.connection  # type: ignore[union-attr]  # it is open
            # pynetdicom looks for bytes 1000 times a second: not before there are any
            if not _has_bytes(self.connection, options.handshake):
                LOG.info("a connection from %s was silent", self.address)
                return
            self.connection.settimeout(options.idle)
            super().run_reactor()
            if self.has_heard and self.requestor.primitive is None:
                hint = "" if options.tls else "; if it was TLS: the site has no `tls`"
                LOG.warning("a connection from %s sent no DICOM%s", self.address, hint)
        except OSError as exc:  # ssl.SSLError is one
            why = tls_failure(exc)
            why = f"TLS: {why}" if why else type(exc).__name__
            LOG.warning("a connection from %s failed (%s)", self.address, why)
        finally:
            self.dul.kill_dul()
            self.cut_off()
            if self._started_dul:
                self.dul.join(options.idle)
            self.data_sets.discard()
            self.receiver.leave(self)
            if counted := self.data_sets.counts:
                counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counted.items()))
                LOG.info("%s at %s: %s", printable(self.title), self.address, counts)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing came for a while, and nothing is to be answered."""
        return not self.is_answering and time.monotonic() - self.heard > QUIET_AFTER_S

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Keep the threads awake while an answer is made, and until it has been sent."""
        self.is_answering = True
        try:
            yield
        finally:
            self.heard = time.monotonic()
            self.is_answering = False

    def check_pace(self) -> None:
        """Refuse a sender that keeps a data set going with a byte now and then.

        Raises
        ------
        OSError
        """
        for draft in list(self.data_sets.drafts.values()):
            lasted = time.monotonic() - draft.began
            if lasted > self.receiver.options.idle and draft.size < MIN_PACE * lasted:
                raise TimeoutError(errno.ETIMEDOUT, "too slow")

    def check_memory(self) -> None:
        """Refuse a message that grows without end in memory.

        Raises
        ------
        OSError
        """
        message = self.dimse.message
        if message is None:
            return
        for part in (message.encoded_command_set, message.data_set):
            if part is not None and part.tell() > MAX_MESSAGE_BYTES:
                raise OSError(errno.EMSGSIZE, "a message is too long")

    def cut_off(self) -> None:
        """Close the connection, whatever waits for it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class _Admission(ACSE):
    """Decides who may begin an association, and ends it when the receiver stops."""

    def negotiate_association(self) -> None:
        """Accept or reject the association that was asked for."""
        association: Any = self.assoc
        refusal = association.receiver.refusal(association)
        if refusal is None:
            super().negotiate_association()
            return
        why = _WHY[refusal]
        LOG.warning("refused %s at %s: %s", printable(association.title), association.address, why)
        self.send_reject(*refusal)
        association.kill()

    def is_release_requested(self) -> bool:
        """Return whether the peer has finished; asked after each message."""
        association: Any = self.assoc
        if super().is_release_requested():
            association.receiver.leave(association)  # a peer may come again once it is answered
            return True
        if association.is_quiet:
            association.hears.clear()
            if association.is_quiet:  # still: what came before `clear` has no event
                association.hears.wait(QUIET_LOOK_S)
        if association.receiver.stopping.is_set() and not association.data_sets.drafts:
            association.abort()
        return False


_NOT_USABLE = {
    errno.EADDRINUSE: "another process has it",
    errno.EADDRNOTAVAIL: "it is no address of this machine",
    errno.EACCES: "ports below 1024 are for root, or for a service with CAP_NET_BIND_SERVICE",
}
_WHY = {
    CALLING_UNKNOWN: "its title, or its title at this address, is not in the list",
    CALLED_UNKNOWN: "it called another title",
    CONGESTED: "the disk has no room, or the receiver stops",
    LIMIT_EXCEEDED: "too many associations",
}


class _Socket(AssociationSocket):
    """The connection of an association, with a deadline for each part that is read."""

    @property
    def ready(self) -> bool:
        """Whether there are bytes to be read."""
        association: Any = self.assoc
        if association.is_quiet:
            with suppress(OSError, ValueError):  # closed, as the other method will find
                _has_bytes(association.connection, QUIET_LOOK_S)
        return super().ready

    def recv(self, nr_bytes: int) -> bytearray:
        """Read so many bytes of a PDU, or fewer if the connection ends.

        Raises
        ------
        OSError
            If they are too many, or do not come in time: the association ends.
        """
        association: Any = self.assoc
        options = association.receiver.options
        limit = options.pdu if association.is_established else MAX_REQUEST_BYTES
        if nr_bytes > limit:
            raise OSError(errno.EMSGSIZE, "the PDU is too long")
        association.check_memory()
        association.check_pace()
        connection = association.connection
        data, got = bytearray(nr_bytes), 0
        view = memoryview(data)
        patience = options.idle if association.is_established else options.handshake
        deadline = time.monotonic() + patience
        try:
            while got < nr_bytes:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, "the PDU takes too long")
                connection.settimeout(remaining)
                count = connection.recv_into(view[got:])
                if not count:
                    break
                association.has_heard = True
                got += count
        finally:
            association.heard = time.monotonic()
            association.hears.set()
            view.release()
            with suppress(OSError):
                connection.settimeout(options.idle)
        return data[:got]


def _has_bytes(connection: socket.socket, seconds: float) -> bool:
    """Return whether bytes, or the end of a connection, come in time."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return True
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _store(event: evt.Event) -> int:
    """Keep an object, and return the status of the answer; called in an association's thread."""
    association: Any = event.assoc
    with association.answering():
        return int(association.data_sets.take(event))


def _report(event: evt.Event) -> tuple[int, None]:
    """Note a report of commitment, and return the status of the answer."""
    association: Any = event.assoc
    note, targets = association.receiver.options.report, association.targets
    if note is None or not targets:
        association.data_sets.counts["reports refused"] += 1
        return NOT_AUTHORIZED, None
    with association.answering():
        status = take_report(event, lambda report: note(report, targets))
    association.data_sets.counts["reports refused" if status else "reported"] += 1
    return status, None
