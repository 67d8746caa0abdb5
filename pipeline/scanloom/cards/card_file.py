"""Reads and writes `card.json`, the one form in which this package keeps a model.

A model is a folder with `card.json` and its weights, `weights/SHA256.safetensors`. Other formats
are converted into this one by `scanloom.convert`, and nothing else reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from scanloom.cards.card import Cleaning, Decision, IntensityStep, Limitation, ModelCard, Weights
from scanloom.core import Flag, Reason, ScanError, did_you_mean, printable, read_error

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

CARD_FILE: Final = "card.json"
WEIGHTS_FOLDER: Final = "weights"
_SCHEMA: Final = 1
_MAX_BYTES: Final = 16 << 20
"""Largest card that is read; TotalSegmentator's, with hundreds of structures, have 1 MB."""
_ALTERNATIVES: Final = {
    kind.__name__: kind for union in (IntensityStep, Cleaning, Decision) for kind in get_args(union)
}
"""Classes of which a field takes one or another: in the file, the entry "class" names it."""
_SHA256: Final = re.compile("[0-9a-f]{64}")
_SHOWN_CHARACTERS: Final = 100
_UNKNOWN: Final = "is unknown"
_PROBLEMS: Final = (
    ("missing", "is missing"),
    ("extra_forbidden", _UNKNOWN),
    ("unexpected_keyword_argument", _UNKNOWN),
    ("too_short", "has fewer than {min_length} values"),
    ("too_long", "has more than {max_length} values"),
    ("string_too_short", "has fewer than {min_length} characters"),
    ("string_too_long", "has more than {max_length} characters"),
    ("string_pattern", "is not of the form {pattern}"),
    ("literal", "is not {expected}"),
    ("greater_than_equal", "is not {ge} or more"),
    ("less_than_equal", "is not {le} or less"),
    ("string", "is not a text"),
    ("int", "is not a whole number"),
    ("float", "is not a number"),
    ("bool", "is not true or false"),
    *((kind, "is not a list") for kind in ("tuple", "list")),
    *((kind, "is not a mapping of names to values") for kind in ("model", "dict", "dataclass")),
)
"""What is wrong with an entry, by the start of pydantic's type of error: the first that fits."""
_FORM: Final = re.compile(r"^(int|float|str|tuple|function-.*|constrained-.*|\w+Fields)$|\[")
"""Names of pydantic's for the forms of an entry, which are no keys of a file."""
_NO_LABEL: Final = frozenset(
    {"limitations", "reference_ranges", "reference_directions", "on_request", "fast"}
)
"""Fields of a card that change no label: how its results are judged, which of its structures are
written by default, and what runs instead of it on request."""


def is_card(folder: Path) -> bool:
    """Return whether a folder holds a model in this package's own form."""
    return (folder / CARD_FILE).is_file()


def weights_file(folder: Path, sha256: str) -> Path:
    """Return the path of weights in a model's folder, by their SHA-256."""
    return folder / WEIGHTS_FOLDER / f"{sha256}.safetensors"


