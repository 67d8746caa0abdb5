"""Strict readers of requests: nothing else than verdicts and strokes is accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from scanloom.review.server.cases import PLANES
from scanloom.review.server.drafts import MAX_POINTS, Stroke
from scanloom.review.server.rows import STATES, Query
from scanloom.review.server.security import RefusedError
from scanloom.review.verdicts.verdict import MAX_SECONDS, TAGS, Decision, Seen, Verdict

MAX_COMMENT = 20_000
"""Characters of a comment."""
MAX_STRUCTURES = 2_000
MAX_ROWS = 1_000
"""Rows of the list in an answer."""
MAX_WORDS, MAX_WORD = 20, 200
"""Words of a search, and characters of each."""
MAX_INDEX, MAX_LABEL, MAX_RADIUS_MM = 100_000, 65_535, 200.0


def _known_tag(tag: str) -> str:
    if tag not in TAGS:
        raise ValueError("unknown")
    return tag


Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
Label = Annotated[int, Field(ge=0, le=MAX_LABEL)]
Coordinate = Annotated[float, Field(ge=-MAX_INDEX, le=MAX_INDEX)]


class Fields(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class TokenFields(Fields):
    """The token of a link and the code of its reviewer."""

    token: str
    reviewer: str


class VersionFields(Fields):
    """The version of a draft."""

    version: str


class StrokeFields(VersionFields):
    """A stroke on a version of a draft.

    Of a brush, or the inside of a polygon; `between` limits it to a range of the scan.
    """

    plane: Literal["axial", "coronal", "sagittal"]
    layer: Index
    index: Index
    points: list[tuple[Coordinate, Coordinate]] = Field(min_length=1, max_length=MAX_POINTS)
    radius_mm: float = Field(gt=0, le=MAX_RADIUS_MM)
    label: Label
    only: list[Label] | None = None
    shape: Literal["brush", "polygon"] = "brush"
    between: tuple[float, float] | None = None

    @property
    def stroke(self) -> Stroke:
        """The stroke."""
        plane = PLANES[self.plane]
        return Stroke(
            layer=self.layer,
            normal=plane.normal,
            across=plane.across,
            down=plane.down,
            index=self.index,
            points=self.points,
            radius_mm=self.radius_mm,
            label=self.label,
            only=None if self.only is None else tuple(self.only),
        )


class ToolFields(VersionFields):
    """A tool that changes a structure of a version of a draft.

    `slices` are the two between which it is filled.
    """

    tool: Literal["fill", "smooth", "islands"]
    plane: Literal["axial", "coronal", "sagittal"] = "axial"
    layer: Index
    label: Label
    slices: tuple[Index, Index] = (0, 0)
    radius_mm: float = Field(default=4.0, gt=0, le=MAX_RADIUS_MM)


class LastFields(Fields, extra="forbid"):
    """Number of the reviewer's last verdict about the case that the page knew; 0 for none."""

    last: int


class VerdictFields(LastFields):
    """A verdict with its comment."""

    decision: Decision
    structures: dict[str, Decision] = Field(default={}, max_length=MAX_STRUCTURES)
    tags: list[Annotated[str, AfterValidator(_known_tag)]] = []
    comment: str = Field(default="", max_length=MAX_COMMENT)
    # a page may be left open for long: whole numbers that no float can hold are cut as well
    seconds: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)] = 0
    version: str

    def verdict(self, case: str, reviewer: str, seen: Seen) -> Verdict:
        """Return the verdict of a reviewer on a result of a case."""
        return Verdict(
            case=case,
            reviewer=reviewer,
            seen=seen,
            decision=self.decision,
            structures=self.structures,
            tags=tuple(dict.fromkeys(self.tags)),
            seconds=float(min(self.seconds, MAX_SECONDS)),
        )


T = TypeVar("T", bound=Fields)


def read_fields(kind: type[T], body: bytes) -> T:
    """Return the fields in a body; RefusedError, with the first that is missing or invalid."""
    try:
        plain: Any = json.loads(body)
        # half a character, which JSON can write, is none of UTF-8
        text = json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
        return kind.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        field = str(first["loc"][0])[:40] if first["loc"] else "body"
        if first["type"] == "extra_forbidden":
            raise RefusedError(400, "FIELD", f"Unknown field: {field}.") from None
        raise RefusedError(400, field.upper(), f"{field} is missing or invalid.") from None
    except (ValueError, RecursionError):
        raise RefusedError(400, "JSON", "The body is not JSON.") from None


def read_range(text: str) -> tuple[int, int]:
    """Return the first and the last slice of "12-20", or of "12"; RefusedError if it is neither."""
    first, _, last = text.partition("-")
    numbers = [bound for bound in (first, last or first) if bound.isascii() and bound.isdigit()]
    if len(numbers) != 2 or max(map(len, numbers)) > 6:
        raise RefusedError(404, "SLICES", "Slices are given as first-last.")
    return int(numbers[0]), int(numbers[1])


def read_query(fields: Mapping[str, str]) -> Query:
    """Return the selection of the list in an address; what it does not know, it leaves out."""
    state = fields.get("filter", "")
    words = fields.get("q", "").lower().split()[:MAX_WORDS]
    return Query(
        words=tuple(word[:MAX_WORD] for word in words),
        state=state if state in (*STATES, "mine") else "",
        model=fields.get("model", ""),
        modality=fields.get("modality", ""),
        doubtful=bool(fields.get("doubtful")),
    )


def read_rows(text: str) -> tuple[int, int]:
    """Return the first and the last row of "100-199"; RefusedError if they are too many."""
    numbers = text.split("-")
    if len(numbers) != 2 or not all(n.isascii() and n.isdecimal() and len(n) < 9 for n in numbers):
        raise RefusedError(400, "ROWS", "Rows are given as first-last.")
    first, last = int(numbers[0]), int(numbers[1])
    if not first <= last < first + MAX_ROWS:
        raise RefusedError(400, "ROWS", f"An answer has at most {MAX_ROWS} rows.")
    return first, last
