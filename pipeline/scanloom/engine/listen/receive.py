"""Receiving what the peers of a site send, until the process is asked to end."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.outbox import Outbox, outbox_folder
from scanloom.engine.listen.site import Site, Target
from scanloom.engine.listen.spool import Spool
from scanloom.engine.machine.lean_imports import without_optional_imports
from scanloom.io.dicom.header.header import pydicom_muted
from scanloom.io.output.private import PRIVATE, check_links
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.io.network.receiver import ReceiverOptions

SPOOL = "spool"
SYNC_INTERVAL_S = 1.0
"""Between two looks whether to end, and two flushes of the journal."""
DAY_S = 24 * 3600.0
WARNING_S = 30 * DAY_S
"""Before the end of the own certificate, the log warns each day."""
_RENEW = "renew it, and start `listen` again"
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
    try:
        with without_optional_imports():
            from scanloom.io.network.receiver import Receiver
    except ModuleNotFoundError as exc:
        detail = "the receiver is not installed: pip install 'scanloom[hospital]'"
        raise ScanError(Reason.NOT_INSTALLED, detail) from exc
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
        receiver, expires = Receiver(options, spool), _expiry(site)
        told = -math.inf
        try:
            tell(site.address, receiver.port, folder)
            while not requested.wait(SYNC_INTERVAL_S):
                with disk_errors_as_scan_errors():
                    spool.journal.sync()
                if not receiver.is_alive:
                    raise ScanError(Reason.INTERNAL, "connections are accepted no more")
                if expires - time.time() < WARNING_S and time.monotonic() - told > DAY_S:
                    told = time.monotonic()
                    day = time.strftime("%Y-%m-%d", time.localtime(expires))
                    LOG.warning("the certificate of `tls` expires on %s: %s", day, _RENEW)
                sign(_trouble(spool, expires))
        finally:
            receiver.stop(site.limits.idle)


def _expiry(site: Site) -> float:
    """Return when the receiver's own certificate expires, seconds since 1970; infinity without."""
    if site.tls is None:
        return math.inf
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(Path(site.tls.certificate).read_bytes())
    except (OSError, ValueError):  # OpenSSL has read it, and may take more
        return math.inf
    return certificate.not_valid_after_utc.timestamp()


def _trouble(spool: Spool, expires: float = math.inf) -> str:
    """Return why nothing is received, such as without room; "" if all is well."""
    if time.time() > expires:
        return f"its certificate has expired, which senders refuse: {_RENEW}"
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
