"""Reads the network of a bundle, its input channels and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from scanloom.cards.card import ANY_MODALITY, Channel, NetworkSpec
from scanloom.cards.networks import NETWORKS
from scanloom.convert.monai.config.arguments import describe
from scanloom.convert.monai.config.values import Component, Name, truncate
from scanloom.convert.monai.metadata import Metadata, TensorFormat
from scanloom.core import Reason, ScanError

_MODALITIES: Final[Mapping[str, str]] = {
    "CT": "CT",
    "MR": "MR",
    "MRI": "MR",
    "PT": "PT",
    "PET": "PT",
    "NM": "NM",
    "SPECT": "NM",
    "ANY": ANY_MODALITY,
    "NONE": ANY_MODALITY,
}
_MAX_PLAIN: Final = 10_000
"""Largest number of values in a network's arguments; MONAI's model zoo has at most 300."""


def read_network(first: Any) -> NetworkSpec:
    """Return the network of the evaluator.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is missing; MODEL_UNSUPPORTED if it is not one network with arguments
        of plain data; MODEL_NETWORK if it is another component.
    """
    if first is None:
        raise ScanError(Reason.MODEL_DAMAGED, "the evaluator has no network")
    if not isinstance(first, Component):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the network is {describe(first)}")
    if first.kind != "network":
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(first.target)} is not a network")
    args = {
        key: _plain_arguments(value)
        if isinstance(value, Component) and value.kind == "part"
        else value
        for key, value in first.args.items()
        if key not in NETWORKS[first.name].removed
    }
    budget = [_MAX_PLAIN]
    for key, arg in args.items():
        _plain(arg, f"{first.name}({truncate(str(key))}=...)", budget)
    if args.get("spatial_dims", 3) not in (2, 3):
        detail = f"{first.name} of {describe(args['spatial_dims'])} dimensions"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    return NetworkSpec(first.name, args)


def _plain_arguments(component: Component) -> dict[str, Any]:
    """Return the arguments of a part of a network, without the device."""
    return {key: value for key, value in component.args.items() if key != "device"}


def _plain(value: Any, location: str, budget: list[int]) -> None:
    """Refuse values that are not plain data, and more than `_MAX_PLAIN` of them."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{location} has more than {_MAX_PLAIN} values")
    if isinstance(value, Name | Component):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{location} is {describe(value)}")
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _plain(item, location, budget)


def read_channels(
    metadata: Metadata, network: NetworkSpec, keys: Sequence[str], clicks: int | None
) -> tuple[Channel, ...]:
    """Return the input channels; MONAI's metadata has one modality for all.

    Parameters
    ----------
    metadata : Metadata
        Of the bundle.
    network : NetworkSpec
        The network, of which the metadata must know the number of channels.
    keys : sequence of str
        Names of channels that are loaded one by one; of one, its name in the metadata counts.
    clicks : int or None
        Number of channels before those of clicks, see `Preprocessing`.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED for several inputs or an unknown modality; MODEL_DAMAGED if metadata and
        network contradict each other.
    """
    inputs = metadata.network_data_format.inputs
    if len(inputs) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the network has {len(inputs)} inputs")
    image = next(iter(inputs.values()))
    modality = _MODALITIES.get(image.modality.strip().upper())
    if modality is None:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the modality {truncate(image.modality)!r}")
    if network.args.get("in_channels", image.num_channels) != image.num_channels:
        raise ScanError(
            Reason.MODEL_DAMAGED,
            f"the network takes {describe(network.args['in_channels'])} channels, the metadata "
            f"declares {image.num_channels}",
        )
    count = image.num_channels if clicks is None else clicks
    if len(keys) > 1 and len(keys) != count:
        detail = f"{len(keys)} channels are loaded, the metadata declares {count}"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    names = [image.channel_def.get(str(n), f"channel {n}") for n in range(count)]
    return tuple(Channel(name, modality) for name in (names if len(keys) < 2 else keys))


def read_output(metadata: Metadata, network: NetworkSpec) -> TensorFormat:
    """Return the output with the scores.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED if none of several is called `pred`; MODEL_DAMAGED if metadata and network
        contradict each other.
    """
    outputs = metadata.network_data_format.outputs
    pred = outputs.get("pred", next(iter(outputs.values())) if len(outputs) == 1 else None)
    if pred is None:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{len(outputs)} outputs, none called pred")
    for key in ("out_channels", "num_classes"):
        if network.args.get(key, pred.num_channels) != pred.num_channels:
            raise ScanError(
                Reason.MODEL_DAMAGED,
                f"the network has {describe(network.args[key])} output channels, the metadata "
                f"declares {pred.num_channels}",
            )
    return pred
