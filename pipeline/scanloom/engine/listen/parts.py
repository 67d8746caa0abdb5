"""The processes of `listen`: one that only receives, one that segments, and one that keeps both.

The keeper starts the others, and starts each one again that ends, after a pause that grows. They
die with it. It has no state: whatever is killed at whatever moment, the spool and the output folder
tell the next process what is to be done.

A part reads its setup from stdin, and writes lines of JSON to stdout: that it is ready, signs of
life, its log, or why it ends. What else it writes goes to a file of the private folder, since it
may name a patient. One that gives no sign of life is told about, and not killed: it may be slow.
"""

from __future__ import annotations

import json
import logging
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from pydantic import TypeAdapter

from scanloom.core import Reason, ScanError, blame, counted, keep_memory_private, settle_in
from scanloom.engine.listen.site import Site
from scanloom.engine.worker.child_main import die_with_parent
from scanloom.io.output.private import PRIVATE, append_private, check_links, load_key_of
from scanloom.io.system.disk_errors import disk_errors_as_scan_errors
from scanloom.own_python import make_private_folder, own_environment, own_python

OURS = "scanloom"
LOG = logging.getLogger(f"{OURS}.engine.listen.parts")  # run as a program, it is __main__

RECEIVER, WORKER, DELIVERY = "receiver", "worker", "delivery"
PAGE, TABLES = "page", "tables"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a part that ended is started again: twice as long each time."""
STEADY_S = 120.0
"""A part that lived for so long is started again after the first pause."""
MAX_FIRST_STARTS = 3
"""Starts of a part that has never been ready."""
LOOK_S = 0.2
PAGE_PAUSE_S = 5.0
"""Between two writings of the page; `RESTS` times what one takes if that is longer."""
CLEAR_PAUSE_S = 60.0
"""Between two looks for studies to remove from the spool."""
PATIENCE_S = 90.0
"""For parts to end in good order, beyond the running data sets."""
SIGN_S = 10.0
"""Between two signs of life of a part."""
SILENT_S = 300.0
"""A part without one for so long is stopped or hangs: to read a large study takes less."""
LONGEST_LIFE_S = 300 * 24 * 3600.0
"""Of a worker, by the clock: the certificate of its Dask cluster lasts a year from its start."""
CLOCK_STEP_S = 60.0
"""A clock that was put back by more makes that certificate one of the future."""
KEEPER_S = 1.0
"""Longest wait for a keeper that reads nothing, as if it is stopped; then a line is dropped."""


@dataclass(frozen=True)
class Setup:
    """Settings of all processes of a `listen`.

    Parameters
    ----------
    out, spool : Path
        Absolute, as `key` is.
    key : Path or None
        File with the key of the case ids.
    """

    site: Site
    out: Path
    spool: Path
    key: Path | None

    def to_json(self) -> str:
        """Return a line for the process of a part."""
        document = TypeAdapter(Setup).dump_python(self, mode="json", by_alias=True)
        level = logging.getLogger(OURS).getEffectiveLevel()
        return json.dumps({**document, "level": level, "parent": os.getpid()})


def start_part(
    role: str, setup: Setup, *arguments: str, messages: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start the process of a part, which dies with the thread that calls this.

    `messages` is the descriptor that it writes its messages to.
    """
    folder = setup.out / PRIVATE
    with disk_errors_as_scan_errors():
        check_links(setup.out)
        make_private_folder(folder)
        with append_private(folder / f"listen-{role}.log") as errors:
            process = subprocess.Popen(  # noqa: S603  # this very program
                own_python("-m", "scanloom.engine.listen.parts", role, *arguments),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=messages,
                stderr=errors,
                env=own_environment(),
                start_new_session=True,  # Ctrl-C at the terminal goes to the keeper only
            )
    with suppress(OSError):  # or it has ended
        cast("IO[bytes]", process.stdin).write(setup.to_json().encode() + b"\n")
    return process


