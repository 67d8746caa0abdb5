"""Loads a model card's networks with their trained weights, in the type in which they calculate.

Weights are safetensors; their hash, types, shapes and values are checked.

Libraries have computed convolutions in half precision wrong without an error, for some sizes and on
some devices only. So a model's own network is compared with float32, for a window of its own size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from scanloom.cards.card import ModelCard, NetworkSpec, Weights
from scanloom.core import Reason, ScanError, read_error
from scanloom.inference.device import (
    all_finite,
    cudnn_version,
    device_memory,
    dtype_name,
    is_out_of_memory,
    own_settings,
)
from scanloom.inference.engines.cache import (
    device_model,
    export_key,
    exports_folder,
    save_measurement,
)
from scanloom.inference.network.architectures import (
    build_network,
    check_dimensions,
)
from scanloom.inference.network.layers import (
    FinalLayer,
    MixedBfloat16,
    PlaneNetwork,
    detach_final_layer,
    input_size,
)

SHARE_OF_NETWORKS = 8
"""Networks of several folds that need more than this fraction (1/8) of a device's memory are moved
there one at a time."""

State = dict[str, torch.Tensor]

LARGEST_ERROR = 0.2
"""Root mean square of the differences of the scores, in their standard deviations. It is about
0.002 in float16 and 0.02 in bfloat16 for networks of 20 to 40 layers, and about 1 for a convolution
that is computed wrong, so that labels of such a window are noise."""
_WHOLE_SCAN = (64, 64, 64)
"""Window of a model without one."""
_SCHEMA = 1


@dataclass(frozen=True, eq=False)
class LoadedNetwork:
    """A network, and its final layer if detached.

    Parameters
    ----------
    network : Module
        In evaluation mode. Maps windows (N, channels, x, y, z) of type `takes` to scores, or to
        features for `head`.
    head : FinalLayer or None
        The final layer, if it is applied after windows are summed.
    dtype : torch.dtype
        Type in which the network calculates.
    folds : tuple of LoadedNetwork
        Networks with the card's further weights, of the same type.
    """

    network: nn.Module
    head: FinalLayer | None
    dtype: torch.dtype
    folds: tuple[LoadedNetwork, ...] = ()

    @property
    def takes(self) -> torch.dtype:
        """Type of the input: float32 for bfloat16 too, since the first layers are exact."""
        return torch.float32 if self.dtype is torch.bfloat16 else self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of this network, without `folds`."""
        return sum(v.nbytes for v in (*self.network.parameters(), *self.network.buffers()))


def load_network(card: ModelCard, dtype: torch.dtype) -> LoadedNetwork:
    """Build a card's network, and those of its further weights, on the CPU and load the weights.

    Parameters
    ----------
    dtype : torch.dtype
        Type in which the network calculates; float32 is used instead if weights overflow it.

    Raises
    ------
    ScanError
        As `read_weights`, `build_network` and `load_weights`; MODEL_UNSUPPORTED if the network has
        other dimensions than the card's windows.
    """
    check_dimensions(card)
    networks = [_trained(card.network, weights) for weights in (card.weights, *card.folds)]
    if dtype is not torch.float32:
        most = max(largest(network) for network in networks)
        dtype = dtype if most <= torch.finfo(dtype).max else torch.float32
    first, *folds = (_converted(network, card, dtype) for network in networks)
    return replace(first, folds=tuple(folds))


def _trained(spec: NetworkSpec, weights: Weights) -> nn.Module:
    """Return a network with its weights, in float32."""
    state = read_weights(weights)
    network = build_network(spec, sum(values.numel() for values in state.values()))
    load_weights(network, state)
    return network


def _converted(network: nn.Module, card: ModelCard, dtype: torch.dtype) -> LoadedNetwork:
    """Return a network in the type in which it calculates, its final layer detached if possible."""
    size, head = input_size(card.window), None
    if card.window.sums_features:
        head = detach_final_layer(network, card.network, size)
    if dtype is torch.bfloat16:
        network = MixedBfloat16(network, card.n_inputs, size)
    else:
        network = network.to(dtype)
    if card.window.plane is not None:
        network = PlaneNetwork(network, card.window.plane)
    return LoadedNetwork(network, head, dtype)


class TrainedNetworks:
    """A model's networks in each type in which they calculate, loaded at the first use and kept.

    They are loaded from the card's files: weights rounded to half precision cannot be restored.

    Parameters
    ----------
    first : LoadedNetwork
        Its networks in the type that is used first.
    """

    def __init__(self, card: ModelCard, first: LoadedNetwork) -> None:
        self._card, self._kept = card, {first.dtype: first}
        self._without_weights: dict[torch.dtype, LoadedNetwork] = {}

    def load(self, dtype: torch.dtype) -> LoadedNetwork:
        """Return the networks that calculate in a type, with their weights."""
        if dtype not in self._kept:
            self._kept[dtype] = load_network(self._card, dtype)
        return self._kept[dtype]

    def describe(self, dtype: torch.dtype) -> LoadedNetwork:
        """Return the networks that calculate in a type; their modules may have no weights."""
        return self._without_weights.get(dtype) or self.load(dtype)

    def release(self, dtype: torch.dtype) -> None:
        """Free the weights, since an engine runs the networks; only final layers are kept."""
        loaded = self._kept.pop(dtype, None)
        if loaded is not None:
            folds = tuple(replace(fold, network=nn.Identity()) for fold in loaded.folds)
            self._without_weights[dtype] = replace(loaded, network=nn.Identity(), folds=folds)


