"""Train `ct_tissue`, a network that labels the tissue of each CT voxel, at 3 mm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from monai.networks.nets import BasicUNet
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, gaussian_filter1d
from torch import Tensor, nn

from scanloom.training.tissue_data import Example
from scanloom.training.tissue_rules import NAMES

HU_RANGE = (-1050.0, 550.0)
_CLOTH_HU = -930.0
"""HU above which voxels outside the body are cloth or table, not air."""
_NETWORK_RANGE = (-4.0, 4.0)
"""Range that HU_RANGE is mapped to, as in the bundle's inference config; air and padding: -4."""
NETWORK: dict[str, object] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": len(NAMES),
    "features": [8, 8, 16, 32, 64, 8],
    "norm": None,
    "act": ["LeakyReLU", {"negative_slope": 0.1, "inplace": True}],
}
"""No normalisation layers: the absolute scale of HU distinguishes tissues."""


@dataclass(frozen=True)
class Phase:
    """One phase of the training: one cycle of the learning rate.

    Parameters
    ----------
    seed : int
        Seed of all random numbers.
    steps, patch : int
        Number of steps; edge length of a patch in voxels.
    rate : float
        Highest learning rate.
    dice : float
        Weight of the Dice loss relative to cross entropy; a small one keeps volumes right.
    batch, threads : int
        Patches per step; CPU threads.
    noise : float
        Relative noise on the output of each layer: per voxel, plus a third of it per channel, as
        all voxels of uniform air are rounded alike. It makes decisions robust to rounding.
    """

    seed: int
    steps: int
    patch: int
    rate: float
    dice: float
    batch: int = 2
    threads: int = 2
    noise: float = 0.0


PHASES = (
    Phase(seed=1, steps=900, patch=56, rate=4e-3, dice=0.5),
    Phase(seed=2, steps=400, patch=64, rate=7e-4, dice=0.1),
)
NOISE_PHASES = (
    Phase(seed=3, steps=800, patch=64, rate=1e-3, dice=0.1, noise=0.03),
    Phase(seed=4, steps=800, patch=64, rate=7e-4, dice=0.1, noise=0.06),
    Phase(seed=5, steps=450, patch=64, rate=5e-4, dice=0.1, noise=0.04),
    Phase(seed=6, steps=350, patch=64, rate=4e-4, dice=0.1, noise=0.04),
)
"""Phases with noise of at least 3 %; rounding to bfloat16 changes a value by at most 0.4 %."""


@dataclass(frozen=True, eq=False)
class SyntheticTorso:
    """A synthetic torso, whose volumes are known.

    Parameters
    ----------
    example : Example
        Image and labels on the network's grid.
    shape : (I, J, K)
        Shape of the torso's own grid.
    ml : (classes,) array
        Volume of each tissue in ml.
    voxel_ml : float
        Volume of a voxel of the torso's own grid in ml.
    """

    example: Example
    shape: tuple[int, int, int]
    ml: NDArray[np.float64]
    voxel_ml: float


def _network() -> nn.Module:
    """Return the untrained network."""
    act = ("LeakyReLU", {"negative_slope": 0.1, "inplace": True})
    net: nn.Module = BasicUNet(**{**NETWORK, "act": act})
    return net


