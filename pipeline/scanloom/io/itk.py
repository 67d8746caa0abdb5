"""Read NRRD and MetaImage by SimpleITK."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Grid, Reason, ScanError, Volume
from scanloom.io.plain import MIN_VOXELS, affine_from_codes, check_finite, unit_of
from scanloom.io.scan import ItkSource, Scan

ITK_SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")

_HEADER_LIMIT = 1 << 16  # a header in text is a few kB
_NRRD_DATA = re.compile(rb"^data ?file:[ \t]*(.*?)\s*$", re.IGNORECASE | re.MULTILINE)
_NRRD_UNITS = re.compile(rb"^space units:[ \t]*(.*?)\s*$", re.IGNORECASE | re.MULTILINE)
_META_DATA = re.compile(rb"^ElementDataFile\s*=\s*(.*?)\s*$", re.IGNORECASE | re.MULTILINE)
_NRRD_SPACES = (
    "left-posterior-superior",
    "right-anterior-superior",
    "left-anterior-superior",
)
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def itk_files(path: Path) -> tuple[Path, ...]:
    """Return the files of an image: itself, and the data file that its header names.

    Raises
    ------
    ScanError
        NOT_FOUND if that is missing; DAMAGED if it is not in the same folder.
    """
    data = _data_file(path)
    return (path,) if data is None else (path, data)


def read_itk(
    files: Sequence[Path], orientation: str | None = None, modality: str | None = None
) -> Scan:
    """Read a NRRD or MetaImage volume.

    Parameters
    ----------
    files : sequence of Path
        As `itk_files` gives them.
    orientation, modality
        As in `scanloom.load_volume`.

    Raises
    ------
    ScanError
        TOO_FEW_SLICES, FOUR_D, COLOR, PIXEL_TYPE, ORIENTATION_UNKNOWN, BAD_GEOMETRY, TRUNCATED,
        DAMAGED or UNREADABLE.
    """
    import SimpleITK

    _check_readable(files)
    reader = SimpleITK.ImageFileReader()
    reader.SetFileName(str(files[0]))
    reader.SetImageIO("NrrdImageIO" if _is_nrrd(files[0]) else "MetaImageIO")
    shown = SimpleITK.ProcessObject.GetGlobalWarningDisplay()
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)  # ITK prints what the header says
    try:
        reader.ReadImageInformation()
        _check_kind(reader)
        _check_space(reader, files[0], orientation)
        image = reader.Execute()
    except RuntimeError as exc:
        raise ScanError(Reason.DAMAGED, "not readable as NRRD or MetaImage") from exc
    finally:
        SimpleITK.ProcessObject.SetGlobalWarningDisplay(shown)
    values: NDArray[Any] = SimpleITK.GetArrayFromImage(image).T
    affine, flags = _affine(image, _says_space(reader, files[0]), orientation)
    check_finite(values)
    grid = Grid(values.shape, affine)
    return Scan(Volume(values, grid, unit_of(modality), modality, flags=flags), ItkSource())


def _is_nrrd(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"NRRD"


def _header_text(path: Path) -> bytes:
    """Return the text before the data: to the empty line (NRRD), or the data file (MetaImage)."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_LIMIT)
    except OSError as exc:
        detail = f"the file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    if start.startswith(b"NRRD"):
        return re.split(rb"\r?\n\r?\n", start, maxsplit=1)[0]
    named = _META_DATA.search(start)
    return start[: named.end()] if named else b""


def _data_file(path: Path) -> Path | None:
    """Return the data file that a header names, None where the data follow the header."""
    text = _header_text(path)
    named = (_NRRD_DATA if text.startswith(b"NRRD") else _META_DATA).search(text)
    if named is None:
        return None
    name = named[1].decode("utf-8", "replace")
    if name.upper() == "LOCAL":
        return None
    if name.upper().startswith("LIST") or "%" in name:
        raise ScanError(Reason.DAMAGED, "its data are spread over several files")
    data = path.parent / name
    if not data.resolve().is_relative_to(path.parent.resolve()):
        raise ScanError(Reason.DAMAGED, "its header names a data file in another folder")
    if not data.is_file():
        raise ScanError(Reason.NOT_FOUND, "the data file that its header names is missing")
    return data


def _check_readable(files: Sequence[Path]) -> None:
    named = itk_files(files[0])
    if tuple(files) != named:
        raise ScanError(Reason.DAMAGED, "its header names another data file than before")
    text = _header_text(files[0])
    if not text:
        raise ScanError(Reason.DAMAGED, "the file has no NRRD or MetaImage header")
    units = _NRRD_UNITS.search(text)
    if units is not None and set(re.findall(rb'"(.*?)"', units[1])) - {b"mm", b""}:
        raise ScanError(Reason.BAD_GEOMETRY, "its lengths are not in millimetres")


def _check_kind(reader: Any) -> None:
    """Refuse what is no single grey volume."""
    size = reader.GetSize()
    while len(size) > 3 and size[-1] == 1:
        size = size[:-1]
    if reader.GetNumberOfComponents() > 1:
        colour = reader.GetNumberOfComponents() in (3, 4)
        detail = f"{reader.GetNumberOfComponents()} numbers a voxel"
        raise ScanError(Reason.COLOR if colour else Reason.PIXEL_TYPE, detail)
    if len(size) > 3:
        raise ScanError(Reason.FOUR_D, f"{size[3]} volumes")
    if len(size) < 3 or min(size) < MIN_VOXELS:
        raise ScanError(Reason.TOO_FEW_SLICES, f"the image has {tuple(size)} voxels")


def _says_space(reader: Any, path: Path) -> bool:
    """Whether the file says where it lies: a NRRD may not; a MetaImage is LPS by definition."""
    if not _is_nrrd(path):
        return True
    if not reader.HasMetaDataKey("NRRD_space"):
        return False
    return reader.GetMetaData("NRRD_space") in _NRRD_SPACES


def _check_space(reader: Any, path: Path, orientation: str | None) -> None:
    if orientation is None and not _says_space(reader, path):
        raise ScanError(Reason.ORIENTATION_UNKNOWN, "the NRRD names no anatomical space")


def _affine(
    image: Any, says: bool, orientation: str | None
) -> tuple[NDArray[np.float64], tuple[Flag, ...]]:
    spacing = np.array(image.GetSpacing())
    if not says and orientation is not None:
        return affine_from_codes(orientation, spacing), (Flag.ORIENTATION_GIVEN,)
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * spacing
    affine[:3, 3] = image.GetOrigin()
    return _LPS_TO_RAS @ affine, ()
