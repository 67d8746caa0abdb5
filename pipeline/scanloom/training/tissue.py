"""Train `ct_tissue`: which tissue a voxel of a CT shows, at 3 mm."""

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
CLOTH = -930.0
"""HU above which what lies outside the body is cloth or table, not air."""
LIMITS = (-4.0, 4.0)
"""What HU_RANGE is mapped to, as in the bundle's inference config; air and padding are -4."""
NETWORK: dict[str, object] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": len(NAMES),
    "features": [8, 8, 16, 32, 64, 8],
    "norm": None,
    "act": ["LeakyReLU", {"negative_slope": 0.1, "inplace": True}],
}
"""No normalisation: the absolute scale of HU tells tissues apart."""


@dataclass(frozen=True)
class Phase:
    """A part of the training: one cycle of the learning rate.

    Parameters
    ----------
    seed : int
        Decides everything that chance decides.
    steps, patch : int
        Steps, and voxels along a patch's edge.
    rate : float
        Highest learning rate.
    dice : float
        Weight of the Dice loss beside cross entropy; little of it keeps volumes right.
    batch, threads : int
        Patches a step; processor threads.
    noise : float
        How far what each layer gives is changed at random, as a share, voxel by voxel, and a third
        of it channel by channel (in even air all voxels are rounded alike): decisions become such
        as rounding does not change.
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
NOISY = (
    Phase(seed=3, steps=800, patch=64, rate=1e-3, dice=0.1, noise=0.03),
    Phase(seed=4, steps=800, patch=64, rate=7e-4, dice=0.1, noise=0.06),
    Phase(seed=5, steps=450, patch=64, rate=5e-4, dice=0.1, noise=0.04),
    Phase(seed=6, steps=350, patch=64, rate=4e-4, dice=0.1, noise=0.04),
)
"""Of 3 % and more: rounding to bfloat16 changes a value by 0.4 % at most."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A torso that was drawn: its volumes are known.

    Parameters
    ----------
    example : Example
        On the network's grid.
    shape : (I, J, K)
        Of its own grid.
    ml : (classes,) array
        Volume of each tissue.
    voxel_ml : float
        Volume of a voxel of its own grid.
    """

    example: Example
    shape: tuple[int, int, int]
    ml: NDArray[np.float64]
    voxel_ml: float


def network() -> nn.Module:
    """Return the network, untrained."""
    act = ("LeakyReLU", {"negative_slope": 0.1, "inplace": True})
    net: nn.Module = BasicUNet(**{**NETWORK, "act": act})
    return net


def train(
    examples: Sequence[Example],
    phases: Sequence[Phase],
    report: Callable[[str], None],
    start: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train a network on the processor and return its state dict.

    Parameters
    ----------
    examples : sequence of Example
        Scans with their labels.
    phases : sequence of Phase
        How, one after the other.
    report : function
        Is told a line of progress now and then.
    start : dict of tensors, optional
        Of a network to go on with.
    """
    torch.manual_seed(phases[0].seed)
    net = network().train()
    if start is not None:
        net.load_state_dict(start)
    for phase in phases:
        torch.manual_seed(phase.seed)
        torch.set_num_threads(phase.threads)
        with _noise(net, phase):
            run_phase(net, examples, phase, report)
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


@contextmanager
def _noise(net: nn.Module, phase: Phase) -> Iterator[None]:
    """Change what convolutions give at random, but for the last one's scores."""
    chance = torch.Generator().manual_seed(phase.seed)

    def change(_: nn.Module, __: object, out: Tensor) -> Tensor:
        share = torch.rand(out.shape, generator=chance)
        share += torch.rand((*out.shape[:2], 1, 1, 1), generator=chance) / 3
        return out + out.detach() * ((share - 2 / 3) * 2 * phase.noise).to(out.dtype)

    layers = [one for one in net.modules() if isinstance(one, (nn.Conv3d, nn.ConvTranspose3d))]
    hooks = [one.register_forward_hook(change) for one in layers[:-1] if phase.noise]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run_phase(
    net: nn.Module, examples: Sequence[Example], phase: Phase, report: Callable[[str], None]
) -> None:
    """Train `net` for one phase, in place."""
    rng = np.random.default_rng(phase.seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=phase.rate, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, phase.rate, total_steps=phase.steps, pct_start=0.1
    )
    began, shown = time.perf_counter(), 0.0
    for step in range(phase.steps):
        image, labels = batch(examples, phase, rng)
        with torch.autocast("cpu", torch.bfloat16):
            scores = net(image)
        value = loss(scores.float(), labels, phase.dice)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shown = 0.95 * shown + 0.05 * float(value.detach())
        if step % 50 == 49:
            mean = shown / (1 - 0.95 ** (step + 1))
            report(f"step {step + 1}: loss {mean:.3f}, {time.perf_counter() - began:.0f} s")


