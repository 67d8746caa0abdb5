"""Siemens mosaics and UIH grids: files whose one plane holds a whole volume as tiles."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError
from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.slices import Slice, Tile, decode_text, parse_decimal, single_slice
from scanloom.io.dicom.header.header import Header, parsing, pydicom_muted

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
    if not (header.position and header.orientation and header.spacing):
        raise ScanError(Reason.NO_POSITION, "a mosaic has no position, orientation or spacing")
    row, column = np.array(header.orientation).reshape(2, 3)
    count, normal = _tile_count_and_normal(header, row, column)
    if np.abs(np.abs(normal @ np.cross(row, column)) - 1) > _DIRECTION_TOLERANCE:
        raise ScanError(Reason.BAD_GEOMETRY, "normal and orientation of a mosaic contradict")
    step = _slice_spacing(header) * normal
    tiles = _tiles(header, count, math.ceil(math.sqrt(count)), "a mosaic")
    row_spacing, column_spacing = header.spacing
    first = np.array(header.position)
    first = first + row * column_spacing * (header.columns - tiles[0].columns) / 2
    first = first + column * row_spacing * (header.rows - tiles[0].rows) / 2
    positions = [tuple(map(float, first + n * step)) for n in range(count)]
    template = replace(single_slice(header), shared=None)
    return [replace(template, position=p, tile=t) for p, t in zip(positions, tiles, strict=True)]


def _tiles(header: Header, count: int, down: int, name: str) -> list[Tile]:
    """Return tiles that are stored row by row, `down` in each column; DAMAGED if they don't fit."""
    across = math.ceil(math.sqrt(count))
    rows, columns = header.rows // down, header.columns // across
    if rows * down != header.rows or columns * across != header.columns or not rows * columns:
        raise ScanError(Reason.DAMAGED, f"{count} tiles do not fit the size of {name}")
    return [Tile(n // across * rows, n % across * columns, rows, columns) for n in range(count)]


def _tile_count_and_normal(header: Header, row: _Floats, column: _Floats) -> tuple[int, _Floats]:
    """Return the number of tiles and the unit vector from tile to tile; all vectors are LPS."""
    with pydicom_muted():  # nibabel warns that nicom is experimental
        from nibabel.nicom import csareader
    dataset = header.read_dataset()
    errors = AssertionError, csareader.CSAReadError
    with parsing("the private header of a mosaic", Reason.MOSAIC, *errors):
        csa_header = _csa_header(dataset, "image")
        if csa_header is None:
            count, normal = _from_protocol(header, dataset, row, column)
        else:
            items = csa_header["tags"]
            count = int(_parse_numbers(items["NumberOfImagesInMosaic"]["items"], 1)[0])
            normal = np.array(_parse_numbers(items["SliceNormalVector"]["items"], 3))
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
    centres = planned_slice_centres(str(protocol["items"][0]))
    # Without a known VR the value is bytes: US, little endian
    counts = len(centres), struct.pack("<H", len(centres))
    if _COUNT in dataset and dataset[_COUNT].value not in counts:
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


# --- Siemens' protocol ----------------------------------------------------------------------------
# Planned slice positions, from a text in the series header (CSA).

_PROTOCOL = re.compile(r"### ASCCONV BEGIN.*?###(.*?)### ASCCONV END ###", re.DOTALL)
_SLICE_COUNT = re.compile(r"^\s*sSliceArray\.lSize\s*=\s*(0x[0-9a-fA-F]+|\d+)\s*$", re.MULTILINE)
_SLICE_CENTRE = re.compile(
    r"^\s*sSliceArray\.asSlice\[(\d+)\]\.sPosition\.d(Sag|Cor|Tra)\s*=\s*([-+.\deE]+)\s*$",
    re.MULTILINE,
)
_AXES = {"Sag": 0, "Cor": 1, "Tra": 2}
_MAX_SPACING_DIFFERENCE = 0.02
"""Share of the slice distance by which that of the protocol may differ."""
_MAX_DEVIATION = 0.1
"""Distance of a planned slice from its position in a regular stack, as a share of the distance."""
_MAX_TILE_SHIFT = 0.25
"""Distance of the first tile from an end of the plan, in steps from slice to slice."""


def planned_slice_centres(protocol: str) -> _Floats:
    """Return the centre (N, 3) of each slice in the order of the plan, LPS mm.

    A coordinate of 0 is left out of the text.

    Raises
    ------
    ValueError
        If the protocol has fewer than 2 slices, or more than `_MAX_TILES`.
    """
    section = _PROTOCOL.search(protocol)
    text = section[1] if section else ""
    size = _SLICE_COUNT.search(text)
    count = int(size[1], 0) if size else 0
    if not 2 <= count <= _MAX_TILES:
        raise ValueError("the protocol has no valid number of slices")
    centres = np.zeros((count, 3))
    for number, axis, value in _SLICE_CENTRE.findall(text):
        if int(number) < count:
            centres[int(number), _AXES[axis]] = float(value)
    return centres


def tile_direction(centres: _Floats, first: _Floats, distance: float) -> _Floats:
    """Return the unit vector from tile to tile.

    Its sign depends on the end of the plan at which the first tile lies.

    Parameters
    ----------
    centres : (N, 3) array
        Result of `planned_slice_centres`, LPS mm.
    first : (3,) array
        Centre of the first tile, LPS mm.
    distance : float
        Distance from tile to tile, mm.

    Raises
    ------
    ValueError
        If the plan is not a regular stack of that distance, or the first tile is at neither end.
    """
    count = len(centres)
    step = (centres[-1] - centres[0]) / (count - 1)
    length = float(np.linalg.norm(step))
    deviation = np.abs(centres - centres[0] - np.outer(np.arange(count), step)).max()
    same_distance = abs(length - distance) <= _MAX_SPACING_DIFFERENCE * distance
    if not same_distance or deviation > _MAX_DEVIATION * distance:
        raise ValueError("the slices of the protocol differ from the tiles")
    if not np.isfinite(first).all():
        raise ValueError("the position of the first tile is not finite")
    steps_from_start = float((first - centres[0]) @ step) / length**2
    direction: _Floats = step / length
    if abs(steps_from_start) < _MAX_TILE_SHIFT:
        return direction
    if abs(steps_from_start - (count - 1)) < _MAX_TILE_SHIFT:
        return -direction
    raise ValueError("the first tile is at neither end of the plan")


# --- grids of United Imaging ----------------------------------------------------------------------
# VFRAME: a private attribute holds the number of tiles, and a private sequence next to it has one
# item per tile with its position (rordenlab/dcm2niix issue 225).

_UIH_GROUP, _UIH_COUNT, _UIH_FRAMES = 0x0065, 0x50, 0x51
_UIH_CREATOR = "Image Private Header"
_UIH_DEFAULT_BLOCK = 0x10
_COSINE_TOLERANCE = 1e-4
"""Largest difference of a direction cosine between tiles: rounding to four decimals."""


def is_uih_grid(header: Header) -> bool:
    """Whether ImageType marks a grid of tiles and the file has no position of its own."""
    return "VFRAME" in header.image_type and header.position is None


def uih_grid_slices(header: Header) -> list[Slice]:
    """Return the tiles of a grid as slices with their own positions.

    N tiles are stored row by row in ceil(sqrt(N)) columns and as many rows as needed.

    Raises
    ------
    ScanError
        MOSAIC if the private attributes are missing or unreadable; DAMAGED if the tiles do not
        fit the plane; SLICE_ORIENTATION if they differ in orientation.
    """
    with parsing("the private attributes of a grid", Reason.MOSAIC):
        positions, cosines = _tile_geometry(header.read_dataset())
    orientation = header.orientation or cosines[0] or None
    if any(
        abs(a - b) > _COSINE_TOLERANCE
        for tile_cosines in filter(None, cosines)
        for a, b in zip(tile_cosines, orientation or (), strict=True)
    ):
        raise ScanError(Reason.SLICE_ORIENTATION, "tiles of a grid differ in orientation")
    count = len(positions)
    tiles = _tiles(header, count, -(-count // math.ceil(math.sqrt(count))), "a grid")
    template = replace(single_slice(header), orientation=orientation, shared=None)
    return [replace(template, position=p, tile=t) for p, t in zip(positions, tiles, strict=True)]


def _tile_geometry(dataset: Dataset) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return the position (LPS mm) and the direction cosines of each tile.

    The cosines of a tile may be empty. A missing position or a contradictory count is a ValueError.
    """
    creators = (
        block
        for block in range(_UIH_DEFAULT_BLOCK, 0x100)
        if (_UIH_GROUP, block) in dataset
        and _text(dataset[_UIH_GROUP, block].value) == _UIH_CREATOR
    )
    block = next(creators, _UIH_DEFAULT_BLOCK) << 8
    number = parse_decimal(_text(dataset[_UIH_GROUP, block | _UIH_COUNT].value))
    frames = _items(dataset[_UIH_GROUP, block | _UIH_FRAMES].value)
    if not number.is_integer() or not 1 <= number <= _MAX_TILES or number != len(frames):
        raise ValueError("unexpected number of tiles")
    positions = [_finite_numbers(frame, tags.IMAGE_POSITION_PATIENT, 3) for frame in frames]
    cosines = [_finite_numbers(frame, tags.IMAGE_ORIENTATION_PATIENT, 6) for frame in frames]
    if () in positions:
        raise ValueError("a tile without a position")
    return positions, cosines


def _text(value: object) -> str:
    return decode_text(value) if isinstance(value, bytes) else str(value).strip(" \0")


def _items(value: object) -> Sequence[Dataset]:
    """Return the items of a sequence; raw bytes of unknown VR are parsed as implicit VR."""
    from pydicom.sequence import Sequence as Items
    from pydicom.values import convert_SQ

    if isinstance(value, bytes):
        value = convert_SQ(value, is_implicit_VR=True, is_little_endian=True)
    if not isinstance(value, Items):
        raise TypeError("not a sequence")
    return tuple(value)


def _finite_numbers(frame: Dataset, tag: int, count: int) -> tuple[float, ...]:
    if tag not in frame:
        return ()
    value = frame.get_item(tag).value
    if not isinstance(value, bytes):
        raise TypeError("not text")
    values = tuple(map(parse_decimal, decode_text(value).split("\\")))
    if len(values) != count or not all(map(math.isfinite, values)):
        raise ValueError("unexpected number of values")
    return values