class ListenPart:
    """A part, which is started again whenever it ends; used by one thread.

    Parameters
    ----------
    role : str
        RECEIVER, WORKER, DELIVERY or PAGE.
    selector : BaseSelector
        Tells when it has written something; the part is the data of its pipe.
    """

    def __init__(self, role: str, setup: Setup, selector: selectors.BaseSelector) -> None:
        self.role, self.setup, self._selector = role, setup, selector
        self.ready: dict[str, Any] | None = None
        self.is_ending = False
        self.error: ScanError | None = None
        self._pause, self._due, self._rest, self._ends = FIRST_PAUSE_S, 0.0, b"", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._silent, self._is_up, self._ended_by, self._trouble = 0.0, False, "", ""
        self._start()

    def _start(self) -> None:
        self._began, self._rest, self.error = time.monotonic(), b"", None
        self._silent, self._is_up, self._trouble = 0.0, False, ""
        self._messages, messages = os.pipe()
        try:
            self._process = start_part(self.role, self.setup, messages=messages)
        except BaseException:
            os.close(self._messages)
            raise
        finally:
            os.close(messages)
        self._selector.register(self._messages, selectors.EVENT_READ, self)

    def read(self) -> None:
        """Take note of what the process has written, or that it has ended."""
        data = os.read(self._messages, 1 << 16)
        if self._silent >= SILENT_S and self._is_up and data:
            LOG.warning("the %s gives signs of life again", self.role)
        self._silent = 0.0
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        if not data and self._process is not None:
            self._selector.unregister(self._messages)
            os.close(self._messages)
            self._end(self._process)

    def _take(self, line: bytes) -> None:
        try:
            document = json.loads(line)
            if "alive" in document:
                self._trouble = str(document["alive"])
            elif "ready" in document:
                self.ready, self._is_up = dict(document["ready"]), True
            elif "failed" in document:
                code, detail, private = map(str, document["failed"])
                self.error = ScanError(Reason[code], detail, private)
            else:
                logging.getLogger(document["name"]).log(document["level"], "%s", document["text"])
        except (ValueError, TypeError, KeyError):  # not ours
            LOG.warning("the %s wrote something else than its log", self.role)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        cast("IO[bytes]", process.stdin).close()
        self._process, self._is_up = None, False
        self._ends += 1
        self._ended_by = f"exit code {code}" if self.error is None else self.error.code
        if time.monotonic() - self._began > STEADY_S:
            self._pause = FIRST_PAUSE_S
        self._due = time.monotonic() + self._pause
        if self._is_hopeless or (self.is_ending and code in (0, -signal.SIGTERM)):
            return
        why = f"exit code {code}" if self.error is None else str(self.error)
        again = "" if self.is_ending else f"; started again in {self._pause:.0f} s"
        # By itself in good order: such as before the certificate of its cluster expires
        LOG.log(
            logging.ERROR if code else logging.INFO, "the %s ended: %s%s", self.role, why, again
        )
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    @property
    def _is_hopeless(self) -> bool:
        """Whether it was never ready, for a reason that stays."""
        error = self.error if self.ready is None else None
        return error is not None and error.reason is not Reason.CLUSTER

    def check_start(self) -> None:
        """Raise why the process was never ready: a mistake of the site, or another `listen`."""
        if self.runs or self.ready is not None:
            return
        error = self.error
        if error is not None and self._is_hopeless:
            raise error
        if self._ends == MAX_FIRST_STARTS:  # otherwise something from outside may have ended it
            detail = f"the {self.role} ended {self._ends} times before it was ready"
            raise error or ScanError(Reason.INTERNAL, detail)

    def keep(self) -> None:
        """Start the process again, if it has ended and the pause is over."""
        if self._process is not None or time.monotonic() < self._due:
            return
        try:
            self._start()
        except (OSError, ScanError) as exc:  # such as a full disk, which the other one reports too
            LOG.warning("the %s can't be started (%s)", self.role, type(exc).__name__)
            self._due = time.monotonic() + self._pause

    def count_silence(self, seconds: float) -> None:
        """Add to the time without a sign of life, and say so once it is long."""
        before, self._silent = self._silent, self._silent + seconds
        if before < SILENT_S <= self._silent and self._is_up and self._process is not None:
            detail = "it is stopped or hangs, such as on a share that is away"
            again = f"kill -9 {self._process.pid} starts it again"
            LOG.error("the %s gives %s: %s. %s", self.role, self.state, detail, again)

    @property
    def state(self) -> str:
        """Why it does nothing, in words that name nobody; "" if it runs."""
        if not self._is_up:
            return f"ended ({self._ended_by}); it starts again" if self._ended_by else "starts"
        if self._silent < SILENT_S:
            return self._trouble
        return f"no sign of life for more than {SILENT_S / 60:.0f} minutes"

    def tell(self, document: Mapping[str, str]) -> None:
        """Write a line for the process; it misses lines if it reads nothing."""
        if self._process is not None and self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
            with suppress(OSError):
                self._process.stdin.write(json.dumps(document).encode() + b"\n")

    @property
    def runs(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process is not None

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def keep_parts(
    setup: Setup, tell: Callable[[str, int, Path], None], end_requested: Callable[[], bool]
) -> None:
    """Keep processes that receive, segment and send results, until the end is requested.

    The site's rules and targets decide which there are.

    Raises
    ------
    ScanError
        Why one of them can't be started the first time.
    """
    selector = selectors.DefaultSelector()
    parts: list[ListenPart] = []
    is_reachable = False
    try:
        site = setup.site
        delivers = site.targets or site.clear_after is not None
        roles = {RECEIVER: True, WORKER: site.rules, DELIVERY: delivers, PAGE: True}
        parts.extend(  # one by one: if one can't be started, `_stop` ends those before it
            ListenPart(role, setup, selector) for role, is_needed in roles.items() if is_needed
        )
        looked = told = time.monotonic()
        while not end_requested():
            for selected, _ in selector.select(LOOK_S):
                selected.data.read()
            now = time.monotonic()
            for part in parts:
                part.check_start()
                part.keep()
                part.count_silence(min(now - looked, 5 * LOOK_S))  # we may have been stopped
            if now - told > PAGE_PAUSE_S:
                told = now
                parts[-1].tell({part.role: part.state for part in parts[:-1]})
            looked = now
            port = int((parts[0].ready or {}).get("port", 0))
            if port and not setup.site.port:  # the next process has to have the same one
                site = setup.site.model_copy(update={"port": port})
                setup = Setup(site, setup.out, setup.spool, setup.key)
                parts[0].setup = setup
            if port and not is_reachable:
                is_reachable = True
                tell(setup.site.address, port, setup.spool)
    finally:
        _stop(parts, selector, setup.site.limits.idle + PATIENCE_S)
        selector.close()


def _stop(parts: Sequence[ListenPart], selector: selectors.BaseSelector, patience: float) -> None:
    """Ask all parts to end, the page last, and kill those that do not."""
    for part in parts:
        part.is_ending = True
    pages = [part for part in parts if part.role == PAGE]  # shows what the others have left
    for ending in ([part for part in parts if part not in pages], pages):
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, PATIENCE_S)):
            deadline = time.monotonic() + seconds
            for part in ending:
                part.signal(number)
            while any(part.runs for part in ending) and time.monotonic() < deadline:
                for selected, _ in selector.select(LOOK_S):
                    selected.data.read()


