"""Words that messages are made of."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from typing import Final

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode's categories of what steers a terminal or the order of letters, or has no shape."""
_JOINERS: Final = frozenset("\u200c\u200d")
"""Of those, what the spelling of Persian and of Indian languages needs."""


def printable(text: str) -> str:
    r"""Return foreign text as it may reach a terminal: what has no shape of its own is escaped.

    Control characters (ESC and those of C1 too), marks that turn the direction of writing, line
    and paragraph separators and bytes of a path that are no UTF-8 become escapes such as
    ``\x1b``, ``\u202e`` and ``\udcff``. It has no line breaks.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(c) for c in text)


def _escaped(character: str) -> str:
    hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
    return character.encode("unicode_escape").decode("ascii") if hidden else character


def byte_words(count: int) -> str:
    """Return a number of bytes in the unit that fits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the question whether the nearest known word was meant, if any, and all of them."""
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    near = {k.lower(): k for k in words}.get(word.lower()) or (close[0] if close else None)
    listed = f"expected one of {', '.join(words)}"
    return f"did you mean {near}? {listed}" if near else listed
