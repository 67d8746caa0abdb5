"""Reads a `.pt` file of small NumPy arrays, such as the architecture of DiNTS, as plain data."""

from __future__ import annotations

import math
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from scanloom.cards.monai.config.values import truncate
from scanloom.cards.monai.files import MAX_BYTES, check_archive, find_file
from scanloom.cards.nnunet.inert_pickle import (
    Known,
    Stateful,
    encode_bytes,
    ordered_dict,
    read_pickle,
    small_shape,
)
from scanloom.core import Reason, ScanError, format_bytes

MAX_VALUES: Final = 10_000
"""Largest number of values of an array; those of DiNTS have 120."""
_NUMBER: Final = re.compile(r"[biuf][1248]")
"""Data types of NumPy numbers."""


def read_arrays(folder: Path, name: str) -> dict[str, Any]:
    """Return the arrays of a bundle's file as nested lists, and its numbers, by name.

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
    content = read_pickle(_pickle(file, name), _KNOWN, lambda _: None, name=truncate(name))
    if not isinstance(content, dict):
        raise ScanError(Reason.MODEL_DAMAGED, f"{truncate(name)} has no entries")
    return {key: _plain(value) for key, value in content.items() if isinstance(key, str)}


def _pickle(file: Path, name: str) -> bytes:
    """Return the pickle in PyTorch's archive."""
    try:
        with file.open("rb") as stream:
            _check_size(file, name)
            check_archive(stream)
            stream.seek(0)
            with zipfile.ZipFile(stream) as archive:
                members = [m for m in archive.namelist() if m.endswith("/data.pkl")]
                return archive.read(members[0])
    except ScanError:
        raise
    except Exception as exc:  # damaged archives raise errors of many types
        detail = f"{truncate(name)} is not a PyTorch file ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc


def _check_size(file: Path, name: str) -> None:
    if file.stat().st_size > MAX_BYTES:
        detail = f"{truncate(name)} is larger than {format_bytes(MAX_BYTES)}"
        raise ScanError(Reason.MODEL_DAMAGED, detail)


def _plain(value: Any) -> Any:
    return value.values() if isinstance(value, _Array) else value


class _Type(Stateful):
    """Data type of an array; only numbers are accepted."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _NUMBER.fullmatch(code):
            raise ScanError(Reason.MODEL_UNSAFE, "an array holds objects, not numbers")
        self.code, self.order = code, "<"

    def set_state(self, state: Any) -> None:
        """Take the byte order."""
        self.order = state[1] if state[1] in ("<", ">") else "<"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The data type with its byte order."""
        return np.dtype(self.order + self.code)


class _Array(Stateful):
    """An array; its numbers come with the state."""

    def __init__(self) -> None:
        self._array = np.zeros(0)

    def set_state(self, state: Any) -> None:
        """Take shape, data type, order and numbers."""
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _Type) or math.prod(small_shape(shape)) > MAX_VALUES:
            raise ValueError("not a small array of numbers")
        order = "F" if fortran else "C"
        # `order` is "C" or "F"; NumPy types it as a literal
        self._array = np.frombuffer(raw, kind.dtype).reshape(small_shape(shape), order=order)  # type: ignore[call-overload]

    def values(self) -> Any:
        """Return the numbers as nested lists."""
        return self._array.tolist()


def _scalar(kind: Any, raw: Any = b"") -> Any:
    return np.frombuffer(raw, kind.dtype)[0].item()


_MODULES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
"""Module of an array's functions before and since NumPy 2."""
_KNOWN: Final[Known] = {
    "_codecs.encode": encode_bytes,
    "collections.OrderedDict": ordered_dict,
    "numpy.dtype": _Type,
    "numpy.ndarray": _Array,
    **{f"{module}._reconstruct": lambda *_: _Array() for module in _MODULES},
    **{f"{module}.scalar": _scalar for module in _MODULES},
}
