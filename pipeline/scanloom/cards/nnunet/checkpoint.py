"""Reads nnU-Net's checkpoints without PyTorch: a zip archive with a pickle and raw tensors."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np

from scanloom.cards.monai.files import check_archive
from scanloom.cards.nnunet.inert_pickle import (
    MAX_BYTES,
    Known,
    Name,
    encode_bytes,
    ordered_dict,
    read_pickle,
    small_shape,
)
from scanloom.core import Reason, ScanError, format_bytes

WEIGHTS_KEY: Final = "network_weights"
"""Entry of a checkpoint that holds the state dict."""

STORAGES: Final[Mapping[str, str]] = {
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
"""Data type of each of PyTorch's storages."""
_NUMBER: Final = re.compile(r"[<=|]?[biuf][1248]")
"""Data types of NumPy numbers."""
_SCALARS: Final = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


@dataclass(frozen=True)
class Storage:
    """A block of numbers of one type in the archive."""

    member: str
    dtype: str
    count: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the archive, as a view of a storage; offset and strides in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.offset) is not int or self.offset < 0:
            raise ValueError("the offset must be a whole number")
        if len(self.shape) != len(self.stride):
            raise ValueError("shape and stride must have the same length")
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        if math.prod(self.shape) and last >= self.storage.count:
            raise ValueError("the tensor exceeds its storage")


@dataclass(frozen=True)
class Checkpoint:
    """Description of a model, from an nnU-Net checkpoint.

    Parameters
    ----------
    trainer : str
        Name of the trainer class.
    configuration : str
        Configuration of the plans: "2d", "3d_fullres".
    mirror : tuple of int
        Axes along which mirroring is allowed.
    tensors : mapping
        The state dict; several names may refer to one storage.
    """

    trainer: str
    configuration: str
    mirror: tuple[int, ...]
    tensors: Mapping[str, StoredTensor]


def read_checkpoint(stream: IO[bytes]) -> Checkpoint:
    """Return the description of an nnU-Net checkpoint; tensors are not read.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if it contains anything but tensors, numbers, texts and containers;
        MODEL_DAMAGED if it is not a checkpoint of nnU-Net v2.
    """
    with _open(stream) as (archive, root):
        content = _content(archive, root)
    trainer, arguments = content.get("trainer_name"), content.get("init_args")
    configuration = arguments.get("configuration") if isinstance(arguments, dict) else None
    mirror = content.get("inference_allowed_mirroring_axes") or ()
    tensors = content.get(WEIGHTS_KEY)
    if not isinstance(trainer, str) or not isinstance(configuration, str):
        detail = "the checkpoint does not name its trainer and configuration"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    return Checkpoint(trainer, configuration, _axes(mirror), _state(tensors))


def _axes(mirror: Any) -> tuple[int, ...]:
    """Return mirrored axes after a check."""
    try:
        axes = small_shape(mirror)
    except TypeError:
        axes = (-1,)
    if len(set(axes)) != len(axes) or not {0, 1, 2}.issuperset(axes):
        raise ScanError(Reason.MODEL_DAMAGED, "the checkpoint's mirrored axes are not axes")
    return axes


def read_state(stream: IO[bytes]) -> tuple[Mapping[str, StoredTensor], Mapping[str, bytearray]]:
    """Return the state dict of a checkpoint, and the content of its storages by member name.

    Storages of the optimiser are not read.

    Raises
    ------
    ScanError
        As `read_checkpoint`.
    """
    with _open(stream) as (archive, root):
        tensors = _state(_content(archive, root).get(WEIGHTS_KEY))
        storages = {tensor.storage.member: tensor.storage for tensor in tensors.values()}
        blocks = {name: _block(archive, storage) for name, storage in storages.items()}
    return tensors, blocks


@contextmanager
def _open(stream: IO[bytes]) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """Open the archive, and return it with its root folder; damage raises MODEL_DAMAGED."""
    check_archive(stream)
    stream.seek(0)
    try:
        with zipfile.ZipFile(stream) as archive:
            yield archive, _root(archive)
    except ScanError:
        raise
    except Exception as exc:  # damaged archives raise errors of many types
        detail = f"the checkpoint can't be read ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc


