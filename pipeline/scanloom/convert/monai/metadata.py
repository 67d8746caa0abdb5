"""Read a bundle's `metadata.json`: MONAI's own fields and the entry "scanloom".

`parse` reads the entries of other models' files, too.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from scanloom.cards.card_file import explain_invalid
from scanloom.convert.files import read_json
from scanloom.core import Reason, ScanError, printable
from scanloom.core.measurement import Quantity
from scanloom.options import MAX_OVERLAP

METADATA = "configs/metadata.json"
_MODALITIES: Final = {
    "CT": ("ct", "cta", "cbct", "hu"),
    "PT": ("pt", "pet", "suv", "fdg"),
    "NM": ("nm", "spect"),
    "MR": (
        *("mr", "mri", "t1", "t1w", "t1c", "t1ce", "t1gd", "t1n", "t1wce", "t2", "t2w", "t2f"),
        *("t2s", "flair", "dwi", "adc", "swi", "tof", "mra", "dce", "dixon", "pdw", "dti", "bold"),
    ),
}
"""Words that state a modality."""
T = TypeVar("T", bound=BaseModel)


def _as_text(value: Any) -> Any:
    """Return text; a list, as some models have, is joined, and a number written out."""
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, int | float):
        return str(value)
    return "" if value is None else value


def one_line(text: str) -> str:
    """Return a bundle's text on one line with control characters escaped."""
    return printable(re.sub(r"[\t\r\n]+", " ", text))


def modality_of(text: str) -> str | None:
    """Return the modality that a text states, such as a channel's name; None without just one."""
    words = set(re.findall(r"[a-z0-9]+", text.lower()))
    stated = [each for each, known in _MODALITIES.items() if not words.isdisjoint(known)]
    return stated[0] if len(stated) == 1 else None


def _shown(text: str) -> str:
    """Accept text that is written into results unchanged: without control characters."""
    if printable(text) != text:
        raise ValueError("control characters are not allowed")
    return text


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    """Accept two finite numbers, the lower one first."""
    if not -math.inf < pair[0] < pair[1] < math.inf:
        raise ValueError("the first number must be the lower one")
    return pair


def _pointing(direction: tuple[float, float, float]) -> tuple[float, float, float]:
    """Accept a direction other than 0."""
    if not any(direction):
        raise ValueError("a direction is not 0, 0, 0")
    return direction


Text = Annotated[str, BeforeValidator(_as_text), AfterValidator(one_line)]
Shown = Annotated[str, AfterValidator(_shown)]
Sentence = Annotated[Shown, Field(min_length=1, max_length=300)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Pair = tuple[Finite, Finite]
Millimetres = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _MonaiModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorFormat(_MonaiModel):
    """One input or output of the network, as MONAI's bundle specification describes it."""

    num_channels: int = Field(ge=1, le=65535)
    modality: Text = ""
    channel_def: dict[str, Text] = {}
    label_def: dict[str, Text] = {}


class DataFormat(_MonaiModel):
    """Inputs and outputs of the network."""

    inputs: dict[str, TensorFormat]
    outputs: dict[str, TensorFormat]


class CodeFields(_StrictModel):
    """A coded concept."""

    value: Shown = Field(min_length=1, max_length=16)
    scheme: Shown = Field(min_length=1, max_length=16)
    meaning: Shown = Field(min_length=1, max_length=64)


class StructureFields(_StrictModel):
    """Fields of a structure; missing ones are looked up by its name."""

    name: Shown | None = Field(default=None, min_length=1, max_length=64)
    category: CodeFields | None = None
    type: CodeFields | None = None
    laterality: CodeFields | None = None
    color: tuple[int, int, int] | None = None
    experimental: bool = False
    on_request: bool = False


class CheckFields(_StrictModel):
    """Plausible ranges of scans; see `scanloom.cards.card.Checks`."""

    low: Pair | None = None
    high: Pair | None = None
    spacing: Pair | None = None
    extent: Pair | None = None
    tilt: float | None = Field(default=None, gt=0, le=90)
    refuse: tuple[Literal["intensity", "spacing", "extent", "tilt"], ...] = ()
    hounsfield: bool | None = None


class ReferenceFields(_StrictModel):
    """The usual range of a measurement; see `scanloom.core.measurement.ReferenceRange`."""

    structure: Shown = Field(min_length=1, max_length=64)
    quantity: Quantity
    range: Annotated[Pair, AfterValidator(_ascending)]
    source: Sentence


class DirectionFields(_StrictModel):
    """The usual direction between structures; see `scanloom.cards.card.ReferenceDirection`."""

    start: Annotated[tuple[Shown, ...], Field(min_length=1)]
    end: Annotated[tuple[Shown, ...], Field(min_length=1)]
    direction: Annotated[tuple[Finite, Finite, Finite], AfterValidator(_pointing)]
    within: float = Field(gt=0, lt=180)
    source: Sentence


class LimitationFields(_StrictModel):
    """A known error of some scans; see `scanloom.cards.card.Limitation`."""

    text: Sentence
    where: Shown = Field(min_length=1, max_length=64)


class FastFields(_StrictModel):
    """Settings of `--fast`; see `scanloom.cards.card.FastPreset`."""

    overlap: float | None = Field(default=None, ge=0.0, le=MAX_OVERLAP)
    spacing: tuple[Millimetres, Millimetres, Millimetres] | None = None
    precisions: tuple[Literal["float16", "bfloat16"], ...] = ()


class ScanloomFields(_StrictModel):
    """The entry "scanloom" of `metadata.json`."""

    weights_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    checks: CheckFields = CheckFields()
    precisions: tuple[Literal["float32", "float16", "bfloat16"], ...] = ("float32",)
    air_below: float | None = Field(default=None, allow_inf_nan=False)
    kernel: Literal["soft", "sharp"] | None = None
    fast: FastFields | None = None
    structures: dict[str, StructureFields] = {}
    limitations: tuple[Sentence | LimitationFields, ...] = ()
    reference_ranges: tuple[ReferenceFields, ...] = ()
    reference_directions: tuple[DirectionFields, ...] = ()
    license: Text = ""
    attribution: Text = ""


class Metadata(_MonaiModel):
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


def read_metadata(folder: Path) -> Metadata:
    """Read `metadata.json` of a bundle.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file is missing or not JSON, or an entry is missing or invalid;
        MODEL_UNSAFE if it is a link out of the bundle.
    """
    return parse(Metadata, read_json(folder, METADATA), METADATA)


def parse(kind: type[T], entries: Any, name: str, unknown: Reason = Reason.MODEL_DAMAGED) -> T:
    """Return entries of a file as an object.

    Raises
    ------
    ScanError
        MODEL_DAMAGED, naming the first entry that is missing or invalid; `unknown` for one that the
        object does not have.
    """
    try:
        return kind.model_validate(entries)
    except ValidationError as exc:
        detail, is_unknown = explain_invalid(exc, "the content")
        reason = unknown if is_unknown else Reason.MODEL_DAMAGED
        raise ScanError(reason, f"{name}: {detail}") from exc
