"""Builds networks of the classes on an allow-list."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from scanloom.cards.card import ModelCard, NetworkSpec
from scanloom.core import Reason, ScanError
from scanloom.inference.device import is_out_of_memory

_MAX_TENSORS: Final = 20_000
"""Maximum number of weight tensors; the largest allowed networks have 1,000 as published."""
_MAX_ARGUMENT: Final = 1 << 16
"""Largest number in a network's arguments: a larger one is not a count of channels or layers."""
CONTAINERS: Final = (b"PK", b"\x80\x02")
"""First bytes of PyTorch's files: a zip archive, or a pickle before version 1.6."""


@dataclass(frozen=True)
class Listed:
    """A class of MONAI, or of our own, that a card may name.

    Parameters
    ----------
    module, name : str
        Module and name of the class.
    gone : tuple of str
        Arguments of earlier MONAI versions that did not change the network; they are dropped.
    most : mapping
        Largest value of arguments with which memory grows as a power, independently of the weights.
    """

    module: str
    name: str
    gone: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)


NETWORKS: Mapping[str, Listed] = {
    "AttentionUnet": Listed("monai.networks.nets.attentionunet", "AttentionUnet"),
    "BasicUNet": Listed("monai.networks.nets.basic_unet", "BasicUNet"),
    "DynUNet": Listed("monai.networks.nets.dynunet", "DynUNet"),
    "PlainConvUNet": Listed("scanloom.inference.nets.unet", "PlainConvUNet"),
    "ResidualEncoderUNet": Listed("scanloom.inference.nets.unet", "ResidualEncoderUNet"),
    "SegResNet": Listed("monai.networks.nets.segresnet", "SegResNet"),
    "SegResNetDS": Listed("monai.networks.nets.segresnet_ds", "SegResNetDS"),
    "SwinUNETR": Listed(
        "monai.networks.nets.swin_unetr", "SwinUNETR", gone=("img_size",), most={"window_size": 16}
    ),
    "UNETR": Listed("monai.networks.nets.unetr", "UNETR"),
    "UNet": Listed("monai.networks.nets.unet", "UNet"),
    "VNet": Listed("monai.networks.nets.vnet", "VNet"),
}
"""Network classes that a card may name. Nothing else is ever imported."""


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
        network has neither two nor three dimensions; MODEL_WEIGHTS if it is much larger than `values`;
        OUT_OF_MEMORY.
    """
    network_class, listed = find_class(spec)
    if spec.args.get("spatial_dims", 3) not in (2, 3):
        detail = "the model's network has neither two nor three dimensions"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    args = {name: value for name, value in spec.args.items() if name not in listed.gone}
    for name, value in args.items():
        _check_numbers(value, listed.most.get(name, _MAX_ARGUMENT))
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


def check_network(card: ModelCard) -> None:
    """Refuse a card whose network can't be built, or whose weights are not a PyTorch file.

    Fast: the network is built on the meta device, and only the first two bytes of the weights are
    read.

    Raises
    ------
    ScanError
        As `build_network`; MODEL_DAMAGED.
    """
    with torch.device("meta"):
        build_network(card.network)
    try:
        with card.weights.file.open("rb") as file:
            start = file.read(2)
    except OSError as exc:
        detail = f"the model's weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    if card.weights.file.suffix != ".safetensors" and start not in CONTAINERS:
        raise ScanError(Reason.MODEL_DAMAGED, "the model's weights are not a PyTorch file")


def find_class(spec: NetworkSpec) -> tuple[Any, Listed]:
    """Import the class of a network; return it with its entry on the list.

    Raises
    ------
    ScanError
        MODEL_NETWORK if the class is not on the list.
    """
    listed = NETWORKS.get(spec.name)
    if listed is None:
        raise ScanError(Reason.MODEL_NETWORK, f"the network is not one of {', '.join(NETWORKS)}")
    return getattr(importlib.import_module(listed.module), listed.name), listed


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
