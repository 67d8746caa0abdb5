"""Processes forked from a server that has imported everything: they start at once.

Each is a process of its own, with its session, environment, output and exit status.
"""

from __future__ import annotations

import atexit
import functools
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

LENGTH, PID, CODE = struct.Struct("i"), struct.Struct("i"), struct.Struct("i")
WORKER = "scanloom.engine.worker.child_main"
COMMAND = "scanloom.cli.main"
PRELOADED = (
    *(WORKER, COMMAND, "support.engine_models"),
    # what cases need beside `import_heavy`; MONAI comes with models, which a formula has none of
    *("monai", "scanloom.io.dicom.series", "scanloom.review.preview.page"),
)


class ForkServer:
    """The process that others are forked from; started with the first of them.

    `connection` is that to a server which somebody else has started.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket = connection
        self._lock = threading.Lock()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> ForkedProcess:
        """Run `main` of a module, at once if it is a preloaded one.

        Parameters
        ----------
        descriptors : sequence of int
            Standard output, standard error, and further ones to inherit. The numbers of the latter
            in the process follow the arguments.
        """
        request = json.dumps([module, [*arguments], dict(environment), str(Path.cwd())]).encode()
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            ours, status = socket.socketpair()
            with status:
                passed = [status.fileno(), *descriptors]
                socket.send_fds(self._socket, [LENGTH.pack(len(request))], passed)
                self._socket.sendall(request)
        return ForkedProcess(ours)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, sys.path)))
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "support.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )
        return ours

    def close(self) -> None:
        if self._server is not None and self._socket is not None:
            self._socket.close()
            self._server.wait()
            self._server = self._socket = None


@functools.cache
def fork_server() -> ForkServer:
    """Return the server of this test process; it ends with the process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


class ForkedProcess:
    """A forked process, as `subprocess.Popen` shows one."""

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
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


def serve(connection: socket.socket) -> None:
    """Fork a process for each request until the connection is closed."""
    from scanloom.engine.case.models import import_heavy
    from scanloom.engine.machine.lean_imports import (
        leave_out_unused_modules,
        without_optional_imports,
    )

    leave_out_unused_modules()
    with without_optional_imports():
        for name in PRELOADED:
            importlib.import_module(name)
        import_heavy()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 16)
        if not head:
            return
        (length,) = LENGTH.unpack(head)
        request = json.loads(connection.recv(length, socket.MSG_WAITALL))
        if os.fork() == 0:
            connection.close()
            become(*request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def become(
    module: str,
    arguments: list[str],
    environment: Mapping[str, str],
    folder: str,
    status: int,
    out: int,
    err: int,
    *inherited: int,
) -> None:
    """Fork once more: the first process reports the end of the second, which runs the module."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    process = os.fork()
    if process:
        for descriptor in inherited:
            os.close(descriptor)
        _, ended = os.waitpid(process, 0)
        os.write(status, CODE.pack(os.waitstatus_to_exitcode(ended)))
        os._exit(0)
    os.setsid()  # before its number is known: its group is killed by it
    os.write(status, PID.pack(os.getpid()))
    os.close(status)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments, *map(str, inherited)]
    _exit_code[:] = [1]
    try:
        importlib.import_module(module).main()
        _exit_code[:] = [0]
    except SystemExit as end:
        _exit_code[:] = [int(end.code or 0)]
    sys.exit()


_exit_code = [0]


def end_at_once() -> None:
    """End without taking all modules apart, which costs a forked process 2 s: it copies them."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(_exit_code[0])


if __name__ == "__main__":
    atexit.register(end_at_once)  # before all others, and so called after them
    serve(socket.socket(fileno=int(sys.argv[1])))
