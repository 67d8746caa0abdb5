"""Weights read as data: plain numbers that are the card's, that fit the network, and are finite."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scanloom.cards.card import Weights
from scanloom.cards.monai.files import check_archive, check_growth
from scanloom.core import Reason, ScanError
from scanloom.inference.device import is_out_of_memory
from scanloom.inference.finite import all_finite
from scanloom.inference.network.architectures import CONTAINERS

State = dict[str, torch.Tensor]


def read_weights(weights: Weights) -> State:
    """Return a state dict from its file.

    Parameters
    ----------
    weights : Weights
        Of the card. The file is hashed again: what is read are the bytes that were hashed.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file can't be read; MODEL_HASH if it is another than the card's;
        MODEL_UNSAFE if it holds more than numbers, or numbers that grow when they are read;
        MODEL_WEIGHTS if it is no state dict of plain numbers; OUT_OF_MEMORY.
    """
    content = _content(weights)
    safetensors = weights.file.suffix == ".safetensors"
    data = _read_safetensors(content) if safetensors else _read_torch(content)
    state = _state(data, weights.key)
    check_growth(sum(v.numel() * v.element_size() for v in state.values()), len(content))
    return state


def load_weights(network: nn.Module, state: State) -> None:
    """Fill a network with trained numbers.

    Parameters
    ----------
    network : Module
        Changed.
    state : dict
        As `read_weights` gives it.

    Raises
    ------
    ScanError
        MODEL_WEIGHTS if they don't fit the network; NOT_FINITE if one is NaN or infinite.
    """
    _compare(network.state_dict(), state)
    try:
        network.load_state_dict(state)
    except RuntimeError as exc:
        raise ScanError(Reason.MODEL_WEIGHTS, "its weights can't be taken over") from exc
    wrong = sum(not all_finite(values) for values in _floating(network))
    if wrong:
        detail = f"{wrong} of the model's tensors hold NaN or infinite numbers"
        raise ScanError(Reason.NOT_FINITE, detail)


def largest(network: nn.Module) -> float:
    """Return the largest absolute value of a network's weights, which are finite."""
    return max((max(map(abs, map(float, v.aminmax()))) for v in _floating(network)), default=0.0)


def _floating(network: nn.Module) -> list[torch.Tensor]:
    """Return the network's floating numbers, what is trained and what is counted."""
    values = network.state_dict().values()
    return [value for value in values if value.is_floating_point() and value.numel()]


def _content(weights: Weights) -> bytes:
    """Return the bytes of the card's file."""
    try:
        if not weights.file.is_file():  # a pipe would never end
            raise ScanError(Reason.MODEL_DAMAGED, "its weights are no file")
        content = weights.file.read_bytes()
    except OSError as exc:
        detail = f"its weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    found = hashlib.sha256(content).hexdigest()
    if found != weights.sha256.lower():
        detail = f"SHA-256 is {found[:12]}.., the card says {weights.sha256[:12].lower()}.."
        raise ScanError(Reason.MODEL_HASH, detail)
    return content


def _read_safetensors(content: bytes) -> Any:
    """Return what a .safetensors file holds."""
    from safetensors.torch import load

    try:
        return load(content)
    except Exception as exc:
        raise _unread(exc, "its weights are no safetensors file") from exc


def _read_torch(content: bytes) -> Any:
    """Return what a .pt file holds; only tensors and plain containers are let in."""
    check_archive(io.BytesIO(content))
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        if content[:2] in CONTAINERS:  # the content is at fault
            detail = "its weights file holds more than numbers"
            raise ScanError(Reason.MODEL_UNSAFE, detail) from exc
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are no PyTorch file") from exc
    except Exception as exc:
        raise _unread(exc, f"its weights can't be read ({type(exc).__name__})") from exc


def _unread(error: Exception, detail: str) -> ScanError:
    """Return what a reader's error means: it is the file's fault unless there was no memory."""
    if is_out_of_memory(error):
        return ScanError(Reason.OUT_OF_MEMORY, "the model's weights do not fit into memory")
    return ScanError(Reason.MODEL_DAMAGED, detail)


def _state(data: Any, key: str | None) -> State:
    """Return the state dict; where `key` is not in the file, the file itself is it (ignite)."""
    if key is not None and isinstance(data, Mapping) and key in data:
        data = data[key]
    if not isinstance(data, Mapping) or not data:
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file holds no state dict")
    if not all(isinstance(k, str) and _is_plain(v) for k, v in data.items()):
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file holds no plain state dict")
    return {k: v.detach().as_subclass(torch.Tensor) for k, v in data.items()}


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor of numbers that are there, one by one."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
    )


def _compare(wanted: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights whose names, shapes or kinds of numbers are not the network's."""
    both = wanted.keys() & state.keys()
    missing, more = len(wanted.keys() - both), len(state.keys() - both)
    other = sum(_form(wanted[k]) != _form(state[k]) for k in both)
    if missing or more or other:
        detail = f"{missing} tensors are missing, {more} too many, {other} of another form"
        raise ScanError(Reason.MODEL_WEIGHTS, detail)


def _form(values: torch.Tensor) -> tuple[torch.Size, bool]:
    return values.shape, values.is_floating_point()
