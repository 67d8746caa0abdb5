"""Reads the files of a bundle that PyTorch wrote: weights, and arrays in place of config."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from scanloom.cards.card import Weights
from scanloom.convert.files import MAX_BYTES, find_file
from scanloom.convert.monai.config.values import truncate
from scanloom.convert.monai.runner import Load
from scanloom.convert.weights import find_weights, load_torch
from scanloom.core import Reason, ScanError, format_bytes

MAX_VALUES: Final = 10_000
"""Largest number of values of an array; those of DiNTS have 120."""


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
    weights = find_weights(file, load.key, "the weights file")
    if pinned is not None and weights.sha256 != pinned:
        detail = f"the weights have SHA-256 {weights.sha256[:12]}..., not {pinned[:12]}..."
        raise ScanError(Reason.MODEL_HASH, detail)
    return weights


def read_arrays(folder: Path, name: str) -> dict[str, Any]:
    """Return the arrays of a bundle's `.pt` file as nested lists, and its numbers, by name.

    DiNTS keeps its architecture in such a file.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the file holds anything but arrays, numbers, texts and containers, or lies
        outside the bundle; MODEL_DAMAGED if it is missing, too large or not PyTorch's.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ScanError(Reason.MODEL_UNSAFE, f"{truncate(name)} is outside the bundle")
    file = find_file(folder, name)
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"{truncate(name)} is missing")
    if file.stat().st_size > MAX_BYTES:
        detail = f"{truncate(name)} is larger than {format_bytes(MAX_BYTES)}"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    content = load_torch(file, truncate(name), device="meta")
    if not isinstance(content, dict):
        raise ScanError(Reason.MODEL_DAMAGED, f"{truncate(name)} has no entries")
    return {key: _plain(value) for key, value in content.items() if isinstance(key, str)}


def _plain(value: Any) -> Any:
    """Return a NumPy array or number as nested lists or a number; other plain data as it is."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict):
        return value
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf":
        raise ScanError(Reason.MODEL_UNSAFE, "an array holds objects, not numbers")
    if value.size > MAX_VALUES:
        raise ScanError(Reason.MODEL_DAMAGED, "an array has more values than an architecture")
    return value.tolist()
