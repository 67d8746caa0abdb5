"""A disk that is really full: a small one is mounted in a namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import write_tiny_bundle
from dicom_maker import noise, write_series

MOUNT = 'mount -t tmpfs -o size=40k none "$1" && shift && exec "$@"'


def test_a_full_disk_is_74_and_nothing_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh", str(disk)]
    probe = [*small, "true"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(probe, capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare can't mount a small disk here")
    write_series(tmp_path / "study", noise((64, 60, 20)))
    model = write_tiny_bundle(tmp_path / "models")

    command = [sys.executable, "-m", "scanloom", "segment", str(tmp_path / "study")]
    command += ["--model", str(model), "--out", str(disk / "out"), "--output", "image"]
    listing = [*small, "sh", "-c", '"$@"; code=$?; ls -A "$0"; exit $code', str(disk), *command]
    done = subprocess.run(listing, capture_output=True, text=True, check=False)

    assert done.returncode == 74, done.stderr
    assert "DISK_FULL" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
