"""Recipes: the hash over everything that was requested and can change a result.

A result is current as long as the hash of its recipe is. The hashed document therefore never
changes for a request that an earlier version could express:

- `FIELDS_OF_SCHEMA_1` names the fields of each class as they were when recipes were first
  published. They are always part of the document. The table is frozen.
- A field that was added later is part of the document only if it differs from its default. So the
  default of a new field must mean "as before", and must never change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.cards.requested import requested_card
from scanloom.core import ComputeOptions, Outputs, ReadOptions
from scanloom.core.relations import NO_RELATIONS, Relations

FIELDS_OF_SCHEMA_1: Mapping[str, tuple[str, ...]] = {
    "ModelCard": (
        *("name", "version", "title", "description", "intended_use", "license", "attribution"),
        *("channels", "network", "weights", "grid", "window", "structures", "before", "after"),
        *("activation", "decision", "restore", "cleaning", "checks", "precisions", "air_below"),
        "kernel",
    ),
    "Channel": ("name", "modality"),
    "NetworkSpec": ("name", "args"),
    "Weights": ("sha256", "key"),
    "NetworkGrid": ("orientation", "spacing", "mode"),
    "Window": ("size", "overlap", "blending", "sigma_scale", "padding", "padding_value"),
    "Structure": (
        *("label", "number", "name", "category", "type", "color", "laterality", "experimental"),
    ),
    "Code": ("value", "scheme", "meaning"),
    "Checks": ("low", "high", "spacing", "extent", "refuse"),
    "Range": ("low", "high"),
    "ScaleRange": ("a_min", "a_max", "b_min", "b_max", "clip"),
    "ScaleMinMax": ("minv", "maxv"),
    "Normalize": ("subtrahend", "divisor", "nonzero"),
    "Argmax": (),
    "Threshold": ("value",),
    "KeepLargest": ("numbers", "together", "parts", "connectivity", "when"),
    "Outputs": ("seg", "dates", "structures"),
    "ReadOptions": ("gaps", "orientation", "modality"),
    "ComputeOptions": ("precision", "skip_air", "compiled_restore"),
}
"""Fields of each class in recipes of schema 1. Never change this table."""

_NOT_IN_RECIPE: Mapping[str, tuple[str, ...]] = {
    "Weights": ("file",),
    "Checks": ("hounsfield",),
    "ModelCard": ("limitations", "reference_ranges", "fast"),
    "Outputs": ("also",),  # part of `outputs_document`
}
"""Fields that cannot change a result, beside options whose entry in `scanloom.options` says so:
weights are the same wherever their file is, and labels however a model's limitations are worded and
its results are judged. A card's preset for `fast` counts only if it is requested: see
`recipe_hash`."""
_KEYS_OF_SCHEMA_1 = {"skip_air": "body_box", "compiled_restore": "fused_restore"}
"""Names of fields in recipes, if they were renamed since."""
_EXTRAS_OF_SCHEMA_1 = {"image": "image", "masks": "split"}
"""Optional writers that have a key of their own in recipes, true or false."""
_STEPS = ("before", "after", "cleaning", "steps")
"""Fields with steps of several classes: written as text, with the class's name."""


def recipe_hash(
    cards: Sequence[ModelCard],
    options: Iterable[ReadOptions | ComputeOptions],
    outputs: Outputs,
    relations: Relations = NO_RELATIONS,
) -> str:
    """Return the hash (SHA-256, hex) over everything requested that can change a result."""
    options = tuple(options)
    documents = [recipe_document(subject) for subject in options]
    fast = [each for each in options if isinstance(each, ComputeOptions) and each.fast]
    cards = [requested_card(c, fast[0]) if fast and c.fast else c for c in cards]
    return _digest(
        {
            "models": [card_digest(card) for card in cards],
            "options": {name: value for document in documents for name, value in document.items()},
            "outputs": outputs_document(outputs),
            **({"relations": recipe_document(relations)} if relations else {}),
        }
    )


def card_digest(card: ModelCard) -> str:
    """Return the hash (SHA-256, hex) of a card with its weights, independent of file locations."""
    return _digest(recipe_document(card))


def recipe_document(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that belong to a recipe, as plain data.

    Nested dataclasses are treated in the same way, nested cards are replaced by their digests.
    """
    return {
        _KEYS_OF_SCHEMA_1.get(f.name, f.name): _entry(f.name, getattr(value, f.name))
        for f in _recipe_fields(value)
    }


def outputs_document(outputs: Outputs) -> dict[str, Any]:
    """Return outputs as recipes and `case.json` have them."""
    extras = {key: name in outputs.also for name, key in _EXTRAS_OF_SCHEMA_1.items()}
    later = sorted(set(outputs.also) - set(_EXTRAS_OF_SCHEMA_1))
    document = recipe_document(outputs)
    first = {name: document.pop(name) for name in ("seg", "dates")}
    return {**first, **extras, **document, **({"also": later} if later else {})}


def _recipe_fields(value: Any) -> list[Field[Any]]:
    """Return the fields of schema 1, in their order there, then later ones that are set."""
    kind = type(value).__name__
    first, left_out = FIELDS_OF_SCHEMA_1.get(kind, ()), _NOT_IN_RECIPE.get(kind, ())
    by_name = {f.name: f for f in fields(value) if f.metadata.get("changes_result", True)}
    later = [
        field
        for name, field in by_name.items()
        if name not in (*first, *left_out) and getattr(value, name) != _default(field)
    ]
    return [*(by_name[name] for name in first), *later]


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _text(value: Any) -> str:
    """Return the `repr` of a dataclass, with its recipe fields only."""
    arguments = (f"{f.name}={getattr(value, f.name)!r}" for f in _recipe_fields(value))
    return f"{type(value).__qualname__}({', '.join(arguments)})"


def _entry(name: str, value: Any) -> Any:
    """Return the value of a field as plain data."""
    if name in _STEPS:
        return [type(step).__name__ + _text(step) for step in value]
    return _text(value) if name == "decision" else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, ModelCard):
        return card_digest(value)
    if is_dataclass(value) and not isinstance(value, type):
        return recipe_document(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, default=_unknown)
    return hashlib.sha256(text.encode()).hexdigest()


def _unknown(value: object) -> str:
    """Return the text of a value that JSON does not know."""
    return value.name if isinstance(value, Path) else repr(value)
