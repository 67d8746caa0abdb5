"""Train `ct_tissue`, a network that labels the tissue of each CT voxel, at 3 mm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from monai.networks.nets import BasicUNet
from numpy.typing import NDArray
from torch import Tensor, nn

from ct_tissue_training.data import Example
from ct_tissue_training.patches import draw_batch, scale
from ct_tissue_training.phases import Phase
from ct_tissue_training.rules import NAMES

NETWORK: dict[str, object] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": len(NAMES),
    "features": [8, 8, 16, 32, 64, 8],
    "norm": None,
    "act": ["LeakyReLU", {"negative_slope": 0.1, "inplace": True}],
}
"""No normalisation layers: the absolute scale of HU distinguishes tissues."""


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
        image, labels = draw_batch(examples, phase, rng)
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
        bias[1:] -= 3.2 * torch.log(torch.tensor(np.mean(ratios, axis=0))).float()[1:]
    bias_name = "final_conv.bias"
    return {**state, bias_name: state[bias_name] + bias}


def _scores_of(net: nn.Module, hu: NDArray[np.float32]) -> Tensor:
    """Return the scores (C, I, J, K) of a whole scan, its border repeated to multiples of 16."""
    scaled = np.pad(scale(hu), [(0, -n % 16) for n in hu.shape], mode="edge")
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
