"""Reads foreign files of weights as plain data, and writes state dicts as safetensors.

A pickle is a program. torch's own reader for weights runs none of it: it builds tensors, containers
and the few types of NumPy's numbers that are listed here, and refuses any other name. It has no
limit of time or memory: those of the sandbox hold, see `scanloom.convert.conversion`.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from scanloom.cards.card import Weights
from scanloom.cards.card_file import WEIGHTS_FOLDER, weights_file
from scanloom.convert.files import check_archive, check_growth, is_safetensors
from scanloom.core import Reason, ScanError, format_bytes, lacks_memory, printable
from scanloom.io.system.sandbox import report_progress

MAX_WEIGHTS: Final = 4 << 30
"""Largest file of weights. The largest in MONAI's model zoo has about 900 MB, and those of nnU-Net
about 1.5 GB with their optimiser."""
FLOAT32_KEY: Final = "float32"
"""`ForeignWeights.key` of a file of float32 numbers without names, in the order of the network's
weights, kernels with channels last."""
_NUMBERS: Final = "?bBhHiIlLqQefd"
"""Type codes of NumPy's numbers."""
_MODULES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
"""Module of NumPy's functions before and since version 2."""
_CONTAINERS: Final = (b"PK", b"\x80\x02")
"""First bytes of PyTorch's files: a zip archive, or a pickle before version 1.6."""


@dataclass(frozen=True)
class ForeignWeights(Weights):
    """Weights in the form in which they were published.

    Parameters
    ----------
    key : str or None
        Entry of the file that holds the state dict; None if the file is the state dict. A file
        without that entry is taken as the state dict, as in ignite's CheckpointLoader.
    """

    key: str | None = None


def find_weights(file: Path, key: str | None, name: str, largest: int = MAX_WEIGHTS) -> Weights:
    """Return the weights in a file, with their SHA-256; safetensors are recognised.

    Parameters
    ----------
    file : Path
        The file.
    key : str or None
        As in `ForeignWeights`.
    name : str
        Name of the weights, for messages.
    largest : int
        Most bytes of the file.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file can't be read or is too large; MODEL_UNSAFE as `check_archive`.
    """
    report_progress()  # a model may have dozens of files, each of a gigabyte on a slow disk
    try:
        with file.open("rb") as stream:
            if file.stat().st_size > largest:
                detail = f"{name} is larger than {format_bytes(largest)}"
                raise ScanError(Reason.MODEL_DAMAGED, detail)
            check_archive(stream)
            safetensors = is_safetensors(stream)
            stream.seek(0)
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} can't be read") from exc
    return Weights(file, sha256) if safetensors else ForeignWeights(file, sha256, key=key)


def convert_weights(weights: Weights, folder: Path) -> Weights:
    """Put weights into a model's folder as safetensors, and return them.

    Safetensors are linked: a hard link, or a copy, to files of the same folder, and a symbolic link
    to others, whose folder may be deleted and converted again.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file can't be read; MODEL_HASH if it changed since it was found;
        MODEL_UNSAFE if it holds more than tensors, or expands when it is read; MODEL_WEIGHTS if it
        is not a state dict of plain tensors.
    MemoryError
        If memory runs out.
    """
    (folder / WEIGHTS_FOLDER).mkdir(exist_ok=True)
    if not isinstance(weights, ForeignWeights):
        target = weights_file(folder, weights.sha256)
        _link(weights.file, target, inside=weights.file.is_relative_to(folder))
        return Weights(target, weights.sha256)
    try:
        content = weights.file.read_bytes()
    except OSError as exc:
        detail = f"the model's weights can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    if hashlib.sha256(content).hexdigest() != weights.sha256:
        raise ScanError(Reason.MODEL_HASH, "the weights were replaced while they were read")
    converted = (
        _float32_numbers(content)
        if weights.key == FLOAT32_KEY
        else _state_dict(content, weights.key)
    )
    sha256 = hashlib.sha256(converted).hexdigest()
    target = weights_file(folder, sha256)
    target.unlink(missing_ok=True)  # a link there is not followed
    target.write_bytes(converted)  # not by safetensors: its files are for this user only
    return Weights(target, sha256, weights.sha256)


def _link(file: Path, target: Path, *, inside: bool) -> None:
    """Link or copy a file to another path, in the place of what is there."""
    with suppress(OSError):
        if target.samefile(file):
            return
    target.unlink(missing_ok=True)
    if not inside:
        target.symlink_to(file.absolute())
        return
    try:
        os.link(file.resolve(), target)  # not the link that the file may be
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


