"""Translate a bundle's postprocessing into the fields of a card."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scanloom.cards.card import (
    Argmax,
    Cleaning,
    Decision,
    FillHoles,
    KeepLargest,
    NetworkSpec,
    Paint,
    RemoveSmallObjects,
    Threshold,
)
from scanloom.convert.files import unsupported
from scanloom.convert.monai.config import (
    Arguments,
    Component,
    Name,
    Priorities,
    Unchanged,
    describe,
)
from scanloom.convert.monai.preprocessing import Preprocessing, read_type, steps
from scanloom.convert.monai.runner import Obstacles
from scanloom.core import Flag

_CONNECTIVITY: dict[int | None, Literal[6, 18, 26]] = {1: 6, 2: 18, 3: 26, None: 26}
"""Number of neighbours by scikit-image's `connectivity` (largest number of orthogonal hops)."""


@dataclass(frozen=True)
class Postprocessing:
    """Steps from the network's scores to labels on the source grid; see `ModelCard`."""

    activation: Literal["softmax", "sigmoid"] | None
    decision: Decision
    restore: Literal["scores", "labels"]
    cleaning: tuple[Cleaning, ...]
    flags: tuple[Flag, ...] = ()
    rests: tuple[int, ...] = ()
    """Numbers of structures that are what regions within them leave of their region."""


@dataclass
class _State:
    """Result of the transforms read so far."""

    activation: Literal["softmax", "sigmoid"] | None = None
    decision: Decision | None = None
    inverted: Literal["linear", "nearest"] | None = None
    restore: Literal["scores", "labels"] = "scores"
    saved: bool = False
    """Whether the result is written already: later transforms do not change the file."""
    activated_late: bool = False
    """Whether scores are mapped back to the source grid before activation."""
    late: bool = False
    """Whether they are interpolated, too."""
    cleaning: list[Cleaning] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    rests: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Context:
    """Properties of the bundle with which the transforms must agree."""

    before: Preprocessing
    transform: Any
    network: str
    outputs: int


def read_postprocessing(
    value: Any,
    before: Preprocessing,
    transform: Any,
    network: NetworkSpec,
    outputs: int,
    obstacles: Obstacles,
) -> Postprocessing:
    """Read the transforms after the network.

    Parameters
    ----------
    value : Component or list
        Transforms of the evaluator, and of its handlers.
    before : Preprocessing
        The transforms before the network.
    transform : Component
        Transforms of the dataset, to which Invertd must refer.
    outputs : int
        Number of output channels of the network.
    obstacles : Obstacles
        Takes an error for each transform that a card can't express. With obstacles, the result is
        meaningless.
    """
    state = _State()
    context = _Context(before, transform, network.name, outputs)
    for component in steps(value):
        with obstacles.noted():
            _read(component, state, context)
    if obstacles:
        return Postprocessing(None, Argmax(), "scores", ())
    return _judged(state, before)


def _read(component: Component, state: _State, context: _Context) -> None:
    name, args = component.name, Arguments(component)
    keys = args.take("keys")
    if name == "SaveImaged":
        if keys in ("pred", ["pred"]):
            _save(args, state, context)
        elif "pred" in (keys if isinstance(keys, list) else [keys]):
            raise unsupported(f"SaveImaged of {describe(keys)}")
        return
    # its effect would be on what nobody reads
    if state.saved:
        raise unsupported(f"{name} after SaveImaged")
    if keys not in ("pred", ["pred"]):
        raise unsupported(f"{name} of {describe(keys)}, where the result is pred")
    args.ignore("allow_missing_keys")
    match name:
        case "Activationsd":
            _activate(args, state, context)
        case "Invertd":
            _invert(args, state, context)
        case "AsDiscreted":
            _decide(args, state, context)
        case "VistaPostTransformd":
            if context.network != "Vista3d":
                raise unsupported(f"VistaPostTransformd after {context.network}")
            _decide_once(state, Argmax())
        case "Lambdad":
            _apply(args, state, context)
        case "MergeClassesd":
            _merge(args, state, context)
        case "KeepLargestConnectedComponentd" | "FillHolesd" | "RemoveSmallObjectsd":
            state.cleaning.append(_cleaning(name, args, state, context))
        case "EnsureTyped" | "CastToTyped" | "ToTensord":
            read_type(args)
        case _:
            raise unsupported(f"{name} after the network")
    args.done()


