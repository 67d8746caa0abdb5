"""Voxels that are written as text: numbers with space between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError

_PIECE = 1 << 20
_TOKEN = 64  # characters of one number


def read_words(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield words, piece by piece; one that a piece cuts goes with the next."""
    rest = b""
    while piece := file.read(_PIECE):
        words = (rest + piece).split()
        whole = (piece[-1:]).isspace()
        rest = b"" if whole or not words else words.pop()
        if len(rest) > _TOKEN:
            break
        if words:
            yield words
    if rest:
        yield [rest]


def parse_numbers(tokens: list[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return words as numbers of a type.

    Raises
    ------
    ScanError
        DAMAGED if they are none, or do not fit it.
    """
    if max(map(len, tokens)) > _TOKEN:
        raise ScanError(Reason.DAMAGED, "its voxels are no numbers")
    wide = np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[dtype.kind])
    try:
        numbers = np.array(tokens).astype(wide)
    except (ValueError, OverflowError) as exc:
        raise ScanError(Reason.DAMAGED, "its voxels are no numbers") from exc
    if dtype.kind != "f":
        ends = np.iinfo(dtype)
        if numbers.min() < ends.min or numbers.max() > ends.max:
            raise ScanError(Reason.DAMAGED, "its voxels do not fit the type that it names")
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)
