"""`listen`: receive until the process is asked to end, and segment by the rules of the site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.own_status import own_status
from scanloom.engine.listen.receive import end_requested, receive, spool_folder
from scanloom.engine.listen.site import Site


def listen(
    site: Site,
    out: Path,
    tell: Callable[[str, int, Path], None],
    key: Path | None = None,
) -> None:
    """Receive, segment by the site's rules, and send results back, until SIGTERM or SIGINT.

    Parameters
    ----------
    out : Path
        The output folder.
    tell : callable
        Receives address, port and spool once peers can connect.
    key : Path or None
        As of a run.

    Raises
    ------
    ScanError
        As of `receive`; with rules, also as of a run.
    """
    if not site.peers:
        raise ScanError(Reason.SITE, "`peers` is missing: nobody may send")
    if not (site.rules or site.targets or site.metrics):  # one that only receives needs no keeper
        with own_status(out, "receiver") as sign:
            receive(site, out, tell, sign)
        return
    from scanloom.engine.listen.parts import Setup, keep_parts
    from scanloom.engine.listen.work import read_requests

    read_requests(site)  # mistakes in workflows are told before anything is started
    out, key = out.absolute(), key and key.absolute()
    with end_requested() as requested:
        keep_parts(Setup(site, out, spool_folder(site, out), key), tell, requested.is_set)