def _judged(state: _State, before: Preprocessing) -> Postprocessing:
    """Return the fields of a card; refuse transforms that give no labels on the source grid."""
    if state.decision is None:
        raise unsupported("no AsDiscreted with argmax or threshold")
    changed = before.resampled or before.orientation or before.boxed
    if state.inverted is None and changed:
        detail = "no Invertd, although the scan is reoriented, resampled, cropped or padded"
        raise unsupported(detail)
    cleaning = tuple(state.cleaning)
    if state.inverted is None:  # nothing to map back: all cleaning is on the source grid
        cleaning = tuple(replace(step, when="after") for step in cleaning)
    activation, decision = state.activation, state.decision
    if state.activated_late and before.grid.boxed and not isinstance(decision, Argmax):
        raise unsupported("Invertd of a crop before Activationsd")
    if state.late:
        activation, decision = None, _without_activation(activation, decision)
    return Postprocessing(
        activation, decision, state.restore, cleaning, tuple(state.flags), state.rests
    )


def _without_activation(activation: str | None, decision: Decision) -> Decision:
    """Return the decision on raw scores that is equivalent to one on activated scores.

    A card activates before it maps scores back. If a bundle activates afterwards, the activation
    can be omitted because it is monotonic: argmax is unchanged, and sigmoid(x) >= t is equivalent
    to x >= log(t / (1 - t)).
    """
    if isinstance(decision, Argmax):
        return decision
    if activation != "sigmoid" or not 0 < decision.value < 1:
        raise unsupported("Invertd before Activationsd, with a threshold that is not of a sigmoid")
    return replace(decision, value=math.log(decision.value / (1 - decision.value)))


def _activate(args: Arguments, state: _State, context: _Context) -> None:
    sigmoid, softmax = args.flag("sigmoid", False), args.flag("softmax", False)
    args.only("other", None)
    args.only("dim", 0)
    if sigmoid and softmax:
        raise args.refused("sigmoid", sigmoid)
    if state.activation is not None or state.decision is not None:
        raise unsupported("Activationsd twice, or after AsDiscreted")
    if sigmoid or softmax:
        state.activation = "sigmoid" if sigmoid else "softmax"
        state.activated_late = state.inverted is not None
        state.late = state.inverted == "linear" and context.before.resampled


def _invert(args: Arguments, state: _State, context: _Context) -> None:
    """Read the mapping back to the source grid.

    Nearest-neighbour interpolation and decision commute: either way, each voxel gets the label of
    one network voxel.
    """
    nearest = args.flag("nearest_interp", True)
    transform, keys = args.take("transform"), args.take("orig_keys")
    if transform is not context.transform or not isinstance(transform, Component):
        raise args.refused("transform", "not that of the dataset")
    if keys not in (context.before.sources[0], [context.before.sources[0]]):
        raise args.refused("orig_keys", keys)  # without them, MONAI inverts nothing
    args.only("post_func", None)
    args.ignore("meta_keys", "orig_meta_keys", "meta_key_postfix", "to_tensor", "device")
    if state.inverted is not None:
        raise unsupported("Invertd twice")
    exact = not context.before.resampled or context.before.mode == "nearest"
    if context.before.shape is not None and not nearest and state.decision is not None:
        raise unsupported("Invertd(nearest_interp=False) of labels after Resized")
    if state.decision is not None and not nearest and not exact:
        if not isinstance(state.decision, Argmax):
            raise unsupported("Invertd(nearest_interp=False) of decided labels")
        state.flags.append(Flag.LABELS_NEAREST)
    outside = not isinstance(state.decision, Argmax | None) and state.decision.value <= 0
    if outside and context.before.grid.boxed:
        raise unsupported("Invertd of a crop after AsDiscreted with a threshold of at most 0")
    state.inverted = "nearest" if nearest or context.before.mode == "nearest" else "linear"
    if state.decision is not None or state.inverted == "nearest":
        state.restore = "labels"


def _save(args: Arguments, state: _State, context: _Context) -> None:
    """Read what is written of the result: it must be the result itself.

    It lies on the source grid by then, so that resampling it would change nothing.
    """
    args.only("scale", None)
    _check_type(args, "output_dtype", context)
    for name in ("writer", "output_name_formatter", "folder_layout"):
        args.only(name, None)
    args.one_of("output_ext", ".nii.gz", ".nii", ".nrrd", ".mha")
    args.ignore("resample", "mode", "padding_mode", "dtype", "squeeze_end_dims", "output_dir")
    args.ignore("meta_keys", "meta_key_postfix", "output_postfix", "data_root_dir", "print_log")
    args.ignore("separate_folder", "output_format", "savepath_in_metadict", "allow_missing_keys")
    args.done()
    state.saved = True


def _check_type(args: Arguments, name: str, context: _Context) -> None:
    """Refuse a data type that does not hold all labels."""
    value = args.take(name)
    text = value.text if isinstance(value, Name) else value
    # whole numbers up to these are exact in each type
    largest = {"uint8": 255, "int8": 127, "half": 2048, "float16": 2048, "int16": 32767}
    wide = ("float", "float32", "float64", "double", "int32", "int64", "long", None)
    if text not in wide and (not isinstance(text, str) or largest.get(text, 0) < context.outputs):
        raise args.refused(name, value)


