"""Build networks of the classes in `scanloom.cards.networks`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from scanloom.cards.card import ModelCard, NetworkSpec
from scanloom.cards.meshnet.layers_model import FLOAT32_KEY
from scanloom.cards.monai.files import is_safetensors
from scanloom.cards.networks import NETWORKS, AllowedNetwork
from scanloom.core import Reason, ScanError
from scanloom.inference.device import is_out_of_memory
from scanloom.inference.network.meta_shapes import meta_dispatch

_MAX_TENSORS: Final = 20_000
"""Maximum number of weight tensors; the largest allowed networks have 1,000 as published."""
_MAX_ARGUMENT: Final = 1 << 16
"""Largest number in a network's arguments: a larger one is not a count of channels or layers."""
CONTAINERS: Final = (b"PK", b"\x80\x02")
"""First bytes of PyTorch's files: a zip archive, or a pickle before version 1.6."""


def build_network(spec: NetworkSpec, values: int | None = None) -> nn.Module:
    """Return an untrained network, in evaluation mode, on the CPU.

    Parameters
    ----------
    spec : NetworkSpec
        Class and arguments from the card.
    values : int, optional
        Number of values in the weights file: a much larger network is refused before it is
        allocated.

    Raises
    ------
    ScanError
        MODEL_NETWORK if the class is not allowed or rejects the arguments; MODEL_UNSUPPORTED if the
        network is neither two- nor three-dimensional; MODEL_WEIGHTS if it is much larger than
        `values`; OUT_OF_MEMORY.
    """
    network_class, allowed = find_class(spec)
    if dimensions(spec) not in (2, 3):
        detail = "the model's network is neither two- nor three-dimensional"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    args = {name: value for name, value in spec.args.items() if name not in allowed.removed}
    for name, value in args.items():
        _check_numbers(value, allowed.largest.get(name, _MAX_ARGUMENT))
    try:
        with _limit_weights(values):
            network: nn.Module = network_class(**args)
    except ScanError:
        raise
    except Exception as exc:  # constructors raise any type of error
        if isinstance(exc, ImportError):
            raise
        if is_out_of_memory(exc):
            _refuse_too_large(network_class, args, values)
            detail = "the model's network does not fit into memory"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from exc
        detail = f"{spec.name} rejects the card's arguments ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_NETWORK, detail) from exc
    network.eval()
    return network


def dimensions(spec: NetworkSpec) -> object:
    """Return the number of spatial dimensions, from a network's arguments."""
    return spec.args.get("spatial_dims", 3)


def check_dimensions(card: ModelCard) -> None:
    """Refuse a card (MODEL_UNSUPPORTED) whose windows have other dimensions than its network."""
    expected = 3 if card.window.plane is None else 2
    if dimensions(card.network) != expected:
        detail = f"the model's network is not {'three' if expected == 3 else 'two'}-dimensional"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)


def check_network(card: ModelCard) -> None:
    """Refuse a card whose network can't be built, or whose weights have an unknown format.

    Fast: the network is built on the meta device, and only the first bytes of the weights are read.

    Raises
    ------
    ScanError
        As `build_network`; MODEL_DAMAGED.
    """
    check_dimensions(card)
    with torch.device("meta"), meta_dispatch():
        build_network(card.network)
    for weights in (card.weights, *card.folds):
        if weights.key != FLOAT32_KEY:  # plain numbers have no first bytes of their own
            _check_container(weights.file)


def _check_container(path: Path) -> None:
    """Refuse a weights file (MODEL_DAMAGED) that is not of PyTorch's or safetensors' format."""
    try:
        with path.open("rb") as file:
            safetensors = is_safetensors(file)
            file.seek(0)
            start = file.read(2)
    except OSError as exc:
        detail = f"the model's weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    if not safetensors and start not in CONTAINERS:
        detail = "the model's weights are neither a PyTorch nor a safetensors file"
        raise ScanError(Reason.MODEL_DAMAGED, detail)


def find_class(spec: NetworkSpec) -> tuple[Any, AllowedNetwork]:
    """Import the class of a network; return it with its entry on the list.

    Raises
    ------
    ScanError
        MODEL_NETWORK if the class is not on the list.
    """
    allowed = NETWORKS.get(spec.name)
    if allowed is None:
        raise ScanError(Reason.MODEL_NETWORK, f"the network is not one of {', '.join(NETWORKS)}")
    return getattr(importlib.import_module(allowed.module), spec.name), allowed


def _refuse_too_large(network_class: Any, args: Mapping[str, Any], values: int | None) -> None:
    """Refuse a network that is much larger than its weights; it is built on the meta device."""
    with suppress(RuntimeError, NotImplementedError), torch.device("meta"), _limit_weights(values):
        network_class(**args)


def _check_numbers(value: Any, largest: int) -> None:
    """Refuse an argument (MODEL_NETWORK) with a number beyond `largest`, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    for entry in value if isinstance(value, list | tuple) else (value,):
        if isinstance(entry, list | tuple | Mapping):
            _check_numbers(entry, largest)
        elif isinstance(entry, int | float) and abs(entry) > largest:
            detail = f"an argument of the model's network exceeds {largest}"
            raise ScanError(Reason.MODEL_NETWORK, detail)


@contextmanager
def _limit_weights(values: int | None) -> Iterator[None]:
    """Refuse networks that register too many weights, within this block and thread.

    Weights are counted when a layer registers them, before they are initialised.
    """
    thread, tensors, numbers = threading.get_ident(), 0, 0

    def count(_: nn.Module, __: str, weight: nn.Parameter) -> None:
        nonlocal tensors, numbers
        if threading.get_ident() != thread:
            return
        tensors, numbers = tensors + 1, numbers + weight.numel()
        if tensors > _MAX_TENSORS:
            detail = f"the model's network has more than {_MAX_TENSORS} tensors"
            raise ScanError(Reason.MODEL_NETWORK, detail)
        if values is not None and numbers > 2 * values:  # some layers are built and discarded
            detail = "the model's network is much larger than its weights"
            raise ScanError(Reason.MODEL_WEIGHTS, detail)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
