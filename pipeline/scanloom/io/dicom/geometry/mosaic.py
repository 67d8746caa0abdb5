"""Siemens mosaics: single-frame files whose one plane holds a whole volume as tiles."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.siemens_protocol import planned_slice_centres, tile_direction
from scanloom.io.dicom.geometry.slices import Slice, Tile, parse_decimal, single_slice
from scanloom.io.dicom.header.fallback import PARSE_ERRORS
from scanloom.io.dicom.header.header import Header, pydicom_muted

if TYPE_CHECKING:
    from pydicom import Dataset

_Floats = NDArray[np.float64]

_MAX_TILES = 4096
"""Largest number of tiles in one mosaic; scanners write a few dozen."""
_BETWEEN, _COUNT = tags.SPACING_BETWEEN_SLICES, tags.SIEMENS_NUMBER_OF_IMAGES_IN_MOSAIC
_PROTOCOL_NAMES = ("MrPhoenixProtocol", "MrProtocol")
_CSA_GROUP, _CSA = 0x0029, {"image": 0x10, "series": 0x20}
_CSA_SIGNATURE = b"SV10"
_DIRECTION_TOLERANCE = 1e-3
"""Largest difference between SliceNormalVector and the image normal, both of few digits."""


def is_mosaic(header: Header) -> bool:
    """Whether ImageType marks the file as a mosaic of tiles."""
    return "MOSAIC" in header.image_type


def mosaic_slices(header: Header) -> list[Slice]:
    """Return the tiles of a mosaic as slices with their positions.

    The number of tiles and the direction from tile to tile come from Siemens' CSA image header.
    If that is missing, they come from the protocol in the CSA series header.
    ImagePositionPatient is the position of the first pixel if the whole plane were one slice
    around the same centre, so the first tile begins half the remaining width and height further in.

    Raises
    ------
    ScanError
        MOSAIC if Siemens' header is missing or unreadable; DAMAGED if the tiles do not fit the
        plane; NO_POSITION or BAD_GEOMETRY.
    """
    template = single_slice(header)
    if not (header.position and header.orientation and header.spacing):
        raise ScanError(Reason.NO_POSITION, "a mosaic has no position, orientation or spacing")
    row, column = np.array(header.orientation).reshape(2, 3)
    count, normal = _tile_count_and_normal(header, row, column)
    if np.abs(np.abs(normal @ np.cross(row, column)) - 1) > _DIRECTION_TOLERANCE:
        raise ScanError(Reason.BAD_GEOMETRY, "normal and orientation of a mosaic contradict")
    step = _slice_spacing(header) * normal
    across = math.ceil(math.sqrt(count))
    rows, columns = header.rows // across, header.columns // across
    if not rows * across == header.rows or not columns * across == header.columns:
        raise ScanError(Reason.DAMAGED, f"{count} tiles do not fit the size of a mosaic")
    row_spacing, column_spacing = header.spacing
    first = np.array(header.position)
    first = first + row * column_spacing * (header.columns - columns) / 2
    first = first + column * row_spacing * (header.rows - rows) / 2
    return [
        replace(
            template,
            position=tuple(map(float, first + n * step)),
            tile=Tile(n // across * rows, n % across * columns, rows, columns),
            shared=None,
        )
        for n in range(count)
    ]


def _tile_count_and_normal(header: Header, row: _Floats, column: _Floats) -> tuple[int, _Floats]:
    """Return the number of tiles and the unit vector from tile to tile, LPS.

    Parameters
    ----------
    row, column : (3,) array
        Direction cosines along a row and down a column, LPS.
    """
    with pydicom_muted():  # nibabel warns that nicom is experimental
        from nibabel.nicom import csareader
    dataset = header.read_dataset()
    try:
        with pydicom_muted():
            csa_header = _csa_header(dataset, "image")
            if csa_header is None:
                count, normal = _from_protocol(header, dataset, row, column)
            else:
                count = int(
                    _parse_numbers(csa_header["tags"]["NumberOfImagesInMosaic"]["items"], 1)[0]
                )
                normal = np.array(
                    _parse_numbers(csa_header["tags"]["SliceNormalVector"]["items"], 3)
                )
    except (AssertionError, OSError, csareader.CSAReadError, *PARSE_ERRORS) as exc:
        detail = f"the private header of a mosaic can't be parsed ({type(exc).__name__})"
        raise ScanError(Reason.MOSAIC, detail) from exc
    if not (1 <= count <= _MAX_TILES and np.isfinite(normal).all()):
        raise ScanError(Reason.MOSAIC, "the private header of a mosaic has invalid values")
    return count, normal


def _from_protocol(
    header: Header, dataset: Dataset, row: _Floats, column: _Floats
) -> tuple[int, _Floats]:
    """Return the tile count and the normal from the slices planned in the series' protocol."""
    csa_header = _csa_header(dataset, "series")
    if csa_header is None:
        raise ScanError(Reason.MOSAIC, "Siemens' private header of a mosaic is missing")
    csa_tags = csa_header["tags"]
    protocol = next(csa_tags[name] for name in _PROTOCOL_NAMES if name in csa_tags)
    centres = planned_slice_centres(str(protocol["items"][0]), _MAX_TILES)
    if _COUNT in dataset and dataset[_COUNT].value not in (len(centres), _raw_us(len(centres))):
        raise ValueError("the protocol has a different number of slices")
    row_spacing, column_spacing = header.spacing or (0.0, 0.0)
    centre = np.array(header.position) + row * column_spacing * header.columns / 2
    centre = centre + column * row_spacing * header.rows / 2
    normal = np.cross(row, column)
    direction = tile_direction(centres, centre, _slice_spacing(header))
    return len(centres), normal if direction @ normal > 0 else -normal


def _csa_header(dataset: Dataset, kind: Literal["image", "series"]) -> Any:
    """Return Siemens' CSA header as nibabel parses it; None if it is missing.

    Anonymisers keep the header itself and drop the element that reserves its block: then it is
    recognised by its signature at the element that Siemens uses in any block.
    """
    from nibabel.nicom import csareader

    header = csareader.get_csa_header(dataset, kind)
    if header is not None:
        return header
    for tag in dataset.keys():  # noqa: SIM118 iterating a Dataset converts each element
        if tag.group == _CSA_GROUP and tag.element > 0xFF and tag.element & 0xFF == _CSA[kind]:
            value = dataset[tag].value
            if isinstance(value, bytes) and value.startswith(_CSA_SIGNATURE):
                return csareader.read(value)
    return None


def _raw_us(count: int) -> bytes:
    """Return the raw bytes of a count whose VR is unknown (US, little endian)."""
    return struct.pack("<H", count)


def _parse_numbers(items: Sequence[Any], count: int) -> list[float]:
    values = [float(item) for item in items if item != ""]
    if len(values) != count:
        raise ValueError("unexpected number of values")
    return values


def _slice_spacing(header: Header) -> float:
    text = header.elements.text(_BETWEEN)
    try:
        distance = parse_decimal(text)
    except ValueError:
        distance = math.nan
    if not (math.isfinite(distance) and distance > 0):
        raise ScanError(Reason.BAD_GEOMETRY, "a mosaic has no valid SpacingBetweenSlices")
    return distance
