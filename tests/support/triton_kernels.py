"""Runs kernels in Triton's interpreter, and compiles them for GPUs that are not here.

Triton reads when it is imported whether it shall interpret, so a process of its own does it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MOST_SPILLED_BYTES = 16

ONLY_COMPILE = """
import contextlib, json, os, re, subprocess, tempfile
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

backend, arch = os.environ["ARCH"].split()
TARGET = GPUTarget(backend, int(arch) if arch.isdecimal() else arch, 64 if backend == "hip" else 32)

class Elsewhere:  # what Triton asks of a driver before it compiles
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return TARGET
    def get_active_torch_device(self): return torch.device("cuda", 0)

driver.set_active(Elsewhere())
torch.cuda.device = lambda number: contextlib.nullcontext()
seen, launch = {}, jit.JITFunction.run

def resources(code):
    if backend == "hip":
        found = [re.search(rf"\\.{name}: +(\\d+)", code.asm["amdgcn"])
                 for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")]
        registers, *spills = (int(match.group(1)) for match in found)
        return registers, sum(spills)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
                              capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\\d+) STACK:(\\d+).* LOCAL:(\\d+)", told).groups()
    return int(registers), int(stack) + int(local)

def only_compile(kernel, *args, grid, warmup, **constants):
    code = launch(kernel, *args, grid=grid, warmup=True, **constants)
    assert len(code.asm["amdgcn" if backend == "hip" else "cubin"]) > 0
    note(kernel, args, constants, code)

jit.JITFunction.run = only_compile
"""
"""Begins a script whose `note(kernel, args, constants, code)` fills `seen`."""


def needs_triton(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that takes Triton, and half a minute."""
    absent = importlib.util.find_spec("triton") is None
    skip = pytest.mark.skipif(absent, reason="Triton is not installed")
    marked: Callable[..., None] = pytest.mark.slow(skip(test))
    return marked


def _answer(script: str, **variables: str) -> dict[str, Any]:
    """Return the JSON that a script prints in a process of its own."""
    folder = Path(__file__).parents[1]
    here = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def interpret(script: str) -> dict[str, Any]:
    """Return the JSON that a script prints, its kernels interpreted on the CPU."""
    return _answer(script, TRITON_INTERPRET="1")


def compiled_for(arch: str, script: str, folder: Path) -> dict[str, Any]:
    """Return the JSON that a script prints, its kernels compiled for a GPU such as "cuda 90"."""
    return _answer(ONLY_COMPILE + script, TRITON_CACHE_DIR=str(folder), ARCH=arch)
