"""A DICOM series into a `Scan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Gaps, Grid, Reason, ScanError, Volume
from scanloom.core.volume import MODALITIES, Unit
from scanloom.io.dicom import tags
from scanloom.io.dicom.doubled import groups_contradict
from scanloom.io.dicom.elements import FLOATS, TWICE
from scanloom.io.dicom.fast_header import read_start
from scanloom.io.dicom.frames import have_own_frames, stack_without_frames
from scanloom.io.dicom.gaps import fill_gaps
from scanloom.io.dicom.grid import grid_slices, is_grid
from scanloom.io.dicom.headers import Header, read_headers
from scanloom.io.dicom.kinds import has_reversed_rows, is_multiframe, skip_reason
from scanloom.io.dicom.mosaic import is_mosaic, mosaic_slices
from scanloom.io.dicom.multiframe import frame_reason, multiframe_slices
from scanloom.io.dicom.phases import Volumes, split_volumes
from scanloom.io.dicom.pixels import check_values, read_values, same_content
from scanloom.io.dicom.slices import Slice, single_slice
from scanloom.io.dicom.stack import Stack, contradiction, stack_slices
from scanloom.io.limits import VOXEL_LIMIT
from scanloom.io.scan import DicomSource, Scan, SourceSlice
from scanloom.io.seg_source import decimals
from scanloom.io.session import current_session
from scanloom.io.unpack import starts_gzip
from scanloom.io.values import rounding_flags

_PADDING_LIMIT = tags.PIXEL_PADDING_RANGE_LIMIT
_SHORT = 24  # bits that float32 holds


def read_dicom(
    files: Sequence[Path],
    *,
    modality: str | None = None,
    phase: int | None = None,
    gaps: Gaps = "refuse",
    limit: int = VOXEL_LIMIT,
) -> Scan:
    """Read one volume of a series.

    Parameters
    ----------
    files : sequence of Path
        In any order.
    modality : str or None
        Used only where the headers name none.
    phase : int or None
        Which volume of a series that holds several, from 0; the order is that of `phases.TELLING`.
    gaps : "refuse" or "interpolate"
        What to do about missing slices.
    limit : int
        Bytes that the voxels may take.

    Raises
    ------
    ScanError
        By the code of what is wrong; nothing is guessed.
    """
    headers = _headers(files)
    stack = _stack(_slices(headers), phase, gaps)
    dropped = _drop_twins(stack)
    array = read_values(stack.slices, limit)
    padding, padding_limit = _padding(stack.real)
    fill_gaps(array, stack.slices, padding)
    modality = _modality(stack.real) or modality
    unit = _unit(stack.real, modality)
    flags = list(stack.flags)
    if dropped:
        flags.append(Flag.DUPLICATES_DROPPED)
    if modality == "CT" and unit != "HU":
        flags.append(Flag.NOT_HOUNSFIELD)
    flags += _rounding(stack, array)
    if any(s.header.burned_in for s in stack.real):
        flags.append(Flag.BURNED_IN)
    volume = Volume(
        array=array,
        grid=Grid(array.shape, stack.affine),
        unit=unit,
        modality=modality,
        padding=padding,
        flags=tuple(flags),
        padding_limit=padding_limit,
    )
    return Scan(volume, _source(stack))


def dicom_outline(
    files: Sequence[Path], phase: int | None = None, gaps: Gaps = "refuse"
) -> tuple[Grid, np.dtype[Any]]:
    """Return grid and type that `read_dicom` would give; same errors.

    Pixels are read only where slices that look like several volumes may be one, sent twice.
    """
    headers = _headers(files)
    current_session().headers.put(headers)  # they are about to be read
    return _outline(_stack(_slices(headers), phase, gaps))


def headers_outline(
    headers: Sequence[Header], phase: int | None = None, gaps: Gaps = "refuse"
) -> tuple[Grid, np.dtype[Any]]:
    """Return grid and type of what headers describe; same errors.

    Pixels are read only where slices that look like several volumes may be one, sent twice.
    """
    return _outline(_stack(_slices(headers), phase, gaps))


def _outline(stack: Stack) -> tuple[Grid, np.dtype[Any]]:
    check_values(stack.real)
    rescaled = {(s.slope, s.intercept) for s in stack.real}
    whole = all(float(n).is_integer() for pair in rescaled for n in pair)
    shape = (stack.real[0].columns, stack.real[0].rows, len(stack.slices))
    return Grid(shape, stack.affine), np.dtype(np.int16 if whole else np.float32)


def _slices(headers: Sequence[Header]) -> list[Slice]:
    """Return the planes of all files, in an order that does not depend on names.

    Raises
    ------
    ScanError
        Where a file that holds several does not say which; why none of the frames is a slice; as
        of `_check_faults`.
    """
    _check_faults(headers)
    slices: list[Slice] = []
    several: list[Header] = []
    for header in headers:
        if is_multiframe(header):
            several.append(header)
        elif is_mosaic(header):
            slices += mosaic_slices(header)
        elif is_grid(header):
            slices += grid_slices(header)
        else:
            slices.append(single_slice(header))
    frames = multiframe_slices(several)
    reasons = [frame_reason(one) for one in frames]
    slices += [one for one, reason in zip(frames, reasons, strict=True) if reason is None]
    if not slices:
        raise ScanError(next(filter(None, reasons)), "none of its frames is a slice of a volume")
    return sorted(slices, key=lambda s: (s.header.sop_instance, s.header.place, s.frame))


def _check_faults(headers: Sequence[Header]) -> None:
    """Refuse what a header says twice, pixels that are no integers, and rows in reverse.

    Raises
    ------
    ScanError
        HEADER_CONTRADICTS, PIXEL_TYPE or REVERSED_ROWS.
    """
    if any(map(has_reversed_rows, {h.shared: h for h in headers}.values())):
        raise ScanError(Reason.REVERSED_ROWS, "an EPI series with reversed polarity")
    floats = sum(header.elements.faults & FLOATS > 0 for header in headers)
    if floats:
        detail = f"{floats} of {len(headers)} files have floating-point pixels"
        raise ScanError(Reason.PIXEL_TYPE, detail)
    twice = sum(
        header.elements.faults & TWICE > 0 or (is_multiframe(header) and groups_contradict(header))
        for header in headers
    )
    if twice:
        detail = f"in {twice} of {len(headers)} files an element stands twice, with other values"
        raise ScanError(Reason.HEADER_CONTRADICTS, detail)


def _stack(slices: Sequence[Slice], phase: int | None, gaps: Gaps) -> Stack:
    """Return the one volume that is meant.

    Raises
    ------
    ScanError
        PHASES where there are several and none was chosen; what is wrong with it.
    """
    if have_own_frames(slices):
        return stack_without_frames(slices, phase, gaps)
    volumes = split_volumes(slices)
    if phase is None and len(volumes.groups) > 1:
        stack = _sent_again(slices, gaps)
        if stack is not None:
            return stack
    return _chosen(volumes, phase, gaps)


def _chosen(volumes: Volumes, phase: int | None, gaps: Gaps) -> Stack:
    """Return the stack of one of several volumes.

    Raises
    ------
    ScanError
        PHASES if none was chosen; SLICE_GAP where slices at its ends are missing, and gaps are
        refused; what is wrong with it.
    """
    slices, cut = volumes.choose(phase)
    if cut and gaps == "refuse":
        detail = f"{cut} slices at its ends are missing that other volumes of the series have"
        raise ScanError(Reason.SLICE_GAP, detail)
    stack = stack_slices(slices, gaps)
    if cut:
        stack = stack.with_flag(Flag.FILES_LOST)
    return stack.with_flag(Flag.SLICES_SET_ASIDE) if volumes.crossing else stack


def _sent_again(slices: Sequence[Slice], gaps: Gaps) -> Stack | None:
    """Return the one volume that slices are which look like several, but say the same."""
    try:
        stack = stack_slices(slices, gaps)
        same = all(same_content(_at(stack, k), twin) for k, twin in stack.twins)
    except ScanError:
        return None
    return stack if same and stack.twins else None


def _at(stack: Stack, k: int) -> Slice:
    one = stack.slices[k]
    if one is None:
        raise ValueError("a twin of no slice")
    return one


def _source(stack: Stack) -> DicomSource:
    first = next((s for s in stack.real if s.header.frame_of_reference), stack.real[0])
    return DicomSource(
        first=first.header.read_dataset(),
        slices=tuple(None if one is None else _source_slice(one) for one in stack.slices),
        spacing=tuple(decimals(first.spacing)),
        orientation=tuple(decimals(first.orientation)),
    )


def _source_slice(one: Slice) -> SourceSlice:
    return SourceSlice(
        sop_class=one.header.sop_class,
        sop_instance=one.header.sop_instance,
        frame=one.frame + 1 if one.multiframe else None,
        position=tuple(decimals(one.position)),
    )


def _headers(files: Sequence[Path]) -> list[Header]:
    """Return the headers of the files, those that were found a moment ago from memory."""
    session = current_session()
    taken: dict[Path, Header | ScanError | None] = {
        path: session.headers.take(path) for path in files
    }
    missing = [path for path, header in taken.items() if header is None]
    taken.update(zip(missing, read_headers(missing), strict=True))
    headers = []
    for header in taken.values():
        if isinstance(header, ScanError):
            raise header
        if header is not None:
            headers.append(header)
    packed = {header.path for header in headers if header.elements.gzipped}
    packed = {path for path in packed if starts_gzip(read_start(path))}  # or it was, when found
    if packed:  # it could not be unpacked then: that is tried again, or says why not
        return _headers([session.scratch.plain(str(p), gzipped=p in packed) for p in taken])
    usable = [header for header in headers if skip_reason(header) is None]
    if not usable:
        reasons = [skip_reason(header) for header in headers]
        raise ScanError(next(filter(None, reasons), Reason.NO_IMAGES), "no slices in this series")
    return usable


def _rounding(stack: Stack, array: NDArray[Any]) -> list[Flag]:
    """Return the flag of whole numbers that were made float32 and are rounded by it."""
    if array.dtype.kind != "f":
        return []
    for k, one in enumerate(stack.slices):
        if one is None or one.header.format.allocated <= _SHORT:
            continue
        kind = np.dtype(np.int32)
        if rounding_flags(array[:, :, k], kind, one.slope, one.intercept):
            return [Flag.VALUES_ROUNDED]
    return []


def _drop_twins(stack: Stack) -> int:
    """Return how many slices are there twice.

    Raises
    ------
    ScanError
        DUPLICATE_SLICES or SLICE_GAP if slices at one place hold different pixels.
    """
    for k, twin in stack.twins:
        if not same_content(_at(stack, k), twin):
            raise contradiction(stack)
    return len(stack.twins)


def _modality(slices: Sequence[Slice]) -> str | None:
    """Return what slices say, of the closed list; those of a stack say the same."""
    said = slices[0].header.modality
    return said if said in MODALITIES else None


def _unit(slices: Sequence[Slice], modality: str | None) -> Unit:
    """Hounsfield units only for CT that says so (DICOM PS3.3 C.8.2.1.1.2)."""
    if modality == "CT" and all(s.hounsfield for s in slices):
        return "HU"
    return "a.u." if modality is not None else "unknown"


def _padding(slices: Sequence[Slice]) -> tuple[float | None, float | None]:
    """Return PixelPaddingValue and PixelPaddingRangeLimit after rescale (PS3.3 C.7.5.1.1.2).

    None where they are not there or slices differ.
    """
    values = {_padding_of(one) for one in slices}
    return values.pop() if len(values) == 1 else (None, None)


def _padding_of(one: Slice) -> tuple[float | None, float | None]:
    header = one.header
    if header.padding is None:
        return None, None
    limit = None
    if len(header.elements.raw(_PADDING_LIMIT)) == 2:
        limit = header.elements.number(_PADDING_LIMIT, 0, signed=header.format.signed)
    first = header.padding * one.slope + one.intercept
    return first, None if limit is None else limit * one.slope + one.intercept
