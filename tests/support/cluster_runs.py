"""Runs by formula over a small archive, for the tests of clusters: started, watched, judged."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from support import engine_models as em
from support.commands import write_tiny_bundle
from support.formula_run import formula_environment, processes, start

LOOPBACK = ("127.0.0.1", "::1")


class ClusterRun:
    """One workflow over an archive of small CTs, each of which takes `seconds`."""

    def __init__(self, folder: Path, scans: int, seconds: float, execution: str) -> None:
        self.folder, self.scans = folder, scans
        self.archive, self.out = folder / "archive", folder / "out"
        self.notes, self.log = folder / "notes", folder / "log"
        self.archive.mkdir(parents=True)
        for n in range(scans):
            em.make_case(self.archive, f"scan{n}", 3000 + n)
        model = write_tiny_bundle(folder / "bundles")
        self.workflow = folder / "workflow.yaml"
        head = f"name: test\nmodels: [{model}]\npolicy: {{modality: CT}}\nexecution: "
        self.workflow.write_text(head + execution)
        self.environment = formula_environment(self.notes, seconds)

    @contextmanager
    def going(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it beside the test; whatever is left of it at the end is killed."""
        command = ["run", self.workflow, self.archive, "--out", self.out, *options]
        run = start(command, self.environment, self.log)
        try:
            yield run
        finally:
            for process in (run.pid, *processes(self.notes)):
                with closing_of(process):
                    psutil.Process(process).send_signal(signal.SIGKILL)
            run.wait()

    def until(self, condition: Callable[[], Any], event: str, seconds: float = 120.0) -> Any:
        """Wait for something, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.1)
        raise AssertionError(f"{event} did not come; the run said:\n{self.output}")

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def started(self) -> Counter[str]:
        """The number of starts of each scan."""
        starts = self.notes / "starts"
        lines = starts.read_text().split("\n") if starts.exists() else []
        return Counter(line.split()[0] for line in lines if line)

    @property
    def status(self) -> dict[str, Any]:
        """The last status that the run wrote."""
        reported = sorted(self.out.glob("runs/*/status.json"))
        return json.loads(reported[-1].read_text()) if reported else {}

    @property
    def done(self) -> int:
        return len(list((self.out / "cases").glob("*/case.json")))

    def check_end(self, run: subprocess.Popen[bytes], seconds: float = 240.0) -> None:
        """All is published, nobody is blamed, and no foreign word was said."""
        assert run.wait(seconds) == 0, self.output
        assert self.done == self.status["done"] == self.scans
        assert self.status["failed"] == 0
        assert not list(self.out.glob("failed/*"))
        for name in ("distributed", "Traceback", "Warning", "asyncio", "tornado"):
            assert name not in self.output
        self.until(lambda: not processes(self.notes), "the end of all processes")


@contextmanager
def closing_of(process: int) -> Iterator[None]:
    """Pass over a process that is gone."""
    try:
        yield
    except psutil.NoSuchProcess:
        return


def listeners(notes: Path) -> list[tuple[str, int]]:
    """Return where the processes of a run listen."""
    addresses = []
    for process in processes(notes):
        with closing_of(process):
            for connection in psutil.Process(process).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.append((connection.laddr.ip, connection.laddr.port))
    return addresses


def http_answer(port: int, route: str) -> str:
    """Return the status that a port gives for a route, "" where it speaks no HTTP."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=60.0)) as line:
        line.sendall(f"GET {route} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        line.settimeout(2.0)
        try:
            head = line.recv(200)
        except OSError:
            return ""
    return head.split()[1].decode() if head.startswith(b"HTTP/") else ""
