"""Model cards and scans that tests make up, and grids that lean, turn and flip."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import (
    Channel,
    IntensityStep,
    ModelCard,
    NetworkGrid,
    NetworkSpec,
    ScaleRange,
    Weights,
    Window,
)
from scanloom.core import Code, Grid, Structure

TISSUE = Code("85756007", "SCT", "Tissue")

SMALL_UNET: Mapping[str, Any] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 3,
    "channels": [4, 8],
    "strides": [2],
    "norm": "batch",
}


def structures(count: int) -> tuple[Structure, ...]:
    """Return structures of the numbers 1 to `count`."""
    return tuple(
        Structure(f"part-{n}", n, f"Part {n}", TISSUE, TISSUE, (n % 256, 100, 50))
        for n in range(1, count + 1)
    )


def card(weights: Path, **changes: Any) -> ModelCard:
    """Return a card for a small UNet of 3 channels on a 2 mm RAS grid."""
    fields: dict[str, Any] = {
        "name": "by-hand",
        "version": "1",
        "title": "By hand",
        "description": "",
        "intended_use": "",
        "license": "CC0-1.0",
        "attribution": "",
        "channels": (Channel("ct", "CT"),),
        "network": NetworkSpec("UNet", SMALL_UNET),
        "weights": Weights(weights, hashlib.sha256(weights.read_bytes()).hexdigest()),
        "grid": NetworkGrid("RAS", (2.0, 2.0, 2.0)),
        "window": Window((16, 16, 16), 0.5),
        "structures": structures(2),
        "after": (ScaleRange(-200.0, 200.0, 0.0, 1.0, clip=True),),
        "activation": "softmax",
    }
    return ModelCard(**{**fields, **changes})


def small_weights(folder: Path, args: Mapping[str, Any] = SMALL_UNET, seed: int = 0) -> Path:
    """Save random weights of a small UNet, balanced on a scan of blobs; return the file."""
    import torch
    from monai.networks.nets.unet import UNet

    torch.manual_seed(seed)
    steps = (ScaleRange(-200.0, 200.0, 0.0, 1.0, clip=True),)
    path = folder / "model.safetensors"
    balanced_weights(UNet(**args), steps, smooth_scan((32, 32, 32)), path)
    return path


def converted(path: Path, key: str | None = None) -> Weights:
    """Return the weights of a file, converted into a folder next to it."""
    from scanloom.convert.weights import convert_weights, find_weights

    folder = path.parent / "converted"
    folder.mkdir(exist_ok=True)
    return convert_weights(find_weights(path, key, "the weights file"), folder)


def loud_weights(folder: Path, quiet: Path, loud: tuple[float, float], bias: float = 0.0) -> Path:
    """Save the weights of a small UNet with a channel of its own that is loud, and changes nothing.

    A constant becomes `loud[0] * loud[1]`, `bias` is added, and then it is multiplied by 0: where
    that overflowed, the result is NaN, and so are all scores.
    """
    import torch
    from safetensors.torch import load_file, save_file

    state = torch.load(quiet) if quiet.suffix == ".pt" else load_file(quiet)
    for name, value in (("model.0.adn.N.bias", loud[0]), ("model.1.submodule.conv.bias", bias)):
        state[name][0] = value
    state["model.0.adn.N.weight"][0] = 0.0
    state["model.1.submodule.conv.weight"][:, 0] = 0.0
    state["model.1.submodule.conv.weight"][0] = 0.0
    state["model.1.submodule.conv.weight"][0, 0, 1, 1, 1] = loud[1]
    state["model.1.submodule.adn.N.weight"][0] = 0.0
    state["model.2.conv.weight"][0] = 0.0
    path = folder / "loud.safetensors"
    save_file(state, path)
    return path


def balanced_weights(
    network: Any, steps: Sequence[IntensityStep], array: NDArray[Any], path: Path
) -> None:
    """Save a network's weights, its last bias such that every class wins somewhere.

    Parameters
    ----------
    network : torch Module
        (1, 1, x, y, z) to scores.
    steps : sequence of IntensityStep
        Intensity steps of the network's card.
    array : (I, J, K) array
        A scan.
    path : Path
        File of the weights, as safetensors or, with the suffix `.pt`, as PyTorch's; its folder is
        created.
    """
    import torch
    from safetensors.torch import save_file

    from scanloom.inference.intensity import apply_steps

    image = apply_steps(torch.from_numpy(array.astype(np.float32)), steps)
    i, j, k = (n // 16 * 16 for n in array.shape)
    network.eval()
    with torch.inference_mode():
        scores = network(image[None, None, :i, :j, :k])[0].flatten(1)
    state = network.state_dict()
    last = [name for name, value in state.items() if value.shape == (len(scores),)][-1]
    state[last] -= scores.median(dim=1).values
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        save_file(state, path)


def grid(
    shape: tuple[int, int, int],
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0),
    codes: str = "RAS",
    turn: float = 0.0,
    tilt: float = 0.0,
) -> Grid:
    """Return a grid of given axis codes, turned about all patient axes, its slices sheared.

    Parameters
    ----------
    turn : float
        Degrees about each of S, A and R, one after the other.
    tilt : float
        Degrees by which the last axis leans on the second.
    """
    axes = np.zeros((3, 3))
    for axis, code in enumerate(codes):
        axes["RASLPI".index(code) % 3, axis] = 1.0 if code in "RAS" else -1.0
    axes[:, 2] += np.tan(np.radians(tilt)) * axes[:, 1]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        axes = _turn(first, second, np.radians(turn)) @ axes
    affine = np.eye(4)
    affine[:3, :3] = axes * spacing
    affine[:3, 3] = (-31.0, 17.5, -120.25)
    return Grid(shape, affine)


def _turn(first: int, second: int, angle: float) -> NDArray[np.float64]:
    matrix = np.eye(3)
    matrix[first, first] = matrix[second, second] = np.cos(angle)
    matrix[first, second], matrix[second, first] = -np.sin(angle), np.sin(angle)
    return matrix


def smooth_scan(shape: tuple[int, int, int], seed: int = 0) -> NDArray[np.int16]:
    """Return a scan of soft blobs with noise, -1000 to 1000 or so, I fastest in memory."""
    from scipy import ndimage

    noise = np.random.default_rng(seed).standard_normal(shape)
    blobs = ndimage.gaussian_filter(noise, [max(n / 12, 1) for n in shape])
    values = 400 * blobs / blobs.std() + 20 * noise
    return np.asfortranarray(np.clip(values, -1000, 1000).astype(np.int16))