def take_turns(networks: Sequence[LoadedNetwork], device: torch.device) -> bool:
    """Return whether networks are on a device one at a time.

    It depends on the device's total memory, never on its free memory.
    """
    if device.type != "cuda" or len(networks) == 1:
        return False
    nbytes = sum(network.nbytes for network in networks)
    return nbytes > device_memory(device) // SHARE_OF_NETWORKS


def is_on(network: nn.Module, device: torch.device) -> bool:
    """Return whether a network with weights is on a device, by its first value."""
    first = next(itertools.chain(network.parameters(), network.buffers()), None)
    return first is not None and first.device == device


class TakingTurns:
    """Keeps only one of several networks in a device's memory; the others wait on the host.

    Parameters
    ----------
    device : torch.device
        Device on which the networks run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._present: nn.Module | None = None

    def wrap(self, network: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that moves a network to the device if necessary, and runs it."""
        if is_on(network, self._device):  # since the scan before: it leaves before another comes
            self._present = network

        def run(windows: torch.Tensor) -> torch.Tensor:
            if self._present is not network:
                # The other network leaves first: both do not fit
                if self._present is not None:
                    self._present.to("cpu")
                network.to(self._device)
                self._present = network
            scores: torch.Tensor = network(windows)
            return scores

        return run


def read_weights(weights: Weights) -> State:
    """Read a state dict from its file.

    Parameters
    ----------
    weights : Weights
        File and hash from the card. The bytes are hashed again before they are parsed.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file is missing or no safetensors; UNREADABLE; MODEL_HASH if its hash
        differs from the card's; OUT_OF_MEMORY.
    """
    from safetensors.torch import load

    try:
        if not weights.file.is_file():  # reading a pipe would never end
            raise ScanError(Reason.MODEL_DAMAGED, "the model's weights are not a file")
        content = weights.file.read_bytes()
    except OSError as exc:
        raise read_error(exc, "the model's weights", Reason.MODEL_DAMAGED) from exc
    # Hashed as read, so that no other process can change the file in between
    digest, expected = hashlib.sha256(content).hexdigest(), weights.sha256.lower()
    if digest != expected:
        detail = f"the weights' SHA-256 is {digest[:12]}.., but {expected[:12]}.. in the card"
        raise ScanError(Reason.MODEL_HASH, detail)
    try:
        state: State = load(content)
    except Exception as exc:  # damaged files raise errors of many types
        if is_out_of_memory(exc):
            detail = "the model's weights do not fit into memory"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from exc
        detail = "the model's weights are not a safetensors file"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
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
    expected = network.state_dict(keep_vars=True)
    # DynUNet and nnU-Net's networks have layers under two names; a file may hold one of them
    stored = {id(values): state[name] for name, values in expected.items() if name in state}
    state = {n: stored[id(v)] for n, v in expected.items() if id(v) in stored} | state
    common = expected.keys() & state.keys()
    missing, unexpected = len(expected.keys() - common), len(state.keys() - common)
    different = sum(
        (expected[k].shape, expected[k].is_floating_point())
        != (state[k].shape, state[k].is_floating_point())
        for k in common
    )
    if missing or unexpected or different:
        counts = f"{missing} missing, {unexpected} unexpected, {different} of another shape or type"
        detail = f"the weights do not match the network: {counts} (tensors)"
        raise ScanError(Reason.MODEL_WEIGHTS, detail)
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


def wrong_half(card: ModelCard, loaded: LoadedNetwork, device: torch.device) -> str:
    """Return why a model's half precision can't be used on a device; empty if it can.

    The comparison takes two windows' time. Its result is kept in the user's cache, for the weights,
    the versions of torch and cuDNN, and the device.

    Parameters
    ----------
    loaded : LoadedNetwork
        Its networks in half precision; the first of them is compared.
    """
    size = card.window.size or _WHOLE_SCAN
    subject = {
        "form": ["half", _SCHEMA],
        "weights": card.weights.sha256,
        "shape": [card.n_inputs, *size],
        "type": str(loaded.dtype),
        "versions": [torch.__version__, cudnn_version()],
        "device": device_model(device),
    }
    path = exports_folder() / "half" / f"{export_key(subject)}.json"
    error = math.nan
    with suppress(OSError, ValueError, TypeError, KeyError):
        error = float(json.loads(path.read_text(encoding="utf-8"))["error"])
    if not math.isfinite(error):
        try:
            error = half_error(card, loaded, device, size)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            return ""  # as every scan will be told
        save_measurement(path, {"error": error})
    if error <= LARGEST_ERROR:
        return ""
    return f"{dtype_name(loaded.dtype)} was wrong by {error:.1g} in a window here"


def half_error(
    card: ModelCard, loaded: LoadedNetwork, device: torch.device, size: tuple[int, int, int]
) -> float:
    """Return the error of a window's scores in half precision, relative to their deviation.

    Of scores that overflow, the error is 0: each scan on which they do is repeated in float32.
    """
    # Smooth structures with noise, as in a normalised scan
    source = torch.Generator().manual_seed(0)
    coarse = torch.randn((1, card.n_inputs, *(-(-n // 8) for n in size)), generator=source)
    window = functional.interpolate(coarse, size, mode="trilinear")
    window += 0.2 * torch.randn(window.shape, generator=source)  # normalised intensities, roughly
    exact = load_network(card, torch.float32).network.to(device)
    with own_settings(), torch.inference_mode():
        expected = exact(window.to(device)).to(torch.float32)
        scores = loaded.network.to(device)(window.to(device, loaded.takes)).to(torch.float32)
        if not bool(torch.isfinite(scores).all()):
            return 0.0
        deviation = float(expected.std())
        return float((scores - expected).square().mean().sqrt()) / max(deviation, 1e-12)
