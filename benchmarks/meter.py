"""Time, processor time and peak memory of the processes of a script, and environments for peers."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

OFTEN, SELDOM = 0.02, 0.25  # s between looks at memory: cheap ones, and dear ones
LIMIT = 3600.0  # s that a command may take: a peer that hangs must not hang the others
TAIL = 6  # lines shown of what a command that failed had to say

PEERS: dict[str, tuple[str, ...]] = {
    "nnunet": ("nnunetv2==2.8.1", "torch==2.13.0", "monai==1.6.1"),
    "monai": (
        "monai==1.6.1",
        "torch==2.13.0",
        "pytorch-ignite==0.5.5",
        "fire==0.7.1",
        "nibabel==5.4.2",
    ),
}
"""What pip installs into the environment of each peer."""


SAMPLE = Path(__file__).parents[1] / "data" / "torso_ct"
"""The study that ships with scanloom."""
UNAVAILABLE = 69
"""Exit status of a script that misses another program, as EX_UNAVAILABLE of sysexits.h."""


class Failed(SystemExit):
    """A command ended badly, or not in time. Where nobody takes it, it ends the script."""


@dataclass(frozen=True)
class Spent:
    """Time and memory of a process and its children."""

    wall: float  # s
    cpu: float  # s
    peak: int  # bytes, proportional set size of the whole tree, or of its largest process if more
    answer: Any  # the JSON in the last line it printed


class Watch:
    """Samples memory while the block runs: of another process's tree, or of this process alone.

    The proportional set size of a tree takes the kernel milliseconds to count, so it is looked at
    seldom; this process's own resident pages are there to be read. Whoever sets `stage` finds each
    stage's peak in `stages`.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.pid, self.peak, self._stop = pid, 0, threading.Event()
        self.stage, self.stages = "", dict[str, int]()

    def __enter__(self) -> Watch:
        self.start = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _look(self) -> None:
        while not self._stop.wait(SELDOM if self.pid else OFTEN):
            self._take()

    def _take(self) -> None:
        now = self._now()
        self.peak = max(self.peak, now)
        self.stages[self.stage] = max(self.stages.get(self.stage, 0), now)

    def _now(self) -> int:
        if self.pid is None:
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            return resident * os.sysconf("SC_PAGE_SIZE")
        return sum(_pss(pid) for pid in tree(self.pid))


def tree(pid: int) -> list[int]:
    """Return a process and all that it started."""
    processes = [pid]
    for parent in processes:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                processes += [int(n) for n in (task / "children").read_text().split()]
        except OSError:
            continue
    return processes


def _pss(pid: int) -> int:
    """Return bytes of memory, shared pages divided among those who share them (proc(5))."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def peak_memory(pid: int | str = "self") -> int:
    """Return the largest resident memory of a process so far, bytes; 0 if it has ended.

    Not ru_maxrss, which begins with that of the process that started it.
    """
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if "VmHWM:" in status:  # a process that has ended, and was not waited for, has none
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return 0


def run(
    command: Sequence[str | Path],
    environment: dict[str, str] | None = None,
    limit: float = LIMIT,
) -> Spent:
    """Run a command, watch its tree, and read the JSON of its last line of output.

    Raises
    ------
    Failed
        If it ends with another code than 0, or not within `limit` seconds: then all that it
        started is ended too.
    """
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(argument) for argument in command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that it can be ended with all that it started
        )
        timer = threading.Timer(limit, _end, [process])
        timer.start()
        try:
            with process, Watch(process.pid) as watch:
                out = process.stdout.read() if process.stdout else ""
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            in_time = timer.is_alive()
            timer.cancel()
            _end(process)
        wall = time.perf_counter() - start
        if not in_time:
            raise Failed(f"it did not end within {limit:.0f} s")
        if process.returncode:
            errors.seek(0)
            messages = "".join(errors.readlines()[-TAIL:]).rstrip()
            raise Failed(f"it ended with {process.returncode}:\n{messages}")
    lines = out.strip().splitlines()
    answer = json.loads(lines[-1]) if lines and lines[-1].startswith(("{", "[")) else None
    peak = max(watch.peak, usage.ru_maxrss * 1024)
    return Spent(wall, usage.ru_utime + usage.ru_stime, peak, answer)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command with all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class Stages:
    """Collects wall and processor time by stage, as the product's own clock does."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def add(self, name: str, wall: float, cpu: float) -> None:
        """Add seconds to a stage."""
        before = self.spent.get(name, [0.0, 0.0])
        self.spent[name] = [before[0] + wall, before[1] + cpu]

    def timed(self, name: str, work: Any) -> Any:
        """Return `work` wrapped, so that its calls count for stage `name`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                self.add(name, time.perf_counter() - wall, time.process_time() - cpu)

        return wrapped


def cache(*names: str) -> Path:
    """Return a folder or file under the cache of these benchmarks; its parent is made."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scanloom-bench"
    path = root.joinpath(*names)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def peer_python(peer: str, environment: Path | None = None) -> Path:
    """Return the Python of a peer's environment: one that is given, or one made here by pip."""
    if environment is not None:
        return environment / "bin" / "python"
    folder = cache("peers", peer)
    stamp = folder / "installed"
    packages = "\n".join(PEERS[peer])
    if not stamp.is_file() or stamp.read_text() != packages:
        print(f"making an environment for {peer} in {folder} ...", file=sys.stderr)
        try:
            venv.create(folder, with_pip=True, clear=True)
            run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PEERS[peer]])
        except (Failed, OSError, subprocess.CalledProcessError) as exc:
            raise Failed(f"its environment can't be made: {exc}") from exc
        stamp.write_text(packages)
    return folder / "bin" / "python"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of some packages of this environment."""
    return {name: metadata.version(name) for name in packages}


def machine(*packages: str) -> str:
    """Return a line about this machine, with the versions of some packages."""
    model = platform.processor() or platform.machine()
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        if name.strip() == "flags":
            flags = " ".join(sorted({"avx2", "avx512f", "amx_bf16"} & set(value.split())))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    known = ", ".join(f"{name} {version}" for name, version in versions(*packages).items())
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}; {model} ({flags}), {cores} cores, {memory:.0f} GiB, "
        f"load {load:.1f} at the start; Python {platform.python_version()}, {known}"
    )


def parse(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Parse the command line; with --smallest, `smallest` replaces the defaults of arguments."""
    parser.add_argument("--smallest", action="store_true", help="the smallest form: does it run?")
    if "--smallest" in sys.argv[1:]:
        parser.set_defaults(**smallest)
    return parser.parse_args()


def unavailable(needed: str) -> NoReturn:
    """End the script with status `UNAVAILABLE`, and name the missing program."""
    print(f"not available: {needed}", file=sys.stderr)
    raise SystemExit(UNAVAILABLE)


def chromium(named: str | None = None) -> str:
    """Return the Chromium of a name or path, else of SCANLOOM_CHROMIUM, else of the search path.

    Without it, or without playwright, the script ends.
    """
    if importlib.util.find_spec("playwright") is None:
        unavailable("playwright (pip install playwright), and Chromium")
    program = named or os.environ.get("SCANLOOM_CHROMIUM") or "chromium"
    return shutil.which(program) or unavailable("Chromium: name it with SCANLOOM_CHROMIUM")


def median(values: Sequence[float]) -> float:
    """Return the middle value."""
    return float(statistics.median(values))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as a Markdown table; numbers to three digits."""
    cells = [[_cell(value) for value in row] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
