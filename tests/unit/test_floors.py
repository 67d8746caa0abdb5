"""An import goes down, never up: import-linter judges, by the contracts of pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.real_scans import ROOT


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache", "--config", root / "pyproject.toml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={"PYTHONPATH": str(root / "pipeline"), "PATH": ""},
    )


def test_contracts_are_kept() -> None:
    done = linted(ROOT)

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(contracts['contracts'])} kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core/grid.py", "import scanloom.cards.card"),
        ("io/index/series.py", "import scanloom.inference.device"),
        ("inference/device.py", "import scanloom.io.index.series"),
        ("engine/segment.py", "import torch"),
        ("io/readback/case.py", "import highdicom"),
        ("io/readback/case.py", "import scanloom.io.extras.nifti"),
    ],
)
def test_an_import_up_is_found(module: str, line: str, tmp_path: Path) -> None:
    """The linter really looks: one wrong import more and it fails."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline")
    changed = tmp_path / "pipeline" / "scanloom" / module
    changed.write_text(changed.read_text() + f"\n{line}\n")

    assert linted(tmp_path).returncode == 1
