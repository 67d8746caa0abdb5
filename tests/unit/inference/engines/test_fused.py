"""Fused instance norms, in Triton's interpreter and by its compiler, beside float64."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scanloom.inference.engines.fused_engine import ENGINE, FusedNorm, fuse, normalise
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest
from scanloom.inference.engines.selection import ENGINES
from support import fused_cases
from support.triton_kernels import (
    MOST_SPILLED_BYTES,
    compiled_for,
    interpret,
    needs_triton,
)

NORMS = """
import json
from support import fused_cases
print(json.dumps({f"{name}, {dtype}": fused_cases.compare_norm(name, dtype)
                  for name in fused_cases.FEATURES for dtype in fused_cases.DTYPES}))
"""

NETWORKS = """
import json, torch
from support import fused_cases
float32, half = torch.float32, torch.float16
seen = {f"{name}, {float32}": fused_cases.compare_network(name, float32)
        for name in fused_cases.NETWORKS}
seen[f"plain, {half}"] = fused_cases.compare_network("plain", half)
print(json.dumps(seen))
"""

RESOURCES = """
from scanloom.inference.engines import fused_engine

def note(kernel, args, constants, code):
    seen[f"{kernel.__name__} {args[0].dtype} {constants['BLOCKS']} {args[0].shape[-1]}"] = (
        resources(code))

for dtype in (torch.float32, torch.float16):
    for shape in ((1, 2, 64), (1, 2, 63), (64, 32, 1 << 15)):
        values, ones = torch.empty(shape, dtype=dtype, device="meta"), torch.ones(shape[1])
        fused_engine.normalise(values, ones, ones, 1e-5, 0.01, values)
print(json.dumps(seen))
"""

MOST_REGISTERS = {"cuda 80": 64, "cuda 90": 64, "cuda 100": 64, "hip gfx942": 100}
"""Registers of a thread: with 64, 4 programs of 256 threads fit on a multiprocessor of NVIDIA."""
FLOAT32_NORM = 2e-6
"""Largest error of a norm in float32, whose results are below 10."""
FLOAT32_NETWORK = 2e-5
"""Largest error of scores in float32, in their standard deviations."""


@pytest.fixture(scope="module")
def norms() -> dict[str, Any]:
    """Return the errors of all cases."""
    return interpret(NORMS)


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    """Return the errors of all networks."""
    return interpret(NETWORKS)


@needs_triton
@pytest.mark.parametrize("dtype", fused_cases.DTYPES)
@pytest.mark.parametrize("name", fused_cases.FEATURES)
def test_a_norm_is_that_of_float64(norms: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    """Half precision adds the rounding of the result, and nothing else."""
    seen = norms[f"{name}, {dtype}"]

    # At 1000, float32 has steps of 6e-5
    assert seen["error"] <= (1e-4 if name == "large mean" else FLOAT32_NORM)
    assert seen["in place"] == 1


@needs_triton
@pytest.mark.parametrize("name", fused_cases.NETWORKS)
def test_a_network_computes_the_scores_of_float64(networks: dict[str, Any], name: str) -> None:
    """Biases are left out only where a norm subtracts them: all are large."""
    seen = networks[f"{name}, {torch.float32}"]

    assert seen["fused"] <= FLOAT32_NETWORK
    assert seen["repeated"]
    assert seen["unchanged"], "torch runs the network too"


@needs_triton
def test_half_precision_is_no_worse_than_torch(networks: dict[str, Any]) -> None:
    seen = networks[f"plain, {torch.float16}"]

    assert 0 < seen["fused"] <= seen["torch"]


@needs_triton
@pytest.mark.parametrize("arch", MOST_REGISTERS)
def test_norms_keep_their_values_in_registers(arch: str, tmp_path: Path) -> None:
    """Compiled ahead of time, for aligned rows, others, and long ones."""
    used = compiled_for(arch, RESOURCES, tmp_path)

    assert len(used) == 12
    for name, (registers, spilled) in used.items():
        assert registers <= MOST_REGISTERS[arch], (name, registers)
        assert spilled <= MOST_SPILLED_BYTES, (name, spilled)


def fused(network: nn.Module) -> list[FusedNorm]:
    """Return the fused norms of a copy of a network."""
    network = copy.deepcopy(network)
    fuse(network)
    return [module for module in network.modules() if isinstance(module, FusedNorm)]


@pytest.mark.parametrize(
    ("name", "activations"),
    [("plain", 4), ("plain, dropout", 4), ("DynUNet", 10), ("UNet", 3), ("UNet, PReLU", 0)],
)
def test_an_activation_is_fused_where_it_follows_a_norm(name: str, activations: int) -> None:
    """Their number, as the networks' definitions have it."""
    slopes = [norm.slope for norm in fused(fused_cases.build(name))]

    assert sum(slope != 1 for slope in slopes) == activations


def test_an_activation_before_a_norm_stays() -> None:
    network = fused_cases.build("activation first")
    fuse(network)

    assert all(norm.slope == 1 and not norm.in_place for norm in fused(network))
    assert sum(isinstance(module, nn.LeakyReLU) for module in network.modules()) == 4


def test_a_bias_stays_where_no_norm_follows() -> None:
    before, first, last = nn.Conv3d(1, 2, 1), nn.InstanceNorm3d(2), nn.Conv3d(2, 2, 1)
    network = nn.Sequential(before, first, nn.ReLU(), last, nn.ReLU(), nn.InstanceNorm3d(2)).eval()
    fuse(network)

    assert before.bias is None
    assert last.bias is not None


def test_running_statistics_are_no_moments() -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 1), nn.InstanceNorm3d(2, track_running_stats=True))

    assert not fused(network.eval())


def test_a_network_without_instance_norm_is_refused() -> None:
    cpu, network = torch.device("cpu"), nn.Sequential(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)).eval()
    request = NetworkRequest(lambda: network, ("batch",), (1, 1, 4, 4, 4), torch.float32, cpu, 1)

    with pytest.raises(EngineUnfitError, match="no instance norm"):
        ENGINE.prepare(request)


def test_features_that_a_kernel_would_leave_are_refused() -> None:
    """Kernels do not check bounds."""
    values, ones = torch.zeros(1, 2, 4, 4, 4), torch.ones(2)

    with pytest.raises(ValueError, match="contiguous"):
        normalise(values.transpose(2, 3), ones, ones, 1e-5, 0.01, values)
    with pytest.raises(ValueError, match="of the same shape"):
        normalise(values, ones, ones, 1e-5, 0.01, values[:, :, :2])
    with pytest.raises(ValueError, match=r"must be \(2,\)"):
        normalise(values, torch.ones(3), ones, 1e-5, 0.01, values)
    with pytest.raises(ValueError, match="5 dimensions"):
        FusedNorm(nn.InstanceNorm3d(2), 1.0, in_place=False)(values[0])


def test_the_engine_needs_triton_and_cuda() -> None:
    absent = importlib.util.find_spec("triton") is None
    cuda = torch.device("cuda", 0)

    assert (ENGINE.version() is None) is absent
    assert ENGINE.supports(cuda, torch.float32)
    assert ENGINE.supports(cuda, torch.float16)
    assert not ENGINE.supports(cuda, torch.bfloat16)
    assert not ENGINE.supports(torch.device("cpu"), torch.float32)


def test_it_is_measured_before_cuda_graphs() -> None:
    """They save the launches of kernels only, and "auto" takes the first that is faster."""
    names = list(ENGINES)

    assert ENGINE.automatic
    assert names.index("fused") < names.index("cudagraphs")
