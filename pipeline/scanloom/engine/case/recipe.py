"""Recipes: the hash over everything that was requested and can change a result.

A result is current as long as the hash of its recipe is. A field is part of a recipe only if it
differs from its default: an option that is added later leaves results current. So the default of a
new field must mean "as before", and must never change. Models count by `card_digest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.cards.requested import requested_card
from scanloom.core import ComputeOptions, Outputs, ReadOptions
from scanloom.core.relations import NO_RELATIONS, Relations


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
    recipe = {
        "models": [card_digest(card) for card in cards],
        "options": {name: value for document in documents for name, value in document.items()},
        "outputs": recipe_document(outputs),
        **({"relations": recipe_document(relations)} if relations else {}),
    }
    text = json.dumps(recipe, sort_keys=True, default=_unknown)
    return hashlib.sha256(text.encode()).hexdigest()


def recipe_document(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that belong to a recipe, as plain data.

    Nested dataclasses are treated in the same way and keep the name of their class.
    """
    return {field.name: _plain(getattr(value, field.name)) for field in _recipe_fields(value)}


def _recipe_fields(value: Any) -> Iterator[Field[Any]]:
    for field in fields(value):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        is_set = default is MISSING or getattr(value, field.name) != default
        if is_set and field.metadata.get("changes_result", True):
            yield field


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__name__, **recipe_document(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _unknown(value: object) -> str:
    """Return the text of a value that JSON does not know."""
    return value.name if isinstance(value, Path) else repr(value)
