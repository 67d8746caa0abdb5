"""Processes that index one archive at the same time, for tests: `python -m support.shared_index`.

The argument is a JSON document with `archive`, `out`, `processes`, `kills`: `kills` times, one of
the processes is killed after a random time, each time into another folder in `out`. Processes have
neither hard links nor flock(2). A line is printed for each end: the folder, and for each process
that was not killed, the paths that it opened below `archive`, how many it counts, and a digest of
its index.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from scanloom.io.index import build, claims, merge, parts, storage
from support.index_rows import index_rows

KEY = bytes(32)
PART_FILES = 4


def digest(index: build.Index) -> str:
    """Return a digest of all that an index says."""
    return hashlib.sha256(repr(index_rows(index)).encode()).hexdigest()


def _refuse(*_arguments: Any, **_more: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, "a share without it")


def _index(archive: str, out: Path, answer: int) -> None:
    import fcntl

    os.link = fcntl.flock = _refuse
    opened = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event == "open" else None
        if isinstance(path, str | os.PathLike) and str(path).startswith(archive):
            opened.append(str(path))

    sys.addaudithook(note)
    index = build.build_index([archive], KEY, out, processes=1)
    read = sorted(set(opened))
    os.write(answer, f"{json.dumps([read, index.opened, digest(index)])}\n".encode())


def _together(archive: str, out: Path, processes: int, kill_after_s: float | None) -> list[Any]:
    """Return what the processes that were not killed say."""
    reader, writer = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            try:
                _index(archive, out, writer)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            os._exit(0)
        children.append(child)
    os.close(writer)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(children[0], signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    with open(reader) as answers:  # noqa: PTH123 - a pipe
        return [json.loads(line) for line in answers]


def main() -> None:
    """Index, kill, print."""
    import pyarrow.parquet  # noqa: F401 - before the fork

    told = json.loads(sys.argv[1])
    archive, out, processes = told["archive"], Path(told["out"]), told["processes"]
    parts.PART_FILES, claims.POLL_S, storage.SORTED_AT_ONCE = PART_FILES, 0.01, 8
    merge._DESCRIBED_AT_ONCE = 2
    start = time.monotonic()
    print(json.dumps(["whole", _together(archive, out / "whole", processes, None)]))
    lasts = time.monotonic() - start
    for number in range(told["kills"]):
        after = random.Random(number).uniform(0, lasts)
        name = f"killed {number}"
        print(json.dumps([name, _together(archive, out / name, processes, after)]))


if __name__ == "__main__":
    main()