def _root(archive: zipfile.ZipFile) -> str:
    """Return the folder of an archive that holds its pickle."""
    names = [name for name in archive.namelist() if name.count("/") == 1]
    roots = [name.partition("/")[0] for name in names if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise ScanError(Reason.MODEL_DAMAGED, "the checkpoint is not a PyTorch archive")
    order = f"{roots[0]}/byteorder"
    if order in names and archive.read(order).strip() != b"little":
        raise ScanError(Reason.MODEL_UNSUPPORTED, "a checkpoint of a big-endian machine")
    return roots[0]


def _content(archive: zipfile.ZipFile, root: str) -> Mapping[str, Any]:
    """Return the content of the archive's pickle."""
    member = f"{root}/data.pkl"
    if archive.getinfo(member).file_size > MAX_BYTES:
        detail = f"the checkpoint's description is larger than {format_bytes(MAX_BYTES)}"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    content = read_pickle(
        archive.read(member), KNOWN, lambda key: _storage(key, root), name="the checkpoint"
    )
    if not isinstance(content, dict):
        raise ScanError(Reason.MODEL_DAMAGED, "the checkpoint has no entries")
    return content


def _state(tensors: Any) -> Mapping[str, StoredTensor]:
    if not isinstance(tensors, dict) or not tensors:
        raise ScanError(Reason.MODEL_WEIGHTS, f"the checkpoint has no {WEIGHTS_KEY}")
    if not all(isinstance(k, str) and isinstance(v, StoredTensor) for k, v in tensors.items()):
        raise ScanError(Reason.MODEL_WEIGHTS, f"{WEIGHTS_KEY} holds more than tensors")
    return tensors


def _storage(key: Any, root: str) -> Storage:
    """Return the storage of a persistent id: ("storage", type, name, device, count)."""
    kind, type_, name, _, count = key
    if kind != "storage" or not isinstance(type_, Name):
        raise ValueError("not a storage")
    if type(name) is not str or type(count) is not int or count < 0:
        raise ValueError("a storage without name or size")
    return Storage(f"{root}/data/{name}", STORAGES[type_.text], count)


def _block(archive: zipfile.ZipFile, storage: Storage) -> bytearray:
    """Return the content of a storage, writable as PyTorch expects it."""
    size = 2 if storage.dtype == "bfloat16" else np.dtype(storage.dtype).itemsize
    if archive.getinfo(storage.member).file_size != size * storage.count:
        raise ScanError(Reason.MODEL_DAMAGED, "a tensor of the checkpoint has another size")
    return bytearray(archive.read(storage.member))


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise TypeError("not a storage")
    return StoredTensor(storage, offset, small_shape(shape), small_shape(stride))


def _number_type(code: Any, *_: Any) -> str:
    if not isinstance(code, str) or not _NUMBER.fullmatch(code):
        raise ScanError(Reason.MODEL_UNSAFE, "the checkpoint holds NumPy objects, not numbers")
    return code


def _scalar(code: Any, raw: Any = b"") -> Any:
    return np.frombuffer(raw, _number_type(code))[0].item()


def _never(*_: Any) -> Any:
    raise ScanError(Reason.MODEL_UNSAFE, "the checkpoint makes a storage of its own")


NUMBERS: Final[Known] = {
    "_codecs.encode": encode_bytes,
    "numpy.dtype": _number_type,
    **dict.fromkeys(_SCALARS, _scalar),
}
"""Names with which NumPy's numbers are pickled."""
KNOWN: Final[Known] = {
    **NUMBERS,
    "collections.OrderedDict": ordered_dict,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch.device": lambda *_: None,
    "torch.Size": small_shape,
    **dict.fromkeys(STORAGES, _never),
}
"""Names that a checkpoint may refer to: tensors, containers and numbers."""
