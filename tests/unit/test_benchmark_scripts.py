"""Every script of `benchmarks/` runs in its smallest form, and names its measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
UNAVAILABLE = 69  # a script's exit status if it misses another program
STARTED_BY_OTHERS = {
    "case_scanloom.py",
    "peer_monai.py",
    "peer_nnunet.py",
}
"""Scripts that are started by others and have no smallest form of their own."""
SCRIPTS = sorted(
    str(path.relative_to(BENCHMARKS))
    for path in BENCHMARKS.rglob("*.py")
    if "__main__" in path.read_text() and 'if __name__ == "__main__"' in path.read_text()
)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def start(script: str, option: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with one option, in a cache of its own."""
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, option],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_it_measures(script: str, tmp_path: Path) -> None:
    done = start(script, "--help", tmp_path)

    assert done.returncode == 0, done.stderr
    first = (
        (BENCHMARKS / script).read_text().splitlines()[0].removeprefix('"""').removesuffix('"""')
    )
    assert " ".join(first.split()) in " ".join(done.stdout.split())


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in STARTED_BY_OTHERS])
def test_a_script_runs_in_its_smallest_form(script: str, tmp_path: Path) -> None:
    done = start(script, "--smallest", tmp_path)

    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
