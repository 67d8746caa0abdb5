"""Runs by formula over an archive of tiny scans in small parts, of which all processes are killed.

A run is forked from a server that has imported everything, and so is its child process. All limits
are small: files of a part of the index, rows in memory, and rows that are appended before a table
is written anew.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from support.early_pace import Pace
from support.engine_models import Threshold, formula_models
from support.fork_server import ForkedProcess, ForkServer, fork_server, serve
from support.formula_run import formula_environment, processes
from support.kill_points import watch_operations
from support.machines import move_to_machine, refuse_links

DEADLINE_S = 600.0
KILLED = -signal.SIGKILL
SMALL = 5
"""Cases of which all are looked at: `scanloom.io.output.ledger.CHECKED`."""


def main() -> None:
    """Run a command, as a process that the fork server has made."""
    from scanloom.cli.main import main as command
    from scanloom.engine import run
    from scanloom.engine.worker import supervisor
    from support import engine_models, warm_workers

    if machine := os.environ["FORMULA_MACHINE"]:
        move_to_machine(machine)
        refuse_links()
    notes = Path(os.environ["FORMULA"])
    engine_models.note_process(notes)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:  # the server of child processes
        ours.close()
        engine_models.note_process(notes)
        serve(theirs)
        os._exit(0)
    theirs.close()
    server = ForkServer(ours)
    warm_workers.fork_server = lambda: server
    supervisor.subprocess = warm_workers.WARM_WORKERS
    run.model_loader = lambda *_: small_models
    make_small()
    Pace(SimpleNamespace(setattr=setattr))  # else such an index is complete before its first case
    watch_operations()
    command()


def small_models() -> Sequence[Threshold]:
    """Load models, in a child process."""
    make_small()
    watch_operations()
    return formula_models()


def make_small() -> None:
    """Make all limits small, in this process."""
    from scanloom.engine import early_cases, run
    from scanloom.engine.results import run_cases
    from scanloom.io.index import claims, merge, parts, storage
    from scanloom.io.output import crosswalk, ledger, tabled_cases
    from scanloom.review.report import parts as report_parts

    parts.PART_FILES, storage.SORTED_AT_ONCE = 12, 8
    claims.POLL_S, claims.BEAT_S, claims.SILENT_AFTER_S = 0.02, 0.5, 3.0
    storage.MERGED_AT_ONCE, storage._BATCH, merge._DESCRIBED_AT_ONCE = 3, 2, 2
    early_cases.ENOUGH_CASES = run.ENOUGH_CASES = 3
    crosswalk.CHEAP_BYTES, ledger.MIN_LINES_BYTES, ledger.CHECKED = 1 << 12, 1 << 11, SMALL
    tabled_cases.BATCH_ROWS, run_cases.SOURCES_AT_ONCE = 16, 10
    report_parts.ROWS, report_parts.WHOLE = 10, 20


@dataclass
class KilledRuns:
    """Runs of one workflow over one archive into `out`, one after the other.

    `folder` is for what they leave elsewhere. With a name of a `machine`, they are on it, where
    files can't be linked.
    """

    folder: Path
    archive: Path
    workflow: Path
    key: Path
    out: Path
    machine: str = ""

    def __post_init__(self) -> None:
        self.notes, self.temporary = self.folder / "notes", self.folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)

    def begin(self, *options: str | Path, kill: str = "", trace: str = "") -> ForkedProcess:
        """Start a run; `kill` and `trace` are as in `kill_points`."""
        counter = self.notes / "counter"
        counter.unlink(missing_ok=True)
        environment = formula_environment(
            self.notes,
            FORMULA_KILL=kill,
            FORMULA_COUNTER=str(counter),
            FORMULA_TRACE=trace,
            FORMULA_MACHINE=self.machine,
            SCANLOOM_KEY=str(self.key),
            TMPDIR=str(self.temporary),
            XDG_CACHE_HOME=str(self.folder / "cache"),
        )
        command = ["run", self.workflow, self.archive, "--out", self.out, "--cluster", "none", "-q"]
        words = [str(word) for word in (*command, *options)]
        with (self.folder / "log").open("ab") as log:
            descriptors = [log.fileno(), log.fileno()]
            return fork_server().fork("support.killed_runs", words, environment, descriptors)

    def __call__(self, *options: str | Path, kill: str = "", trace: str = "") -> int:
        """Run; return the exit code, that of SIGKILL if it was killed."""
        code = self.begin(*options, kill=kill, trace=trace).wait(DEADLINE_S)
        while not self.machine and processes(self.notes):  # those that were killed with it
            time.sleep(0.01)
        return code
