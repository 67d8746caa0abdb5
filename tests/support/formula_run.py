"""`scanloom` with a formula in place of networks, as a program: `python formula_run.py run ...`.

The formula is `engine_models.Threshold`: it behaves as a scan's brightest voxel selects. It keeps
its notes in the folder that FORMULA names: `starts`, a line a start, and a file `at-PROCESS-TASK`
for each scan that it works on. FORMULA_SECONDS: its sleep for each scan. The models of the workflow
are read as cards, and not loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scanloom.io.system.scratch_folders import process_start_ticks

PROGRAM = Path(__file__)


def formula_environment(notes: Path, seconds: float = 0.0, **more: str) -> dict[str, str]:
    """Return the environment of a run by formula: its processes are known by `FORMULA`."""
    notes.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")))
    return {
        **os.environ,
        "PYTHONPATH": path.rstrip(os.pathsep),
        "FORMULA": str(notes),
        "FORMULA_SECONDS": str(seconds),
        "SCANLOOM_KEY": str(notes / "key"),
        **more,
    }


def start(
    arguments: list[str | Path], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; its output goes to a file."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, arguments)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def processes(notes: Path) -> dict[int, str]:
    """Return the command line of every process that runs with these notes."""
    mark = f"FORMULA={notes}".encode()
    noted = notes / "processes"
    lines = noted.read_text().splitlines() if noted.exists() else []
    ours = {int(process): start for process, start in map(str.split, lines)}
    commands = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            process = int(folder.name)
            known = ours.get(process) == process_start_ticks(process)
            if known or mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    commands[int(folder.name)] = command.decode("utf-8", "replace").strip()
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return commands


if __name__ == "__main__":
    from scanloom.cli.main import main
    from scanloom.engine import run
    from support import engine_models

    engine_models.note_process(Path(os.environ["FORMULA"]))
    run.model_loader = engine_models.formula_loader
    main()
