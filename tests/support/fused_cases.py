"""Features to normalise and small networks to fuse, compared with float64.

Its functions run in Triton's interpreter, where `normalise` takes tensors on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from monai.networks import nets
from torch import nn
from torch.nn import functional

from scanloom.inference.engines import fused_engine
from scanloom.inference.engines.fused_engine import ENGINE, MAX_PARTS, normalise
from scanloom.inference.engines.protocol import NetworkRequest
from scanloom.inference.nets.unet import PlainConvUNet, ResidualEncoderUNet

EPS: Final = 1e-5
SLOPE: Final = 0.01
DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_PLAN: Final = {
    "features": [2, 4],
    "encoder": [1, 2],
    "decoder": [1],
}
_LAYERS: Final = {
    "bias": True,
    "norm": "instance",
    "norm_args": {"eps": EPS, "affine": True},
    "slope": SLOPE,
}
_INSTANCE: Final = ("INSTANCE", {"affine": True})


def nnunet(
    network: type[PlainConvUNet | ResidualEncoderUNet], dimensions: Any = 3, **layers: object
) -> nn.Module:
    """Return a small network of nnU-Net."""
    sizes = {"kernels": [[3] * dimensions] * 2, "strides": [[1] * dimensions, [2] * dimensions]}
    return network(
        in_channels=1,
        out_channels=3,
        plan=_PLAN | sizes,
        layers=_LAYERS | layers,
        spatial_dims=dimensions,
    )


def dynunet(**args: object) -> nn.Module:
    """Return a small DynUNet."""
    sizes = ([3] * 3, [1, 2, 2], [2, 2])
    return nets.DynUNet(3, 1, 3, *sizes, filters=[2, 2, 4], norm_name=_INSTANCE, **args)


NETWORKS: Final[dict[str, Callable[[], nn.Module]]] = {
    "plain": lambda: nnunet(PlainConvUNet),
    "plain, 2D": lambda: nnunet(PlainConvUNet, 2),
    "plain, dropout": lambda: nnunet(PlainConvUNet, dropout=True),
    "plain, not affine": lambda: nnunet(PlainConvUNet, norm_args={"eps": EPS, "affine": False}),
    "activation first": lambda: nnunet(PlainConvUNet, activation_first=True),
    "residual": lambda: nnunet(ResidualEncoderUNet),
    "DynUNet": dynunet,
    "DynUNet, residual": lambda: dynunet(res_block=True, dropout=0.1),
    "UNet": lambda: nets.UNet(3, 1, 3, (2, 4), (2,), num_res_units=1, act="RELU", dropout=0.1),
    "UNet, PReLU": lambda: nets.UNet(3, 1, 3, (2, 4), (2,), num_res_units=0),
}


def build(name: str) -> nn.Module:
    """Return a network with random weights; biases are larger than what they are added to."""
    torch.manual_seed(0)
    network = NETWORKS[name]().eval()
    for module in network.modules():
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.normal_(bias, std=10 if "Conv" in type(module).__name__ else 1)
        if isinstance(module, nn.InstanceNorm2d | nn.InstanceNorm3d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2)
    return network


def compare_network(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the errors of torch and of the fused network, and whether the network was changed.

    Errors are relative to the standard deviation of the scores in float64.
    """
    network = build(name)
    layers, state = repr(network), copy.deepcopy(network.state_dict())
    shape: Any = (1, 1, *(12,) * (2 if "2D" in name else 3))
    request = NetworkRequest(lambda: network, (name,), shape, dtype, torch.device("cpu"), 1)
    windows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    run = ENGINE.prepare(request)
    with torch.inference_mode():
        exact = copy.deepcopy(network).double()(windows.double())
        own = request.torch_network()(windows).double()
        scores = run(windows).double()
        again = run(windows).double()
    same = all(torch.equal(state[key], value) for key, value in network.state_dict().items())
    return {
        "torch": float((own - exact).abs().max() / exact.std()),
        "fused": float((scores - exact).abs().max() / exact.std()),
        "unchanged": repr(network) == layers and same,
        "repeated": torch.equal(scores, again),
    }


def features(name: str) -> torch.Tensor:
    """Return the features (N, C, ...) of a case."""
    shape, mean = _FEATURES[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2)) + mean
    if name == "constant":
        values = torch.full(shape, 1000.1)
    if name == "the first voxel is far from all":
        values[..., 0, 0, 0] = 1000
    return values


_FEATURES: Final[dict[str, tuple[tuple[int, ...], float]]] = {
    "odd sizes": ((2, 3, 5, 7, 9), 0),
    "one channel": ((1, 1, 4, 4, 4), 0),
    "two dimensions": ((2, 3, 33, 31), 0),
    "one voxel": ((1, 2, 1, 1, 1), 0),
    "a block": ((1, 2, 64, 64), 0),
    "a block and a voxel": ((1, 2, 17, 241), 0),
    "several parts": ((1, 2, 20, 21, 23), 0),
    "parts of several blocks": ((1, 2, 20, 21, 60), 0),
    "large mean": ((1, 2, 20, 20, 20), 1000),
    "constant": ((1, 2, 9, 9, 9), 0),
    "the first voxel is far from all": ((1, 2, 20, 20, 20), 0),
}
FEATURES: Final = tuple(_FEATURES)


def compare_norm(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest error, less the rounding of the result, and if it is the same in place."""
    values = features(name).to(dtype)
    channels = values.shape[1]
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(channels, generator=generator).add(0.5).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype)
    rows = values.double().flatten(2)
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    normal = (rows - mean) / (variance + EPS).sqrt() * weight[:, None] + bias[:, None]
    exact = functional.leaky_relu(normal, SLOPE).view(values.shape)
    # Triton's interpreter cuts the digits of bfloat16 off
    rounding = exact.abs() * torch.finfo(dtype).eps / (1 if dtype is torch.bfloat16 else 2)
    fused_engine.MAX_PARTS = 2 if name == "parts of several blocks" else MAX_PARTS
    apart = torch.empty_like(values)
    normalise(values, weight, bias, EPS, SLOPE, apart)
    normalise(values, weight, bias, EPS, SLOPE, values)  # in place
    error = ((apart.double() - exact).abs() - rounding).max()
    return {"error": float(error), "in place": float(torch.equal(apart, values))}