def _decide(args: Arguments, state: _State, context: _Context) -> None:
    argmax = args.flag("argmax", False)
    threshold = args.number_or_none("threshold")
    args.only("to_onehot", None)
    args.only("rounding", None)
    args.only("dim", 0)
    args.only("keepdim", True)
    _check_type(args, "dtype", context)
    # one of the two decides; both, or none, would leave something to guess
    if argmax == (threshold is not None):
        raise args.refused("argmax", argmax)
    _decide_once(state, Argmax() if threshold is None else Threshold(threshold))


def _decide_once(state: _State, decision: Decision) -> None:
    if state.decision is not None:
        raise unsupported("AsDiscreted twice")
    state.decision = decision


def _apply(args: Arguments, state: _State, context: _Context) -> None:
    function = args.take("func")
    args.only("inv_func", None)
    args.only("overwrite", True)
    args.ignore("track_meta")
    match function:
        case Unchanged():
            return
        case Priorities():
            _paint(state, context, function.regions)
            state.rests = tuple(number for _, number in function.regions[1:])
        case _:
            raise args.refused("func", function)


def _merge(args: Arguments, state: _State, context: _Context) -> None:
    """Read the transform that gives a voxel the number of its first region, but channel 0."""
    regions = tuple((n, n) for n in range(1, context.outputs))
    _paint(state, context, regions)


def _paint(state: _State, context: _Context, regions: tuple[tuple[int, int], ...]) -> None:
    """Unite thresholded channels into one label map; the first region of a voxel wins."""
    numbers = [number for _, number in regions]
    valid = regions and max(channel for channel, _ in regions) < context.outputs
    if not isinstance(state.decision, Threshold) or state.cleaning:
        raise unsupported("Lambdad or MergeClassesd of other than thresholded channels")
    if not valid or len(set(numbers)) < len(numbers) or max(numbers) > 65535:
        raise unsupported("Lambdad with channels or labels that are missing or used twice")
    state.decision = Paint(regions[::-1], state.decision.value)


def _cleaning(name: str, args: Arguments, state: _State, context: _Context) -> Cleaning:
    """Read a transform of connected components: of one label map, or of thresholded channels."""
    if state.decision is None:
        raise unsupported(f"{name} before AsDiscreted")
    many = isinstance(state.decision, Threshold) and context.outputs > 1
    when: Literal["before", "after"] = "before" if state.inverted is None else "after"
    if name == "RemoveSmallObjectsd":
        return _small_objects(args, many, when)
    hops = args.whole_or_none("connectivity")
    if hops not in _CONNECTIVITY:
        raise args.refused("connectivity", hops)
    connectivity, numbers = _CONNECTIVITY[hops], _numbers(args, many, context.outputs)
    if name == "FillHolesd":
        if many and 1 in numbers:
            raise args.refused("applied_labels", 0)  # MONAI never fills the first channel
        return FillHoles(numbers, connectivity, when)
    args.only("is_onehot", None, many)
    together = not args.flag("independent", True)
    if together and many:
        raise args.refused("independent", False)
    count = args.whole_or_none("num_components")
    return KeepLargest(numbers, together, 1 if count is None else count, connectivity, when)


def _small_objects(
    args: Arguments, many: bool, when: Literal["before", "after"]
) -> RemoveSmallObjects:
    """Read the removal of small objects from a label map.

    The axis of channels is one along which MONAI connects voxels. With a single channel it makes no
    difference; objects of several would reach from one structure into another.
    """
    if many:
        raise unsupported("RemoveSmallObjectsd of several channels, which it connects")
    hops = args.take("connectivity", 1)
    if hops not in (1, 2, 3, 4):
        raise args.refused("connectivity", hops)
    size = args.number("min_size", 64)
    unit: Literal["voxels", "mm3"] = "mm3" if args.flag("by_measure", False) else "voxels"
    together = not args.flag("independent_channels", True)
    args.ignore("pixdim")  # the scan has its own
    return RemoveSmallObjects(size, unit, together, _CONNECTIVITY[min(hops, 3)], when)


def _numbers(args: Arguments, many: bool, outputs: int) -> tuple[int, ...]:
    """Return the structures to clean; () for all.

    For several thresholded channels, MONAI counts channels from 0, and excludes channel 0 if no
    labels are given.
    """
    value = args.take("applied_labels")
    labels = value if isinstance(value, list) else [value]
    if value is None:
        return tuple(range(2, outputs + 1)) if many else ()
    numbers = tuple(n + 1 if many else n for n in labels if isinstance(n, int))
    if len(numbers) < len(labels) or min(numbers, default=0) < 1 or max(numbers) > outputs:
        raise args.refused("applied_labels", value)
    return numbers