def train(
    examples: Sequence[Example],
    phases: Sequence[Phase],
    report: Callable[[str], None],
    start: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train a network on the CPU and return its state dict.

    Parameters
    ----------
    examples : sequence of Example
        Scans with their labels.
    phases : sequence of Phase
        Phases of the training, in order.
    report : function
        Called with a line of progress every 50 steps.
    start : dict of tensors, optional
        State dict of a network to continue from.
    """
    torch.manual_seed(phases[0].seed)
    net = _network().train()
    if start is not None:
        net.load_state_dict(start)
    for phase in phases:
        torch.manual_seed(phase.seed)
        torch.set_num_threads(phase.threads)
        with _output_noise(net, phase):
            _run_phase(net, examples, phase, report)
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


@contextmanager
def _output_noise(net: nn.Module, phase: Phase) -> Iterator[None]:
    """Add noise to the outputs of all convolutions except the last, which returns the scores."""
    generator = torch.Generator().manual_seed(phase.seed)

    def add_noise(_: nn.Module, __: object, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator)
        noise += torch.rand((*output.shape[:2], 1, 1, 1), generator=generator) / 3
        return output + output.detach() * ((noise - 2 / 3) * 2 * phase.noise).to(output.dtype)

    layers = [
        layer for layer in net.modules() if isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d))
    ]
    hooks = [layer.register_forward_hook(add_noise) for layer in layers[:-1] if phase.noise]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run_phase(
    net: nn.Module, examples: Sequence[Example], phase: Phase, report: Callable[[str], None]
) -> None:
    """Train `net` for one phase, in place."""
    rng = np.random.default_rng(phase.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=phase.rate, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, phase.rate, total_steps=phase.steps, pct_start=0.1
    )
    start, running_loss = time.perf_counter(), 0.0
    for step in range(phase.steps):
        image, labels = _batch(examples, phase, rng)
        with torch.autocast("cpu", torch.bfloat16):
            scores = net(image)
        batch_loss = _loss(scores.float(), labels, phase.dice)
        optimizer.zero_grad()
        batch_loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running_loss = 0.95 * running_loss + 0.05 * float(batch_loss.detach())
        if step % 50 == 49:
            mean_loss = running_loss / (1 - 0.95 ** (step + 1))
            report(f"step {step + 1}: loss {mean_loss:.3f}, {time.perf_counter() - start:.0f} s")


def _loss(scores: Tensor, labels: Tensor, dice: float) -> Tensor:
    """Return cross entropy plus `dice` times the mean soft Dice loss of the classes present.

    Parameters
    ----------
    scores : (B, C, P, P, P) tensor
        Scores before softmax.
    labels : (B, P, P, P) tensor
        Class numbers.
    dice : float
        Weight of the Dice loss.
    """
    entropy = nn.functional.cross_entropy(scores, labels)
    probability = scores.softmax(1)
    truth = nn.functional.one_hot(labels, len(NAMES)).movedim(-1, 1).to(probability.dtype)
    axes = (0, 2, 3, 4)
    overlap = (probability * truth).sum(axes)
    total = probability.sum(axes) + truth.sum(axes)
    is_present = truth.sum(axes) > 0
    return entropy + dice * (1 - (2 * overlap + 1) / (total + 1))[is_present].mean()


def average_weights(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of network weights, as saved at the ends of the last phases.

    Their random fluctuations average out (Izmailov et al. 2018, arXiv:1803.05407).
    """
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def round_to_bfloat16(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights rounded to bfloat16, still as float32.

    Half of the differences between labels in the two precisions would come from rounding weights.
    The accuracy of the network is the same.
    """
    return {name: value.to(torch.bfloat16).to(value.dtype) for name, value in state.items()}


def calibrate(state: dict[str, Tensor], drawn: Sequence[SyntheticTorso]) -> dict[str, Tensor]:
    """Adjust the biases of the last layer until the volumes of synthetic torsos are right.

    A network trained to label voxels may be biased in volume, as thin bone and the edge of the
    lung are decided at their borders. This sets one number per class.

    Parameters
    ----------
    state : dict of tensors
        State dict of the trained network.
    drawn : sequence of SyntheticTorso
        Synthetic torsos of the training set.

    Returns
    -------
    dict of tensors
        State dict with new biases of the last layer.
    """
    net = _network().eval()
    net.load_state_dict(state)
    scores = [_scores_of(net, torso.example.hu) for torso in drawn]
    bias = torch.zeros(len(NAMES))
    for _ in range(13):
        ratios = [
            _class_volumes(s + bias[:, None, None, None], torso.shape) * torso.voxel_ml / torso.ml
            for s, torso in zip(scores, drawn, strict=True)
        ]
        bias[1:] -= 0.8 * torch.log(torch.tensor(np.mean(ratios, axis=0))).float()[1:]
    bias_name = "final_conv.bias"
    return {**state, bias_name: state[bias_name] + bias}


def _scores_of(net: nn.Module, hu: NDArray[np.float32]) -> Tensor:
    """Return the scores (C, I, J, K) of a whole scan, padded with air to multiples of 16."""
    scaled = np.pad(_scale(hu), [(0, -n % 16) for n in hu.shape], constant_values=_NETWORK_RANGE[0])
    with torch.inference_mode():
        scores = net(torch.from_numpy(scaled[None, None]))[0]
    i, j, k = hu.shape
    return torch.as_tensor(scores[:, :i, :j, :k]).clone()


def _class_volumes(scores: Tensor, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return the voxel count of each class (C,), at least 1, after resampling to `shape`."""
    resampled = nn.functional.interpolate(
        scores.softmax(0)[None], size=shape, mode="trilinear", align_corners=True
    )
    counts = torch.bincount(resampled[0].argmax(0).ravel(), minlength=len(NAMES))
    return np.asarray(np.maximum(counts.numpy().astype(float), 1))


def _scale(hu: NDArray[np.float32]) -> NDArray[np.float32]:
    """Map HU_RANGE to the network's range, as the bundle does."""
    (in_low, in_high), (out_low, out_high) = HU_RANGE, _NETWORK_RANGE
    fraction = np.clip((hu - in_low) / (in_high - in_low), 0, 1)
    return np.asarray(out_low + fraction * (out_high - out_low), np.float32)


def _batch(examples: Sequence[Example], phase: Phase, rng: Generator) -> tuple[Tensor, Tensor]:
    """Draw random patches: scaled images (B, 1, P, P, P) and labels (B, P, P, P)."""
    weights = np.array([e.weight for e in examples])
    pairs = []
    for _ in range(phase.batch):
        example = examples[int(rng.choice(len(examples), p=weights / weights.sum()))]
        pairs.append(_patch(example, phase.patch, rng))
    image = torch.from_numpy(np.stack([p[0] for p in pairs])[:, None])
    labels = torch.from_numpy(np.stack([p[1] for p in pairs]))
    return image, labels.long()


def _patch(
    example: Example, size: int, rng: Generator
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Sample a rotated and scaled patch from a scan; outside the scan is air, as in padding."""
    rotation = _random_rotation(rng)
    centre = _random_centre(example, size, rng)
    offsets = np.arange(size) - (size - 1) / 2
    grid = np.stack(np.meshgrid(offsets, offsets, offsets, indexing="ij"), -1) @ rotation.T + centre
    shape = np.array(example.hu.shape)
    inside = np.asarray(((grid > -0.5) & (grid < shape - 0.5)).all(-1))
    low = np.clip(np.floor(grid.min((0, 1, 2))).astype(int), 0, shape - 1)
    high = np.clip(np.ceil(grid.max((0, 1, 2))).astype(int) + 1, low + 1, shape)
    box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    points = ((2 * (grid - low) + 1) / (high - low) - 1)[None, ..., ::-1].copy()
    sample_points = torch.from_numpy(points).float()
    image = _sample(example.hu[box], sample_points, "bilinear")
    labels = _sample(example.labels[box], sample_points, "nearest").astype(np.uint8)
    labels[~inside] = 0
    return _augment(image, inside, rng), labels


def _sample(array: NDArray[np.generic], points: Tensor, mode: str) -> NDArray[np.float32]:
    source = torch.from_numpy(np.ascontiguousarray(array, np.float32))[None, None]
    sampled = nn.functional.grid_sample(
        source, points, mode=mode, padding_mode="border", align_corners=False
    )
    return np.asarray(sampled[0, 0].numpy())


def _random_rotation(rng: Generator) -> NDArray[np.float64]:
    """Return a random (3, 3) rotation (SD 6 degrees per axis) with scale and random mirroring."""
    matrix = np.eye(3)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        angle = rng.normal(scale=0.1)
        rotation = np.eye(3)
        rotation[a, a] = rotation[b, b] = np.cos(angle)
        rotation[a, b], rotation[b, a] = -np.sin(angle), np.sin(angle)
        matrix = matrix @ rotation
    mirror = np.where(rng.random(3) < (0.5, 0.1, 0.3), -1.0, 1.0)
    return np.asarray(matrix * mirror * rng.uniform(0.85, 1.2))


def _random_centre(example: Example, size: int, rng: Generator) -> NDArray[np.float64]:
    """Return a patch centre: random, or in half of the cases near a rare or difficult tissue."""
    shape = np.array(example.hu.shape)
    if rng.random() < 0.5:
        tissue = rng.choice((0, 1, 2, 5))
        candidates = example.labels == tissue
        if tissue == 0:
            candidates &= example.hu > _CLOTH_HU
        indices = np.flatnonzero(candidates)
        if indices.size:
            centre = np.array(np.unravel_index(int(rng.choice(indices)), tuple(shape)), float)
            return np.asarray(centre + rng.uniform(-size / 3, size / 3, 3))
    margin = np.maximum(shape - size, 0)
    return np.asarray((shape - 1) / 2 + rng.uniform(-0.5, 0.5, 3) * (margin + size * 0.4))


def _augment(
    image: NDArray[np.float32], inside: NDArray[np.bool_], rng: Generator
) -> NDArray[np.float32]:
    """Blur along an axis, add noise and shift HU, as scanners differ; scale for the network."""
    if rng.random() < 0.35:
        axis = int(rng.choice((0, 1, 2, 2)))
        image = gaussian_filter1d(image, rng.uniform(0.3, 1.0), axis=axis)
    if rng.random() < 0.7:
        noise = rng.standard_normal(image.shape, np.float32)
        if rng.random() < 0.5:
            noise = gaussian_filter(noise, 0.6, truncate=2.0)
            noise /= noise.std()
        image = image + noise * np.float32(rng.uniform(0, 28))
    scaled = _scale(image + np.float32(rng.normal(scale=6)))
    scaled[~inside] = _NETWORK_RANGE[0]
    return scaled
