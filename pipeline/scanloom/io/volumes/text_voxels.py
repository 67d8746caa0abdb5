"""Voxels stored as text: numbers separated by white space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError

_CHUNK_BYTES = 1 << 20
_TOKEN_LIMIT = 64  # characters of a number


def read_tokens(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the tokens of a file, as a list for each chunk that is read; no token is split."""
    incomplete = b""
    while chunk := file.read(_CHUNK_BYTES):
        tokens = (incomplete + chunk).split()
        ends_in_space = chunk[-1:].isspace()
        incomplete = b"" if ends_in_space or not tokens else tokens.pop()
        if len(incomplete) > _TOKEN_LIMIT:
            break
        if tokens:
            yield tokens
    if incomplete:
        yield [incomplete]


def parse_numbers(tokens: list[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return tokens as an array (N,) of numbers of a type.

    Raises
    ------
    ScanError
        DAMAGED if a token is not a number, or does not fit the type.
    """
    if max(map(len, tokens)) > _TOKEN_LIMIT:
        raise ScanError(Reason.DAMAGED, "a voxel stored as text is not a number")
    wide = np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[dtype.kind])
    try:
        numbers = np.array(tokens).astype(wide)
    except (ValueError, OverflowError) as exc:
        raise ScanError(Reason.DAMAGED, "a voxel stored as text is not a number") from exc
    if dtype.kind != "f":
        limits = np.iinfo(dtype)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise ScanError(Reason.DAMAGED, "a voxel exceeds the range of the header's data type")
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)
