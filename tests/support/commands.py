"""The command line, run in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.bundles import spleen_config, spleen_metadata, write_bundle
from support.fork_server import COMMAND, fork_server
from support.model_cards import SMALL_UNET, small_weights


@dataclass(frozen=True)
class Ended:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The document of `--json`: stdout contains it and nothing else."""
        return json.loads(self.out)


def scanloom(*arguments: str | Path) -> Ended:
    """Run a command in this process."""
    from scanloom.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Ended(code, out.getvalue(), err.getvalue())


def scanloom_process(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "scanloom", *map(str, arguments)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, check=False, timeout=600
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def scanloom_forked(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    deadline: float | None = None,
) -> Ended:
    """Run a command in a process of its own, forked from one that has imported everything.

    Raises
    ------
    subprocess.TimeoutExpired
        If it does not end within `deadline` seconds; it is killed.
    """
    env = {**os.environ, **(environment or {})}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        descriptors = [out.fileno(), err.fileno()]
        process = fork_server().fork(COMMAND, [str(a) for a in arguments], env, descriptors)
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        for file in (out, err):
            file.seek(0)
        return Ended(code, out.read().decode(), err.read().decode())


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: writing is then an OSError (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores the signal
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_tiny_bundle(folder: Path, name: str = "tiny") -> Path:
    """Write a bundle with a small UNet of random weights: two structures in CT, in seconds."""
    import torch
    from safetensors.torch import load_file

    config, metadata = spleen_config(), spleen_metadata()
    config["network_def"] = {"_target_": "UNet", **SMALL_UNET}
    config["inferer"]["roi_size"] = [32, 32, 16]
    outputs = metadata["network_data_format"]["outputs"]["pred"]
    outputs["num_channels"] = 3
    outputs["channel_def"] = {"0": "background", "1": "spleen", "2": "liver"}
    folder.mkdir(parents=True)
    content, safetensors = io.BytesIO(), small_weights(folder)
    torch.save(load_file(safetensors), content)
    safetensors.unlink()
    return write_bundle(folder / name, config, metadata, content.getvalue())
