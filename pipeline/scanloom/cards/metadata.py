"""`metadata.json` of a bundle: MONAI's own fields, and what scanloom adds under "scanloom"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from scanloom.cards.config import short
from scanloom.core import Reason, ScanError

MAX_BYTES = 8 << 20
"""Largest config file that is read; the largest of MONAI's model zoo has 60 kB."""


def _as_text(value: Any) -> Any:
    """Return a list of texts, as some authors write it, as one text."""
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "" if value is None else value


Text = Annotated[str, BeforeValidator(_as_text)]
Pair = tuple[float, float]


class _Theirs(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Ours(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorFormat(_Theirs):
    """One input or output of the network, as MONAI's bundle specification describes it."""

    num_channels: int = Field(ge=1, le=65535)
    modality: Text = ""
    channel_def: dict[str, Text] = {}
    label_def: dict[str, Text] = {}


class DataFormat(_Theirs):
    """What the network takes and gives."""

    inputs: dict[str, TensorFormat]
    outputs: dict[str, TensorFormat]


class CodeFields(_Ours):
    """A coded concept."""

    value: str = Field(min_length=1, max_length=16)
    scheme: str = Field(min_length=1, max_length=16)
    meaning: str = Field(min_length=1, max_length=64)


class StructureFields(_Ours):
    """What is said of a structure; what is left out is looked up by its name."""

    name: str | None = Field(default=None, min_length=1, max_length=64)
    category: CodeFields | None = None
    type: CodeFields | None = None
    laterality: CodeFields | None = None
    color: tuple[int, int, int] | None = None
    experimental: bool = False


class CheckFields(_Ours):
    """What a scan must be like."""

    low: Pair | None = None
    high: Pair | None = None
    spacing: Pair | None = None
    extent: Pair | None = None
    refuse: tuple[Literal["intensity", "spacing", "extent"], ...] = ()


class ScanloomFields(_Ours):
    """The entry "scanloom" of `metadata.json`."""

    weights_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    checks: CheckFields = CheckFields()
    precisions: tuple[Literal["float32", "float16", "bfloat16"], ...] = ("float32",)
    air_below: float | None = Field(default=None, allow_inf_nan=False)
    kernel: Literal["soft", "sharp"] | None = None
    structures: dict[str, StructureFields] = {}
    license: str = ""
    attribution: str = ""


class Metadata(_Theirs):
    """`metadata.json`."""

    version: Text
    name: Text = ""
    task: Text = ""
    description: Text = ""
    intended_use: Text = ""
    authors: Text = ""
    copyright: Text = ""
    data_source: Text = ""
    license: Text = ""
    network_data_format: DataFormat
    scanloom: ScanloomFields = ScanloomFields()


def read_metadata(file: Path) -> Metadata:
    """Read `metadata.json`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED where it is missing, no JSON, or an entry is missing or of another form.
    """
    entries = read_json(file)
    try:
        return Metadata.model_validate(entries)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ScanError(
            Reason.MODEL_DAMAGED, f"{file.name}: {short(where)}: {_problem(first['type'])}"
        ) from exc


def read_json(file: Path) -> Any:
    """Return what a JSON file holds.

    Raises
    ------
    ScanError
        MODEL_DAMAGED where it is missing, too large or no JSON.
    """
    text = read_text(file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{file.name} is no JSON") from exc


def read_text(file: Path) -> str:
    """Return the text of a file of a bundle; MODEL_DAMAGED where it is missing or too large."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{file.name} can't be read") from exc
    except UnicodeDecodeError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{file.name} is no text") from exc
    if len(data) > MAX_BYTES:
        raise ScanError(Reason.MODEL_DAMAGED, f"{file.name} is larger than {MAX_BYTES} bytes")
    return text


def _problem(kind: str) -> str:
    """Return pydantic's kind of error in our words."""
    words = {
        "missing": "is missing",
        "extra_forbidden": "is not known",
        "literal_error": "is not one of the allowed words",
        "string_pattern_mismatch": "has another form",
    }
    return words.get(kind, f"has another form ({kind.replace('_', ' ')})")
