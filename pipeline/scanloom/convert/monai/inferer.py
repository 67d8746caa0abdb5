"""Translate a bundle's inferer into the `Window` of a card."""

from __future__ import annotations

from typing import Any, Literal

from scanloom.cards.card import Window
from scanloom.convert.monai.config.arguments import Arguments, describe
from scanloom.convert.monai.config.values import Component
from scanloom.core import Reason, ScanError
from scanloom.options import MAX_OVERLAP

_BLENDING: dict[str, Literal["constant", "gaussian"]] = {
    "constant": "constant",
    "gaussian": "gaussian",
}
_PADDING: dict[str, Literal["constant", "replicate", "reflect"]] = {
    "constant": "constant",
    "replicate": "replicate",
    "reflect": "reflect",
}
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
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the inferer is {describe(value)}")
    if value.kind != "inferer":
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{value.name} is not an inferer")
    args = Arguments(value)
    match value.name:
        case "SimpleInferer":
            window = Window(size=None)
        case "Vista3dInferer":
            window = _vista(args)
        case "SliceInferer":
            window = _planes(args)
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
        blending=args.choice("mode", _BLENDING, "constant"),
        sigma_scale=sigma_scale,
        padding=args.choice("padding_mode", _PADDING, "constant"),
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


def _vista(args: Arguments) -> Window:
    """Return the window of VISTA3D's inferer, which passes neither overlap nor blending on."""
    size = _size(args)
    args.ignore("overlap", "sw_batch_size", "use_point_window")
    return Window(size)


def _size(args: Arguments) -> tuple[int, int, int] | None:
    """Return the window size; None if it is the whole grid (all sizes 0 or below)."""
    value = args.take("roi_size")
    sizes = value if isinstance(value, list) else [value] * 3
    if len(sizes) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
        raise args.refused("roi_size", value)
    if max(sizes) <= 0:
        return None
    if not all(_is_size(n) for n in sizes):
        raise args.refused("roi_size", value)
    i, j, k = sizes
    return i, j, k


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_SIZE
