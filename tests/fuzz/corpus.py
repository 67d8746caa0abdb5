"""Runs the fuzzers of header readers one after the other, and keeps their corpus small.

    python -m fuzz.corpus SECONDS [TARGET ...]     (`make fuzz SECONDS=600`, from tests/)

A finding stands in the working directory as fuzz-TARGET-crash-..., and ends that target.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from fuzz.seeds import seeds

SCRIPT = Path(__file__).with_name("fuzz_headers.py")
KEPT = Path(__file__).parent / "corpus"
TARGETS = ("dicom", "nifti", "nrrd", "metaimage")
LIMIT = 100_000  # bytes of a target's inputs, before they are packed
LARGEST = 4096  # bytes of one input
_KINDS = {"metaimage": "mha"}


def inputs(target: str) -> dict[str, bytes]:
    """Return the kept inputs of a target's corpus, by name."""
    path = KEPT / f"{target}.zip"
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def unpack(target: str, folder: Path) -> None:
    """Write the kept inputs and the drawn files into a folder."""
    files = inputs(target)
    for n, seed in enumerate(seeds(_KINDS.get(target, target))):
        data = seed.files[seed.targets[0]]
        files[f"seed-{n}"] = data.removeprefix(b"NRRD000") if target == "nrrd" else data
    for name, data in files.items():
        (folder / name).write_bytes(data)


def pack(target: str, folder: Path) -> None:
    """Keep the smallest inputs, up to a limit, the same bytes for the same inputs."""
    inputs_by_content = {path.read_bytes() for path in folder.iterdir()}
    KEPT.mkdir(exist_ok=True)
    size = 0
    with zipfile.ZipFile(KEPT / f"{target}.zip", "w") as out:
        for data in sorted(inputs_by_content, key=lambda data: (len(data), data)):
            size += len(data)
            if size > LIMIT or len(data) > LARGEST:
                break
            name = zipfile.ZipInfo(hashlib.sha256(data).hexdigest()[:12])
            out.writestr(name, data, zipfile.ZIP_DEFLATED, 9)


def run(target: str, seconds: int) -> int:
    """Fuzz one reader, keep the inputs that led to new code; return the exit status."""
    with TemporaryDirectory() as name:
        unpack(target, Path(name))
        command = [sys.executable, str(SCRIPT), f"-max_total_time={seconds}", "-timeout=30"]
        command += [f"-max_len={2 * LARGEST}", "-rss_limit_mb=4096"]
        command += [f"-artifact_prefix=fuzz-{target}-"]
        environment = {**os.environ, "FUZZ_TARGET": target}
        status = subprocess.run([*command, name], env=environment).returncode
        pack(target, Path(name))
        return status


if __name__ == "__main__":
    failed = [t for t in sys.argv[2:] or TARGETS if run(t, int(sys.argv[1])) != 0]
    sys.exit(f"findings: {', '.join(failed)}" if failed else 0)
