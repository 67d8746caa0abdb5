"""Reads the network of a bundle, its channels, windows and structures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from scanloom.cards.card import ANY_MODALITY, Argmax, Channel, Decision, NetworkSpec, Paint, Window
from scanloom.cards.codes import coding, color, color_by_code
from scanloom.cards.networks import NETWORKS
from scanloom.convert.files import damaged, truncate, unsupported
from scanloom.convert.monai.config import Arguments, Component, Name, describe, is_whole
from scanloom.convert.monai.metadata import (
    METADATA,
    CodeFields,
    Metadata,
    StructureFields,
    TensorFormat,
    modality_of,
)
from scanloom.core import Code, Reason, ScanError, Structure, slug
from scanloom.options import MAX_OVERLAP

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
        raise damaged("the evaluator has no network")
    if not isinstance(first, Component):
        raise unsupported(f"the network is {describe(first)}")
    if first.kind != "network":
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(first.target)} is not a network")
    args = {
        key: value for key, value in first.args.items() if key not in NETWORKS[first.name].removed
    }
    for key, value in args.items():
        if isinstance(value, Component) and value.kind == "part":
            args[key] = {name: each for name, each in value.args.items() if name != "device"}
    count = 0
    for key, arg in args.items():
        location = f"{first.name}({truncate(str(key))}=...)"
        for value in _values(arg):
            count += 1
            if count > _MAX_PLAIN:
                raise unsupported(f"{location} has more than {_MAX_PLAIN} values")
            if isinstance(value, Name | Component):
                raise unsupported(f"{location} is {describe(value)}")
    if args.get("spatial_dims", 3) not in (2, 3):
        raise unsupported(f"{first.name} of {describe(args['spatial_dims'])} dimensions")
    return NetworkSpec(first.name, args)


def _values(value: Any) -> Iterator[Any]:
    yield value
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list) else ():
        yield from _values(item)


def read_channels(
    metadata: Metadata, network: NetworkSpec, keys: Sequence[str], clicks: int | None
) -> tuple[Channel, ...]:
    """Return the input channels; MONAI's metadata has one modality for all.

    Parameters
    ----------
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
        raise unsupported(f"the network has {len(inputs)} inputs")
    image = next(iter(inputs.values()))
    takes_all = image.modality.strip().lower() in ("any", "none")
    modality = ANY_MODALITY if takes_all else modality_of(image.modality)
    if modality is None:
        named = f"the modality {truncate(image.modality)!r}" if image.modality else "no modality"
        raise unsupported(f"{METADATA} states {named}, and not one of CT, MR, PT, NM, or any")
    if network.args.get("in_channels", image.num_channels) != image.num_channels:
        raise damaged(
            f"the network takes {describe(network.args['in_channels'])} channels, the metadata "
            f"declares {image.num_channels}"
        )
    count = image.num_channels if clicks is None else clicks
    if len(keys) > 1 and len(keys) != count:
        raise damaged(f"{len(keys)} channels are loaded, the metadata declares {count}")
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
        raise unsupported(f"{len(outputs)} outputs, none called pred")
    for key in ("out_channels", "num_classes"):
        if network.args.get(key, pred.num_channels) != pred.num_channels:
            raise damaged(
                f"the network has {describe(network.args[key])} output channels, the metadata "
                f"declares {pred.num_channels}"
            )
    return pred


_BACKGROUND: Final = frozenset(
    {"background", "bg", "other", "others", "everything else", "none", "unlabeled", "unlabelled"}
)
REST: Final = " (rest)"
"""Ending of the name of a region without the regions in it."""


def read_structures(
    output: TensorFormat,
    decision: Decision,
    fields_by_label: Mapping[str, StructureFields],
    rests: Collection[int] = (),
) -> tuple[Structure, ...]:
    """Return the structures, ordered by number.

    Parameters
    ----------
    output : TensorFormat
        Names each channel in `channel_def`, or each label in `label_def`.
    decision : Argmax, Threshold or Paint
        Argmax: channel n is structure n, and channel 0 must be the background. Threshold: channel
        n is structure n + 1; background channels are dropped. Paint: each region has a number.
    fields_by_label : mapping
        Structures of the entry "scanloom", by label.
    rests : collection of int
        Numbers of structures that are only the part of their region without the regions in it, and
        are named so.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a channel has no name, two have the same, or `fields_by_label` has an
        unknown label; MODEL_UNSUPPORTED if argmax has no background.
    """
    names = output.channel_def or output.label_def
    missing = [n for n in range(output.num_channels) if not names.get(str(n), "").strip()]
    if missing:
        raise damaged(f"channel {missing[0]} has no name in channel_def")
    first = 0 if isinstance(decision, Argmax) else 1
    if first == 0 and names["0"].strip().lower() not in _BACKGROUND:
        raise unsupported(f"channel 0 is {truncate(names['0'])!r}, not the background")
    numbers = {n: n + first for n in range(output.num_channels)}
    if isinstance(decision, Paint):
        numbers = dict(sorted(decision.regions, key=lambda region: region[1]))
    structures = [
        make_structure(names[str(n)].strip() + REST * (number in rests), number, fields_by_label)
        for n, number in numbers.items()
        if names[str(n)].strip().lower() not in _BACKGROUND
    ]
    labels = [structure.label for structure in structures]
    invalid = [label for label in labels if labels.count(label) > 1] or [
        *set(fields_by_label) - set(labels)
    ]
    if invalid or not structures:
        raise damaged(
            f"structure {truncate(sorted(invalid)[0])!r} is missing or defined twice"
            if invalid
            else "the metadata name no structures"
        )
    own = [label for label, fields in fields_by_label.items() if fields.color is not None]
    return color_by_code(structures, own)


