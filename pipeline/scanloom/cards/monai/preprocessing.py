"""Translate a bundle's preprocessing into the fields of a card.

Arguments and defaults are those of MONAI 1.6.1. A transform that a card can't express is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from scanloom.cards.card import NetworkGrid
from scanloom.cards.intensity import IntensityStep, Normalize, ScaleMinMax, ScaleRange
from scanloom.cards.monai.allow_list import canonical_target
from scanloom.cards.monai.arguments import Arguments, describe, is_number
from scanloom.cards.monai.config import Component
from scanloom.core import Reason, ScanError


@dataclass
class Preprocessing:
    """Transforms of a scan before the network."""

    key: str = "image"
    orientation: str | None = None
    spacing: tuple[float, float, float] | None = None
    mode: Literal["linear", "nearest"] = "linear"
    before: list[IntensityStep] = field(default_factory=list)
    after: list[IntensityStep] = field(default_factory=list)

    @property
    def grid(self) -> NetworkGrid:
        """The network grid."""
        return NetworkGrid(self.orientation, self.spacing, self.mode)


def unsupported(description: str) -> ScanError:
    """Return the error for a feature that a card can't express."""
    return ScanError(Reason.MODEL_UNSUPPORTED, description)


def steps(value: Any) -> tuple[Component, ...]:
    """Return the transforms of a Compose, of Composes in it, or of a bare list, in order."""
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(step for item in value for step in steps(item))
    if not isinstance(value, Component):
        raise unsupported(f"a transform is {describe(value)}")
    kind, name = canonical_target(value.target)
    if kind == "ignored":
        return ()
    if kind != "transform":
        raise unsupported(f"{name} is not a transform")
    if name != "Compose":
        return (value,)
    args = Arguments(value)
    transforms = steps(args.take("transforms"))
    args.ignore("map_items", "unpack_items", "log_stats", "overrides", "threading")
    args.only("lazy", False, None)
    args.done()
    return transforms


def read_preprocessing(value: Any, channels: int) -> Preprocessing:
    """Read the transforms before the network.

    Parameters
    ----------
    value : Component or list
        `preprocessing` of the config.
    channels : int
        Number of input channels.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming the transform, if a card can't express it.
    """
    state = Preprocessing()
    for component in steps(value):
        name = canonical_target(component.target)[1]
        args = Arguments(component)
        keys = args.take("keys")
        key = keys[0] if isinstance(keys, list) and len(keys) == 1 else keys
        args.ignore("allow_missing_keys")
        if name == "LoadImaged" and isinstance(key, str):
            state.key = key
        if key != state.key:
            raise unsupported(f"{name} of {describe(keys)}, where the scan is {state.key}")
        if name in ("ScaleIntensityRanged", "ScaleIntensityd", "NormalizeIntensityd"):
            (state.before if state.spacing is None else state.after).append(
                _intensity(name, args, channels)
            )
        else:
            _spatial(name, args, state)
        args.done()
    if state.spacing is None:  # nothing is resampled, so all steps come "after"
        state.before, state.after = [], state.before
    return state


def _intensity(name: str, args: Arguments, channels: int) -> IntensityStep:
    args.floating("dtype")
    if name == "ScaleIntensityRanged":
        return ScaleRange(
            args.number("a_min"),
            args.number("a_max"),
            args.number_or_none("b_min"),
            args.number_or_none("b_max"),
            args.flag("clip", False),
        )
    channel_wise = args.flag("channel_wise", False)
    if channels > 1 and not channel_wise:
        raise args.refused("channel_wise", channel_wise)
    if name == "ScaleIntensityd":
        args.only("factor", None)
        return ScaleMinMax(args.number("minv", 0.0), args.number("maxv", 1.0))
    nonzero = args.flag("nonzero", False)
    return Normalize(args.number_or_none("subtrahend"), args.number_or_none("divisor"), nonzero)


def _spatial(name: str, args: Arguments, state: Preprocessing) -> None:
    """Read a transform that loads, reorients or resamples the scan."""
    match name:
        case "LoadImaged":
            args.floating("dtype")
            args.ignore("reader", "meta_keys", "meta_key_postfix", "overwriting", "image_only")
            args.ignore("ensure_channel_first", "simple_keys", "expanduser")
            args.ignore("prune_meta_pattern", "prune_meta_sep")
        case "EnsureChannelFirstd":
            args.ignore("strict_check", "channel_dim")
        case "EnsureTyped" | "CastToTyped":
            args.floating("dtype")
            args.ignore("data_type", "device", "wrap_sequence", "track_meta")
        case "Orientationd":
            if state.spacing is not None or state.orientation is not None:
                raise unsupported("Orientationd after Spacingd, or twice")
            state.orientation = _axcodes(args)
            args.only("as_closest_canonical", False)
            args.only("labels", None, [["L", "R"], ["P", "A"], ["I", "S"]])
            args.only("lazy", False)
        case "Spacingd":
            if state.spacing is not None:
                raise unsupported("Spacingd twice")
            state.spacing = _pixdim(args)
            _resampling(args, state)
        case _:
            raise unsupported(f"{name} before the network")


def _axcodes(args: Arguments) -> str:
    codes = args.take("axcodes")
    codes = "".join(codes) if isinstance(codes, list) and len(codes) == 3 else codes
    pairs = ("LR", "PA", "IS")
    if not isinstance(codes, str) or sorted(c for c in codes for p in pairs if c in p) != sorted(
        codes
    ):
        raise args.refused("axcodes", codes)
    if [sum(c in pair for c in codes) for pair in pairs] != [1, 1, 1]:
        raise args.refused("axcodes", codes)
    return codes


def _pixdim(args: Arguments) -> tuple[float, float, float]:
    """Return three spacings; like MONAI, missing ones are 1 mm."""
    value = args.take("pixdim")
    values = value if isinstance(value, list) else [value]
    if not values or not all(is_number(v) and v > 0 for v in values[:3]):
        raise args.refused("pixdim", value)
    i, j, k = [float(v) for v in values[:3]] + [1.0] * (3 - len(values[:3]))
    return i, j, k


def _resampling(args: Arguments, state: Preprocessing) -> None:
    modes: dict[str, Literal["linear", "nearest"]] = {"bilinear": "linear", "nearest": "nearest"}
    state.mode = args.choice("mode", modes, "bilinear")
    args.only("padding_mode", "border")
    args.floating("dtype")
    for name in ("diagonal", "scale_extent", "recompute_affine", "lazy"):
        args.only(name, False)
    for name in ("min_pixdim", "max_pixdim"):
        args.only(name, None)
    args.ignore("align_corners", "ensure_same_shape")  # both are the same map of indices
