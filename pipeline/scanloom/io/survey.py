"""What files are, and what the series they make are like: from headers alone.

`look_at` goes file by file, `describe` tells of one series, and `survey` does both at once, for
large archives in other processes (`scanloom.io.helpers`).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scanloom.core import DICOM, MODALITIES, Gaps, Grid, Reason, ScanError, Series, blame
from scanloom.io.bodyparts import body_part
from scanloom.io.dicom.elements import Packed, unpack_elements
from scanloom.io.dicom.headers import Header, make_header, quiet, read_elements, read_headers
from scanloom.io.dicom.kinds import ends_early, is_derived, skip_reason
from scanloom.io.dicom.planes import NATIVE
from scanloom.io.formats import FORMATS, format_of

logger = logging.getLogger(__name__)

MOST_DIGITS = 12
"""Of an integer string (PS3.5 6.2); damaged files have thousands, which Python refuses to parse."""
_OBLIQUE = 0.8
"""Cosine: planes that are turned further than 37 degrees from an axis are oblique."""
_PLANES = ("sagittal", "coronal", "axial")


class Look(NamedTuple):
    """What one file is.

    Parameters
    ----------
    kind : str
        A name of `scanloom.io.formats.FORMATS`; empty for what is no image at all.
    gzipped : bool
        Whether gzip packed a DICOM file.
    study, series : str
        UIDs of a DICOM file.
    reason : str
        Code of why it is no part of a volume; empty where it may be one.
    detail : str
    packed : Packed or None
        `Elements.packed` of a DICOM file.
    """

    kind: str
    gzipped: bool = False
    study: str = ""
    series: str = ""
    reason: str = ""
    detail: str = ""
    packed: Packed | None = None


_NO_IMAGE = Look("", reason=Reason.NOT_AN_IMAGE.code)
_CUT = Look(DICOM, reason=Reason.TRUNCATED.code, detail="a file ends before its header does")


class Description(NamedTuple):
    """What a series is like. Words come from closed lists, but for `date` and the last three.

    Parameters
    ----------
    reason : str
        Code of why it gives no volume; empty where it does.
    detail : str
    shape : tuple of int
        (I, J, K); empty where there is no volume, as `spacing` is.
    spacing : tuple of float
        mm.
    plane : str
        "axial", "coronal", "sagittal" or "oblique": that of the slices.
    modality, body_part : str
        Empty where the headers don't say; body parts that are on no list are "OTHER".
    date : str
        Of series and acquisition, to tell the newest: it sorts by time.
    number : int
        SeriesNumber, -1 where there is none.
    contrast : bool
    image_type, kernel, description : str
        As the headers say, values of the first joined by a backslash.
    """

    reason: str = ""
    detail: str = ""
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    plane: str = ""
    modality: str = ""
    body_part: str = ""
    date: str = ""
    number: int = -1
    contrast: bool = False
    image_type: str = ""
    kernel: str = ""
    description: str = ""


class Surveyed(NamedTuple):
    """What some files are, and what the series are like that they make among themselves.

    Parameters
    ----------
    looks : list of Look
        One for each file.
    series : list of (places, Description)
        Which of the files it is of.
    """

    looks: list[Look]
    series: list[tuple[tuple[int, ...], Description]]


def look_at(paths: Sequence[str]) -> list[Look]:
    """Return what each file is. Volume files are known by their names, DICOM by its content."""
    with quiet():
        return [_look(path)[0] for path in paths]


def survey(files: Sequence[tuple[str, int]]) -> Surveyed:
    """Return what files are, and describe series while their headers are at hand.

    Parameters
    ----------
    files : sequence of (path, bytes)
        Those of a folder should come together: a series of which some are elsewhere is described
        anew.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    headers: list[Header | None] = []
    looks = []
    with quiet(), no_collector():
        for n, (path, _) in enumerate(files):
            look, header = _look(path)
            looks.append(look)
            headers.append(header)
            if header is not None and not look.reason:
                place = "" if look.series else os.path.dirname(path)  # noqa: PTH120
                groups.setdefault((look.study, look.series, place), []).append(n)
        series = [
            (
                tuple(places),
                _describe_headers(
                    [h for n in places if (h := headers[n])], [files[n][1] for n in places]
                ),
            )
            for places in groups.values()
        ]
    return Surveyed(looks, series)


