"""Volume files and archives for tests, written by programs that are not ours, or by hand."""

from __future__ import annotations

import bz2
import io
import lzma
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pyarrow as pa
from nibabel.freesurfer import MGHImage
from numpy.typing import NDArray

from support.case_folders import directions, turned
from support.write_dicom import noise

SPACING = (0.8, 0.9, 2.5)
CORNERS = ((0, 0, 0), (23, 0, 0), (0, 19, 0), (0, 0, 5), (23, 19, 5), (7, 3, 2))
"""Voxels of `dicom_maker.noise()`."""


def affine_of(order: str = "LPS", oblique: float = 20.0) -> NDArray[np.float64]:
    """Return an affine whose axes follow `order`."""
    affine = np.eye(4)
    affine[:3, :3] = turned(directions(order), oblique) * SPACING
    affine[:3, 3] = (11, -23, 47)
    return affine


def write_mgh(
    path: Path, array: NDArray[Any] | None = None, affine: NDArray[np.float64] | None = None
) -> Path:
    """Write a .mgh or .mgz file with nibabel, also the fields after the voxels."""
    array = noise() if array is None else array
    MGHImage(array, affine_of() if affine is None else affine).to_filename(path)
    return path


def write_analyze(
    path: Path, array: NDArray[Any] | None = None, edit: Mapping[str, Any] | None = None
) -> Path:
    """Write a .hdr and its .img with nibabel; `edit` changes header fields last."""
    image = nibabel.AnalyzeImage(noise() if array is None else array, None)
    image.header.set_zooms((*SPACING, *[1] * (image.ndim - 3)))
    image.to_filename(path)
    header = image.header.copy()
    for name, value in (edit or {}).items():
        header[name] = value
    path.write_bytes(header.binaryblock)
    return path


def zstd(data: bytes) -> bytes:
    """Pack by pyarrow."""
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def command(*arguments: str) -> Callable[[bytes], bytes]:
    """Return a function that packs bytes with a program."""
    return lambda data: (
        subprocess.run(arguments, input=data, capture_output=True, check=True).stdout
    )


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def write_nifti(
    path: Path, array: NDArray[Any] | None = None, affine: NDArray[np.float64] | None = None
) -> Path:
    """Write a NIfTI, packed as its suffix requires."""
    image = nibabel.Nifti1Image(noise() if array is None else array, None)
    image.set_sform(affine_of() if affine is None else affine, 1)
    packer = PACKERS.get(path.suffix)
    if packer is None:
        image.to_filename(path)
    else:
        path.write_bytes(packer(image.to_bytes()))
    return path


def write_zip(path: Path, members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    """Write a zip archive."""
    with zipfile.ZipFile(path, "w", method) as pack:
        for name, data in members.items():
            pack.writestr(name, data)
    return path


def write_tar(path: Path, members: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar archive, packed as its suffix requires."""
    mode = {".tgz": "w:gz", ".gz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}.get(path.suffix, "w")
    with tarfile.open(path, mode, format=form) as pack:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            pack.addfile(info, io.BytesIO(data))
    return path


def write_archive(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write an archive of the kind that its suffix says."""
    return (write_zip if path.suffix == ".zip" else write_tar)(path, members)


ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


def header_of(
    kind: str, array: NDArray[Any], *, order: str = "LPS", **changes: str | None
) -> bytes:
    """Return a header of NRRD or MetaImage for an array; underscores stand for spaces in NRRD."""
    sizes = " ".join(map(str, array.shape))
    names = {"int16": ("short", "MET_SHORT"), "uint8": ("uchar", "MET_UCHAR")}
    names |= {"float32": ("float", "MET_FLOAT"), "uint16": ("ushort", "MET_USHORT")}
    nrrd, metaimage = names[array.dtype.name]
    columns = affine_of(order)[:3, :3] * np.array([[-1], [-1], [1]])  # LPS
    origin = affine_of(order)[:3, 3] * (-1, -1, 1)
    if kind == "nrrd":
        vectors = [f"({','.join(map(repr, map(float, column)))})" for column in columns.T]
        fields = {
            "type": nrrd,
            "dimension": str(array.ndim),
            "space": "left-posterior-superior",
            "sizes": sizes,
            "space directions": " ".join(vectors + ["none"] * (array.ndim - 3)),
            "kinds": " ".join(["domain"] * 3 + ["list"] * (array.ndim - 3)),
            "endian": "little",
            "encoding": "raw",
            "space origin": f"({','.join(map(repr, map(float, origin)))})",
        } | {name.replace("_", " "): text for name, text in changes.items()}
        lines = [f"{name}: {text}" for name, text in fields.items() if text is not None]
        return "\n".join(["NRRD0005", *lines, ""]).encode()
    turn = np.eye(array.ndim)
    turn[:3, :3] = (columns / SPACING).T
    fields = {
        "ObjectType": "Image",
        "NDims": str(array.ndim),
        "BinaryData": "True",
        "BinaryDataByteOrderMSB": "False",
        "TransformMatrix": " ".join(map(repr, map(float, turn.ravel()))),
        "Offset": " ".join(map(repr, map(float, [*origin, *[0] * (array.ndim - 3)]))),
        "ElementSpacing": " ".join(map(str, [*SPACING, *[1] * (array.ndim - 3)])),
        "DimSize": sizes,
        "ElementType": metaimage,
        **changes,
    }
    lines = [f"{name} = {text}" for name, text in fields.items() if text is not None]
    return "\n".join([*lines, ""]).encode()
