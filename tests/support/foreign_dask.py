"""A scheduler and workers of plain Dask, started by others; workers that lack something."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from support.cluster_runs import ClusterRun

OTHER_VERSION = """
import scanloom.version
scanloom.version.__version__ = "0.0.7"
"""
NO_SCANLOOM = """
import sys
sys.modules["scanloom"] = None
"""
BLIND = """
from pathlib import Path
def blind(self, *args, read=Path.read_text, **kwargs):
    if "handshake" in self.name:
        raise FileNotFoundError(self)
    return read(self, *args, **kwargs)
Path.read_text = blind
"""


class Foreign:
    """A scheduler and workers of plain Dask, in processes of their own."""

    def __init__(self, run: ClusterRun, stack: ExitStack) -> None:
        self._run, self._stack = run, stack
        self.file = run.folder / "scheduler.json"
        self.scheduler = self.start("scheduler", "--host", "127.0.0.1", "--port", "0")
        run.until(lambda: self.file.exists() and self.file.read_text(), "the scheduler file")

    def start(
        self,
        program: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        command = [*before, sys.executable, "-m", f"distributed.cli.dask_{program}"]
        quiet = ["--scheduler-file", str(self.file), "--no-dashboard", "--dashboard-address", ":0"]
        with (self._run.folder / f"{program}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *quiet, *options],
                env=dict(environment or self._run.environment),
                stdout=log,
                stderr=log,
            )
        self._stack.callback(end, process)
        return process

    def worker(
        self,
        preload: str = "",
        *options: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        path = self._run.folder / f"preload_{len(preload)}.py"
        path.write_text(preload)
        named = ["--preload", str(path)] if preload else []
        arguments = ("--host", "127.0.0.1", "--nthreads", "1", *named, *options)
        return self.start("worker", *arguments, environment=environment, before=before)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def foreign(run: ClusterRun) -> Iterator[Foreign]:
    with ExitStack() as stack:
        yield Foreign(run, stack)
