"""Kills a run over an archive again and again, and compares its results with an undisturbed one.

    python tests/stress/kill_runs.py --folder FOLDER [--studies 2010] [--repeat 5] [--broken-writer]

An archive of small studies is made in FOLDER (and kept for the next time), a fifth of them
compressed, a few damaged. It is run undisturbed, then again with SIGKILL for client, scheduler,
worker, child process and decode child while cases are being indexed, loaded, segmented, written,
published and reported; the stage of the run is seen from outside, by its folder and by /proc. An
ended process is started again. At the end everything is compared byte for byte. A formula stands
for the network (`formula_run.py`).

With `--broken-writer` a case is published file by file: the script then must find faults, and ends
with 0 if it does.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.uid import JPEG2000Lossless, JPEGLSLossless, RLELossless

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.commands import write_tiny_bundle
from support.formula_run import formula_environment, processes, start
from support.output_state import rows_of_folders, told_results
from support.write_dicom import Coding, Words, write_series

SLICES = 6
SYNTAXES = (JPEG2000Lossless, JPEGLSLossless, RLELossless)
FIRST = 3000
"""The brightest voxel of study n is FIRST + n, so that the formula knows which one it works on."""
WRONG = 1006
"""`engine_models.RAISE`: the model raises."""
PATIENCE = 60.0
"""Seconds to wait for a moment to kill at, and for a run to end."""
ORPHAN_AFTER = 10.0
"""Seconds that the processes of a run may outlive its client."""

Victim = str  # "client", "scheduler", "worker", "engine" or "decoder"
PLAN: tuple[tuple[str, Victim, str], ...] = (
    ("index", "client", "none"),
    ("load", "decoder", "none"),
    ("write", "engine", "none"),
    ("publish", "client", "none"),
    ("segment", "client", "none"),
    ("load", "client", "local"),
    ("segment", "worker", "local"),
    ("publish", "engine", "local"),
    ("write", "worker", "local"),
    ("write", "client", "local"),
    ("load", "scheduler", "address"),
    ("segment", "engine", "address"),
    ("publish", "worker", "address"),
    ("write", "scheduler", "address"),
    ("report", "client", "none"),
)
"""What is killed when, and how the run is done; each is repeated."""


def make_archive(folder: Path, studies: int) -> None:
    """Write small CT studies: a fifth compressed, some no CT, damaged, with a gap, packed."""
    if (folder / "whole").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    for n in range(studies):
        stored = np.random.default_rng(n).integers(0, 900, (32, 32, SLICES)).astype(np.int16)
        brightest = WRONG if n % 100 == 11 else FIRST + n
        stored[3:7, 3:7, 1 : SLICES - 1] = brightest + 1024
        syntax = SYNTAXES[n % 3] if n % 5 == 0 else Coding().syntax
        attributes = Words(
            modality="MR" if n % 100 == 7 else "CT",
            name=f"series {n}",
            study=f"study {n}",
            more={} if n % 10 == 0 else {"BurnedInAnnotation": "YES"},  # most need no picture
        )
        paths = write_series(
            folder / f"{n // 100:03d}" / f"{n:06d}",
            stored,
            coding=Coding(syntax=syntax),
            words=attributes,
        )
        if n % 100 == 8:
            paths[2].write_bytes(paths[2].read_bytes()[:-100])
        elif n % 100 == 9:
            paths[2].unlink()
        elif n % 100 == 12:
            packed = paths[0].with_suffix(".dcm.gz")
            packed.write_bytes(gzip.compress(paths[0].read_bytes(), mtime=0))
            paths[0].unlink()
    (folder / "whole").write_text("no image")


@dataclass
class RunFolder:
    """One output folder with all that belongs to its runs."""

    folder: Path
    archive: Path
    broken: bool = False
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out, self.notes = self.folder / "out", self.folder / "notes"
        more = {"TMPDIR": str(self.folder / "tmp"), "FORMULA_BROKEN": "1" if self.broken else ""}
        self.environment = formula_environment(self.notes, 0.02, **more)

    def clear(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        self.notes.mkdir()
        shutil.copy(self.folder.parent / "key", self.notes / "key")

    def begin(self, cluster: str) -> subprocess.Popen[bytes]:
        """Start the run."""
        where = self._open_cluster() if cluster == "address" else cluster
        workflow = self.folder.parent / "workflow.yaml"
        command = ["run", workflow, self.archive, "--out", self.out, "--cluster", where]
        return start(command, self.environment, self.folder / "log")

    def _open_cluster(self) -> str:
        """Start a scheduler and a worker of their own, on this machine."""
        self.close_cluster()
        file = self.folder / "scheduler.json"
        file.unlink(missing_ok=True)
        common = ("--host", "127.0.0.1", "--scheduler-file", str(file))
        self._dask("scheduler", *common, "--port", "0", "--no-dashboard")
        wait_for(file.exists)
        preload = ("--preload", "scanloom.engine.clusters.dask_preload", "--no-dashboard")
        self._dask("worker", *common, "--nthreads", "3", *preload, "--death-timeout", "20")
        return str(file)

    def _dask(self, *command: str) -> None:
        with (self.folder / "dask.log").open("ab") as log:
            self.workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dask", *command],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def close_cluster(self) -> None:
        """End the scheduler and the worker."""
        for process in reversed(self.workers):
            process.terminate()
        for process in self.workers:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.workers.clear()

    # --- what goes on, seen from outside -------------------------------------------------------

    def status(self) -> dict[str, Any]:
        runs = sorted((self.out / "runs").glob("*/status.json"))
        try:
            reported: dict[str, Any] = json.loads(runs[-1].read_text())
        except (IndexError, OSError, ValueError):
            return {}
        return reported

    def published(self) -> int:
        cases = self.out / "cases"
        return len(list(cases.iterdir())) if cases.is_dir() else 0

    def drafts(self) -> Iterator[set[str]]:
        """Yield the content of each unfinished case folder."""
        try:
            for entry in os.scandir(self.out / ".work"):
                if entry.name.endswith(".new"):
                    yield {file.name for file in os.scandir(entry.path)}
        except OSError:
            return

    def engines(self) -> list[int]:
        return [
            p
            for p, command in processes(self.notes).items()
            if "scanloom.engine.worker.child_main" in command
        ]

    def decoders(self, engine: int) -> list[int]:
        """Return the processes that decode for a child process: children of its helper."""
        return [worker for helper in children(engine) for worker in children(helper)]

    def loading(self, engine: int) -> bool:
        """Whether a child process has a file of the archive open."""
        try:
            files = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{engine}/fd")]  # noqa: PTH115 fast
        except OSError:
            return False
        return any(file.startswith(str(self.archive)) for file in files)

    def marks(self) -> list[str]:
        return [path.name for path in self.notes.glob("at-*")]

    def is_at(self, stage: str, engine: int) -> bool:
        """Whether a case (or the run itself) is at that stage now."""
        if stage == "write":
            return any(names and "SHA256SUMS" not in names for names in self.drafts())
        if stage == "publish":
            return any("SHA256SUMS" in names for names in self.drafts())
        if stage == "segment":
            return bool(self.marks())
        return bool(self.decoders(engine)) or self.loading(engine)


def children(process: int) -> list[int]:
    """Return the children of all threads of a process."""
    processes_below: list[int] = []
    try:
        for thread in os.scandir(f"/proc/{process}/task"):
            with open(f"{thread.path}/children") as file:  # noqa: PTH123 it is read often
                processes_below += map(int, file.read().split())
    except OSError:
        pass
    return processes_below


def parent(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Return whether it came true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Tally:
    """Killed processes, and faults on the way."""

    kills: Counter[tuple[str, Victim, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    slowest_end: float = 0.0


class Killer:
    """Goes through the plan with one output folder."""

    def __init__(self, run_folder: RunFolder, seed: int = 0) -> None:
        self.run_folder, self.tally = run_folder, Tally()
        self._random = random.Random(seed)
        self._client: subprocess.Popen[bytes] | None = None
        self._cluster = ""

    def kill(self, stage: str, victim: Victim, cluster: str) -> bool:
        """Kill once; return whether the moment came."""
        client = self._running(cluster)
        if stage in ("index", "report"):
            hit = self._at(stage, client)
        else:
            hit = self._in_work(stage, victim, client)
        if hit:
            self.tally.kills[stage, victim, cluster] += 1
        if victim in ("client", "scheduler"):
            self._end(client)
        return hit

    def finish(self) -> None:
        """Let the run come to its end."""
        for _ in range(3):
            code = self._running("local").wait()  # Dask clears what it left when it next starts
            self._end(self._client)
            if code in (0, 1):
                return
            self.tally.faults.append(f"the run ended with {code}")

    def _running(self, cluster: str) -> subprocess.Popen[bytes]:
        if self._client is not None and (
            self._client.poll() is not None or cluster != self._cluster
        ):
            if self._client.poll() is None:
                self._client.send_signal(signal.SIGINT)  # another kind of run comes next
            self._end(self._client)
        if self._client is None:
            self._client, self._cluster = self.run_folder.begin(cluster), cluster
            self.tally.starts += 1
        return self._client

    def _end(self, client: subprocess.Popen[bytes] | None) -> None:
        """Wait until all processes of a run are gone; those that are not are orphans."""
        if client is None:
            return
        try:
            client.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.tally.faults.append("the client did not end")
            client.kill()
            client.wait()
        began = time.monotonic()
        self.run_folder.close_cluster()
        wait_for(lambda: not processes(self.run_folder.notes), ORPHAN_AFTER)
        orphans = processes(self.run_folder.notes)
        self.tally.slowest_end = max(self.tally.slowest_end, time.monotonic() - began)
        for process, command in orphans.items():
            self.tally.faults.append(f"orphan: {command}")
            os.kill(process, signal.SIGKILL)
        for mark in self.run_folder.marks():
            (self.run_folder.notes / mark).unlink(missing_ok=True)
        self._client = None

    def _at(self, stage: str, client: subprocess.Popen[bytes]) -> bool:
        """Kill the client while it indexes, or while it writes tables and report."""
        began = time.time()
        states = ("indexing",) if stage == "index" else ("collecting", "done")

        def reached() -> bool:
            now = self.run_folder.status()
            return client.poll() is not None or (
                now.get("moment", 0) >= began - 1 and now.get("state") in states
            )

        wait_for(reached, 20 * PATIENCE)
        time.sleep(self._random.uniform(0.0, 1.0))
        if client.poll() is not None:
            return False
        client.kill()
        client.wait()
        return self.run_folder.status().get("state") in states

    def _in_work(self, stage: str, victim: Victim, client: subprocess.Popen[bytes]) -> bool:
        done = self.run_folder.published()
        until = time.monotonic() + 2 * PATIENCE
        wait_for(lambda: self.run_folder.published() > done or client.poll() is not None)
        engines = self.run_folder.engines()
        looked = time.monotonic()
        while time.monotonic() < until and client.poll() is None:
            if time.monotonic() - looked > 1 or not engines:  # it may have been replaced
                engines, looked = self.run_folder.engines(), time.monotonic()
            for engine in engines:
                if self.run_folder.is_at(stage, engine) and self._strike(victim, engine, client):
                    return True
        return False

    def _strike(self, victim: Victim, engine: int, client: subprocess.Popen[bytes]) -> bool:
        if victim == "client":
            client.kill()
            return True
        if victim == "scheduler":
            self.run_folder.workers[0].kill()
            return True
        chosen = {"engine": [engine], "worker": [parent(engine)]}.get(victim)
        if chosen is None:
            chosen = self.run_folder.decoders(engine)
        try:
            os.kill(chosen[0], signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True


def digests(out: Path) -> dict[str, str]:
    """Return the hash of every file that must be the same for equal runs."""
    timed = ("timing.json", "audit.jsonl", "ledger.parquet")  # and inodes: see `compare`
    hashes = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        aside = name.startswith(("runs/", "report/", "private/runs/")) or path.name in timed
        if path.is_file() and not aside:
            hashes[name] = hashlib.blake2b(path.read_bytes()).hexdigest()
    return hashes


def compare(undisturbed: Path, killed: Path, key: bytes) -> list[str]:
    """Return what is different, missing or additional in the run that was killed."""
    ours, theirs = digests(killed), digests(undisturbed)
    faults = [f"missing: {name}" for name in theirs.keys() - ours.keys()]
    faults += [f"more: {name}" for name in ours.keys() - theirs.keys()]
    faults += [f"different: {n}" for n in ours.keys() & theirs.keys() if ours[n] != theirs[n]]
    tables = [rows_of_folders(out, "ledger") for out in (killed, undisturbed)]
    trails = [told_results(out, key) for out in (killed, undisturbed)]
    pairs = {"ledger": tables, "audit trail": trails}
    faults += [f"different: {name}" for name, (one, other) in pairs.items() if one != other]
    return sorted(faults)


def left_over(run_folder: RunFolder) -> list[str]:
    """Return remains that no run needs: drafts, sockets, temporary files."""
    temporary = run_folder.folder / "tmp"
    known = ("torchinductor_", "dask-scratch-space")  # a cache; a folder with two lock files
    own = [p for p in temporary.glob("*") if not p.name.startswith(known)]
    scratch = [p for p in temporary.glob("dask-scratch-space/*") if p.is_dir()]
    own += [p for p in scratch if not p.name.startswith("scheduler-")]  # of this script's own
    faults = [f"left in .work: {p.name}" for p in (run_folder.out / ".work").glob("*")]
    faults += [f"left in TMPDIR: {p.relative_to(temporary)}" for p in own]
    drafts = {p for p in run_folder.out.rglob(".*") if p.name not in (".work", ".lock")}
    return faults + [f"a draft: {p.relative_to(run_folder.out)}" for p in drafts]


def started_again(run_folder: RunFolder, values: dict[int, str]) -> list[str]:
    """Return the cases that were started when they had been published."""
    faults = []
    for line in (run_folder.notes / "starts").read_text().splitlines():
        value, _, moment = line.split()
        folder = run_folder.out / "cases" / values.get(int(value), "none")
        if folder.exists() and folder.stat().st_ctime + 0.01 < float(moment):
            faults.append(f"started when it was published: study {int(value) - FIRST}")
    return faults


def brightest(out: Path) -> dict[int, str]:
    """Return the id of each published case, by its brightest voxel."""
    ids = {}
    for folder in (out / "cases").iterdir():
        reported = json.loads((folder / "measurements.json").read_text())
        ids[round(reported["measurements"][0]["mean"])] = folder.name  # all voxels are that bright
    return ids


def measured(run_folder: RunFolder) -> dict[str, float]:
    """Run undisturbed; return seconds, peak memory of all processes together, and bytes."""
    run_folder.clear()
    began, peak = time.monotonic(), 0.0
    client = run_folder.begin("none")
    while client.poll() is None:
        peak = max(peak, memory(run_folder.notes))
        time.sleep(1.0)
    if client.returncode != 1:  # some failed: they are damaged
        raise SystemExit(f"the undisturbed run ended with {client.returncode}")
    size = sum(p.stat().st_size for p in run_folder.out.rglob("*") if p.is_file())
    return {
        "seconds": time.monotonic() - began,
        "MiB at most": peak / 2**20,
        "MiB out": size / 2**20,
    }


def memory(notes: Path) -> float:
    """Return the bytes that all processes of a run take, shared pages shared out."""
    total = 0.0
    for process in processes(notes):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def main() -> int:
    """Run the script."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--folder", type=Path, required=True)
    reader.add_argument("--studies", type=int, default=2010)
    reader.add_argument("--repeat", type=int, default=3, help="how often each line of the plan")
    reader.add_argument("--only", choices=("none", "local", "address"), help="one kind of run")
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--broken-writer", action="store_true")
    options = reader.parse_args()
    folder = options.folder.absolute()
    prepare(folder, options.studies)
    undisturbed = RunFolder(folder / "undisturbed", folder / "archive")
    if not (folder / "measured.json").exists():
        (folder / "measured.json").write_text(json.dumps(measured(undisturbed)))
    print("undisturbed:", (folder / "measured.json").read_text())
    killed = RunFolder(folder / "killed", folder / "archive", options.broken_writer)
    killed.clear()
    began = time.monotonic()
    plan = [line for line in PLAN if options.only in (None, line[2])]
    tally = kill_all(killed, plan, options.repeat, options.seed)
    faults = (
        tally.faults
        + compare(undisturbed.out, killed.out, (folder / "key").read_bytes())
        + left_over(killed)
    )
    faults += started_again(killed, brightest(undisturbed.out))
    print_table(tally, time.monotonic() - began)
    print("\n".join(faults[:40]) or "no fault")
    print(f"{len(faults)} faults")
    return int(bool(faults) != options.broken_writer)