@contextmanager
def no_collector() -> Iterator[None]:
    """Let nobody look for cycles among headers by the thousand: there are none."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _look(path: str) -> tuple[Look, Header | None]:
    if kind := format_of(path):
        return Look(kind), None
    try:
        elements = read_elements(path)
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        return Look("", reason=Reason.UNREADABLE.code, detail=detail), None
    except ScanError as error:
        return Look(DICOM, reason=error.code, detail=error.detail), None
    if elements is None:
        return _NO_IMAGE, None
    header = make_header(path, elements)
    if ends_early(header):
        return _CUT, None
    reason = skip_reason(header)
    look = Look(
        kind=DICOM,
        gzipped=elements.gzipped,
        study=header.study_uid,
        series=header.series_uid,
        reason="" if reason is None else reason.code,
        packed=elements.packed(),
    )
    return look, header


def describe(kind: str, paths: Sequence[str], packed: Sequence[Packed] = ()) -> Description:
    """Return what a series is like.

    Parameters
    ----------
    kind : str
        A name of `scanloom.io.formats.FORMATS`.
    paths : sequence of str
        Its files.
    packed : sequence of Packed
        What the files of a DICOM series say, one for each.
    """
    try:
        with quiet():
            if kind == DICOM:
                pairs = zip(paths, packed, strict=True)
                return _describe_headers([make_header(f, unpack_elements(p)) for f, p in pairs])
            return _described(Description(), FORMATS[kind].probe(tuple(map(Path, paths)))[0])
    except ScanError as error:
        return Description(reason=error.code, detail=error.detail)


def describe_series(
    series: Series,
    phase: int | None = None,
    gaps: Gaps = "refuse",
    orientation: str | None = None,
) -> Description:
    """Return what a series that was found is like, if it is read with these options."""
    from scanloom.io.outline import read_outline

    words, headers = Description(modality=series.modality or ""), []
    try:
        if series.kind == DICOM:
            headers = [h for h in read_headers(series.files) if isinstance(h, Header)]
            with quiet():
                words = _words(headers[0]) if headers else words
        return _judged(words, headers, read_outline(series, phase, orientation, gaps)[0])
    except ScanError as error:
        return words._replace(reason=error.code, detail=error.detail)


def _describe_headers(headers: Sequence[Header], sizes: Sequence[int] = ()) -> Description:
    """Return what a DICOM series is like; a fault in one must not stop the others.

    `sizes` are those of the files, bytes; without them they are asked for.
    """
    from scanloom.io.dicom.series import headers_outline

    words = _words(headers[0])
    reason = skip_reason(headers[0])  # none where there are slices: others are not among them
    if reason is not None:
        return words._replace(reason=reason.code)
    try:
        grid = headers_outline(headers)[0]
    except ScanError as error:
        return words._replace(reason=error.code, detail=error.detail)
    except Exception as error:  # foreign data; a fault of ours stands as INTERNAL in the index
        logger.debug("series not described", exc_info=True)
        fault = blame(error)
        return words._replace(reason=fault.code, detail=fault.detail)
    return _judged(words, headers, grid, sizes)


def _judged(
    words: Description, headers: Sequence[Header], grid: Grid, sizes: Sequence[int] = ()
) -> Description:
    cut = sum(map(_is_cut, headers, sizes or map(_size, headers)))
    if cut:
        detail = f"{cut} of {len(headers)} files end in the middle of their pixels"
        return words._replace(reason=Reason.TRUNCATED.code, detail=detail)
    if headers and all(map(is_derived, headers)):
        words = words._replace(reason=Reason.DERIVED.code)
    return _described(words, grid)


def _is_cut(header: Header, size: int) -> bool:
    """Whether a file has fewer pixels than it describes, as far as its size tells."""
    place = header.pixels
    if place is None or place.length is None or header.syntax not in NATIVE:
        return False
    if header.elements.gzipped:
        return False
    bits = header.frames * header.rows * header.columns * header.format.allocated
    return 8 * min(place.length, size - place.offset) < bits


def _size(header: Header) -> int:
    """Return the bytes of a file; one that can't be asked is whole until it is read."""
    try:
        return os.stat(header.place).st_size  # noqa: PTH116
    except OSError:
        return sys.maxsize


def _described(words: Description, grid: Grid) -> Description:
    return words._replace(
        shape=tuple(map(int, grid.shape)),
        spacing=tuple(round(float(mm), 6) for mm in grid.spacing),
        plane=_plane(grid),
    )


def _plane(grid: Grid) -> str:
    """Return the plane of the slices by their normal, which a tilt does not turn."""
    normal = np.cross(grid.affine[:3, 0], grid.affine[:3, 1])
    share = np.abs(normal) / np.linalg.norm(normal)
    return _PLANES[int(share.argmax())] if share.max() >= _OBLIQUE else "oblique"


def _words(header: Header) -> Description:
    text = header.elements.text
    number = text(0x00200011)
    date = text(0x00080021) or text(0x00080022) or text(0x00080020)
    return Description(
        modality=header.modality if header.modality in MODALITIES else "",
        body_part=body_part(text(0x00180015)),
        date=date + (text(0x00080031) or text(0x00080032)),
        number=int(number) if number.isdigit() and len(number) <= MOST_DIGITS else -1,
        contrast=bool(text(0x00180010)),
        image_type="\\".join(header.image_type),
        kernel=text(0x00181210),
        description=series_description(header).encode("utf-8", "replace").decode(),
    )


def series_description(header: Header) -> str:
    """Return SeriesDescription; what is not plain ASCII is decoded by pydicom."""
    raw = header.elements.raw(0x0008103E)
    if raw.isascii() and b"\x1b" not in raw:  # ISO 2022 escapes to others by plain bytes
        return raw.decode("ascii").strip(" \0")
    try:
        return str(header.read_dataset().get("SeriesDescription", "") or "")
    except ScanError:
        return ""
