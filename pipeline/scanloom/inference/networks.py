"""Networks from an allow-list, and weights read as data."""

from __future__ import annotations

import hashlib
import importlib
import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scanloom.cards.card import ModelCard, NetworkSpec, Weights
from scanloom.core import Reason, ScanError, lacks_memory


@dataclass(frozen=True)
class Listed:
    """A MONAI class that a card may name.

    Parameters
    ----------
    module, name : str
        Where it is.
    gone : tuple of str
        Arguments of earlier MONAI versions that changed nothing in the network: they are dropped.
    """

    module: str
    name: str
    gone: tuple[str, ...] = ()


NETWORKS: Mapping[str, Listed] = {
    "AttentionUnet": Listed("monai.networks.nets.attentionunet", "AttentionUnet"),
    "BasicUNet": Listed("monai.networks.nets.basic_unet", "BasicUNet"),
    "DynUNet": Listed("monai.networks.nets.dynunet", "DynUNet"),
    "SegResNet": Listed("monai.networks.nets.segresnet", "SegResNet"),
    "SegResNetDS": Listed("monai.networks.nets.segresnet_ds", "SegResNetDS"),
    "SwinUNETR": Listed("monai.networks.nets.swin_unetr", "SwinUNETR", gone=("img_size",)),
    "UNETR": Listed("monai.networks.nets.unetr", "UNETR"),
    "UNet": Listed("monai.networks.nets.unet", "UNet"),
    "VNet": Listed("monai.networks.nets.vnet", "VNet"),
}
"""Networks that a card may name: class name to where it is. Nothing else is ever imported."""


_CONTAINERS = (b"PK", b"\x80\x02")
"""How PyTorch's files begin: a zip archive, before version 1.6 a pickle."""


def build_network(spec: NetworkSpec) -> nn.Module:
    """Return an untrained network, in evaluation mode, on the CPU.

    Parameters
    ----------
    spec : NetworkSpec
        Of the card.

    Raises
    ------
    ScanError
        MODEL_NETWORK if it is not on the list or does not take these arguments;
        MODEL_UNSUPPORTED if it is not three-dimensional.
    """
    listed = NETWORKS.get(spec.name)
    if listed is None:
        raise ScanError(Reason.MODEL_NETWORK, f"the network is none of {', '.join(NETWORKS)}")
    if spec.args.get("spatial_dims", 3) != 3:
        raise ScanError(Reason.MODEL_UNSUPPORTED, "its network is not three-dimensional")
    args = {name: value for name, value in spec.args.items() if name not in listed.gone}
    network_class = getattr(importlib.import_module(listed.module), listed.name)
    try:
        network: nn.Module = network_class(**args)
    except Exception as exc:  # arguments that don't fit fail in any way
        if isinstance(exc, ImportError) or lacks_memory(exc):
            raise
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
    if card.weights.file.suffix != ".safetensors" and start not in _CONTAINERS:
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are no PyTorch file")


def load_weights(network: nn.Module, weights: Weights) -> None:
    """Fill a network with trained numbers.

    Parameters
    ----------
    network : Module
        Changed.
    weights : Weights
        Of the card. The file is hashed again: what is loaded are the bytes that were hashed.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file can't be read; MODEL_HASH if it is another than the card's;
        MODEL_UNSAFE if it holds more than numbers; MODEL_WEIGHTS if they don't fit the network.
    """
    try:
        content = weights.file.read_bytes()
    except OSError as exc:
        detail = f"its weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    found = hashlib.sha256(content).hexdigest()
    if found != weights.sha256.lower():
        detail = f"SHA-256 is {found[:12]}.., the card says {weights.sha256[:12].lower()}.."
        raise ScanError(Reason.MODEL_HASH, detail)
    safetensors = weights.file.suffix == ".safetensors"
    data = _read_safetensors(content) if safetensors else _read_torch(content)
    state = _state(data, weights.key)
    _compare(network.state_dict(), state)
    network.load_state_dict(state)


def _read_safetensors(content: bytes) -> Any:
    """Return what a .safetensors file holds."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except SafetensorError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are no safetensors file") from exc


def _read_torch(content: bytes) -> Any:
    """Return what a .pt file holds; only tensors and plain containers are let in."""
    _refuse_programs(content)
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        if content[:2] in _CONTAINERS:  # the content is at fault
            detail = "its weights file holds more than numbers"
            raise ScanError(Reason.MODEL_UNSAFE, detail) from exc
        raise ScanError(Reason.MODEL_DAMAGED, "its weights are no PyTorch file") from exc
    except Exception as exc:  # the unpickler takes any text for a program, and fails in any way
        if lacks_memory(exc):
            raise
        detail = f"its weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc


def _refuse_programs(content: bytes) -> None:
    """Refuse TorchScript and exported programs: their code would run when they are loaded."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    if any(name == "constants.pkl" or name.startswith("code/") for name in names):
        raise ScanError(Reason.MODEL_UNSAFE, "its weights file is a program (TorchScript)")


def _state(data: Any, key: str | None) -> dict[str, torch.Tensor]:
    """Return the state dict; where `key` is not in the file, the file itself is it (ignite)."""
    if key is not None and isinstance(data, Mapping) and key in data:
        data = data[key]
    if not isinstance(data, Mapping) or not data:
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file holds no state dict")
    if not all(isinstance(v, torch.Tensor) and isinstance(k, str) for k, v in data.items()):
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file holds no plain state dict")
    return dict(data)


def _compare(wanted: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights whose names or shapes are not the network's."""
    missing, more = len(wanted.keys() - state.keys()), len(state.keys() - wanted.keys())
    shapes = sum(wanted[k].shape != state[k].shape for k in wanted.keys() & state.keys())
    if missing or more or shapes:
        detail = f"{missing} tensors are missing, {more} too many, {shapes} of another shape"
        raise ScanError(Reason.MODEL_WEIGHTS, detail)