def prepare(folder: Path, studies: int) -> None:
    """Make archive, key, model and workflow."""
    make_archive(folder / "archive", studies)
    if not (folder / "key").exists():
        (folder / "key").write_bytes(bytes(range(32)))
        model = write_tiny_bundle(folder / "bundles")
        execution = "{threads: 1, workers: 1, device: cpu}"
        text = f"name: kills\nmodels: [{model}]\nselect: {{modality: CT}}\nexecution: {execution}\n"
        (folder / "workflow.yaml").write_text(text)


def kill_all(
    run_folder: RunFolder, plan: Sequence[tuple[str, Victim, str]], repeat: int, seed: int
) -> Tally:
    """Go through the plan: by kinds of run, so that not every kill needs another kind."""
    killer = Killer(run_folder, seed)
    for stage, victim, cluster in plan:
        for _ in range(repeat):
            hit = killer.kill(stage, victim, cluster)
            print(f"{stage} {victim} {cluster}: {'killed' if hit else 'missed'}", flush=True)
    killer.finish()
    return killer.tally


def print_table(tally: Tally, seconds: float) -> None:
    """Print the number of kills by stage and process."""
    stages = dict.fromkeys(stage for stage, _, _ in PLAN)
    victims = dict.fromkeys(victim for _, victim, _ in PLAN)
    print(f"{'':10s}" + "".join(f"{victim:>10s}" for victim in victims) + f"{'all':>10s}")
    for stage in stages:
        row = [
            sum(n for (s, v, _), n in tally.kills.items() if (s, v) == (stage, w)) for w in victims
        ]
        print(f"{stage:10s}" + "".join(f"{n or '':>10}" for n in row) + f"{sum(row):>10d}")
    print(f"{tally.kills.total()} kills, {tally.starts} starts, {seconds:.0f} s;", end=" ")
    print(f"all processes gone {tally.slowest_end:.1f} s after the client at the latest")


if __name__ == "__main__":
    sys.exit(main())
