"""Words that messages are made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
