"""Strict readers of requests: nothing else than verdicts and strokes is accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from scanloom.review.server.cases import PLANES
from scanloom.review.server.drafts import MAX_POINTS, Stroke
from scanloom.review.server.security import RefusedError
from scanloom.review.verdicts.verdict import DECISIONS, MAX_SECONDS, TAGS, Seen, Verdict

MAX_COMMENT = 20_000
"""Characters of a comment."""
MAX_STRUCTURES = 2_000
MAX_INDEX, MAX_LABEL, MAX_RADIUS_MM = 100_000, 65_535, 200.0


def read_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; RefusedError if it is not one."""
    try:
        plain = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "JSON", "The body is not JSON.") from None
    if not isinstance(plain, dict):
        raise RefusedError(400, "JSON", "The body is not a JSON object.")
    return plain


def read_verdict(plain: Mapping[str, Any], case: str, reviewer: str) -> tuple[Verdict, str]:
    """Return the verdict and the comment in a request.

    Raises
    ------
    RefusedError
        If a field is missing or has another type or value.
    """
    known = {"decision", "structures", "tags", "comment", "seconds", "recipe", "seen"}
    if extra := sorted(map(str, plain.keys() - known)):
        raise RefusedError(400, "FIELD", f"Unknown field: {extra[0][:40]}.")
    decision, tags = plain.get("decision"), plain.get("tags", [])
    if decision not in DECISIONS:
        raise RefusedError(400, "DECISION", "A verdict is accept, edit or reject.")
    if not isinstance(tags, list) or not all(isinstance(t, str) and t in TAGS for t in tags):
        raise RefusedError(400, "TAGS", "Unknown tag.")
    structures = _texts(plain.get("structures", {}), "structures")
    if not set(structures.values()) <= set(DECISIONS):
        raise RefusedError(400, "STRUCTURES", "A verdict is accept, edit or reject.")
    comment = plain.get("comment", "")
    if not isinstance(comment, str) or len(comment) > MAX_COMMENT:
        raise RefusedError(400, "COMMENT", f"A comment has at most {MAX_COMMENT} characters.")
    recipe = plain.get("recipe")
    if not isinstance(recipe, str):
        raise RefusedError(400, "RECIPE", "The recipe is missing.")
    seen = Seen(recipe, _texts(plain.get("seen"), "seen"))
    seconds = plain.get("seconds", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise RefusedError(400, "SECONDS", "seconds must be a number.")
    if not 0 <= seconds < math.inf:  # not NaN; a whole number may be too large for a float
        raise RefusedError(400, "SECONDS", "seconds must be a number from 0.")
    verdict = Verdict(
        case=case,
        reviewer=reviewer,
        seen=seen,
        decision=decision,
        structures=structures,  # type: ignore[arg-type]  # checked above
        tags=tuple(dict.fromkeys(tags)),
        seconds=float(min(seconds, MAX_SECONDS)),
    )
    return verdict, comment.encode("utf-8", "replace").decode().strip()


def read_stroke(plain: Mapping[str, Any], layers: int) -> Stroke:
    """Return the stroke in a request.

    Parameters
    ----------
    layers : int
        Number of label maps of the case.

    Raises
    ------
    RefusedError
        If a field is missing or has another type or value.
    """
    plane = PLANES.get(str(plain.get("plane")))
    if plane is None:
        raise RefusedError(400, "PLANE", "Planes are axial, coronal and sagittal.")
    layer, index = _whole(plain, "layer", layers - 1), _whole(plain, "index", MAX_INDEX)
    points, radius, only = plain.get("points"), plain.get("radius_mm"), plain.get("only")
    if not isinstance(points, list) or not 1 <= len(points) <= MAX_POINTS:
        raise RefusedError(400, "POINTS", f"A stroke has 1 to {MAX_POINTS} points.")
    if not all(isinstance(p, list) and len(p) == 2 and all(map(_is_number, p)) for p in points):
        raise RefusedError(400, "POINTS", "A point is [column, row].")
    if not _is_number(radius) or not 0 < float(radius) <= MAX_RADIUS_MM:  # type: ignore[arg-type]
        raise RefusedError(400, "RADIUS", f"The radius is above 0, up to {MAX_RADIUS_MM:g} mm.")
    if only is not None and not (
        isinstance(only, list) and all(type(n) is int and 0 <= n <= MAX_LABEL for n in only)
    ):
        raise RefusedError(400, "ONLY", "only is a list of labels.")
    return Stroke(
        layer=layer,
        normal=plane.normal,
        across=plane.across,
        down=plane.down,
        index=index,
        points=[(float(x), float(y)) for x, y in points],
        radius_mm=float(radius),  # type: ignore[arg-type]  # a number, as checked
        label=_whole(plain, "label", MAX_LABEL),
        only=None if only is None else tuple(only),
    )


def read_version(plain: Mapping[str, Any]) -> str:
    """Return the version of a draft in a request; RefusedError if it is missing."""
    version = plain.get("version")
    if not isinstance(version, str):
        raise RefusedError(400, "VERSION", "The version of the correction is missing.")
    return version


def _whole(plain: Mapping[str, Any], field: str, highest: int) -> int:
    value = plain.get(field)
    if type(value) is not int or not 0 <= value <= highest:
        raise RefusedError(400, field.upper(), f"{field} is a whole number up to {highest}.")
    return value


def _is_number(value: object) -> bool:
    """Return whether a value is a number of a size that a place in a slice can have.

    NaN and infinity are not; whole numbers may be too large for a float, and are compared as such.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= MAX_INDEX  # type: ignore[arg-type]


def read_range(text: str) -> tuple[int, int]:
    """Return the first and the last slice of "12-20", or of "12"; RefusedError if it is neither."""
    first, _, last = text.partition("-")
    numbers = [part for part in (first, last or first) if part.isascii() and part.isdigit()]
    if len(numbers) != 2 or max(map(len, numbers)) > 6:
        raise RefusedError(404, "SLICES", "Slices are given as first-last.")
    return int(numbers[0]), int(numbers[1])


def read_token(plain: Mapping[str, Any]) -> tuple[str, str]:
    """Return the token of a link and the code of its reviewer; RefusedError if they are missing."""
    token, reviewer = plain.get("token"), plain.get("reviewer")
    if not isinstance(token, str) or not isinstance(reviewer, str):
        raise RefusedError(400, "TOKEN", "The token or its reviewer is missing.")
    return token, reviewer


def _texts(plain: object, field: str) -> dict[str, str]:
    if not isinstance(plain, dict) or len(plain) > MAX_STRUCTURES:
        raise RefusedError(400, field.upper(), f"{field} must be an object.")
    if not all(isinstance(value, str) for value in plain.values()):
        raise RefusedError(400, field.upper(), f"{field} must be an object of texts.")
    return dict(plain)