# --- in the process of a part ---------------------------------------------------------------------


class _Lines(logging.Handler):
    """Writes our messages as lines for the keeper.

    Parameters
    ----------
    descriptor : int
        Of the pipe. No process that this one starts has it, so that it ends with this one.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._signed = descriptor, 0.0
        os.set_blocking(descriptor, False)

    def say(self, document: dict[str, Any]) -> None:
        """Write a document, unless the keeper reads nothing."""
        with suppress(OSError):  # the keeper has died, and this process will
            poll = select.poll()  # one of each thread
            poll.register(self._descriptor, select.POLLOUT)
            if poll.poll(KEEPER_S * 1000):
                os.write(self._descriptor, json.dumps(document).encode() + b"\n")

    def sign(self, trouble: str = "") -> None:
        """Write a sign of life, with what keeps it from its work, if the last was some time ago."""
        now = time.monotonic()
        if now - self._signed > SIGN_S:
            self._signed = now
            self.say({"alive": trouble})

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message of the log."""
        name, level = record.name, record.levelno
        self.say({"name": name, "level": level, "text": record.getMessage()})


def _receive(setup: Setup, lines: _Lines) -> None:
    from scanloom.engine.listen.receive import receive

    def tell(address: str, port: int, spool: Path) -> None:
        lines.say({"ready": {"port": port}})

    receive(setup.site, setup.out, tell, lines.sign)


def _work(setup: Setup, lines: _Lines) -> None:
    from scanloom.engine.listen.outbox import Outbox, outbox_folder
    from scanloom.engine.listen.receive import end_requested
    from scanloom.engine.listen.work import LOOK_S as BETWEEN_LOOKS_S
    from scanloom.engine.listen.work import Worker
    from scanloom.io.output.file_names import CASE
    from scanloom.io.output.json_file import read_json

    outbox = Outbox(outbox_folder(setup.out))

    def published(case_folder: Path, targets: Sequence[str], begun: float) -> None:
        for target in targets:
            if not outbox.add(case_folder, target, begun):
                case_id = read_json(case_folder / CASE)["case"]  # its folder may name a patient
                LOG.warning("case %s: nothing for %s: no DICOM results", case_id, target)

    def start_tables(runs: Sequence[str]) -> subprocess.Popen[bytes]:
        process = start_part(TABLES, setup, *runs)
        cast("IO[bytes]", process.stdin).close()
        return process

    with (
        end_requested() as requested,
        Worker(setup.site, setup.spool, setup.out, setup.key, published, start_tables) as worker,
    ):
        lines.say({"ready": {}})
        began = time.time()
        while not requested.wait(BETWEEN_LOOKS_S):
            worker.step(lines.sign)
            if worker.is_idle and not -CLOCK_STEP_S < time.time() - began < LONGEST_LIFE_S:
                LOG.info("the worker ends, since the certificate of its cluster would expire")
                break


