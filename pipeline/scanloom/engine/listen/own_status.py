"""`OUT/listen/status.json`: what the processes of `listen` last said of themselves."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scanloom.core import ScanError
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import LISTEN_STATUS
from scanloom.io.output.private import check_links
from scanloom.io.system.atomic_write import atomic_write

EVERY_S = 5.0
"""Between two writings by one that only receives."""
LOG = logging.getLogger(__name__)


def write_own_status(
    out: Path, written: float, due: float, parts: Mapping[str, str], *, has_ended: bool
) -> None:
    """Write the status, for `scanloom status`.

    Parameters
    ----------
    written, due : float
        Now, and when it will be written again; seconds since 1970.
    parts : mapping
        Why each process does nothing, by its role; "" for one that runs.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if a folder of the output is a link.
    OSError
        If it can't be written.
    """
    check_links(out)
    path = out / LISTEN_STATUS
    path.parent.mkdir(parents=True, exist_ok=True)
    status = {"written": written, "due": due, "has_ended": has_ended, "parts": dict(parts)}
    atomic_write(path, lambda draft: write_document(draft, status))


@contextmanager
def own_status(out: Path, role: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes what keeps the process from its work; it writes the status.

    At the end of the block, the last status says that the process has ended, if one was written.
    """
    said: str | None = None
    told, fault = -math.inf, ""

    def write(trouble: str, *, has_ended: bool = False) -> None:
        nonlocal fault
        now, before, fault = time.time(), fault, ""
        try:
            write_own_status(out, now, now + EVERY_S, {role: trouble}, has_ended=has_ended)
        except (OSError, ScanError) as exc:  # receiving goes on
            fault = type(exc).__name__
            if not before:
                LOG.warning("the status can't be written (%s)", fault)

    def say(trouble: str) -> None:
        nonlocal said, told
        if trouble != said or time.monotonic() - told >= EVERY_S:
            said, told = trouble, time.monotonic()
            write(trouble)

    try:
        yield say
    finally:
        if said is not None:
            write(said, has_ended=True)