def write_card(card: ModelCard, folder: Path) -> None:
    """Write `card.json`; the weights are expected in the same folder, see `weights_file`."""
    text = _text({"schema": _SCHEMA, **plain_entries(card)})
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def card_digest(card: ModelCard) -> str:
    """Return the SHA-256 (hex) of a card as its file has it, without fields that change no label.

    Weights count by their content: it does not matter where the model lies.
    """
    return hashlib.sha256(_text(plain_entries(card, _NO_LABEL)).encode()).hexdigest()


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def plain_entries(value: Any, left_out: frozenset[str] = frozenset()) -> Any:
    """Return a value of a card as JSON knows it; fields with their default value are left out.

    A field that is added to the card later thus leaves the digests of present cards as they are.
    """
    if isinstance(value, Flag):
        return {"class": "Flag", "name": value.name}
    if isinstance(value, Limitation) and not value.where:
        return value.text
    if is_dataclass(value) and not isinstance(value, type):
        is_weights = isinstance(value, Weights)
        entries = {
            field.name: plain_entries(getattr(value, field.name), left_out)
            for field in fields(value)
            if field.name not in left_out
            and not (is_weights and field.name == "file")
            and getattr(value, field.name) != _default(field)
        }
        kind = type(value).__name__
        return {"class": kind, **entries} if is_weights or kind in _ALTERNATIVES else entries
    if isinstance(value, list | tuple):
        return [plain_entries(entry, left_out) for entry in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # the same number has the same digest, however a reader came to it
    return dict(value) if isinstance(value, Mapping) else value  # a network's arguments as they are


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def read_card(folder: Path) -> ModelCard:
    """Read a model's card; the weights are not opened.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is missing or too large, or an entry is unknown, missing or invalid;
        NEWER_VERSION if its schema is unknown.
    """
    try:
        with (folder / CARD_FILE).open("rb") as stream:
            data = stream.read(_MAX_BYTES)
        document = json.loads(data, object_hook=_constructor(folder.absolute()))
        schema = document.pop("schema")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise read_error(exc, CARD_FILE, Reason.MODEL_DAMAGED) from exc
    if schema != _SCHEMA:
        raise ScanError(Reason.NEWER_VERSION, f"{CARD_FILE} has another schema")
    card: ModelCard = _validated(ModelCard, document)
    return card


def make_card(entries: Mapping[str, Any], file: str, **fields: Any) -> ModelCard:
    """Return a card of entries as in `card.json`, from another file.

    Parameters
    ----------
    entries : mapping
        Plain data.
    file : str
        Name of the file, for messages.
    fields
        Further fields of the card, ready made.

    Raises
    ------
    ScanError
        MODEL_DAMAGED, with the entry, if one is unknown, missing or invalid.
    """
    try:
        text = json.dumps(entries)
        document = json.loads(text, object_hook=_constructor(Path(), file))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        detail = f"{file} has an entry that no card has ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    card: ModelCard = _validated(ModelCard, {**document, **fields}, file)
    return card


def _constructor(folder: Path, file: str = CARD_FILE) -> Callable[[dict[str, Any]], Any]:
    """Return a function that makes an object of each JSON object which names its class."""

    def construct(entries: dict[str, Any]) -> Any:
        for key, value in entries.items():  # texts go to terminals and into DICOM as they stand
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not text.isprintable():
                    shown = printable(key[:_SHOWN_CHARACTERS])
                    detail = f"{file}: {shown} has control characters"
                    raise ScanError(Reason.MODEL_DAMAGED, detail)
        match entries.get("class"):
            case None:
                if isinstance(texts := entries.get("limitations"), list):
                    entries["limitations"] = [
                        {"text": t} if isinstance(t, str) else t for t in texts
                    ]
                return entries
            case "Flag":
                return Flag[entries["name"]]
            case "Weights":
                sha256, published = entries["sha256"], entries["published"]
                if not _SHA256.fullmatch(sha256) or not _SHA256.fullmatch(published):
                    raise ValueError("not a SHA-256")
                return Weights(weights_file(folder, sha256), sha256, published)
            case kind if kind not in _ALTERNATIVES:
                hint = did_you_mean(str(kind)[:_SHOWN_CHARACTERS], sorted(_ALTERNATIVES))
                shown = printable(repr(kind)[:_SHOWN_CHARACTERS])
                raise ScanError(Reason.MODEL_DAMAGED, f"{file}: there is no class {shown}; {hint}")
            case kind:
                del entries["class"]
                return _validated(_ALTERNATIVES[kind], entries, file)

    return construct


def _validated(kind: Any, entries: Any, file: str = CARD_FILE) -> Any:
    """Return an object of a class of cards; MODEL_DAMAGED, with the first entry that is wrong."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(entries)
    except ValidationError as exc:
        detail, _ = explain_invalid(exc, kind.__name__)
        raise ScanError(Reason.MODEL_DAMAGED, f"{file}: {detail}") from exc


def explain_invalid(error: ValidationError, whole: str) -> tuple[str, bool]:
    """Return what is wrong with the entries of a file, and whether it is an unknown entry.

    Parameters
    ----------
    error : ValidationError
        Its first error counts; of the forms that this entry may have, the one that fits furthest.
    whole : str
        Name of all the entries.
    """
    errors = error.errors(include_url=False)
    entries = [_keys(each["loc"], each["type"]) for each in errors]
    alike = [n for n, keys in enumerate(entries) if keys[: len(entries[0])] == entries[0]]
    chosen = max(alike, key=lambda n: len(errors[n]["loc"]))
    first, name = errors[chosen], ".".join(map(str, entries[chosen]))
    entry, kind = printable(name[:_SHOWN_CHARACTERS]) or whole, first["type"]
    if kind == "value_error":  # of a check of our own, which says what is wrong
        return f"{entry}: {first['msg'].removeprefix('Value error, ')}", False
    if kind in ("too_short", "too_long") and isinstance(first["input"], str):
        kind = f"string_{kind}"
    known = next((text for start, text in _PROBLEMS if kind.startswith(start)), None)
    problem = first["msg"].replace("Input should be", "is not")
    if known is not None:
        problem = known.format(**first.get("ctx", {}))
    got = printable(reprlib.repr(first["input"]))  # in short: it may be deep and long
    return f"{entry} {problem}{f', but {got}' * ('is not' in problem)}", known == _UNKNOWN


def _keys(location: tuple[int | str, ...], kind: str) -> list[int | str]:
    """Return the keys in the location of one of pydantic's errors."""
    own = len(location) - 1 if (kind, _UNKNOWN) in _PROBLEMS else None  # a word of the file's
    return [key for n, key in enumerate(location) if n == own or not _FORM.search(str(key))]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter, with_config

    return TypeAdapter(with_config(extra="forbid")(kind))
