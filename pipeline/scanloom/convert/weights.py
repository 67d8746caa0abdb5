"""Reads foreign files of weights as plain data, and writes state dicts as safetensors.

A pickle is a program. torch's own reader for weights runs none of it: it builds tensors, containers
and the few types of NumPy's numbers that are listed here, and refuses any other name. It has no
limit of time or memory: those of the sandbox hold, see `scanloom.convert.conversion`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import Weights
from scanloom.cards.card_file import WEIGHTS_FOLDER, weights_file
from scanloom.convert.files import check_archive, check_growth, damaged, is_safetensors, unsafe
from scanloom.convert.onnx_file import with_external
from scanloom.core import Reason, ScanError, format_bytes, lacks_memory, printable, read_error
from scanloom.io.system.sandbox import report_progress

MAX_WEIGHTS: Final = 4 << 30
"""Largest file of weights. The largest in MONAI's model zoo has about 900 MB, and those of nnU-Net
about 1.5 GB with their optimiser."""
FLOAT32_KEY: Final = "float32"
"""`ForeignWeights.key` of a file of float32 numbers without names, in the order of
`ForeignWeights.arrays`, kernels with channels last."""
ONNX_KEY: Final = "onnx"
"""`ForeignWeights.key` of an ONNX file."""
NNUNET_KEY: Final = "network_weights"
"""`ForeignWeights.key` of a checkpoint of nnU-Net, whose networks list most layers two or four
times: each tensor is stored once."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""Largest header of a safetensors file, as of the library."""
_KERNEL_DIMS: Final = 5
_NUMBERS: Final = "?bBhHiIlLqQefd"
"""Type codes of NumPy's numbers."""
_MODULES: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
"""Module of NumPy's functions before and since version 2."""
_STATE_DICT_KEYS: Final = ("state_dict", "model_state_dict", "network_weights", "model")
"""Entries in which training programs store the state dict, in the order in which they are tried:
Lightning's and MONAI's tutorials', PyTorch's own, nnU-Net's, and that of ignite."""
_PREFIXES: Final = ("module.", "_orig_mod.")
"""Prefixes of DataParallel's and of torch.compile's networks."""
_OF_NETWORKS: Final = ("torch.nn.modules.", "monai.networks.")
"""Beginnings of the names of classes in a network that was saved with its code."""
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
    arrays : tuple of (name, shape)
        Weights of a MeshNet in the order of its layers, where the file has other names or none; the
        classifier comes last, and a bias of it that is not listed is dropped.
    """

    key: str | None = None
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()


def find_weights(file: Path, key: str | None, name: str, largest: int = MAX_WEIGHTS) -> Weights:
    """Return the weights in a file, with their SHA-256; safetensors are recognised.

    Parameters
    ----------
    key : str or None
        As in `ForeignWeights`.
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
                raise damaged(f"{name} is larger than {format_bytes(largest)}")
            # both are decided by the first and last bytes; the hash reads gigabytes
            check_archive(stream)
            safetensors = is_safetensors(stream)
            stream.seek(0)
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            wrapped = safetensors and wrapping_prefix(_tensor_names(stream))
    except OSError as exc:
        raise read_error(exc, name, Reason.MODEL_DAMAGED) from exc
    if safetensors and not wrapped:
        return Weights(file, sha256)
    return ForeignWeights(file, sha256, key=key)


def _tensor_names(stream: IO[bytes]) -> list[str]:
    """Return the names of the tensors in a safetensors file; none if its header is damaged."""
    stream.seek(0)
    size = int.from_bytes(stream.read(8), "little")
    try:
        header = json.loads(stream.read(min(size, _MAX_HEADER_BYTES)))
        return [name for name in header if name != "__metadata__"]
    except (ValueError, RecursionError, TypeError):  # it is refused when it is loaded
        return []


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
    from safetensors.numpy import save

    (folder / WEIGHTS_FOLDER).mkdir(exist_ok=True)
    if not isinstance(weights, ForeignWeights):
        target = weights_file(folder, weights.sha256)
        _link(weights.file, target, inside=weights.file.is_relative_to(folder))
        return Weights(target, weights.sha256)
    try:
        content = weights.file.read_bytes()
    except OSError as exc:
        raise read_error(exc, "the model's weights", Reason.MODEL_DAMAGED) from exc
    # the bytes that are hashed are those that are read below: the file may be replaced meanwhile
    if hashlib.sha256(content).hexdigest() != weights.sha256:
        raise ScanError(Reason.MODEL_HASH, "the weights were replaced while they were read")
    if weights.key == ONNX_KEY:
        graph = with_external(content, weights.file.parent)
        converted = save({"model": np.frombuffer(graph, np.uint8)})
    elif weights.key == FLOAT32_KEY:
        converted = save(_float32_numbers(content, weights.arrays))
    else:
        converted = _state_dict(content, weights.key, dict(weights.arrays))
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


