"""Reads the weights file of a bundle."""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Final

from scanloom.cards.card import Weights
from scanloom.cards.monai.config.values import truncate
from scanloom.cards.monai.files import check_archive, find_file, is_safetensors
from scanloom.cards.monai.runner import Load
from scanloom.core import Reason, ScanError, format_bytes

MAX_WEIGHTS: Final = 4 << 30
"""Largest weights file; the largest in MONAI's model zoo has about 900 MB."""


def read_weights_file(folder: Path, load: Load, pinned: str | None) -> Weights:
    """Return the weights file that the run loads, with its SHA-256.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the file lies outside the bundle or is a program; MODEL_DAMAGED if it is
        missing or too large; MODEL_HASH if its hash is not `pinned`.
    """
    path = PurePosixPath(load.path)
    if path.is_absolute() or ".." in path.parts:
        detail = f"the weights {truncate(str(path))} are outside the bundle"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    file = find_file(folder, str(path))
    if file is None and path.name:
        file = find_file(folder, str(path.with_suffix(".safetensors")))
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"the weights {truncate(str(path))} are missing")
    if file.suffix not in (".pt", ".pth", ".safetensors"):
        raise ScanError(Reason.MODEL_UNSAFE, f"{truncate(str(path))} is not a state dict")
    try:
        sha256, safetensors = _digest(file)
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{truncate(str(path))} can't be read") from exc
    if pinned is not None and sha256 != pinned:
        detail = f"the weights have SHA-256 {sha256[:12]}..., not {pinned[:12]}..."
        raise ScanError(Reason.MODEL_HASH, detail)
    return Weights(file, sha256, None if safetensors else load.key)


def _digest(file: Path) -> tuple[str, bool]:
    """Return the SHA-256 (hex) of weights and whether they are safetensors, after checks."""
    with file.open("rb") as stream:
        if file.stat().st_size > MAX_WEIGHTS:
            detail = f"the weights are larger than {format_bytes(MAX_WEIGHTS)}"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
        check_archive(stream)
        safetensors = is_safetensors(stream)
        stream.seek(0)
        return hashlib.file_digest(stream, "sha256").hexdigest(), safetensors
