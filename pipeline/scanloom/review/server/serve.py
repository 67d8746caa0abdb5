"""Run the review server until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from scanloom.core import Reason, ScanError
from scanloom.io.output.audit import audit_trail
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.review.server.app import make_app
from scanloom.review.server.cases import OpenCases
from scanloom.review.server.patients import PatientNames
from scanloom.review.server.security import BACKLOG, Connection, Listener, Sessions, max_connections
from scanloom.review.server.state import Publish, ReviewState
from scanloom.review.verdicts.log import VerdictLog, reviewer_codes, reviewer_names
from scanloom.review.verdicts.readers import kept_readers, share_cases
from scanloom.review.verdicts.tables import write_review_tables

DEFAULT_REVIEWER = "reviewer"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """Address and reviewers of a server.

    Parameters
    ----------
    reviewers : tuple of str
        Names of the reviewers; none for those of the last start, or "reviewer".
    host : str
        Address to listen at; another than the loopback's needs a certificate.
    port : int
        0 for a free one.
    certificate, certificate_key : Path or None
        For TLS.
    double, repeat : float or None
        Shares of cases as of `share_cases`.
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.
    patients : bool
        Whether reviewers see names and dates of patients.
    """

    reviewers: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    certificate: Path | None = None
    certificate_key: Path | None = None
    double: float | None = None
    repeat: float | None = None
    key: Path | None = None
    patients: bool = False


def serve(
    out: Path,
    options: ServerOptions,
    tell: Callable[[dict[str, str]], None],
    publish: Publish | None = None,
    tell_kept: Callable[[dict[tuple[str, str], int]], None] = lambda _: None,
) -> None:
    """Serve the results of an output folder to reviewers until the process is interrupted.

    Parameters
    ----------
    tell : callable
        Receives the link of each reviewer, by name, once the server can be reached.
    tell_kept : callable
        Receives the number of strokes that are kept and not saved, by case and name of the
        reviewer, when the server stops.

    Raises
    ------
    ScanError
        REVIEW_OPEN if another server has the folder, with its address; ENVIRONMENT if the address
        or the certificate can't be used; REVIEW_DAMAGED if the log is damaged; READERS if the cases
        can't be shared so; OUTPUT_UNWRITABLE.
    """
    audit = audit_trail(out, options.key)
    with closing(VerdictLog(out, audit)) as log, closing(_listen(options)) as listening:
        codes = _reviewers(out, options.reviewers)
        shares = options.double, options.repeat
        readers = share_cases(out, tuple(codes.values()), *shares, begun=bool(log.count))
        names = reviewer_names(out)
        patients = PatientNames(out, options.key) if options.patients else None
        open_cases = OpenCases(out, options.key)
        state = ReviewState(out, log, readers, open_cases, names, publish, patients)
        state.worklist.refresh()
        sessions = Sessions(list(codes.values()))
        origins = _origins(options, listening.getsockname()[1])
        app = make_app(state, sessions, origins)
        log.announce(origins[0])
        server = uvicorn.Server(_config(app, options))
        tell(
            {name: f"{origins[0]}/{code}/#{sessions.tokens[code]}" for name, code in codes.items()}
        )
        try:
            with suppress(KeyboardInterrupt):  # that is how it is stopped
                server.run(sockets=[listening])
        finally:
            kept = state.drafts.kept()
            tell_kept({(case, names.get(code, code)): n for (case, code), n in kept.items()})
            with disk_errors_as_scan_errors():
                write_review_tables(out)


def _reviewers(out: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the code of each reviewer who gets a link, by name."""
    if names:
        return reviewer_codes(out, names)
    known, kept = reviewer_names(out), kept_readers(out).reviewers
    before = {known[code]: code for code in kept if code in known}
    return before or reviewer_codes(out, [DEFAULT_REVIEWER])


def _config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        http=Connection,
        loop="asyncio",  # another one would not accept connections through `Listener`
        backlog=BACKLOG,
        ws="none",
        timeout_graceful_shutdown=2,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.certificate_key,
    )
    try:
        config.load()
    except OSError as exc:  # ssl.SSLError is one
        detail = f"the certificate or its key can't be read ({type(exc).__name__})"
        raise ScanError(Reason.ENVIRONMENT, detail) from exc
    return config


def _listen(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = Listener(family, max_connections())
    try:
        # else a server that was stopped just now bars the port for a minute
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
        listening.listen(BACKLOG)  # connections wait until the server runs
    except OSError as exc:
        listening.close()
        detail = f"{options.host}:{options.port} can't be used ({type(exc).__name__})"
        raise ScanError(Reason.ENVIRONMENT, detail) from exc
    return listening


def _origins(options: ServerOptions, port: int) -> Sequence[str]:
    scheme = "https" if options.certificate else "http"
    hosts = [f"[{options.host}]" if ":" in options.host else options.host]
    if options.host in ("0.0.0.0", "::"):  # noqa: S104 - requested, and with TLS
        hosts = list(dict.fromkeys((socket.getfqdn(), socket.gethostname())))
    if options.host in LOOPBACK:
        hosts += [host for host in ("127.0.0.1", "localhost") if host not in hosts]
    return [f"{scheme}://{host}:{port}" for host in hosts]
