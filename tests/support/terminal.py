"""`python terminal.py ZOO_LIST COMMAND ...`: a command whose model zoo is that of a test's server.

`answer` runs it on a terminal of its own, and types answers.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def answer(
    zoo: str, *arguments: str | Path, typed: str, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command with a terminal as its stdin and stderr; return its exit code and stderr."""
    ours, theirs = pty.openpty()
    os.write(ours, typed.encode())
    command = [sys.executable, __file__, zoo, *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, env=dict(environment)
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # EIO: the command has ended
        pass
    finally:
        os.close(ours)
    return process.wait(), shown.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    from scanloom.cli.main import main
    from scanloom.convert.download import addresses

    addresses.ZOO_LIST = sys.argv[1]  # type: ignore[misc]  # a stand-in for the network
    main(sys.argv[2:])
