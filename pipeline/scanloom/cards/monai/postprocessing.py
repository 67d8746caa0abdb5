"""Translate a bundle's postprocessing into the fields of a card."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scanloom.cards.card import Argmax, Decision, KeepLargest, Threshold
from scanloom.cards.monai.allow_list import canonical_target
from scanloom.cards.monai.arguments import Arguments, describe
from scanloom.cards.monai.preprocessing import Preprocessing, steps, unsupported

_CONNECTIVITY: dict[int | None, Literal[6, 18, 26]] = {1: 6, 2: 18, 3: 26, None: 26}
"""Number of neighbours by scikit-image's `connectivity` (largest number of orthogonal hops)."""


@dataclass(frozen=True)
class Postprocessing:
    """Steps from the network's scores to labels on the source grid; see `ModelCard`."""

    activation: Literal["softmax", "sigmoid"] | None
    decision: Decision
    restore: Literal["scores", "labels"]
    cleaning: tuple[KeepLargest, ...]


@dataclass
class _State:
    """Result of the transforms read so far."""

    activation: Literal["softmax", "sigmoid"] | None = None
    decision: Decision | None = None
    inverted: Literal["linear", "nearest"] | None = None
    restore: Literal["scores", "labels"] = "scores"
    late: bool = False
    """Whether scores are mapped back to the source grid before activation."""
    cleaning: list[KeepLargest] = field(default_factory=list)


@dataclass(frozen=True)
class _Context:
    """Properties of the bundle with which the transforms must agree."""

    before: Preprocessing
    transform: Any
    outputs: int


def read_postprocessing(
    value: Any, before: Preprocessing, transform: Any, outputs: int
) -> Postprocessing:
    """Read the transforms after the network.

    Parameters
    ----------
    value : Component or list
        `postprocessing` of the config.
    before : Preprocessing
        The transforms before the network.
    transform : Component
        `preprocessing` of the config, to which Invertd must refer.
    outputs : int
        Number of output channels of the network.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming the transform, if a card can't express it.
    """
    state = _State()
    context = _Context(before, transform, outputs)
    for component in steps(value):
        name = canonical_target(component.target)[1]
        args = Arguments(component)
        keys = args.take("keys")
        if keys not in ("pred", ["pred"]):
            raise unsupported(f"{name} of {describe(keys)}, where the result is pred")
        args.ignore("allow_missing_keys")
        match name:
            case "Activationsd":
                _activate(args, state, context)
            case "Invertd":
                _invert(args, state, context)
            case "AsDiscreted":
                _decide(args, state)
            case "KeepLargestConnectedComponentd":
                _clean(args, state, context)
            case "EnsureTyped" | "CastToTyped":
                args.floating("dtype")
                args.ignore("data_type", "device", "wrap_sequence", "track_meta")
            case _:
                raise unsupported(f"{name} after the network")
        args.done()
    return _judged(state, before)


def _judged(state: _State, before: Preprocessing) -> Postprocessing:
    """Return the fields of a card; refuse transforms that give no labels on the source grid."""
    if state.decision is None:
        raise unsupported("no AsDiscreted with argmax or threshold")
    if state.inverted is None and (before.spacing or before.orientation):
        raise unsupported("no Invertd, although the scan is reoriented or resampled")
    cleaning = tuple(state.cleaning)
    if state.inverted is None:  # nothing to map back: all cleaning is on the source grid
        cleaning = tuple(replace(step, when="after") for step in cleaning)
    if not state.late:
        return Postprocessing(state.activation, state.decision, state.restore, cleaning)
    decision = _without_activation(state.activation, state.decision)
    return Postprocessing(None, decision, state.restore, cleaning)


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
    return Threshold(math.log(decision.value / (1 - decision.value)))


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
        state.late = state.inverted == "linear" and context.before.spacing is not None


def _invert(args: Arguments, state: _State, context: _Context) -> None:
    """Read the mapping back to the source grid.

    Nearest-neighbour interpolation and decision commute: either way, each voxel gets the label of
    one network voxel.
    """
    nearest = args.flag("nearest_interp", True)
    if args.take("transform") is not context.transform:
        raise args.refused("transform", "not preprocessing")
    args.only("orig_keys", context.before.key)
    args.only("post_func", None)
    args.ignore("meta_keys", "orig_meta_keys", "meta_key_postfix", "to_tensor", "device")
    if state.inverted is not None:
        raise unsupported("Invertd twice")
    exact = context.before.spacing is None or context.before.mode == "nearest"
    if state.decision is not None and not nearest and not exact:
        raise unsupported("Invertd(nearest_interp=False) of labels: they would be mixed")
    state.inverted = "nearest" if nearest or context.before.mode == "nearest" else "linear"
    if state.decision is not None or state.inverted == "nearest":
        state.restore = "labels"


def _decide(args: Arguments, state: _State) -> None:
    argmax = args.flag("argmax", False)
    threshold = args.number_or_none("threshold")
    args.only("to_onehot", None)
    args.only("rounding", None)
    args.only("dim", 0)
    args.only("keepdim", True)
    args.ignore("dtype")
    if argmax == (threshold is not None):
        raise args.refused("argmax", argmax)
    if state.decision is not None:
        raise unsupported("AsDiscreted twice")
    state.decision = Argmax() if threshold is None else Threshold(threshold)


def _clean(args: Arguments, state: _State, context: _Context) -> None:
    if state.decision is None:
        raise unsupported("KeepLargestConnectedComponentd before AsDiscreted")
    hops = args.whole_or_none("connectivity")
    if hops not in _CONNECTIVITY:
        raise args.refused("connectivity", hops)
    many = isinstance(state.decision, Threshold) and context.outputs > 1
    args.only("is_onehot", None, many)
    count = args.whole_or_none("num_components")
    state.cleaning.append(
        KeepLargest(
            numbers=_numbers(args, many, context.outputs),
            together=not args.flag("independent", True),
            parts=1 if count is None else count,
            connectivity=_CONNECTIVITY[hops],
            when="before" if state.inverted is None else "after",
        )
    )


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
