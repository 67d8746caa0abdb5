"""Networks from an allow-list."""

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

MOST_TENSORS: Final = 20_000
"""Of weights in a network; the largest on the list, as their authors made them, have 1,000."""
MOST: Final = 1 << 16
"""Largest whole number among a network's arguments: more is no number of channels or layers."""
CONTAINERS: Final = (b"PK", b"\x80\x02")
"""How PyTorch's files begin: a zip archive, before version 1.6 a pickle."""


@dataclass(frozen=True)
class Listed:
    """A MONAI class that a card may name.

    Parameters
    ----------
    module, name : str
        Where it is.
    gone : tuple of str
        Arguments of earlier MONAI versions that changed nothing in the network: they are dropped.
    most : mapping
        Largest value of arguments of which memory grows by a power, whatever the weights are.
    """

    module: str
    name: str
    gone: tuple[str, ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)


NETWORKS: Mapping[str, Listed] = {
    "AttentionUnet": Listed("monai.networks.nets.attentionunet", "AttentionUnet"),
    "BasicUNet": Listed("monai.networks.nets.basic_unet", "BasicUNet"),
    "DynUNet": Listed("monai.networks.nets.dynunet", "DynUNet"),
    "SegResNet": Listed("monai.networks.nets.segresnet", "SegResNet"),
    "SegResNetDS": Listed("monai.networks.nets.segresnet_ds", "SegResNetDS"),
    "SwinUNETR": Listed(
        "monai.networks.nets.swin_unetr", "SwinUNETR", gone=("img_size",), most={"window_size": 16}
    ),
    "UNETR": Listed("monai.networks.nets.unetr", "UNETR"),
    "UNet": Listed("monai.networks.nets.unet", "UNet"),
    "VNet": Listed("monai.networks.nets.vnet", "VNet"),
}
"""Networks that a card may name: class name to where it is. Nothing else is ever imported."""


def build_network(spec: NetworkSpec, values: int | None = None) -> nn.Module:
    """Return an untrained network, in evaluation mode, on the CPU.

    Parameters
    ----------
    spec : NetworkSpec
        Of the card.
    values : int, optional
        How many numbers its weights have: a network of far more is refused before memory is taken
        for it.

    Raises
    ------
    ScanError
        MODEL_NETWORK if it is not on the list or does not take these arguments;
        MODEL_UNSUPPORTED if it is not three-dimensional; MODEL_WEIGHTS if it has far more than
        `values`; OUT_OF_MEMORY.
    """
    network_class, listed = find_class(spec)
    if spec.args.get("spatial_dims", 3) != 3:
        raise ScanError(Reason.MODEL_UNSUPPORTED, "its network is not three-dimensional")
    args = {name: value for name, value in spec.args.items() if name not in listed.gone}
    for name, value in args.items():
        _check_numbers(value, listed.most.get(name, MOST))
    try:
        with _counted(values):
            network: nn.Module = network_class(**args)
    except ScanError:
        raise
    except Exception as exc:  # constructors raise whatever they like
        if isinstance(exc, ImportError):
            raise
        if is_out_of_memory(exc):
            _refuse_too_large(network_class, args, values)
            detail = "the model's network does not fit into memory"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from exc
        detail = f"{spec.name} does not take the card's arguments ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_NETWORK, detail) from exc
    network.eval()
    return network


def check_network(card: ModelCard) -> None:
    """Refuse a card whose network can't be built, or whose weights are of another kind of file.

    No number is made or read: the weights are judged by their first bytes.

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
        detail = f"its weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    if card.weights.file.suffix != ".safetensors" and start not in CONTAINERS:
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are no PyTorch file")


def find_class(spec: NetworkSpec) -> tuple[Any, Listed]:
    """Return the class of a network, imported, and what is known of it; MODEL_NETWORK if none."""
    listed = NETWORKS.get(spec.name)
    if listed is None:
        raise ScanError(Reason.MODEL_NETWORK, f"the network is none of {', '.join(NETWORKS)}")
    return getattr(importlib.import_module(listed.module), listed.name), listed


def _refuse_too_large(network_class: Any, args: Mapping[str, Any], values: int | None) -> None:
    """Refuse a network for which no memory suffices: it is built without numbers and counted."""
    with suppress(RuntimeError, NotImplementedError), torch.device("meta"), _counted(values):
        network_class(**args)


def _check_numbers(value: Any, most: int) -> None:
    """Refuse arguments that ask for more than any network has: MODEL_NETWORK."""
    if isinstance(value, Mapping):
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, list | tuple | Mapping):
            _check_numbers(one, most)
        elif isinstance(one, int | float) and abs(one) > most:
            raise ScanError(Reason.MODEL_NETWORK, f"an argument of it is larger than {most}")


@contextmanager
def _counted(values: int | None) -> Iterator[None]:
    """Count the weights that this thread's networks get in the block, before they are filled."""
    mine, tensors, numbers = threading.get_ident(), 0, 0

    def count(_: nn.Module, __: str, weight: nn.Parameter) -> None:
        nonlocal tensors, numbers
        if threading.get_ident() != mine:
            return
        tensors, numbers = tensors + 1, numbers + weight.numel()
        if tensors > MOST_TENSORS:
            raise ScanError(Reason.MODEL_NETWORK, f"it has more than {MOST_TENSORS} tensors")
        if values is not None and numbers > 2 * values:  # some layers are made and not kept
            raise ScanError(Reason.MODEL_WEIGHTS, "its network is far larger than its weights")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