def _deliver(setup: Setup, lines: _Lines) -> None:
    from scanloom.engine.listen.delivery import clear_studies, delivering
    from scanloom.engine.listen.outbox import Outbox, outbox_folder
    from scanloom.engine.listen.receive import end_requested

    site, after, rules = setup.site, setup.site.clear_after, setup.site.rules_digest
    outbox = Outbox(outbox_folder(setup.out), setup.key)
    with end_requested() as requested, delivering(site, outbox, lines.sign):
        lines.say({"ready": {}})
        pause = 0.0
        while not requested.wait(pause):
            pause = CLEAR_PAUSE_S
            if after is not None and (removed := clear_studies(setup.spool, outbox, after, rules)):
                LOG.info("%s removed from the spool", counted(removed, "study", "studies"))


def _show(setup: Setup, lines: _Lines) -> None:
    from scanloom.engine.listen.page import RESTS, ListenPage
    from scanloom.engine.listen.receive import end_requested

    os.nice(10)  # receiving and cases come first
    os.set_blocking(0, False)
    with disk_errors_as_scan_errors(), end_requested() as requested:
        page = ListenPage(setup.site, setup.spool, setup.out, load_key_of(setup.out, setup.key))
        page.write()  # a mistake in `metrics` is told at the start
        lines.say({"ready": {}})
        states, due = dict[str, str](), time.monotonic() + PAGE_PAUSE_S
        while not requested.wait(max(0.0, min(SIGN_S, due - time.monotonic()))):
            lines.sign()
            if (began := time.monotonic()) >= due:
                states = _told(states)
                page.write(states)
                took = time.monotonic() - began
                due = began + took + max(PAGE_PAUSE_S, RESTS * took)
        page.write(has_ended=True)


def _told(before: dict[str, str]) -> dict[str, str]:
    """Return the states of the other parts that the keeper told last."""
    lines = b""
    with suppress(BlockingIOError):
        while data := os.read(0, 1 << 16):
            lines += data
    for line in reversed(lines.splitlines()):
        with suppress(ValueError):  # the pipe was full
            return dict(json.loads(line))
    return before


def _write_tables(setup: Setup, runs: Sequence[str]) -> None:
    from scanloom.engine.listen.tables import write_all_tables

    os.nice(10)  # cases come first
    write_all_tables(setup.site, setup.spool, setup.out, setup.key, runs)


def main() -> None:
    """Run a part: `python -m scanloom.engine.listen.parts ROLE [RUN ...]`."""
    die_with_parent()
    keep_memory_private()
    settle_in()
    role, *runs = sys.argv[1:]
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # the keeper may write more
        document = json.loads(stdin.readline())
    if os.getppid() != document["parent"]:
        return  # it died while this process started
    lines = _Lines(os.dup(1))  # which others do not inherit
    os.dup2(2, 1)
    setup = TypeAdapter(Setup).validate_python(document)
    logger = logging.getLogger(OURS)
    logging.root.addHandler(logging.NullHandler())  # other libraries' messages name patients
    logger.setLevel(max(int(document["level"]), logging.INFO))
    logger.addHandler(lines)
    warnings.simplefilter("ignore")
    do: Mapping[str, Callable[[], None]] = {
        RECEIVER: lambda: _receive(setup, lines),
        WORKER: lambda: _work(setup, lines),
        DELIVERY: lambda: _deliver(setup, lines),
        PAGE: lambda: _show(setup, lines),
        TABLES: lambda: _write_tables(setup, runs),
    }
    try:
        do[role]()
    except Exception as error:
        fault = blame(error)
        lines.say({"failed": [fault.reason.code, fault.detail, fault.private]})
        if isinstance(error, ScanError):
            sys.exit(1)
        raise


if __name__ == "__main__":
    main()
