"""Checksums as publishers state them, and the hashing of files."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

Algorithm = Literal["md5", "sha1", "sha256", "git"]
_HEX_DIGITS: Final = {"md5": 32, "sha1": 40, "sha256": 64, "git": 40}
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Digest:
    """A published checksum of a file.

    Parameters
    ----------
    algorithm : "md5", "sha1", "sha256" or "git"
        "git" is the name of a blob in a git repository: SHA-1 over a header and the content.
    value : str
        Hexadecimal digits, in lower case.
    """

    algorithm: Algorithm
    value: str

    def __post_init__(self) -> None:
        digits = _HEX_DIGITS.get(self.algorithm)
        if digits is None or not re.fullmatch(f"[0-9a-f]{{{digits}}}", self.value):
            raise ValueError(f"not a digest of {', '.join(get_args(Algorithm))}")

    def matches(self, file: Path) -> bool:
        """Return whether a file has this checksum."""
        return file_digest(file, self.algorithm) == self.value


def file_digest(file: Path, algorithm: Algorithm = "sha256") -> str:
    """Return a checksum of a file as hexadecimal digits."""
    name = "sha1" if algorithm == "git" else algorithm
    digest = hashlib.new(name, usedforsecurity=False)
    with file.open("rb") as stream:
        if algorithm == "git":
            digest.update(b"blob %d\0" % file.stat().st_size)
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
