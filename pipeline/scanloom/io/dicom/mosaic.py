"""Siemens mosaics: a file of one plane that holds a whole volume as tiles."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.headers import Header, quiet
from scanloom.io.dicom.odd_header import PARSE_ERRORS
from scanloom.io.dicom.protocol import planned_centres, way_of_tiles
from scanloom.io.dicom.slices import Slice, Tile, single_slice, to_float

if TYPE_CHECKING:
    from pydicom import Dataset

Numbers = NDArray[np.float64]

MOST_TILES = 4096
"""Of one mosaic; scanners make some tens."""
_BETWEEN, _COUNT = tags.SPACING_BETWEEN_SLICES, tags.SIEMENS_NUMBER_OF_IMAGES_IN_MOSAIC
_PROTOCOLS = ("MrPhoenixProtocol", "MrProtocol")
_SAME_DIRECTION = 1e-3
"""Difference of cosines between SliceNormalVector and the normal: both have some digits only."""


def is_mosaic(header: Header) -> bool:
    """Whether ImageType says that the file holds tiles."""
    return "MOSAIC" in header.image_type


def mosaic_slices(header: Header) -> list[Slice]:
    """Return the tiles of a mosaic, each as a slice where it lies.

    How many there are, and on which side of the first the others lie, is said by Siemens' own
    header (CSA) of the image; where that is lost, by the plan in that of the series.
    ImagePositionPatient is that of the first pixel if the whole plane were one
    slice around the same centre: the first tile begins half the rest further in.

    Raises
    ------
    ScanError
        MOSAIC where Siemens' header is missing or can't be read; NO_POSITION or BAD_GEOMETRY.
    """
    whole = single_slice(header)
    if not (header.position and header.orientation and header.spacing):
        raise ScanError(Reason.NO_POSITION, "a mosaic has no position, orientation or spacing")
    row, column = np.array(header.orientation).reshape(2, 3)
    count, normal = _csa(header, row, column)
    if np.abs(np.abs(normal @ np.cross(row, column)) - 1) > _SAME_DIRECTION:
        raise ScanError(Reason.BAD_GEOMETRY, "the normal of a mosaic is not that of its rows")
    step = _distance(header) * normal
    across = math.ceil(math.sqrt(count))
    rows, columns = header.rows // across, header.columns // across
    if not rows * across == header.rows or not columns * across == header.columns:
        raise ScanError(Reason.DAMAGED, f"{count} tiles do not fit the size of a mosaic")
    between_rows, between_columns = header.spacing
    first = np.array(header.position)
    first = first + row * between_columns * (header.columns - columns) / 2
    first = first + column * between_rows * (header.rows - rows) / 2
    return [
        replace(
            whole,
            position=tuple(map(float, first + n * step)),
            tile=Tile(n // across * rows, n % across * columns, rows, columns),
            shared=None,
        )
        for n in range(count)
    ]


def _csa(header: Header, row: Numbers, column: Numbers) -> tuple[int, Numbers]:
    """Return the number of tiles and the direction from tile to tile, LPS."""
    with quiet():  # nibabel says that it is experimental
        from nibabel.nicom import csareader
    dataset = header.read_dataset()
    try:
        with quiet():
            found = csareader.get_csa_header(dataset, "image")
            if found is None:
                count, normal = _planned(header, dataset, row, column)
            else:
                count = int(_only(found["tags"]["NumberOfImagesInMosaic"]["items"], 1)[0])
                normal = np.array(_only(found["tags"]["SliceNormalVector"]["items"], 3))
    except (AssertionError, OSError, csareader.CSAReadError, *PARSE_ERRORS) as exc:
        detail = f"its tiles can't be told apart ({type(exc).__name__})"
        raise ScanError(Reason.MOSAIC, detail) from exc
    if not (1 <= count <= MOST_TILES and np.isfinite(normal).all()):
        raise ScanError(Reason.MOSAIC, "its tiles can't be told apart")
    return count, normal


def _planned(
    header: Header, dataset: Dataset, row: Numbers, column: Numbers
) -> tuple[int, Numbers]:
    """Return the same by the plan of the series: the first tile lies at one end of it."""
    from nibabel.nicom import csareader

    tags = csareader.get_csa_header(dataset, "series")["tags"]
    named = next(tags[name] for name in _PROTOCOLS if name in tags)
    centres = planned_centres(str(named["items"][0]), MOST_TILES)
    if _COUNT in dataset and dataset[_COUNT].value not in (len(centres), _short(len(centres))):
        raise ValueError("the protocol plans another number of slices")
    between_rows, between_columns = header.spacing or (0.0, 0.0)
    middle = np.array(header.position) + row * between_columns * header.columns / 2
    middle = middle + column * between_rows * header.rows / 2
    normal = np.cross(row, column)
    way = way_of_tiles(centres, middle, _distance(header))
    return len(centres), normal if way @ normal > 0 else -normal


def _short(count: int) -> bytes:
    """Return a number as it stands where nobody names its type (US, little endian)."""
    return struct.pack("<H", count)


def _only(items: Sequence[Any], count: int) -> list[float]:
    numbers = [float(item) for item in items if item != ""]
    if len(numbers) != count:
        raise ValueError("another number of values")
    return numbers


def _distance(header: Header) -> float:
    text = header.elements.text(_BETWEEN)
    try:
        distance = to_float(text)
    except ValueError:
        distance = math.nan
    if not (math.isfinite(distance) and distance > 0):
        raise ScanError(Reason.BAD_GEOMETRY, "a mosaic does not say how far its slices are apart")
    return distance
