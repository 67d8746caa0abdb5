"""Receiving what the peers of a site send, until the process is asked to end."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError, printable
from scanloom.engine.listen.nodes import check_installed
from scanloom.engine.listen.outbox import Outbox, outbox_folder
from scanloom.engine.listen.site import Node, Site, Target
from scanloom.engine.listen.spool import Spool
from scanloom.io.dicom.header.header import pydicom_muted
from scanloom.io.output.private import PRIVATE, check_links
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.io.network.receiver import Receiver, ReceiverOptions

SPOOL = "spool"
SYNC_INTERVAL_S = 1.0
"""Between two looks whether to end, and two flushes of the journal."""
DAY_S = 24 * 3600.0
WARNING_S = 30 * DAY_S
"""Before the end of a certificate of ours, the log warns each day."""
LOG = logging.getLogger(__name__)


def spool_folder(site: Site, out: Path) -> Path:
    """Return the folder for what is received."""
    return out / PRIVATE / SPOOL if site.spool is None else Path(site.spool)


def receive(
    site: Site,
    out: Path,
    tell: Callable[[str, int, Path], None],
    sign: Callable[[str], None] = lambda trouble: None,
) -> None:
    """Receive what the site's peers send, until SIGTERM or SIGINT.

    Data sets that are on their way then are still kept, for as long as a PDU may take.

    Parameters
    ----------
    out : Path
        The output folder.
    tell : callable
        Receives address, port and spool once peers can connect.
    sign : callable
        Is called each second, as a sign of life, with why nothing is received; "" if all is well.

    Raises
    ------
    ScanError
        NOT_INSTALLED without pynetdicom; ENVIRONMENT if the address or a certificate can't be used;
        LOCKED if another process receives into the spool; OUTPUT_UNWRITABLE, DISK_FULL.
    """
    check_installed(None)
    from scanloom.io.network.receiver import Receiver

    outbox = Outbox(outbox_folder(out)) if site.targets else None
    options = receiver_options(site, outbox)
    folder = spool_folder(site, out)
    if site.spool is None:
        check_links(out)
        with disk_errors_as_scan_errors():
            make_private_folder(folder.parent)
            folder.parent.chmod(0o700)
    with (
        Spool(folder, site.changed, site.reserve) as spool,
        pydicom_muted(),
        _quiet_threads(),
        end_requested() as requested,
    ):
        receiver = Receiver(options, spool)
        certificates = OwnCertificates(site, receiver)
        try:
            sign(_trouble(spool, certificates.expires))
            tell(site.address, receiver.port, folder)
            while not requested.wait(SYNC_INTERVAL_S):
                with disk_errors_as_scan_errors():
                    spool.journal.sync()
                if not receiver.is_alive:
                    raise ScanError(Reason.INTERNAL, "connections are accepted no more")
                certificates.look()
                sign(_trouble(spool, certificates.expires))
        finally:
            receiver.stop(site.limits.idle)


class OwnCertificates:
    """Our own certificates while `listen` runs; the log warns before the end of each.

    The receiver takes renewed ones here; those for targets are read for each connection.

    Parameters
    ----------
    receiver : Receiver
        Takes the new `tls` for the connections from then on.
    """

    def __init__(self, site: Site, receiver: Receiver) -> None:
        self._site, self._receiver, self._told = site, receiver, -math.inf
        self._stamps = self._stamps_now()
        self.expires = math.inf if site.tls is None else _expiry(site.tls.certificate)

    def look(self) -> None:
        """Take renewed files, and warn once a day; to be called again and again."""
        from scanloom.io.network.receiver import tls_context

        tls, stamps = self._site.tls, self._stamps_now()
        if tls is not None and stamps != self._stamps:
            self._stamps = stamps
            try:
                self._receiver.tls = tls_context(**dict(tls))
            except ScanError as error:  # such as a certificate whose key is written after it
                LOG.warning("`tls` has changed, and is not taken: %s", error.detail)
            else:
                LOG.info("`tls` has changed: its certificates were read again")
                self.expires, self._told = _expiry(tls.certificate), -math.inf
        if time.monotonic() - self._told > DAY_S:
            self._told = time.monotonic()
            for whose, path in _certificates(self._site):
                expires = _expiry(path)
                if expires - time.time() < WARNING_S:
                    day = time.strftime("%Y-%m-%d", time.localtime(expires))
                    LOG.warning("the certificate of %s expires on %s: renew it", whose, day)

    def _stamps_now(self) -> dict[str, tuple[int, int]]:
        """Return the state of each file of `tls` that can be reached."""
        stamps = {}
        for path in () if self._site.tls is None else dict(self._site.tls).values():
            with suppress(OSError):
                state = Path(path).stat()
                stamps[path] = state.st_mtime_ns, state.st_ino
        return stamps


def _certificates(site: Site) -> Iterator[tuple[str, str]]:
    """Yield whose each of our certificates is, and its path."""
    if site.tls is not None:
        yield "`tls`", site.tls.certificate
    nodes: list[tuple[str, Node | None]] = [
        *((f"target {target.name}", target) for target in site.targets),
        *((f"source {source.name}", source) for source in site.sources),
        *((f"`ask` of {printable(peer.title)}", peer.ask) for peer in site.peers),
    ]
    for whose, node in nodes:
        if node is not None and node.tls is not None and node.tls.certificate is not None:
            yield whose, node.tls.certificate


def _expiry(path: str) -> float:
    """Return when a certificate expires, seconds since 1970; infinity if it can't be read."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(Path(path).read_bytes())
    except (OSError, ValueError):  # OpenSSL may take more
        return math.inf
    return certificate.not_valid_after_utc.timestamp()


def _trouble(spool: Spool, expires: float = math.inf) -> str:
    """Return why nothing is received, such as without room; "" if all is well."""
    if time.time() > expires:
        return "its certificate has expired, which senders refuse: renew it"
    try:
        return "" if spool.has_room() else "refuses all objects, since the disk has no room"
    except OSError as exc:
        return f"refuses all objects, since the disk can't be reached ({type(exc).__name__})"


def receiver_options(site: Site, outbox: Outbox | None) -> ReceiverOptions:
    """Return what a receiver needs; its reports of commitment are noted in the outbox."""
    from scanloom.io.network.receiver import ReceiverOptions, Sender, tls_context

    limits = site.limits
    return ReceiverOptions(
        title=site.title,
        address=site.address,
        port=site.port,
        senders=[
            *(Sender(peer.title, peer.addresses) for peer in site.peers),
            *(
                Sender(title, (address, *target.reporters), target.name)
                for target in site.targets
                for title, address in _reporting(target)
            ),
        ],
        tls=None if site.tls is None else tls_context(**dict(site.tls)),
        associations=limits.associations,
        pdu=limits.pdu,
        idle=limits.idle,
        handshake=limits.handshake,
        report=None if outbox is None else outbox.note,
    )


def _reporting(target: Target) -> Iterator[tuple[str, str]]:
    """Yield the titles and addresses from which a target reports commitment."""
    if target.title is None:
        return
    yield target.title, str(target.address)
    if target.committer is not None:
        yield target.committer.title, str(target.committer.address or target.address)


@contextmanager
def end_requested() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    requested = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        requested.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Log the type of an error that ends a thread of pynetdicom: its text may name a patient."""
    before = threading.excepthook

    def log(ended: threading.ExceptHookArgs) -> None:
        LOG.warning("an association ended by %s", ended.exc_type.__name__)

    threading.excepthook = log
    try:
        yield
    finally:
        threading.excepthook = before
