"""What a bundle's postprocessing means, in the words of a card."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scanloom.cards.arguments import Arguments, describe
from scanloom.cards.card import Argmax, Decision, KeepLargest, Threshold
from scanloom.cards.preprocessing import Preprocessing, steps, unsupported
from scanloom.cards.targets import canonical

_CONNECTIVITY: dict[int | None, Literal[6, 18, 26]] = {1: 6, 2: 18, 3: 26, None: 26}
"""Orthogonal hops, as scikit-image counts them, to neighbours of a voxel."""


@dataclass(frozen=True)
class Postprocessing:
    """The way of the network's scores to labels on the source grid, as `ModelCard` has it."""

    activation: Literal["softmax", "sigmoid"] | None
    decision: Decision
    restore: Literal["scores", "labels"]
    cleaning: tuple[KeepLargest, ...]


@dataclass
class _Found:
    """What the steps up to here have said."""

    activation: Literal["softmax", "sigmoid"] | None = None
    decision: Decision | None = None
    inverted: Literal["linear", "nearest"] | None = None
    restore: Literal["scores", "labels"] = "scores"
    late: bool = False
    """Whether scores came back before they were activated."""
    cleaning: list[KeepLargest] = field(default_factory=list)


@dataclass(frozen=True)
class _Context:
    """What the steps must agree with."""

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
        What was done to the scan.
    transform : Component
        `preprocessing` of the config, which Invertd must name.
    outputs : int
        Channels that the network gives.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, by name, for what a card can't express.
    """
    found = _Found()
    context = _Context(before, transform, outputs)
    for component in steps(value):
        name = canonical(component.target)[1]
        args = Arguments(component)
        keys = args.take("keys")
        if keys not in ("pred", ["pred"]):
            raise unsupported(f"{name} of {describe(keys)}, where the result is pred")
        args.ignore("allow_missing_keys")
        match name:
            case "Activationsd":
                _activate(args, found, context)
            case "Invertd":
                _invert(args, found, context)
            case "AsDiscreted":
                _decide(args, found)
            case "KeepLargestConnectedComponentd":
                _clean(args, found, context)
            case "EnsureTyped" | "CastToTyped":
                args.floating("dtype")
                args.ignore("data_type", "device", "wrap_sequence", "track_meta")
            case _:
                raise unsupported(f"{name} after the network")
        args.done()
    return _judged(found, before)


def _judged(found: _Found, before: Preprocessing) -> Postprocessing:
    """Refuse what ends without labels, or with labels that lie on another grid."""
    if found.decision is None:
        raise unsupported("no AsDiscreted with argmax or threshold")
    if found.inverted is None and (before.spacing or before.orientation):
        raise unsupported("no Invertd, though the scan was turned or resampled")
    cleaning = tuple(found.cleaning)
    if found.inverted is None:  # nothing to bring back: all cleaning is on the source grid
        cleaning = tuple(replace(step, when="after") for step in cleaning)
    if not found.late:
        return Postprocessing(found.activation, found.decision, found.restore, cleaning)
    decision = _without_activation(found.activation, found.decision)
    return Postprocessing(None, decision, found.restore, cleaning)


def _without_activation(activation: str | None, decision: Decision) -> Decision:
    """Return the decision on bare scores that equals that on activated ones.

    A card activates before it brings back. Where a bundle does so after, the activation grows with
    the score, so that it can be left out: the largest stays the largest, and
    sigmoid(x) >= t is x >= log(t / (1 - t)).
    """
    if isinstance(decision, Argmax):
        return decision
    if activation != "sigmoid" or not 0 < decision.value < 1:
        raise unsupported("Invertd before Activationsd, with a threshold that is not of a sigmoid")
    return Threshold(math.log(decision.value / (1 - decision.value)))


def _activate(args: Arguments, found: _Found, context: _Context) -> None:
    sigmoid, softmax = args.flag("sigmoid", False), args.flag("softmax", False)
    args.only("other", None)
    args.only("dim", 0)
    if sigmoid and softmax:
        raise args.refused("sigmoid", sigmoid)
    if found.activation is not None or found.decision is not None:
        raise unsupported("Activationsd twice, or after AsDiscreted")
    if sigmoid or softmax:
        found.activation = "sigmoid" if sigmoid else "softmax"
        found.late = found.inverted == "linear" and context.before.spacing is not None


def _invert(args: Arguments, found: _Found, context: _Context) -> None:
    """Read how the result comes back to the source grid.

    Nearest neighbour of scores and then the decision is the decision and then nearest neighbour:
    either way each voxel gets the label of one network voxel.
    """
    nearest = args.flag("nearest_interp", True)
    if args.take("transform") is not context.transform:
        raise args.refused("transform", "another than preprocessing")
    args.only("orig_keys", context.before.key)
    args.only("post_func", None)
    args.ignore("meta_keys", "orig_meta_keys", "meta_key_postfix", "to_tensor", "device")
    if found.inverted is not None:
        raise unsupported("Invertd twice")
    exact = context.before.spacing is None or context.before.mode == "nearest"
    if found.decision is not None and not nearest and not exact:
        raise unsupported("Invertd(nearest_interp=False) of labels: they would be mixed")
    found.inverted = "nearest" if nearest or context.before.mode == "nearest" else "linear"
    if found.decision is not None or found.inverted == "nearest":
        found.restore = "labels"


def _decide(args: Arguments, found: _Found) -> None:
    argmax = args.flag("argmax", False)
    threshold = args.number_or_none("threshold")
    args.only("to_onehot", None)
    args.only("rounding", None)
    args.only("dim", 0)
    args.only("keepdim", True)
    args.ignore("dtype")
    if argmax == (threshold is not None):
        raise args.refused("argmax", argmax)
    if found.decision is not None:
        raise unsupported("AsDiscreted twice")
    found.decision = Argmax() if threshold is None else Threshold(threshold)


def _clean(args: Arguments, found: _Found, context: _Context) -> None:
    if found.decision is None:
        raise unsupported("KeepLargestConnectedComponentd before AsDiscreted")
    hops = args.whole_or_none("connectivity")
    if hops not in _CONNECTIVITY:
        raise args.refused("connectivity", hops)
    many = isinstance(found.decision, Threshold) and context.outputs > 1
    args.only("is_onehot", None, many)
    parts = args.whole_or_none("num_components")
    found.cleaning.append(
        KeepLargest(
            numbers=_numbers(args, many, context.outputs),
            together=not args.flag("independent", True),
            parts=1 if parts is None else parts,
            connectivity=_CONNECTIVITY[hops],
            when="before" if found.inverted is None else "after",
        )
    )


def _numbers(args: Arguments, many: bool, outputs: int) -> tuple[int, ...]:
    """Return the structures to clean; () for all.

    With several channels that were thresholded, MONAI counts channels from 0, and leaves channel 0
    out where none are named.
    """
    value = args.take("applied_labels")
    labels = value if isinstance(value, list) else [value]
    if value is None:
        return tuple(range(2, outputs + 1)) if many else ()
    numbers = tuple(n + 1 if many else n for n in labels if isinstance(n, int))
    if len(numbers) < len(labels) or min(numbers, default=0) < 1 or max(numbers) > outputs:
        raise args.refused("applied_labels", value)
    return numbers
