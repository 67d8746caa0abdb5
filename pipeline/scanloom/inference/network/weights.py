"""Reads trained weights as plain data, and checks hash, types, shapes and values."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from scanloom.cards.card import Weights
from scanloom.cards.meshnet.layers_model import FLOAT32_KEY
from scanloom.cards.monai.files import check_archive, check_growth, is_safetensors
from scanloom.cards.nnunet.checkpoint import WEIGHTS_KEY, read_state
from scanloom.core import Reason, ScanError
from scanloom.inference.device import is_out_of_memory
from scanloom.inference.finite import all_finite
from scanloom.inference.nets.meshnet_state import ONE_ARRAY
from scanloom.inference.network.architectures import CONTAINERS

State = dict[str, torch.Tensor]


def read_weights(weights: Weights) -> State:
    """Read a state dict from its file.

    Parameters
    ----------
    weights : Weights
        File, hash and key from the card. The bytes are hashed again before they are parsed.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file can't be read; MODEL_HASH if its hash differs from the card's;
        MODEL_UNSAFE if it holds more than tensors, or expands when it is read; MODEL_WEIGHTS if it
        is not a state dict of plain tensors; OUT_OF_MEMORY.
    """
    content = _content(weights)
    if is_safetensors(io.BytesIO(content)):
        data = _read_safetensors(content)
    elif weights.key == WEIGHTS_KEY:
        data = _read_nnunet(content)
    elif weights.key == FLOAT32_KEY:
        data = _read_float32(content)
    else:
        data = _read_torch(content)
    state = _state(data, weights.key)
    check_growth(sum(v.numel() * v.element_size() for v in state.values()), len(content))
    return state


def load_weights(network: nn.Module, state: State) -> None:
    """Load trained weights into a network.

    Parameters
    ----------
    network : Module
        Changed in place.
    state : dict
        State dict from `read_weights`.

    Raises
    ------
    ScanError
        MODEL_WEIGHTS if they don't match the network; NOT_FINITE if a value is NaN or infinite.
    """
    _check_matches(network.state_dict(), state)
    try:
        network.load_state_dict(state)
    except RuntimeError as exc:
        raise ScanError(
            Reason.MODEL_WEIGHTS, "the network does not accept the model's weights"
        ) from exc
    count = sum(not all_finite(values) for values in _floating(network))
    if count:
        detail = f"{count} of the model's tensors contain NaN or infinite values"
        raise ScanError(Reason.NOT_FINITE, detail)


def largest(network: nn.Module) -> float:
    """Return the largest absolute value of a network's weights, which must be finite."""
    return max((max(map(abs, map(float, v.aminmax()))) for v in _floating(network)), default=0.0)


def _floating(network: nn.Module) -> list[torch.Tensor]:
    """Return a network's non-empty floating-point tensors: parameters and running statistics."""
    values = network.state_dict().values()
    return [value for value in values if value.is_floating_point() and value.numel()]


def _content(weights: Weights) -> bytes:
    """Read the weights file and check its hash."""
    try:
        if not weights.file.is_file():  # reading a pipe would never end
            raise ScanError(Reason.MODEL_DAMAGED, "the model's weights are not a file")
        content = weights.file.read_bytes()
    except OSError as exc:
        detail = f"the model's weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    digest, expected = hashlib.sha256(content).hexdigest(), weights.sha256.lower()
    if digest != expected:
        detail = f"the weights' SHA-256 is {digest[:12]}.., but {expected[:12]}.. in the card"
        raise ScanError(Reason.MODEL_HASH, detail)
    return content


def _read_safetensors(content: bytes) -> Any:
    """Parse the content of a .safetensors file."""
    from safetensors.torch import load

    try:
        return load(content)
    except Exception as exc:
        raise _read_error(exc, "the model's weights are not a safetensors file") from exc


def _read_torch(content: bytes) -> Any:
    """Parse the content of a .pt file; only tensors and plain containers are accepted."""
    check_archive(io.BytesIO(content))
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        if content[:2] in CONTAINERS:  # a PyTorch file with other objects
            detail = "the model's weights file contains objects other than tensors"
            raise ScanError(Reason.MODEL_UNSAFE, detail) from exc
        detail = "the model's weights are neither a PyTorch nor a safetensors file"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    except Exception as exc:
        detail = f"the model's weights can't be read ({type(exc).__name__})"
        raise _read_error(exc, detail) from exc


def _read_nnunet(content: bytes) -> State:
    """Parse the content of an nnU-Net checkpoint, in which several names may share a tensor."""
    tensors, blocks = read_state(io.BytesIO(content))
    flat = {
        tensor.storage.member: torch.frombuffer(
            blocks[tensor.storage.member], dtype=getattr(torch, tensor.storage.dtype)
        )
        for tensor in tensors.values()
        if tensor.storage.count
    }
    empty = torch.empty(0)
    return {
        name: torch.as_strided(
            flat.get(tensor.storage.member, empty), tensor.shape, tensor.stride, tensor.offset
        )
        for name, tensor in tensors.items()
    }


def _read_float32(content: bytes) -> State:
    """Return the numbers of a file of float32, little-endian, as one array."""
    if not content or len(content) % 4:
        detail = "the model's weights are not a file of float32 numbers"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    numbers = np.frombuffer(content, np.dtype("<f4")).astype(np.float32)
    return {ONE_ARRAY: torch.from_numpy(numbers)}


def _read_error(error: Exception, detail: str) -> ScanError:
    """Return the error for a reader's exception: OUT_OF_MEMORY, or MODEL_DAMAGED with `detail`."""
    if is_out_of_memory(error):
        return ScanError(Reason.OUT_OF_MEMORY, "the model's weights do not fit into memory")
    return ScanError(Reason.MODEL_DAMAGED, detail)


def _state(data: Any, key: str | None) -> State:
    """Return the state dict: the entry `key`, or the file itself without that entry (ignite)."""
    if key is not None and isinstance(data, Mapping) and key in data:
        data = data[key]
    if not isinstance(data, Mapping) or not data:
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file contains no state dict")
    if not all(isinstance(k, str) and _is_plain(v) for k, v in data.items()):
        raise ScanError(
            Reason.MODEL_WEIGHTS,
            "the weights file's state dict contains values that are not plain tensors",
        )
    return {k: v.detach().as_subclass(torch.Tensor) for k, v in data.items()}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense, unquantized tensor of real numbers."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
    )


def _check_matches(expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights whose names, shapes or kinds of numbers differ from the network's."""
    common = expected.keys() & state.keys()
    missing, unexpected = len(expected.keys() - common), len(state.keys() - common)
    different = sum(_shape_and_kind(expected[k]) != _shape_and_kind(state[k]) for k in common)
    if missing or unexpected or different:
        counts = f"{missing} missing, {unexpected} unexpected, {different} of another shape or type"
        detail = f"the weights do not match the network: {counts} (tensors)"
        raise ScanError(Reason.MODEL_WEIGHTS, detail)


def _shape_and_kind(values: torch.Tensor) -> tuple[torch.Size, bool]:
    """Return a tensor's shape, and whether it is floating-point."""
    return values.shape, values.is_floating_point()
