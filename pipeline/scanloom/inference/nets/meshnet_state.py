"""Weights of MeshNets under the names of other programs, in the order in which layers are applied.

brainchop numbers the layers (`model.3.0.weight`), and so do MONAI's bundles; TensorFlow.js stores
all weights as one array, kernels with channels last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import torch

State = dict[str, torch.Tensor]

ONE_ARRAY: Final = "values"
"""Entry of a state dict with all weights as one array."""
_KERNEL_DIMS: Final = 5
_LAST_BIAS: Final = "classifier.bias"


def convert_state(state: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> State:
    """Return weights under the names of `MeshNet`.

    A bias of the classifier is dropped if the network has none. Weights that do not correspond to
    the network keep their names.

    Parameters
    ----------
    state : mapping
        Weights: kernels (C', C, x, y, z), biases (C',) and weights of norms (C',); or one array.
    shapes : mapping
        Shapes of the network's weights by name, in the order of the layers.
    """
    if set(state) == {ONE_ARRAY}:
        return _cut(state[ONE_ARRAY], shapes)
    prefixes = sorted({name.rpartition(".")[0] for name in state}, key=_order)
    kernels = [p for p in prefixes if _dims(state, p) == _KERNEL_DIMS]
    norms = [p for p in prefixes if _dims(state, p) == 1]
    renamed = {norm: f"norms.{n}" for n, norm in enumerate(norms)}
    renamed.update({kernel: f"layers.{n}" for n, kernel in enumerate(kernels[:-1])})
    renamed.update(dict.fromkeys(kernels[-1:], "classifier"))
    converted = {}
    for name, values in state.items():
        prefix, _, leaf = name.rpartition(".")
        converted[f"{renamed.get(prefix, prefix)}.{leaf}"] = values
    return _without_bias(converted, shapes)


def _order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a key that sorts names by the numbers in them; the classifier comes last."""
    parts = re.split(r"(\d+)", name)
    numbers = [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
    return name == "classifier", numbers


def _dims(state: Mapping[str, torch.Tensor], prefix: str) -> int:
    """Return the number of dimensions of a layer's weight; 0 if it has none."""
    weight = state.get(f"{prefix}.weight")
    return 0 if weight is None else weight.ndim


def _cut(values: torch.Tensor, shapes: Mapping[str, torch.Size]) -> State:
    """Return weights from one array: kernel, then bias of each layer, kernels with channels last.

    The array itself if it has too few or too many values.
    """
    expected = dict(shapes)
    classes = list(shapes.values())[-1][0]
    if len(values) - sum(map(math.prod, expected.values())) == classes:
        expected.setdefault(_LAST_BIAS, torch.Size((classes,)))
    if len(values) != sum(map(math.prod, expected.values())):
        return {ONE_ARRAY: values}
    parts = torch.split(values, [math.prod(shape) for shape in expected.values()])
    state = {}
    for (name, shape), part in zip(expected.items(), parts, strict=True):
        if len(shape) == _KERNEL_DIMS:
            stored = part.view(*shape[2:], shape[1], shape[0])
            state[name] = stored.permute(4, 3, 0, 1, 2).contiguous()
        else:
            state[name] = part.clone()
    return _without_bias(state, shapes)


def _without_bias(state: State, shapes: Mapping[str, torch.Size]) -> State:
    """Return weights without the classifier's bias if the network has none."""
    return {name: v for name, v in state.items() if name != _LAST_BIAS or name in shapes}