def _float32_numbers(content: bytes) -> bytes:
    """Return the numbers of a file of float32, little-endian, as one array in safetensors."""
    from safetensors.numpy import save

    from scanloom.inference.nets.meshnet import ONE_ARRAY

    if not content or len(content) % 4:
        detail = "the model's weights are not a file of float32 numbers"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    numbers = np.frombuffer(content, np.dtype("<f4")).astype(np.float32)
    converted: bytes = save({ONE_ARRAY: numbers})
    return converted


def _state_dict(content: bytes, key: str | None) -> bytes:
    """Return the state dict of a file of PyTorch: the entry `key`, or the file without it."""
    from safetensors.torch import save

    data = load_torch(io.BytesIO(content), "the model's weights")
    if key is not None and isinstance(data, Mapping) and key in data:
        data = data[key]
    if not isinstance(data, Mapping) or not data:
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file contains no state dict")
    if not all(isinstance(k, str) and _is_plain(v) for k, v in data.items()):
        raise ScanError(
            Reason.MODEL_WEIGHTS,
            "the weights file's state dict contains values that are not plain tensors",
        )
    # before a view of few numbers is written out as many
    check_growth(sum(v.numel() * v.element_size() for v in data.values()), len(content))
    # clones: safetensors refuse tensors that share their numbers
    converted: bytes = save({k: _as_tensor(v).contiguous().clone() for k, v in data.items()})
    return converted


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense, unquantized tensor of real numbers."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
    )


def _as_tensor(value: Any) -> Any:
    """Return a tensor of a subclass, such as a parameter, as a plain one."""
    import torch

    return value.detach().as_subclass(torch.Tensor)


def load_torch(file: Path | IO[bytes], name: str, device: str = "cpu") -> Any:
    """Return the content of a file of PyTorch: tensors, NumPy's arrays and numbers, containers.

    Parameters
    ----------
    file : Path or binary stream
        Checked with `check_archive`.
    name : str
        Name of the file, for messages.
    device : "cpu" or "meta"
        Where tensors are. On "meta" they have no numbers, and only the description is read.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the file names any other class or function, or is a program; MODEL_DAMAGED
        if it is not of PyTorch's format.
    MemoryError
        If memory runs out.
    """
    import torch
    from torch.serialization import safe_globals

    if isinstance(file, Path):
        with file.open("rb") as stream:
            return load_torch(stream, name, device)
    check_archive(file)
    for attempt in (1, 2):
        file.seek(0)
        try:
            with safe_globals(_numpy_names()):
                return torch.load(file, map_location=device, weights_only=True)
        except pickle.UnpicklingError as exc:
            unknown = _unknown_names(file)
            if attempt == 2 or not unknown or not all(n.startswith("monai.") for n in unknown):
                raise _refusal(file, name, unknown) from exc
            import monai.data.meta_tensor  # noqa: F401 - registers MONAI's class of tensors
        except Exception as exc:  # damaged files raise errors of many types
            if lacks_memory(exc):
                raise MemoryError from exc
            detail = f"{name} can't be read ({type(exc).__name__})"
            raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    raise AssertionError("the second attempt returns or raises")


def _numpy_names() -> list[Any]:
    """Return the functions and classes with which NumPy's arrays and numbers are pickled."""
    from numpy._core import multiarray

    functions = [multiarray.scalar, multiarray._reconstruct]
    return [
        np.dtype,
        np.ndarray,
        *{type(np.dtype(code)) for code in _NUMBERS},
        *((each, f"{module}.{each.__name__}") for each in functions for module in _MODULES),
    ]


def _unknown_names(file: IO[bytes]) -> set[str]:
    """Return the names in a file that stand for no plain data; empty if they can't be listed."""
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    file.seek(0)
    with suppress(Exception), safe_globals(_numpy_names()):
        return set(get_unsafe_globals_in_checkpoint(file))
    return set()


def _refusal(file: IO[bytes], name: str, unknown: set[str]) -> ScanError:
    """Return the error for a file that torch's reader for plain data refused."""
    if unknown:
        detail = f"{name} would run code: it names {printable(min(unknown)[:100])!r}"
        return ScanError(Reason.MODEL_UNSAFE, detail)
    file.seek(0)
    if file.read(2) in _CONTAINERS:
        return ScanError(Reason.MODEL_UNSAFE, f"{name} contains more than plain data")
    detail = f"{name} is neither a PyTorch nor a safetensors file"
    return ScanError(Reason.MODEL_DAMAGED, detail)
