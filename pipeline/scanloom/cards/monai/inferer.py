"""Translate a bundle's inferer into the `Window` of a card."""

from __future__ import annotations

from typing import Any, Literal

from scanloom.cards.card import Window
from scanloom.cards.monai.allow_list import canonical_target
from scanloom.cards.monai.arguments import Arguments, describe
from scanloom.cards.monai.config import Component
from scanloom.core import Reason, ScanError

_BLENDING: dict[str, Literal["constant", "gaussian"]] = {
    "constant": "constant",
    "gaussian": "gaussian",
}
_PADDING: dict[str, Literal["constant", "replicate", "reflect"]] = {
    "constant": "constant",
    "replicate": "replicate",
    "reflect": "reflect",
}


def read_inferer(value: Any) -> Window:
    """Return the sliding window of an inferer; defaults are those of MONAI 1.6.1.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming the argument, if a card can't express it.
    """
    if not isinstance(value, Component):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the inferer is {describe(value)}")
    kind, name = canonical_target(value.target)
    if kind != "inferer":
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{name} is not an inferer")
    args = Arguments(value)
    if name == "SimpleInferer":
        args.done()
        return Window(size=None)
    window = Window(
        size=_size(args),
        overlap=args.same("overlap", 0.25),
        blending=args.choice("mode", _BLENDING, "constant"),
        sigma_scale=args.same("sigma_scale", 0.125),
        padding=args.choice("padding_mode", _PADDING, "constant"),
        padding_value=args.number("cval", 0.0),
    )
    if not 0 <= window.overlap < 1 or window.sigma_scale <= 0:
        raise args.refused("overlap", window.overlap)
    args.only("with_coord", False)
    # batch size and buffers change no label
    args.ignore("sw_batch_size", "sw_device", "device", "progress", "cache_roi_weight_map")
    args.ignore("cpu_thresh", "buffer_steps", "buffer_dim")
    args.done()
    return window


def _size(args: Arguments) -> tuple[int, int, int] | None:
    """Return the window size; None if it is the whole grid (all sizes 0 or below)."""
    value = args.take("roi_size")
    sizes = value if isinstance(value, list) else [value] * 3
    if len(sizes) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
        raise args.refused("roi_size", value)
    i, j, k = sizes
    if max(sizes) <= 0:
        return None
    if min(sizes) <= 0 or max(sizes) > 1024:
        raise args.refused("roi_size", value)
    return i, j, k
