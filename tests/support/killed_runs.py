"""Runs by formula over an archive of tiny scans in small parts, of which all processes are killed.

A run is forked from a server that has imported everything, and so is its engine child. All limits
are small: files of a part of the index, rows in memory, and rows that are appended before a table
is written anew.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.early_pace import Pace
from support.engine_models import Threshold, formula_models
from support.formula_run import formula_environment, processes
from support.kill_points import kill_all, watch_operations

DEADLINE_S = 600.0


def main() -> None:
    """Run a command, as a process that the fork server has made."""
    from scanloom.cli.main import main as command
    from scanloom.engine import run
    from scanloom.engine.worker import supervisor
    from support import engine_models, fork_server, warm_workers

    notes = Path(os.environ["FORMULA"])
    engine_models.note_process(notes)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:  # the server of engine children
        ours.close()
        engine_models.note_process(notes)
        fork_server.serve(theirs)
        os._exit(0)
    theirs.close()
    server = fork_server.ForkServer(ours)
    warm_workers.fork_server = lambda: server  # type: ignore[assignment]
    supervisor.subprocess = warm_workers.WARM_WORKERS  # type: ignore[assignment]
    run.load_models = small_models  # type: ignore[assignment]
    make_small()
    Pace(pytest.MonkeyPatch())  # else such an index is complete before its first case
    watch_operations()
    command()


def small_models(*_: object) -> Sequence[Threshold]:
    """Load models, in an engine child."""
    make_small()
    watch_operations()
    return formula_models()


def make_small() -> None:
    """Make all limits small, in this process."""
    from scanloom.engine import early_cases, run
    from scanloom.engine.results import run_cases, tabled_cases
    from scanloom.io.index import claims, merge, parts, storage
    from scanloom.io.output import crosswalk, ledger
    from scanloom.review.report import parts as report_parts

    parts.PART_FILES, claims.POLL_S, storage.SORTED_AT_ONCE = 12, 0.02, 8
    storage.MERGED_AT_ONCE, storage._BATCH, merge._DESCRIBED_AT_ONCE = 3, 2, 2
    early_cases.ENOUGH_CASES = run.ENOUGH_CASES = 3  # type: ignore[attr-defined]
    crosswalk.CHEAP_BYTES, ledger.MIN_LINES_BYTES, ledger.CHECKED = 1 << 12, 1 << 11, 5
    tabled_cases.BATCH_ROWS, run_cases.SOURCES_AT_ONCE = 16, 10
    report_parts.ROWS, report_parts.WHOLE = 10, 20


@dataclass
class KilledRuns:
    """Runs of one workflow over one archive into one output folder, `folder/out`."""

    folder: Path
    archive: Path
    workflow: Path
    key: Path
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.out, self.notes = self.folder / "out", self.folder / "notes"
        self.temporary, self._log = self.folder / "tmp", self.folder / "log"
        self.temporary.mkdir(parents=True, exist_ok=True)

    def begin(self, *options: str | Path, kill: str = "", trace: Path | None = None):  # type: ignore[no-untyped-def]
        """Start the run; `kill` is a moment of `kill_points`."""
        from support.fork_server import fork_server

        counter = self.notes / "counter"
        counter.unlink(missing_ok=True)
        environment = formula_environment(
            self.notes,
            FORMULA_KILL=kill,
            FORMULA_COUNTER=str(counter),
            FORMULA_TRACE=str(trace or ""),
            SCANLOOM_KEY=str(self.key),
            TMPDIR=str(self.temporary),
            XDG_CACHE_HOME=str(self.folder / "cache"),
        )
        command = ["run", self.workflow, self.archive, "--out", self.out, "--cluster", "none", "-q"]
        words = [str(word) for word in (*command, *self.options, *options)]
        with self._log.open("ab") as log:
            descriptors = [log.fileno(), log.fileno()]
            return fork_server().fork("support.killed_runs", words, environment, descriptors)

    def __call__(self, *options: str | Path, kill: str = "", trace: Path | None = None) -> int:
        """Run; return the exit code, negative if it was killed."""
        process = self.begin(*options, kill=kill, trace=trace)
        try:
            code: int = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            kill_all(self.notes)
            raise
        while processes(self.notes):  # those that were killed with it
            pass
        return code
