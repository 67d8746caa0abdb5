"""What `scanloom plan` says of a run over 2,000 small studies, and what the run takes.

    python plan.py --folder FOLDER [--studies 2010]

The archive is that of `tests/stress/kill_runs.py` (12,000 files, a fifth compressed, some damaged),
which is kept in FOLDER for the next time; a small UNet of random weights stands for the network.
The plan knows nothing of this machine before: its rates are kept apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import machine, parse, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from stress.kill_runs import make_archive
from support.commands import write_tiny_bundle

WORDS = {"seconds": "time, s", "written": "results, MB", "host": "memory of a worker, MB"}


def scanloom(folder: Path, *arguments: str) -> Any:
    """Run a command with a cache of its own; return what its --json prints."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "SCANLOOM_KEY": str(folder / "key")}
    command = [sys.executable, "-m", "scanloom", *arguments, "--json"]
    done = subprocess.run(
        command, env={**os.environ, **own}, check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode not in (0, 1):  # 1: some cases failed, as they should
        raise SystemExit(f"scanloom {arguments[0]} ended with {done.returncode}")
    return json.loads(done.stdout)


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="kept; default a temporary one")
    parser.add_argument("--studies", type=int, default=2010)
    given = parse(parser, studies=12)
    if given.folder:
        compare(given.folder, given.studies)
        return
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), given.studies)


def compare(folder: Path, studies: int) -> None:
    """Plan and run an archive of so many studies, which is drawn if it is not in the folder."""
    make_archive(folder / "archive", studies)
    for name in ("cache", "out", "bundles"):
        shutil.rmtree(folder / name, ignore_errors=True)
    bundle = write_tiny_bundle(folder / "bundles")
    workflow = folder / "workflow.yaml"
    workflow.write_text(f"name: planned\nmodels: [{bundle}]\nselect: {{modality: CT}}\n")
    asked = (str(workflow), str(folder / "archive"), "--out", str(folder / "out"))
    print(machine("scanloom", "torch", "distributed"), flush=True)
    plan = scanloom(folder, "plan", *asked)["plan"]
    print(f"{plan['files']['found']} files, {plan['todo']} cases to do", flush=True)
    compared = scanloom(folder, "run", *asked)["plan"]
    scale = {"seconds": 1.0, "written": 1e-6, "host": 1e-6}
    rows = [
        [words, *(compared[part][name] * scale[name] for part in ("planned", "happened"))]
        for name, words in WORDS.items()
    ]
    print(table(["", "planned", "happened", "ratio"], [[*row, row[1] / row[2]] for row in rows]))


if __name__ == "__main__":
    main()
