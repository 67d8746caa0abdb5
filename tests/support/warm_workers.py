"""Worker processes forked from one that has imported everything: runs in tests start at once.

`WarmWorkers.popen` stands in for `subprocess.Popen` in `scanloom.engine.worker.child_process`. Each
worker process is still one of its own, with its session, environment, output and exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PID, CODE = struct.Struct("i"), struct.Struct("i")
MODULE = "scanloom.engine.worker.child_main"


class WarmWorkers:
    """The process that the worker processes are forked from; started with the first of them."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def module(self) -> SimpleNamespace:
        """Stands in for the module `subprocess`."""
        return SimpleNamespace(
            Popen=self.popen,
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
        )

    def popen(
        self, command: Sequence[str], stdout: Any, env: Mapping[str, str], **_: Any
    ) -> WarmProcess:
        *_, module, number = command
        assert module == MODULE
        with self._lock:
            if self._server is None:
                self._start()
            ours, status = socket.socketpair()
            with status:
                request = json.dumps(dict(env)).encode()
                descriptors = [int(number), stdout.fileno(), status.fileno()]
                socket.send_fds(self._socket, [struct.pack("i", len(request))], descriptors)
                self._socket.sendall(request)
        return WarmProcess(ours)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, sys.path)))
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "support.warm_workers", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        if self._server is not None:
            self._socket.close()
            self._server.wait()


class WarmProcess:
    """A forked worker process, as `subprocess.Popen` shows one."""

    def __init__(self, status: socket.socket) -> None:
        self._status, self._ended = status, threading.Event()
        self.returncode: int | None = None
        (self.pid,) = PID.unpack(status.recv(PID.size, socket.MSG_WAITALL))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with self._status:
            data = self._status.recv(CODE.size, socket.MSG_WAITALL)
        self.returncode = CODE.unpack(data)[0] if data else -signal.SIGKILL
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


def serve(connection: socket.socket) -> None:
    """Fork a worker process for each request until the connection is closed."""
    from scanloom.engine.case.models import import_heavy
    from scanloom.engine.machine.lean_imports import without_optional_imports

    with without_optional_imports():
        for name in (MODULE, "support.engine_models"):
            importlib.import_module(name)
        import_heavy()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        if not head:
            return
        request = connection.recv(struct.unpack("i", head)[0], socket.MSG_WAITALL)
        if os.fork() == 0:
            connection.close()
            become_worker(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def become_worker(environment: Mapping[str, str], ours: int, output: int, status: int) -> None:
    """Fork once more: the first process reports the end of the second, which is the worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = os.fork()
    if worker:
        os.close(ours)
        os.write(status, PID.pack(worker))
        _, ended = os.waitpid(worker, 0)
        os.write(status, CODE.pack(os.waitstatus_to_exitcode(ended)))
        os._exit(0)
    os.close(status)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [MODULE, str(ours)]
    sys.modules[MODULE].main()
    sys.exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
