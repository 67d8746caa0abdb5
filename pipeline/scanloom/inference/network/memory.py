"""Measures the memory of a network's values on the meta device, which allocates nothing."""

from __future__ import annotations

import json
import math
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scanloom.cards.card import NetworkSpec
from scanloom.inference.device import VALUES_PER_VOXEL
from scanloom.inference.network.architectures import MetaShapeRules, build_network, meta_dispatch
from scanloom.inference.network.layers import MixedBfloat16, last_layer, replace_with_identity

MAX_UNFOLDED_VALUES = 20_480
"""Largest number of values per plane (batch, channels, x and y) of an input that is unfolded into
columns on a CPU: torch passes larger inputs to oneDNN."""
CHANNEL_BLOCK = 16
"""Size of oneDNN's blocks of channels: incomplete blocks are padded."""
_FLOAT_BYTES = torch.float32.itemsize


def network_bytes(
    spec: NetworkSpec,
    size: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    windows: int = 1,
    sums: str = "float32",
) -> int:
    """Return the peak memory of a network's values in one forward pass.

    Parameters
    ----------
    spec : NetworkSpec
        Class and arguments.
    size : (x, y, z) or (x, y)
        Size of the network's input.
    dtype : torch.dtype
        Type in which the network calculates.
    windows : int
        Windows in a batch.
    sums : "float32" or "float16"
        Type of the sums of scores: with float16, the final layer is not detached.

    Returns
    -------
    int
        Bytes, including the scores, without input and weights. `VALUES_PER_VOXEL` per voxel for a
        network that cannot run on the meta device.
    """
    arguments = json.dumps(dict(spec.args), sort_keys=True)
    detached = sums == "float32"
    if dtype is torch.bfloat16:
        return _window_bytes(spec.name, arguments, size, detached, ends=True) * windows
    window_bytes = _window_bytes(spec.name, arguments, size, detached, ends=False)
    return window_bytes * windows * dtype.itemsize // _FLOAT_BYTES


@lru_cache(maxsize=64)
def _window_bytes(
    name: str, arguments: str, size: tuple[int, ...], detached: bool, *, ends: bool
) -> int:
    """Return the bytes of one window in float32, or in bfloat16 with `MixedBfloat16`.

    `detached` is whether the final layer is detached where possible.
    """
    spec, channels = NetworkSpec(name, json.loads(arguments)), _channels(arguments)
    try:
        with torch.device("meta"):
            with meta_dispatch():
                network = build_network(spec)
            last = last_layer(spec, size) if detached else None
            if last is not None:
                replace_with_identity(network, last[0])
        if ends:
            with meta_dispatch():
                network = MixedBfloat16(network, channels, size)
        window = torch.empty((1, channels, *size), device="meta")
        with torch.inference_mode(), _LiveMemoryMode() as live:
            network(window)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return math.prod(size) * VALUES_PER_VOXEL * (_FLOAT_BYTES // 2 if ends else _FLOAT_BYTES)
    return int(live.peak)


def _channels(arguments: str) -> int:
    """Return the number of a network's input channels."""
    return int(json.loads(arguments).get("in_channels", 1))


class _LiveMemory(MetaShapeRules):
    """Counts the bytes of all live tensors; `peak` is their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, int] = {}

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._watch(value.untyped_storage())
        self.peak = max(self.peak, self.live + _workspace(str(func), args, out))

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._seen:
            self._seen[key] = storage.nbytes()
            self.live += self._seen[key]
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._seen.pop(key)


# torch's class has no types
class _LiveMemoryMode(_LiveMemory, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all operations of torch in the block."""


def _workspace(operation: str, args: tuple[Any, ...], out: Any) -> int:
    """Return the temporary memory of a convolution (measured with torch 2.13 on a CPU).

    oneDNN converts input and output to blocks of channels; small inputs are unfolded to columns.
    """
    if not operation.startswith("aten.conv"):
        return 0
    image, weight = args[0], args[1]
    if "transpose" in operation or (len(args) > 6 and args[6] is True):
        return 2 * int(out.nbytes)
    if math.prod(image.shape[:4]) <= MAX_UNFOLDED_VALUES:
        columns = math.prod(weight.shape[1:]) * math.prod(out.shape[2:])
        return int(columns * out.element_size())
    padding = out.nbytes * (-out.shape[1] % CHANNEL_BLOCK) // out.shape[1]
    return int(image.nbytes + padding)