def _float32_numbers(
    content: bytes, arrays: Sequence[tuple[str, tuple[int, ...]]]
) -> dict[str, NDArray[np.float32]]:
    """Return the numbers of a file of float32, little-endian, as the listed arrays."""
    if not content or len(content) % 4:
        raise damaged("the model's weights are not a file of float32 numbers")
    numbers = np.frombuffer(content, np.dtype("<f4")).astype(np.float32)
    sizes = [math.prod(shape) for _, shape in arrays]
    last, shape = arrays[-1]
    rest = len(numbers) - sum(sizes)
    if rest not in (0, 0 if last.endswith(".bias") else shape[0]):
        detail = f"the file of weights has {len(numbers)} numbers, the network {sum(sizes)}"
        raise ScanError(Reason.MODEL_WEIGHTS, detail)
    state = {}
    for (name, shape), values in zip(arrays, np.split(numbers, np.cumsum(sizes))[:-1], strict=True):
        if len(shape) == _KERNEL_DIMS:
            kernel = values.reshape(*shape[2:], shape[1], shape[0])
            state[name] = np.ascontiguousarray(kernel.transpose(4, 3, 0, 1, 2))
        else:
            state[name] = values
    return state


def _state_dict(content: bytes, key: str | None, arrays: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return a state dict as safetensors: the entry `key` of a file, or the file without it."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load, save

    if is_safetensors(io.BytesIO(content)):
        try:
            data: Any = load(content)
        except SafetensorError as exc:
            raise damaged("the model's weights are a damaged safetensors file") from exc
    else:
        data = load_torch(io.BytesIO(content), "the file of weights")
    if key is not None and isinstance(data, Mapping) and key in data:
        data = data[key]
    data = _without_wrapping(data)
    if not isinstance(data, Mapping) or not data:
        raise ScanError(Reason.MODEL_WEIGHTS, "the weights file contains no state dict")
    if not all(isinstance(k, str) and _is_plain(v) for k, v in data.items()):
        detail = "the weights file's state dict contains values that are not plain tensors"
        raise ScanError(Reason.MODEL_WEIGHTS, detail)
    if key == NNUNET_KEY:
        names: dict[Any, str] = {}
        for k, v in data.items():
            names.setdefault((v.data_ptr(), v.shape, v.stride()), k)
        data = {k: data[k] for k in names.values()}
    # before a view of few numbers is written out as many
    check_growth(sum(v.numel() * v.element_size() for v in data.values()), len(content))
    # clones: safetensors refuse tensors that share their numbers
    plain = {k: v.detach().as_subclass(torch.Tensor) for k, v in data.items()}  # parameters too
    state = {k: v.contiguous().clone() for k, v in plain.items()}
    converted: bytes = save(_renamed(state, arrays) if arrays else state)
    return converted


def _without_wrapping(data: Any) -> Any:
    """Return the state dict of a file in which training programs wrapped it; else the data itself.

    They store it next to the optimiser's, and parallel and compiled networks prefix all names.
    """
    if isinstance(data, Mapping):
        inner = (data.get(name) for name in _STATE_DICT_KEYS)
        data = next((each for each in inner if isinstance(each, Mapping)), data)
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        return data
    while prefix := wrapping_prefix(data):
        data = {name.removeprefix(prefix): value for name, value in data.items()}
    return data


def wrapping_prefix(names: Iterable[str]) -> str:
    """Return the prefix that a parallel or compiled network gives to all names, "" without one.

    It is taken off: no network that is read has a layer of that name above all others.
    """
    listed = list(names)
    prefixes = _PREFIXES if listed else ()
    return next((p for p in prefixes if all(name.startswith(p) for name in listed)), "")


def _renamed(state: Mapping[str, Any], arrays: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return a chain of convolutions under the names of `MeshNet`, by the numbers in their own.

    Weights that belong to no layer keep their names, and are refused when they are loaded.
    """
    prefixes = sorted({name.rpartition(".")[0] for name in state}, key=_layer_order)
    kernels = [p for p in prefixes if getattr(state.get(f"{p}.weight"), "ndim", 0) == _KERNEL_DIMS]
    layers = {kernel: f"layers.{n}" for n, kernel in enumerate(kernels)}
    layers.update(dict.fromkeys(kernels[-1:], "classifier"))
    renamed = {}
    for name, values in state.items():
        prefix, _, leaf = name.rpartition(".")
        renamed[f"{layers.get(prefix, prefix)}.{leaf}"] = values
    if "classifier.bias" not in arrays:
        renamed.pop("classifier.bias", None)
    return renamed


def _layer_order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a key that sorts names by the numbers in them; the classifier comes last."""
    pieces = re.split(r"(\d+)", name)
    numbers = [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]
    return name == "classifier", numbers


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense, unquantized tensor of real numbers."""
    import torch

    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.is_quantized or value.is_complex() or value.is_nested)
    )


def load_torch(file: Path | IO[bytes], name: str, device: str = "cpu") -> Any:
    """Return the content of a file of PyTorch: tensors, NumPy's arrays and numbers, containers.

    Parameters
    ----------
    file : Path or binary stream
        Checked with `check_archive`.
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
            # only for a file that names it: the import takes seconds
            import monai.data.meta_tensor  # noqa: F401 - registers MONAI's class of tensors
        except Exception as exc:  # damaged files raise errors of many types
            if lacks_memory(exc):
                raise MemoryError from exc
            detail = f"{name} is damaged or cut off ({type(exc).__name__})"
            raise damaged(detail) from exc
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
        whole = any(each.startswith(_OF_NETWORKS) for each in unknown)
        more = ", of a whole network: save its `state_dict()` instead" if whole else ""
        return unsafe(f"{name} would run code: it names {printable(min(unknown)[:100])!r}{more}")
    file.seek(0)
    if file.read(2) in _CONTAINERS:
        return unsafe(f"{name} contains more than plain data")
    return damaged(f"{name} is neither a PyTorch nor a safetensors file")