def loss(scores: Tensor, labels: Tensor, dice: float) -> Tensor:
    """Return cross entropy plus `dice` times the mean soft Dice loss of the classes present.

    Parameters
    ----------
    scores : (B, C, P, P, P) tensor
        Before softmax.
    labels : (B, P, P, P) tensor
        Class numbers.
    dice : float
        Weight.
    """
    entropy = nn.functional.cross_entropy(scores, labels)
    chance = scores.softmax(1)
    truth = nn.functional.one_hot(labels, len(NAMES)).movedim(-1, 1).to(chance.dtype)
    axes = (0, 2, 3, 4)
    both = (chance * truth).sum(axes)
    total = chance.sum(axes) + truth.sum(axes)
    there = truth.sum(axes) > 0
    return entropy + dice * (1 - (2 * both + 1) / (total + 1))[there].mean()


def mean_of(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of weights, those at the ends of the last phases.

    Chance, which moves each of them, evens out (Izmailov et al. 2018, arXiv:1803.05407).
    """
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that bfloat16 holds exactly, still as float32.

    Half of what separates labels of both precisions would be the rounding of weights. What a
    network reaches is the same.
    """
    return {name: value.to(torch.bfloat16).to(value.dtype) for name, value in state.items()}


def calibrate(state: dict[str, Tensor], drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Move the last layer's biases until volumes are right where they are known.

    A network that is trained to label voxels need not be right in volume: thin bone and the edge
    of lung are won or lost at the border. One number a class is set, by torsos that were drawn.

    Parameters
    ----------
    state : dict of tensors
        Of the trained network.
    drawn : sequence of Drawn
        Torsos of the training set.

    Returns
    -------
    dict of tensors
        The same, with other biases of the last layer.
    """
    net = network().eval()
    net.load_state_dict(state)
    scores = [scores_of(net, torso.example.hu) for torso in drawn]
    bias = torch.zeros(len(NAMES))
    for _ in range(13):
        ratios = [
            volumes(s + bias[:, None, None, None], torso.shape) * torso.voxel_ml / torso.ml
            for s, torso in zip(scores, drawn, strict=True)
        ]
        bias[1:] -= 0.8 * torch.log(torch.tensor(np.mean(ratios, axis=0))).float()[1:]
    last = "final_conv.bias"
    return {**state, last: state[last] + bias}


def scores_of(net: nn.Module, hu: NDArray[np.float32]) -> Tensor:
    """Return the scores (C, I, J, K) of a whole scan, enlarged with air to multiples of 16."""
    scaled = np.pad(scale(hu), [(0, -n % 16) for n in hu.shape], constant_values=LIMITS[0])
    with torch.inference_mode():
        scores = net(torch.from_numpy(scaled[None, None]))[0]
    i, j, k = hu.shape
    return torch.as_tensor(scores[:, :i, :j, :k]).clone()


def volumes(scores: Tensor, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return how many voxels each class fills, decided on a grid of `shape`."""
    fine = nn.functional.interpolate(
        scores.softmax(0)[None], size=shape, mode="trilinear", align_corners=True
    )
    counts = torch.bincount(fine[0].argmax(0).ravel(), minlength=len(NAMES))
    return np.asarray(np.maximum(counts.numpy().astype(float), 1))


def scale(hu: NDArray[np.float32]) -> NDArray[np.float32]:
    """Map HU_RANGE to LIMITS, as the bundle does."""
    (low, high), (bottom, top) = HU_RANGE, LIMITS
    share = np.clip((hu - low) / (high - low), 0, 1)
    return np.asarray(bottom + share * (top - bottom), np.float32)


def batch(examples: Sequence[Example], phase: Phase, rng: Generator) -> tuple[Tensor, Tensor]:
    """Draw patches: image (B, 1, P, P, P) within LIMITS, labels (B, P, P, P)."""
    weights = np.array([e.weight for e in examples])
    pairs = []
    for _ in range(phase.batch):
        chosen = examples[int(rng.choice(len(examples), p=weights / weights.sum()))]
        pairs.append(patch(chosen, phase.patch, rng))
    image = torch.from_numpy(np.stack([p[0] for p in pairs])[:, None])
    labels = torch.from_numpy(np.stack([p[1] for p in pairs]))
    return image, labels.long()


def patch(
    chosen: Example, size: int, rng: Generator
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Cut a turned and scaled patch out of a scan; outside of the scan is air, as in padding."""
    turn = _turn(rng)
    centre = _centre(chosen, size, rng)
    ticks = np.arange(size) - (size - 1) / 2
    grid = np.stack(np.meshgrid(ticks, ticks, ticks, indexing="ij"), -1) @ turn.T + centre
    shape = np.array(chosen.hu.shape)
    inside = np.asarray(((grid > -0.5) & (grid < shape - 0.5)).all(-1))
    low = np.clip(np.floor(grid.min((0, 1, 2))).astype(int), 0, shape - 1)
    high = np.clip(np.ceil(grid.max((0, 1, 2))).astype(int) + 1, low + 1, shape)
    part = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    points = ((2 * (grid - low) + 1) / (high - low) - 1)[None, ..., ::-1].copy()
    where = torch.from_numpy(points).float()
    image = _sample(chosen.hu[part], where, "bilinear")
    labels = _sample(chosen.labels[part], where, "nearest").astype(np.uint8)
    labels[~inside] = 0
    return _disturb(image, inside, rng), labels


def _sample(array: NDArray[np.generic], points: Tensor, mode: str) -> NDArray[np.float32]:
    source = torch.from_numpy(np.ascontiguousarray(array, np.float32))[None, None]
    taken = nn.functional.grid_sample(
        source, points, mode=mode, padding_mode="border", align_corners=False
    )
    return np.asarray(taken[0, 0].numpy())


def _turn(rng: Generator) -> NDArray[np.float64]:
    """Return a rotation by up to about 12 degrees, with scale and, at times, mirrored axes."""
    matrix = np.eye(3)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        angle = rng.normal(scale=0.1)
        step = np.eye(3)
        step[a, a] = step[b, b] = np.cos(angle)
        step[a, b], step[b, a] = -np.sin(angle), np.sin(angle)
        matrix = matrix @ step
    mirror = np.where(rng.random(3) < (0.5, 0.1, 0.3), -1.0, 1.0)
    return np.asarray(matrix * mirror * rng.uniform(0.85, 1.2))


def _centre(chosen: Example, size: int, rng: Generator) -> NDArray[np.float64]:
    """Return where the patch lies: anywhere, or half of the time about what is rare or hard."""
    shape = np.array(chosen.hu.shape)
    if rng.random() < 0.5:
        tissue = rng.choice((0, 1, 2, 5))
        wanted = chosen.labels == tissue
        if tissue == 0:
            wanted &= chosen.hu > CLOTH
        found = np.flatnonzero(wanted)
        if found.size:
            at = np.array(np.unravel_index(int(rng.choice(found)), tuple(shape)), float)
            return np.asarray(at + rng.uniform(-size / 3, size / 3, 3))
    room = np.maximum(shape - size, 0)
    return np.asarray((shape - 1) / 2 + rng.uniform(-0.5, 0.5, 3) * (room + size * 0.4))


def _disturb(
    image: NDArray[np.float32], inside: NDArray[np.bool_], rng: Generator
) -> NDArray[np.float32]:
    """Blur along an axis, add noise, shift, as scanners differ; scale to LIMITS."""
    if rng.random() < 0.35:
        axis = int(rng.choice((0, 1, 2, 2)))
        image = gaussian_filter1d(image, rng.uniform(0.3, 1.0), axis=axis)
    if rng.random() < 0.7:
        noise = rng.standard_normal(image.shape, np.float32)
        if rng.random() < 0.5:
            noise = gaussian_filter(noise, 0.6, truncate=2.0)
            noise /= noise.std()
        image = image + noise * np.float32(rng.uniform(0, 28))
    scaled = scale(image + np.float32(rng.normal(scale=6)))
    scaled[~inside] = LIMITS[0]
    return scaled
