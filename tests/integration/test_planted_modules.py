"""Another user of the machine plants modules where a run might look for some; they stay unread.

Each planted module names itself in a file, and ends the process. The folders and their files belong
to another user, which only root can arrange.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster_runs import ClusterRun
from support.formula_run import PROGRAM

NOBODY = 65534
NAMES = ("json", "torch", "numpy", "nibabel", "highdicom", "distributed", "multiprocessing")
NAMES += ("sitecustomize", "matplotlib", "scanloom", "monai", "socket", "jinja2", "support")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user"),
]


class Attack:
    """A folder for temporary files, as open as /tmp, with files of another user."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self.caught = folder / "tmp", folder / "caught"
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        self.caught.mkdir()
        self.caught.chmod(0o1777)

    def plant(self, name: str) -> Path:
        """Make a folder of the other user's that anybody may write to, full of modules."""
        code = (
            "import os, sys; from pathlib import Path\n"
            f"os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "folder = Path(sys.argv[1]); folder.mkdir(exist_ok=True); folder.chmod(0o1777)\n"
            "for name in sys.argv[3:]:\n"
            "    text = f'open({str(Path(sys.argv[2]) / name)!r}, \"w\"); raise SystemExit(7)'\n"
            "    (folder / f'{name}.py').write_text(text)\n"
        )
        folder = self.temporary / name
        command = [sys.executable, "-c", code, name, str(self.caught), *NAMES]
        # from within: the folders above may be closed to others
        subprocess.run(command, check=True, cwd=self.temporary)
        assert folder.stat().st_uid == NOBODY
        return folder

    def check(self) -> None:
        assert [p.name for p in self.caught.iterdir()] == []


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


def go(run: ClusterRun, attack: Attack, where: Path, *options: str) -> None:
    command = ["run", run.workflow, run.archive, "--out", run.out, *options]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, command)],
        env={**run.environment, "TMPDIR": str(attack.temporary)},
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    attack.check()
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.done == run.scans


def test_a_folder_where_dask_would_keep_its_files(tmp_path: Path, attack: Attack) -> None:
    run = ClusterRun(tmp_path, 2, 0.0, "{in_flight: 1}")
    for name in ("dask-scratch-space", f"dask-scratch-space-{os.getuid()}"):
        attack.plant(name)
    attack.plant(f"torchinductor_{getpass.getuser()}")  # torch makes it, to keep nothing there
    before = set(attack.temporary.rglob("*"))

    go(run, attack, tmp_path)

    assert set(attack.temporary.rglob("*")) == before


@pytest.mark.parametrize("cluster", ["local", "none"])
def test_the_folder_in_which_a_run_is_started(tmp_path: Path, attack: Attack, cluster: str) -> None:
    run = ClusterRun(tmp_path, 2, 0.0, "{in_flight: 1}")
    shared = attack.plant("shared")

    go(run, attack, shared, "--cluster", cluster)