def make_structure(
    name: str, number: int, fields_by_label: Mapping[str, StructureFields]
) -> Structure:
    """Return a structure by its name; codes that no fields state are looked up by it.

    A colour that they do not state is that of its number: see `color_by_code`.
    """
    label = structure_label(name, number)
    fields = fields_by_label.get(label, StructureFields())
    codes = coding(name.removesuffix(REST))
    rgb = fields.color or color(number)
    if not all(0 <= value <= 255 for value in rgb):
        raise damaged(f"scanloom.structures.{label}.color is not an RGB colour")
    text = re.sub(r"[_\s]+", " ", name)
    return Structure(
        label=label,
        number=number,
        name=fields.name or text[:1].upper() + text[1:64],
        category=_code(fields.category) or codes.category,
        type=_code(fields.type) or codes.type,
        color=rgb,
        laterality=_code(fields.laterality) or (None if fields.type else codes.laterality),
        experimental=fields.experimental,
    )


def structure_label(name: str, number: int) -> str:
    """Return the label of a structure; by its number if its name has only letters of other scripts.

    MODEL_DAMAGED for a name that has neither a letter nor a digit.
    """
    if not any(map(str.isalnum, name)):
        raise damaged(f"the name {truncate(name)!r} has neither a letter nor a digit")
    return slug(name) or f"label_{number}"


def _code(fields: CodeFields | None) -> Code | None:
    return None if fields is None else Code(fields.value, fields.scheme, fields.meaning)


_MAX_SIZE = 1024
"""Largest window, in voxels along an axis."""


def read_inferer(value: Any) -> Window:
    """Return the sliding window of an inferer; defaults are those of MONAI 1.6.1.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming the argument, if a card can't express it.
    """
    if value is None:
        return Window(size=None)  # the evaluator's default
    if not isinstance(value, Component):
        raise unsupported(f"the inferer is {describe(value)}")
    if value.kind != "inferer":
        raise unsupported(f"{value.name} is not an inferer")
    args = Arguments(value)
    match value.name:
        case "SimpleInferer":
            window = Window(size=None)
        case "Vista3dInferer":
            window = Window(_size(args))
            args.ignore("overlap", "sw_batch_size", "use_point_window")  # it passes none of them on
        case "SliceInferer":
            window = _planes(args)
        case "MirroredMean":
            window = _mirrored(args)
        case _:
            window = _sliding(args, _size(args))
    args.done()
    return window


def _sliding(
    args: Arguments, size: tuple[int, int, int] | None, plane: Literal[0, 1, 2] | None = None
) -> Window:
    """Return the window of MONAI's SlidingWindowInferer."""
    overlap = args.same("overlap", 0.25)
    sigma_scale = args.same("sigma_scale", 0.125)
    if not 0 <= overlap <= MAX_OVERLAP or sigma_scale <= 0:
        raise args.refused("overlap", overlap)
    args.only("with_coord", False)
    # batch size and buffers change no label
    args.ignore("sw_batch_size", "sw_device", "device", "progress", "cache_roi_weight_map")
    args.ignore("cpu_thresh", "buffer_steps", "buffer_dim")
    return Window(
        size=size,
        overlap=overlap,
        blending=args.one_of("mode", "constant", "gaussian"),
        sigma_scale=sigma_scale,
        padding=args.one_of("padding_mode", "constant", "replicate", "reflect"),
        padding_value=args.number("cval", 0.0),
        plane=plane,
    )


def _planes(args: Arguments) -> Window:
    """Return the window of MONAI's SliceInferer: a plane across the axis `spatial_dim`."""
    axis = args.take("spatial_dim", 0)
    value = args.take("roi_size")
    if axis not in (0, 1, 2) or isinstance(axis, bool):
        raise args.refused("spatial_dim", axis)
    sizes = list(value) if isinstance(value, list) else [value] * 2
    if len(sizes) != 2 or not all(_is_size(n) for n in sizes):
        raise args.refused("roi_size", value)
    sizes.insert(axis, 1)
    i, j, k = sizes
    plane: Literal[0, 1, 2] = axis
    return _sliding(args, (i, j, k), plane)


def _mirrored(args: Arguments) -> Window:
    """Return the window of an inferer whose scores are averaged with those of the mirrored scan."""
    window, channels = read_inferer(args.take("inferer")), args.take("channels")
    if not isinstance(channels, list) or not all(type(n) is int for n in channels):
        raise args.refused("channels", channels)
    if window.plane is not None or window.mirror or sorted(channels) != [*range(len(channels))]:
        raise args.refused("channels", channels)
    return replace(window, mirror=(0,), mirrored_channels=tuple(channels))


def _size(args: Arguments) -> tuple[int, int, int] | None:
    """Return the window size; None if it is the whole grid (all sizes 0 or below)."""
    value = args.take("roi_size")
    sizes = value if isinstance(value, list) else [value] * 3
    if len(sizes) != 3 or not all(map(is_whole, sizes)):
        raise args.refused("roi_size", value)
    if max(sizes) <= 0:
        return None
    if not all(_is_size(n) for n in sizes):
        raise args.refused("roi_size", value)
    i, j, k = sizes
    return i, j, k


def _is_size(value: Any) -> bool:
    return is_whole(value) and 1 <= value <= _MAX_SIZE
