"""Model formats that are recognized and not read: their names, what they lack, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from scanloom.convert.files import TORCHSCRIPT, check_archive
from scanloom.core import Reason, ScanError

_MAX_LISTED: Final = 2000
"""Entries of a folder that are looked at: a training folder may hold a scan for each case."""
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
_MONAI: Final = "a MONAI bundle with configs/inference.json and configs/metadata.json states them"
NNUNET_V1: Final = (
    "this is a model of nnU-Net v1: its plans are a pickle, which is a program. "
    "It runs in nnU-Net v1 only, and can't be converted: use a model that nnU-Net v2 trained"
)
AUTO3DSEG: Final = (
    "this is a model of Auto3DSeg: its scripts are the description of the network, and would run. "
    "Write configs/inference.json and configs/metadata.json of a MONAI bundle for its network"
)
KERAS: Final = (
    "this is a model of Keras, and TensorFlow's networks run as ONNX: `python -m tf2onnx.convert` "
    "writes model.onnx, and `scanloom models new FOLDER` the card next to it"
)
ONNX: Final = (
    "this is a network in ONNX: nothing states spacing, orientation, intensities, windows and "
    "structures. card.yaml next to model.onnx does: `scanloom models new FOLDER` writes it"
)


_PROGRAM: Final = f"this is a network as a program: {TORCHSCRIPT}"
_TENSORRT: Final = (
    "this is an engine of TensorRT, for one kind of GPU: give the model that it was built from"
)
_FILES: Final = {
    **dict.fromkeys((".ts", ".torchscript", ".pt2"), _PROGRAM),
    ".onnx": ONNX,
    **dict.fromkeys((".h5", ".hdf5", ".keras"), KERAS),
    **dict.fromkeys((".engine", ".trt", ".plan"), _TENSORRT),
    ".model": NNUNET_V1,
}
"""Sentences on single files, by their suffixes."""
_WEIGHTS: Final = (".pt", ".pth", ".ckpt", ".safetensors", ".bin")
WEIGHTS_ALONE: Final = (
    "these are weights alone: nothing states network, spacing, orientation, intensities, windows "
    f"and structures; {_MONAI}"
)


def unread_error(path: Path) -> ScanError | None:
    """Return the error that names the format of a file or folder, None if it is not recognized.

    Parameters
    ----------
    path : Path
        A file, or a folder that no reader accepts or that lacks a file.
    """
    detail = _folder_detail(path) if path.is_dir() else _file_detail(path)
    return ScanError(Reason.MODEL_FORMAT, detail) if detail else None


def _file_detail(file: Path) -> str:
    """Return the sentence on a file; "" if its format is not known."""
    suffix = file.suffix.lower()
    if suffix in _FILES:
        return _FILES[suffix]
    try:
        with file.open("rb") as stream:
            if stream.read(len(_HDF5)) == _HDF5:
                return KERAS
            if suffix in _WEIGHTS:
                check_archive(stream)
                return WEIGHTS_ALONE
    except ScanError as error:
        return error.detail
    except OSError:
        pass
    return ""


def _folder_detail(folder: Path) -> str:
    """Return the sentence on a folder; "" if nothing in it is known.

    From formats of whole folders to single files, of which the former have some too.
    """
    names = {path.relative_to(folder).as_posix() for path in _entries(folder)}
    if any(name.endswith((".model", ".model.pkl")) for name in names) or "plans.pkl" in names:
        return NNUNET_V1
    if missing := _nnunet_detail(folder, names):
        return missing
    scripts = {"scripts/segmenter.py", "scripts/infer.py", "configs/hyper_parameters.yaml"}
    if len(scripts & names) > 1 or "algo_object.pkl" in names:
        return AUTO3DSEG
    if {"saved_model.pb", "keras_metadata.pb"} & names:
        return KERAS
    # the weights of a folder come last: other formats have some too
    files = sorted(names, key=lambda name: (Path(name).suffix.lower() in _WEIGHTS, name))
    return next((detail for name in files if (detail := _file_detail(folder / name))), "")


def _nnunet_detail(folder: Path, names: set[str]) -> str:
    """Return the sentence on a model of nnU-Net v2, or a fold of one, that lacks its plans."""
    needed = ("plans.json", "dataset.json")
    is_checkpoint = ("checkpoint_final.pth", "checkpoint_best.pth", "checkpoint_latest.pth")
    if any(name.startswith("fold_") and name.endswith(is_checkpoint) for name in names):
        missing = " and ".join(name for name in needed if name not in names)
        return f"this is a model of nnU-Net v2 without {missing}. {_BESIDE}" if missing else ""
    if not any(name in names for name in is_checkpoint):
        return ""
    parent = folder.resolve().parent
    missing = " and ".join(name for name in needed if not (parent / name).is_file())
    if missing:
        return f"this is a fold of nnU-Net v2, and there is no {missing} above it. {_BESIDE}"
    fold = folder.resolve().name.removeprefix("fold_")
    return (
        "this is a fold of a model of nnU-Net v2: give the folder above it, and choose the fold "
        f"by FOLDER:folds={fold}"
    )


_BESIDE: Final = (
    "nnU-Net writes them next to its folds, in "
    "nnUNet_results/DatasetNNN_NAME/TRAINER__PLANS__CONFIGURATION: copy them from there"
)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it."""
    try:
        first = sorted(islice(folder.iterdir(), _MAX_LISTED))
    except OSError:
        return
    for entry in first:
        if entry.is_file():
            yield entry
        elif entry.is_dir() and not entry.is_symlink():
            try:
                inner = [Path(each.path) for each in islice(os.scandir(entry), _MAX_LISTED)]
            except OSError:
                continue
            yield from (path for path in sorted(inner) if path.is_file())
