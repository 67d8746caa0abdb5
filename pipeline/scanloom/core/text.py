"""Text of messages: escaping, sizes, spelling suggestions."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories of characters that control a terminal or text direction, or are invisible."""
_JOINERS: Final = frozenset("\u200c\u200d")
"""Invisible characters that Persian and Indic spelling need; they are not escaped."""


def is_utf8(path: str) -> bool:
    """Return whether the bytes of a path are UTF-8; others have surrogates in place of them."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def printable(text: str) -> str:
    r"""Return foreign text with invisible and control characters escaped, without line breaks.

    Control characters (ESC and C1 included), bidirectional marks, line and paragraph separators
    and path bytes that are not UTF-8 become escapes such as ``\x1b``, ``\u202e``, ``\udcff``.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) for c in text)


def _escaped(character: str) -> str:
    hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
    return character.encode("unicode_escape").decode("ascii") if hidden else character


_SIZE: Final = re.compile(r"(\d*\.)?\d+\s*[A-Za-z]*")
"""A number and a unit. `pydantic.ByteSize` would ignore any text after them: "8,5GB" is 8 bytes."""


def parse_bytes(size: object) -> int:
    """Return the number of bytes of a size such as "8GB", "7.5 GiB" or "900MB".

    The units are those of `pydantic.ByteSize`, in any case: G and GB are 10^9 bytes, GiB 2^30. A
    number without a unit counts bytes; a small one lacks its unit.

    Raises
    ------
    ValueError
        If it is not a size, or zero, or below 1000 without a unit.
    """
    from pydantic import ByteSize, TypeAdapter

    text = str(size).strip()
    try:
        count = int(TypeAdapter(ByteSize).validate_python(text)) if _SIZE.fullmatch(text) else 0
    except ValueError:  # not a unit of size
        count = 0
    if count == 0 or (count < 1000 and not text[-1].isalpha()):
        raise ValueError("a number and a unit, such as 8GB, 7.5GiB or 900MB")
    return count


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit: "1.5 GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:g} bytes"


def plain_number(value: float, digits: int, sign: str = "") -> str:
    """Return a number with its first digits, without an exponent: 12300, 0.00012.

    `sign` is "+" for a number with its sign. Only numbers beyond all measures have an exponent.
    """
    text = f"{value:{sign}.{digits}g}"
    return f"{Decimal(text):{sign}f}" if "e" in text and 1e-9 <= abs(value) < 1e12 else text


def milliliters(volume: float) -> str:
    """Return a volume in ml as text: 345.6, 0.082, < 0.001."""
    if 0 < volume < 0.001:
        return "< 0.001"
    return f"{volume:.1f}" if volume >= 0.995 else f"{volume:.2g}"


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun: "1 file", "3 files"; `plural` if it is not singular + s."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


MAX_LISTED_NAMES: Final = 20
"""Number of known names up to which a message lists them all."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a misspelt name and the list of known names, as one sentence.

    Of many known names, only the nearest are listed.
    """
    names = list(known)
    if len(names) > MAX_LISTED_NAMES:
        return _nearest(name, names)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    best = {k.lower(): k for k in names}.get(name.lower()) or (matches[0] if matches else None)
    if names == [best]:
        return f"did you mean {best}?"
    expected = f"expected one of {', '.join(names)}"
    return f"did you mean {best}? {expected}" if best else expected


def _nearest(name: str, names: Sequence[str]) -> str:
    spelled = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), spelled, n=3, cutoff=0.6)
    if not near:
        return f"none of the {len(names)} known names is like it"
    *first, last = (spelled[known] for known in near)
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"
