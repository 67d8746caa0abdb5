"""Output folders of quick runs, and commands with a deadline, for tests of faults."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.archives import nifti
from support.commands import Ended, scanloom_forked, write_tiny_bundle
from support.processes import outputs_of_group

DEADLINE = 120.0
"""Seconds in which every command ends, whatever is in its way."""
SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


class QuickRun:
    """A workflow that selects none of two scans: a whole run, tables and report, in no time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scans, self.out = folder, folder / "scans", folder / "out"
        self.scans.mkdir(parents=True)
        for n in range(2):
            nifti(self.scans / f"{n}.nii.gz", seed=n)
        model = write_tiny_bundle(folder / "models")
        self.workflow = folder / "workflow.yaml"
        text = (
            f"name: test\nmodels: [{model}]\nselect: {{modality: MR}}\npolicy: {{modality: CT}}\n"
        )
        self.workflow.write_text(text + "execution: {device: cpu}\n")

    def command(self, out: Path | None = None) -> list[str]:
        """Return the words of the run."""
        command = ["run", self.workflow, self.scans, "--out", out or self.out, "--cluster", "none"]
        return [str(argument) for argument in command]

    @property
    def last(self) -> Path:
        """The folder of the newest run."""
        return sorted(path for path in (self.out / "runs").iterdir() if path.is_dir())[-1]


def run_with_deadline(
    *arguments: str | Path, deadline: float = DEADLINE, **environment: str
) -> Ended:
    """Run a command in a process of its own; a command that never ends fails."""
    return scanloom_forked(*arguments, environment=environment, deadline=deadline)


def on_small_disk(script: str, arguments: Sequence[str | Path]) -> str:
    """Run a shell script that mounts small disks, in a namespace of its own; return its output.

    In the script, `scanloom` is the program, and `$1` ... are the arguments.
    """
    disk = Path(arguments[0])
    disk.mkdir(exist_ok=True)
    probe = [*SMALL_DISK, 'mount -t tmpfs none "$1"', "sh", str(disk)]
    if (
        shutil.which("unshare") is None
        or subprocess.run(probe, capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare can't mount a small disk here")
    head = f'scanloom() {{ "{sys.executable}" -m scanloom "$@" 2>&1; }}\n'
    command = [*SMALL_DISK, head + script, "sh", *map(str, arguments)]
    out, err = outputs_of_group(command, 300)
    assert "Traceback" not in out, out
    assert "INTERNAL" not in out, out
    return out + err
