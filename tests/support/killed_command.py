"""`python killed_command.py FOLDER MOMENT COMMAND ...`: a command that is killed at a moment.

Moments are counted by the file operations below FOLDER, as Python's audit hooks report them before
they happen: at operation MOMENT, the process gets SIGKILL. With several MOMENTs, separated by
commas, the command runs once for each, in a fork of a process that has imported everything; -1 is
none. For each, a line says how many operations there were, or that it was killed; FOLDER is moved
to FOLDER-MOMENT afterwards, and made again as it was.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink"}


def run(folder: Path, moment: int, command: list[str], report: int) -> None:
    """Run a command in this process; at an operation it is killed."""
    count = 0
    inside = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in OPERATIONS:
            return
        paths = [os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes, os.PathLike))]
        if not any(inside in path for path in paths):
            return
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    from scanloom.cli.main import main

    sys.addaudithook(hook)
    try:
        main(command)
    finally:
        os.write(report, f"{count}\n".encode())


def main() -> None:
    """Run the command once for each moment, and print what became of it."""
    folder, moments, command = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    from scanloom.engine.case.models import import_heavy

    import_heavy()
    before = folder.with_name(f"{folder.name}-before")
    shutil.copytree(folder, before)
    for moment in moments:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            try:
                run(folder, int(moment), command, write)
            finally:
                os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        with os.fdopen(read) as report:
            print(moment, "killed" if os.WIFSIGNALED(status) else report.read().strip(), flush=True)
        folder.rename(folder.with_name(f"{folder.name}-{moment}"))
        shutil.copytree(before, folder)


if __name__ == "__main__":
    main()
