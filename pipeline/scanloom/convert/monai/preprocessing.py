"""Translate a bundle's preprocessing into the fields of a card.

Arguments and defaults are those of MONAI 1.6.1. A transform that a card can't express is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scanloom.cards.card import (
    Crop,
    Fit,
    IntensityStep,
    NetworkGrid,
    Normalize,
    ScaleMinMax,
    ScalePercentiles,
    ScaleRange,
)
from scanloom.convert.files import unsupported
from scanloom.convert.monai.config import (
    Above,
    Arguments,
    Component,
    describe,
    is_number,
    is_whole,
    unwrapped,
)
from scanloom.convert.monai.runner import Obstacles


@dataclass
class Preprocessing:
    """Transforms of a scan before the network.

    Parameters
    ----------
    keys : tuple of str
        Keys of the input channels in the data, until they are concatenated.
    sources : tuple of str
        Keys of the channels before they are concatenated; transforms of the first are inverted.
    clicks : int or None
        Number of the scan's own channels before those of clicks (DeepEdit); None without clicks.
    """

    keys: tuple[str, ...] = ("image",)
    sources: tuple[str, ...] = ("image",)
    orientation: str | None = None
    orient: Literal["before", "after"] = "before"
    spacing: tuple[float, float, float] | None = None
    shape: tuple[int, int, int] | None = None
    mode: Literal["linear", "nearest", "area", "trilinear"] = "linear"
    alignment: Literal["first", "edges", "ends"] = "first"
    before: list[IntensityStep] = field(default_factory=list)
    after: list[IntensityStep] = field(default_factory=list)
    crop: Crop | None = None
    fits: list[Fit] = field(default_factory=list)
    clicks: int | None = None

    @property
    def resampled(self) -> bool:
        """Whether the scan is resampled."""
        return self.spacing is not None or self.shape is not None

    @property
    def boxed(self) -> bool:
        """Whether the network sees a box of its grid, or one that extends beyond it."""
        return self.crop is not None or bool(self.fits)

    @property
    def padded(self) -> bool:
        """Whether the network sees voxels that were added to the scan."""
        return bool(self.fits) or (self.crop is not None and self.crop.padded)

    @property
    def steps(self) -> int:
        """Number of intensity steps on the network grid that were read so far."""
        return len(self.after if self.resampled else self.before)

    @property
    def grid(self) -> NetworkGrid:
        """The network grid."""
        return NetworkGrid(
            self.orientation,
            self.spacing,
            self.mode,
            alignment=self.alignment,
            shape=self.shape,
            crop=self.crop,
            orient=self.orient,
            fits=tuple(self.fits),
        )


def steps(value: Any) -> tuple[Component, ...]:
    """Return the transforms of a Compose, of Composes in it, or of a bare list, in order."""
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(step for item in value for step in steps(item))
    if not isinstance(value, Component):
        raise unsupported(f"a transform is {describe(value)}")
    if value.kind == "ignored":
        return ()
    if value.kind not in ("transform", "saver"):
        raise unsupported(f"{value.name} is not a transform")
    if value.name != "Compose":
        return (value,)
    args = Arguments(value)
    transforms = steps(args.take("transforms"))
    args.ignore("map_items", "unpack_items", "log_stats", "overrides", "threading")
    args.only("lazy", False, None)
    args.done()
    return transforms


def read_preprocessing(value: Any, channels: int, obstacles: Obstacles) -> Preprocessing:
    """Read the transforms before the network.

    Parameters
    ----------
    value : Component or list
        Transforms of the dataset.
    channels : int
        Number of input channels.
    obstacles : Obstacles
        Takes an error for each transform that a card can't express.
    """
    state = Preprocessing()
    transforms = steps(value)
    state.keys = _channel_keys(transforms)
    state.sources = state.keys
    for component in transforms:
        with obstacles.noted():
            _read(component, state, channels)
    if not obstacles:
        _check_order(transforms, state, channels)
    if not state.resampled:  # so all steps come "after"
        state.before, state.after = [], state.before
    if state.crop is not None and state.crop.steps == len(state.after):
        state.crop = replace(state.crop, steps=None)
    state.fits = [
        replace(fit, steps=None) if fit.steps == len(state.after) else fit for fit in state.fits
    ]
    return state


def _check_order(transforms: Sequence[Component], state: Preprocessing, channels: int) -> None:
    """Refuse transforms that do not load the scan, then give it an axis of channels.

    Without that axis, MONAI takes the first axis of the scan for it.
    """
    names = [
        c.name for c in transforms if c.name not in ("EnsureTyped", "CastToTyped", "ToTensord")
    ]
    if names.count("LoadImaged") != 1 or transforms[0].name != "LoadImaged":
        raise unsupported("LoadImaged is not the first transform before the network")
    first = Arguments(transforms[0]).flag("ensure_channel_first", False)
    files = channels > 1 and len(state.sources) == 1 and state.clicks is None  # a list of files
    if not first and not files and names[1:2] != ["EnsureChannelFirstd"]:
        raise unsupported("LoadImaged without EnsureChannelFirstd right after it")
    if state.keys != ("image",):
        raise unsupported(f"the scan is {state.keys[0]!r}, where the evaluator takes 'image'")


def _channel_keys(transforms: Sequence[Component]) -> tuple[str, ...]:
    """Return the keys of the input channels: those that are concatenated, or the loaded one."""
    for component in transforms:
        merged = component.args.get("keys_merge")
        if component.name == "ConcatImages" and isinstance(merged, list):
            return tuple(str(key) for key in merged) or ("image",)
    loaded = [c.args.get("keys") for c in transforms if c.name == "LoadImaged"]
    key = loaded[0] if loaded else "image"
    key = key[0] if isinstance(key, list) and len(key) == 1 else key
    return (key,) if isinstance(key, str) else ("image",)


def _read(component: Component, state: Preprocessing, channels: int) -> None:
    name, args = component.name, Arguments(component)
    if component.kind == "saver":
        return  # of the scan, which it leaves as it is
    if name == "ConcatImages":
        _concatenate(args, state)
        return
    keys = args.take("keys")
    listed = tuple(str(key) for key in keys) if isinstance(keys, list) else (keys,)
    extra = name == "LoadImaged" and len(state.keys) > 1  # such as a reference label
    if listed != state.keys and not (extra and listed[: len(state.keys)] == state.keys):
        shown = state.keys[0] if len(state.keys) == 1 else describe(list(state.keys))
        raise unsupported(f"{name} of {describe(keys)}, where the scan is {shown}")
    args.ignore("allow_missing_keys")
    if name in _INTENSITY:
        many = channels > 1 and len(state.keys) == 1
        # steps after the resampling are those on the network grid
        (state.after if state.resampled else state.before).append(_intensity(name, args, many))
    else:
        _spatial(name, args, state)
    args.done()


def _concatenate(args: Arguments, state: Preprocessing) -> None:
    """Read the transform that makes one image of the channels."""
    args.take("keys_merge")
    key = args.take("keys_out")
    args.ignore("allow_missing_keys")
    if len(state.keys) < 2 or not isinstance(key, str):
        raise args.refused("keys_out", key)
    state.keys = (key,)
    args.done()


_INTENSITY = (
    "NormalizeIntensityd",
    "ScaleIntensityRangePercentilesd",
    "ScaleIntensityRanged",
    "ScaleIntensityd",
)


def _intensity(name: str, args: Arguments, many: bool) -> IntensityStep:
    """Read an intensity step; `many` if it applies to several channels at once."""
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
    if many and not channel_wise:
        raise args.refused("channel_wise", channel_wise)
    if name == "ScaleIntensityd":
        args.only("factor", None)
        return ScaleMinMax(args.number("minv", 0.0), args.number("maxv", 1.0))
    if name == "ScaleIntensityRangePercentilesd":
        return _percentiles(args)
    nonzero = args.flag("nonzero", False)
    return Normalize(args.number_or_none("subtrahend"), args.number_or_none("divisor"), nonzero)


def _percentiles(args: Arguments) -> ScalePercentiles:
    """Read a scaling by percentiles; `relative` makes the target the same part of its range."""
    lower, upper = (args.number(name) for name in ("lower", "upper"))
    low, high = (args.number_or_none(name) for name in ("b_min", "b_max"))
    if args.flag("relative", False):
        if low is None or high is None:
            raise args.refused("relative", True)
        low, high = ((high - low) * (each / 100.0) + low for each in (lower, upper))
    if not (0 <= lower <= 100 and 0 <= upper <= 100):
        raise args.refused("lower", [lower, upper])
    return ScalePercentiles(lower, upper, low, high, args.flag("clip", False))


def _spatial(name: str, args: Arguments, state: Preprocessing) -> None:
    """Read a transform that loads, reorients or resamples the scan."""
    match name:
        case "LoadImaged":
            args.floating("dtype")
            args.only("reader", None, "ITKReader", "NibabelReader", "itkreader", "nibabelreader")
            args.only("simple_keys", False)
            args.only("prune_meta_pattern", None)
            args.flag("ensure_channel_first", False)
            args.ignore("meta_keys", "meta_key_postfix", "overwriting", "image_only")
            args.ignore("expanduser", "prune_meta_sep")
        case "EnsureChannelFirstd":
            args.only("channel_dim", None, "no_channel")
            args.ignore("strict_check")
        case "EnsureTyped" | "CastToTyped" | "ToTensord":
            read_type(args)
        case "Orientationd":
            _orient(args, state)
            args.only("as_closest_canonical", False)
            args.only("labels", None, [["L", "R"], ["P", "A"], ["I", "S"]])
            args.only("lazy", False)
        case "Spacingd":
            if state.resampled or state.boxed:
                raise unsupported("Spacingd twice, or after Resized, a crop or padding")
            state.spacing = _pixdim(args)
            _resampling(args, state)
        case "Resized":
            if state.resampled or state.boxed:
                raise unsupported("Resized twice, or after Spacingd, a crop or padding")
            _resize(args, state)
        case "CropForegroundd":
            if state.mode == "trilinear":
                # scores next to the box are rounding errors, which decide
                raise unsupported("CropForegroundd after a trilinear Resized")
            _crop(args, state)
        case "SpatialPadd" | "ResizeWithPadOrCropd":
            crops = name == "ResizeWithPadOrCropd"
            if crops and state.mode == "trilinear":
                raise unsupported("ResizeWithPadOrCropd after a trilinear Resized")
            x, y, z = (n if n > 0 else None for n in _lengths(args, "spatial_size"))
            _fit(args, Fit((x, y, z), crops=crops), state)
        case "DivisiblePadd":
            i, j, k = (max(n, 1) for n in _lengths(args, "k"))
            _fit(args, Fit(multiple=(i, j, k)), state)
        case "AddGuidanceSignalDeepEditd":
            state.clicks = args.whole_or_none("number_intensity_ch") or 1
            args.ignore("guidance", "sigma", "disks")
        case _:
            raise unsupported(f"{name} before the network")


def read_type(args: Arguments) -> None:
    """Read a change of type: the scan stays a tensor of floating point with its affine."""
    args.floating("dtype")
    args.only("data_type", "tensor")
    if args.name.startswith("ToTensor") and not args.flag("track_meta", False):
        raise args.refused("track_meta", None)  # it drops the affine
    args.only("track_meta", None, True)
    args.ignore("device", "wrap_sequence")


def _orient(args: Arguments, state: Preprocessing) -> None:
    """Read the orientation; after resampling only if all axes have one spacing."""
    # with equal spacings, turning the axes and resampling can change places
    same = state.spacing is not None and len(set(state.spacing)) == 1
    if state.orientation is not None or (state.resampled and not same):
        raise unsupported("Orientationd twice, or after resampling to different spacings")
    if state.padded:
        raise unsupported("Orientationd after padding")  # of which an odd voxel has a side
    state.orientation = _axcodes(args)
    state.orient = "after" if state.resampled else "before"


def _resize(args: Arguments, state: Preprocessing) -> None:
    """Read a resampling to a fixed shape: the mean over areas, or linear."""
    sizes = args.take("spatial_size")
    if not isinstance(sizes, list) or len(sizes) != 3:
        raise args.refused("spatial_size", sizes)
    if not all(is_whole(n) and 1 <= n <= 1024 for n in sizes):
        raise args.refused("spatial_size", sizes)
    modes: dict[str, Literal["area", "trilinear"]] = {
        "area": "area",
        **dict.fromkeys(("trilinear", "bilinear", "linear"), "trilinear"),
    }
    mode = args.choice("mode", modes, "area")
    corners = unwrapped(args.take("align_corners"))
    if not (corners is None or (mode == "trilinear" and isinstance(corners, bool))):
        raise args.refused("align_corners", corners)
    args.only("size_mode", "all")
    args.only("anti_aliasing", False)
    args.only("lazy", False)
    args.floating("dtype")
    args.ignore("anti_aliasing_sigma")
    i, j, k = sizes
    # together, once nothing is refused: one without the others is no grid
    state.mode, state.shape, state.alignment = mode, (i, j, k), "ends" if corners else "edges"


def _crop(args: Arguments, state: Preprocessing) -> None:
    """Read a crop to the voxels above 0."""
    source, margin = args.take("source_key"), args.same("margin", 0)
    if (source,) != state.keys:
        raise args.refused("source_key", source)
    if state.boxed:
        raise unsupported("CropForegroundd twice, or after padding")
    if not (margin.is_integer() and 0 <= margin <= _LONGEST):
        raise args.refused("margin", margin)
    select = args.take("select_fn")
    if not (select is None or isinstance(select, Above)):
        raise args.refused("select_fn", select)
    args.only("channel_indices", None)
    args.only("lazy", False)
    args.ignore("start_coord_key", "end_coord_key")
    i, j, k = (max(n, 1) for n in _lengths(args, "k_divisible", 1))
    beyond = margin > 0 and not args.flag("allow_smaller", False)
    state.crop = Crop(
        "positive",
        "network",
        int(margin),
        state.steps,
        beyond=beyond,
        multiple=(i, j, k),
        threshold=0.0 if select is None else select.threshold,
    )
    args.ignore("allow_smaller")
    if state.crop.padded:
        args.only("mode", "constant")
    args.ignore("mode")


_LONGEST = 1 << 14
"""Largest length in voxels."""
_PADDINGS: dict[str, Literal["constant", "replicate", "reflect"]] = {
    "constant": "constant",
    "edge": "replicate",
    "replicate": "replicate",
    "reflect": "reflect",
}


def _fit(args: Arguments, fit: Fit, state: Preprocessing) -> None:
    """Read a padding or a crop to given lengths."""
    padding = args.choice("mode", _PADDINGS, "constant")
    name = "constant_values" if padding == "constant" and "constant_values" in args else "value"
    value = args.number(name, 0.0) if padding == "constant" else 0.0
    at_end = args.choice("method", {"symmetric": False, "end": True}, "symmetric")
    args.only("lazy", False)
    state.fits.append(
        replace(fit, at_end=at_end, padding=padding, padding_value=value, steps=state.steps)
    )


def _lengths(args: Arguments, name: str, default: int | None = None) -> list[int]:
    """Return a length for each axis; one counts for all."""
    value = args.take(name, default)
    values = value if isinstance(value, list) and len(value) == 3 else [unwrapped(value)] * 3
    if not all(is_whole(n) and n <= _LONGEST for n in values):
        raise args.refused(name, value)
    return values


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
    """Return three spacings; like MONAI, missing ones are equal to the last."""
    value = args.take("pixdim")
    values = value if isinstance(value, list) else [value]
    if not values or not all(is_number(v) and v > 0 for v in values[:3]):
        raise args.refused("pixdim", value)
    i, j, k = (float(v) for v in (values + values[-1:] * 2)[:3])
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
