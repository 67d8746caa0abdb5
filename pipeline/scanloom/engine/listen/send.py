"""`send`: send results by hand, beside a receiver or without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.delivery import TICK_S, deliver, peer_maker
from scanloom.engine.listen.outbox import NOT_SENT, Line, Outbox, Trouble, outbox_folder
from scanloom.engine.listen.receive import receiver_options
from scanloom.engine.listen.site import Site, find_node
from scanloom.io.output.layout import no_results, published_cases

if TYPE_CHECKING:
    from scanloom.io.network.data_sets import Store

REPORT_WITHIN_S = 20.0
"""Longest wait of somebody for a report of commitment; then an `auto` target is asked."""


@dataclass(frozen=True)
class Sent:
    """Outcomes of results that were sent by hand.

    Parameters
    ----------
    lines : tuple of Line
        As they are now.
    refused : dict
        Why a case was not sent, by its name.
    trouble : Trouble
        With the target.
    """

    lines: tuple[Line, ...]
    refused: dict[str, str]
    trouble: Trouble

    @property
    def is_complete(self) -> bool:
        """Whether all of them are at the target."""
        return not self.refused and all(line.state == "delivered" for line in self.lines)


def send(
    site: Site,
    out: Path,
    to: str,
    cases: Sequence[str],
    wait: float,
    tell: Callable[[Line], None] = lambda line: None,
    key: Path | None = None,
) -> Sent:
    """Send the results of cases to a target, and wait until they are there.

    What is not there then stays in the outbox, for a receiver or another call.

    Parameters
    ----------
    out : Path
        The output folder.
    to : str
        Name of the target.
    cases : sequence of str
        Names of cases; all if there are none.
    wait : float
        Seconds to wait at most.
    tell : callable
        Receives each line that has been delivered or given up.
    key : Path or None
        File with the key of the ids, for the audit trail, as of `Outbox`.

    Raises
    ------
    ScanError
        SITE if there is no such target; NO_RESULTS, ID_UNKNOWN; as of `Outbox` and `deliver`.
    """
    target = find_node(site.targets, to, "target")
    if not (published := published_cases(out)):
        raise no_results(out)
    folders = [folder for folder in published if folder.name in cases]
    unknown = sorted(set(cases) - {folder.name for folder in folders})
    if unknown:
        detail = f"there is no case {unknown[0]} in the output folder"
        raise ScanError(Reason.ID_UNKNOWN, detail)
    outbox = Outbox(outbox_folder(out), key)
    hasty = target.model_copy(
        update={"report_within": min(target.report_within, REPORT_WITHIN_S, wait)}
    )
    here = site.model_copy(update={"targets": (hasty,)})
    peer_maker(here, hasty, outbox)  # before anything is added: what it needs has to be there
    lines, refused = list[Line](), dict[str, str]()
    for folder in folders if cases else published:
        try:
            lines += [outbox.retry(line) for line in outbox.add(folder, to)]
        except ScanError as error:
            if error.reason not in NOT_SENT:
                raise
            refused[folder.name] = error.detail
    if not lines and not refused:
        raise no_results(out, "DICOM results in these cases")
    outbox.set_trouble(to, Trouble())
    watch = _Watch(outbox, lines, time.monotonic() + wait, tell)
    with _own_port(here, outbox):
        try:
            deliver(here, outbox, threading.Event(), watch.is_done)
        except ScanError as error:
            if error.reason is not Reason.LOCKED:
                raise
            while not watch.is_done():  # a receiver delivers
                time.sleep(TICK_S)
    return Sent(tuple(watch.lines.values()), refused, outbox.trouble(to))


class _Watch:
    """Watches lines until they are delivered, or wait for longer than somebody does."""

    def __init__(
        self,
        outbox: Outbox,
        lines: Sequence[Line],
        until: float,
        tell: Callable[[Line], None],
    ) -> None:
        self.lines = {line.id: line for line in lines}
        self._outbox, self._until, self._tell = outbox, until, tell
        self._told = set[str]()

    def is_done(self) -> bool:
        """Look at the lines; return whether there is nothing more to wait for."""
        left, now = self._until - time.monotonic(), time.time()
        for name, line in self.lines.items():
            if name not in self._told:
                self.lines[name] = line = self._outbox.current(line) or line
                if not line.is_open:
                    self._told.add(name)
                    self._tell(line)
        still = [line for line in self.lines.values() if line.is_open]
        if not still or left <= 0:
            return True
        trouble = self._outbox.trouble(still[0].target)
        later = trouble.due > now + left
        return later or all(line.due > now + left for line in still)


@contextmanager
def _own_port(site: Site, outbox: Outbox) -> Iterator[None]:
    """Take reports of commitment at the site's port, unless a receiver does, or none will come."""
    target = site.targets[0]
    with ExitStack() as stack:
        if target.url is None and target.commitment != "no":
            from scanloom.io.network.receiver import Receiver

            options = receiver_options(site.model_copy(update={"peers": ()}), outbox)
            try:
                receiver = Receiver(options, cast("Store", None))  # of no peer: nobody may store
            except ScanError as error:
                if error.reason is not Reason.ENVIRONMENT:
                    raise  # else a receiver takes them, or the target is asked
            else:
                stack.callback(receiver.stop, 1.0)
        yield
