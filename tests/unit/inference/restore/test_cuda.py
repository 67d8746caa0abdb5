"""The CUDA kernels, run by Triton's interpreter: no GPU is needed, Triton is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import Argmax
from scanloom.inference.restore import cuda
from support import restore_cases
from support.triton_kernels import (
    MOST_SPILLED_BYTES,
    compiled_for,
    interpret,
    needs_triton,
)

CASES = restore_cases.cases()

RUN = """
import json
import numpy as np, torch
from support import restore_cases
from scanloom.inference.restore import cuda, triton_kernels

cpu, seen = torch.device("cpu"), {}
for name, case in restore_cases.cases().items():
    labels = restore_cases.labelled(case, cpu)
    seen[name] = [restore_cases.count_wrong(case, labels), np.unique(labels).tolist()]
scores = restore_cases.smooth(9, 40, 18, 30)
noted, launch = [], triton_kernels.mark_classes.run

def run(*args, **constants):
    noted.append(args[1])
    return launch(*args, **constants)

triton_kernels.mark_classes.run = run
restore_cases.labelled(restore_cases.Case(scores, [np.zeros(1)] * 3), cpu)
words = noted[0]
print(json.dumps({"cases": seen, "words": words[0].tolist()}))
"""

COMPILE = """
import numpy as np
from scanloom.cards.card import Argmax, Threshold
from scanloom.inference.restore import cuda

def note(kernel, args, constants, code):
    name = f"{kernel.__name__} {args[0].dtype} {constants['ARGMAX']}"
    seen.setdefault(name, set()).add(code.hash)

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for shape in ((1, 20, 1, 1), (16, 20, 16, 32), (7, 20, 33, 47)):
        sizes = (shape[0], *shape[2:])
        at = tuple(np.linspace(0, n - 1, 2 * n) for n in sizes)
        for decision, maps in ((Argmax(), 1), (Threshold(0.5), shape[1])):
            out = [np.zeros([2 * n for n in sizes], np.uint8) for _ in range(maps)]
            cuda.label(torch.zeros(shape, dtype=dtype), at, decision, out)
print(json.dumps({name: len(codes) for name, codes in seen.items()}))
"""

RESOURCES = """
import numpy as np
from scanloom.cards.card import Argmax
from scanloom.inference.restore import cuda

def note(kernel, args, constants, code):
    seen[f"{kernel.__name__} {args[0].dtype} {args[0].shape[1]}"] = resources(code)

for classes in (2, 26, 118):
    for dtype in (torch.float16, torch.float32):
        scores = torch.zeros((2, classes, 5, 5), dtype=dtype)
        at = tuple(np.linspace(0, n - 1, 2 * n) for n in (2, 5, 5))
        cuda.label(scores, at, Argmax(), [np.zeros((4, 10, 10), np.uint8)])
print(json.dumps(seen))
"""
MOST_REGISTERS = {"cuda 80": 80, "cuda 90": 80, "cuda 100": 128, "hip gfx942": 80}
"""Registers of a thread: with 80, 6 programs of 128 threads fit on a multiprocessor of NVIDIA."""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Return the kernels' labels for every case, and the classes kept in each block."""
    return interpret(RUN)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_labels_are_those_of_scores_brought_back(interpreted: dict[str, Any], name: str) -> None:
    """Labels are those of float64 matrices but for ties of rounding; every voxel is written."""
    wrong, _ = interpreted["cases"][name]

    assert wrong == 0


@needs_triton
def test_cases_hold_several_labels(interpreted: dict[str, Any]) -> None:
    """A kernel that fills the map with one label would pass otherwise."""
    plain = {"one class", "ties"}

    assert all(
        len(labels) > 2 for name, (_, labels) in interpreted["cases"].items() if name not in plain
    )


@needs_triton
def test_the_first_of_equal_scores_wins(interpreted: dict[str, Any]) -> None:
    assert interpreted["cases"]["ties"][1] == [1]


@needs_triton
def test_a_block_keeps_exactly_the_classes_that_can_win(interpreted: dict[str, Any]) -> None:
    """Exactly those whose largest value reaches the largest of the smallest ones."""
    scores = restore_cases.smooth(9, 40, 18, 30).numpy()
    class_bits = np.array(interpreted["words"])

    for block_index in np.ndindex(class_bits.shape[:3]):
        p, b, d = (slice(4 * n, 4 * n + 5) for n in block_index)
        block = scores[p, :, b, d].transpose(1, 0, 2, 3).reshape(40, -1)
        expected = block.max(axis=1) >= block.min(axis=1).max()
        possible = [bool(class_bits[block_index][c // 31] >> (c % 31) & 1) for c in range(40)]
        assert possible == expected.tolist()
    class_counts = np.vectorize(int.bit_count)(class_bits.astype(object)).sum(axis=-1)
    assert class_counts.min() < 20, "no block leaves anybody out: the test shows nothing"


@needs_triton
def test_kernels_compile_for_a_gpu_once_whatever_the_shape(tmp_path: Path) -> None:
    """Two kernels, two decisions and three types of scores are compiled without a GPU."""
    compiled = compiled_for("cuda 80", COMPILE, tmp_path)

    assert len(compiled) == 12
    assert set(compiled.values()) == {1}


@needs_triton
@pytest.mark.parametrize("arch", MOST_REGISTERS)
def test_kernels_keep_their_values_in_registers(arch: str, tmp_path: Path) -> None:
    """Compiled ahead of time for A100, H100, B200 and MI300."""
    used = compiled_for(arch, RESOURCES, tmp_path)

    assert len(used) == 12
    for name, (registers, spilled) in used.items():
        assert registers <= MOST_REGISTERS[arch], (name, registers)
        assert spilled <= MOST_SPILLED_BYTES, (name, spilled)


def test_without_cuda_the_kernels_are_not_taken() -> None:
    choice = cuda.available(torch.device("cpu"))

    assert not choice.usable
    assert choice.why == "the device is not CUDA"


def test_labels_of_another_shape_are_refused() -> None:
    """A kernel would write beyond them."""
    scores, at = torch.zeros(2, 3, 4, 5), (np.zeros(2), np.zeros(2), np.zeros(2))

    with pytest.raises(ValueError, match="labels must be 1 of"):
        cuda.label(scores, at, Argmax(), [np.zeros((2, 2, 3), np.uint8)])
