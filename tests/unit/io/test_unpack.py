"""Unpacked files go away with their process, however that ends."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

UNPACK = """
import os, sys
from scanloom.io.unpack import SCRATCH
print(SCRATCH.plain(sys.argv[1], gzipped=True), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "living":
    sys.stdin.read()
"""


def unpack(packed: Path, end: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(packed.parent)}
    command = [sys.executable, "-c", UNPACK, str(packed), end]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def test_what_a_killed_process_unpacked_goes_when_the_next_one_unpacks(tmp_path: Path) -> None:
    packed = tmp_path / "scan.dcm.gz"
    packed.write_bytes(gzip.compress(b"scan"))
    other = tmp_path / "scanloom-of-somebody"  # without a lock: not ours to judge
    other.mkdir()

    with unpack(packed, "living") as living:
        kept = Path(living.stdout.readline().strip())  # type: ignore[union-attr]
        dead, _ = unpack(packed, "killed").communicate()
        assert Path(dead.strip()).read_bytes() == b"scan"
        unpack(packed, "ended").communicate()
        assert not Path(dead.strip()).exists()
        assert kept.read_bytes() == b"scan"

    assert sorted(tmp_path.iterdir()) == [packed, other]
