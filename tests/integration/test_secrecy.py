"""Memory of processes with the key can't be read: no core files, no access by the same user."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from support import engine_models as em
from support.commands import write_tiny_bundle
from support.formula_run import PROGRAM, formula_environment, processes
from support.processes import next_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl and cores of Linux")

ATTACK = """
import pathlib, sys
key, found = bytes.fromhex(sys.argv[1]), 0
for process in sys.argv[2:]:
    folder = pathlib.Path("/proc", process)
    try:
        lines = (folder / "maps").read_text().splitlines()
        with (folder / "mem").open("rb", buffering=0) as memory:
            for line in lines:
                words = line.split()
                if words[1].startswith("rw") and not words[-1].startswith(("[vv", "/")):
                    start, end = (int(number, 16) for number in words[0].split("-"))
                    memory.seek(start)
                    found += key in memory.read(end - start)
    except OSError:
        continue
print(found)
"""
ROOT = os.getuid() == 0
PLAIN = ["unshare", "--user", "--map-user=54321"] if ROOT else []
"""Makes root a user without rights, in a world where all processes of the test are."""
HOLDS = "import sys, time; key = bytes.fromhex(sys.argv[1]); print(len(key), flush=True); "
HOLDS += "time.sleep(600)"


def attack(key: bytes, victims: list[int]) -> int:
    """Return how many places of memory with the key a process of the same user finds."""
    same = ["nsenter", "--user", f"--target={victims[0]}", "--preserve-credentials"]
    command = [*(same if ROOT else []), sys.executable, "-c", ATTACK, key.hex(), *map(str, victims)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout or -1)


@pytest.fixture
def attacker() -> None:
    """Skip where processes of one user are kept apart anyway."""
    if ROOT and (shutil.which("unshare") is None or shutil.which("nsenter") is None):
        pytest.skip("no unshare and nsenter, by which root loses its rights")
    key = os.urandom(32)
    with subprocess.Popen(
        [*PLAIN, sys.executable, "-c", HOLDS, key.hex()], stdout=subprocess.PIPE
    ) as victim:
        assert victim.stdout is not None
        next_line(victim)
        copies = attack(key, [victim.pid])
        victim.kill()
    if copies < 1:
        pytest.skip("this system keeps processes of one user apart")


def write_scans(folder: Path, tasks: list[int]) -> Path:
    folder.mkdir()
    for n, task in enumerate(tasks):
        array = np.full((12, 11, 10), -900, np.int16)
        array[4:8, 4:8, 4:8] = task
        array[0, 0, 0] = -n
        image = nib.Nifti1Image(array, np.diag((2.0, 2.0, 2.0, 1.0)))
        nib.save(image, folder / f"{n}.nii.gz")
    return folder


def command(folder: Path, task: int, cluster: str) -> list[str | Path]:
    model = write_tiny_bundle(folder / "bundles")
    workflow = folder / "workflow.yaml"
    workflow.write_text(
        f"name: test\nmodels: [{model}]\npolicy: {{modality: CT}}\nexecution: {{device: cpu}}\n"
    )
    scans = write_scans(folder / "archive", [task])
    return ["run", workflow, scans, "--out", folder / "out", "--cluster", cluster]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "notes"
    for process in processes(tmp_path / "notes"):
        os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("attacker")
@pytest.mark.parametrize("cluster", ["none", "local"])
def test_no_process_of_a_run_shows_its_memory(tmp_path: Path, notes: Path, cluster: str) -> None:
    environment = formula_environment(notes)
    arguments = command(tmp_path, em.SLEEP_FOREVER, cluster)
    program = [*PLAIN, sys.executable, str(PROGRAM), *map(str, arguments)]
    with subprocess.Popen(program, env=environment, stderr=subprocess.DEVNULL) as run:
        until = time.monotonic() + 90
        while not (notes / "starts").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        victims = holders(notes)
        copies = attack((notes / "key").read_bytes(), list(victims))
        cores = [core_limit(process) for process in victims]
        run.kill()

    assert len(victims) >= (2 if cluster == "none" else 3)
    assert copies == 0
    assert set(cores) == {"0 0"}


def holders(notes: Path) -> dict[int, str]:
    """Return the processes of a run, without the resource tracker of Python."""
    commands = processes(notes)
    return {n: command for n, command in commands.items() if "resource_tracker" not in command}


def core_limit(process: int) -> str:
    lines = Path(f"/proc/{process}/limits").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Max core file size")]
    return " ".join(line.split()[4:6])


@pytest.mark.slow
def test_a_case_that_brings_its_process_down_leaves_no_core(tmp_path: Path, notes: Path) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith(("|", "/")):
        pytest.skip("cores do not go into the folder of a process here")
    folder = tmp_path / "place"
    folder.mkdir()
    unlimited = ["sh", "-c", 'ulimit -c unlimited; cd "$0" && exec "$@"', str(folder)]
    plain = [*unlimited, sys.executable, "-c", "import os; os.abort()"]
    subprocess.run(plain, capture_output=True, check=False)
    if not list(folder.iterdir()):
        pytest.skip("no core is written here at all")
    for core in folder.iterdir():
        core.unlink()

    arguments = [str(argument) for argument in command(tmp_path, em.ABORT, "none")]
    done = subprocess.run(
        [*unlimited, sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        env=formula_environment(notes),
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert "CRASHED" in next((tmp_path / "out" / "failed").iterdir()).read_text()
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("attacker")
def test_helpers_that_read_headers_and_pixels_show_no_memory() -> None:
    secret = os.urandom(32)
    sandbox = (
        "import time\n"
        "from scanloom.io.system import sandbox as s\n"
        "limits = s.SandboxLimits(1 << 28, 30.0, 30.0)\n"
        "assert s.run_sandboxed(s.start_sandbox, limits=limits) is None\n"
        "print(s._SERVER._process.pid, flush=True); time.sleep(600)\n"
    )
    survey = (
        "import time\n"
        "from contextlib import closing\n"
        "from scanloom.io.index.workers import HeaderWorkers\n"
        "with closing(HeaderWorkers(2)) as h:\n"
        "    h.start(); h.survey([[], []])\n"
        "    print(h._workers[0]._process.pid, flush=True); time.sleep(600)\n"
    )
    for program in (sandbox, survey):
        environment = {**os.environ, "SECRET": secret.hex()}
        with subprocess.Popen(
            [*PLAIN, sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
        ) as parent:
            assert parent.stdout is not None
            helper = int(next_line(parent))
            copies = attack(secret.hex().encode(), [helper])
            limit = core_limit(helper)
            parent.kill()
        assert (copies, limit) == (0, "0 0")
