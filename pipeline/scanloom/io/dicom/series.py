"""Read a DICOM series as a `Scan`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Flag, Gaps, Grid, ReadOptions, Reason, ScanError, Volume, counted
from scanloom.core.volume import MODALITIES, Unit
from scanloom.io.dataset_text import decimal_strings
from scanloom.io.dicom import tags
from scanloom.io.dicom.geometry.mosaic import is_mosaic, is_uih_grid, mosaic_slices, uih_grid_slices
from scanloom.io.dicom.geometry.multiframe import frame_rejection_reason, multiframe_slices
from scanloom.io.dicom.geometry.slices import (
    Slice,
    differ_in_records,
    first_disagreement,
    single_slice,
    unique_by_shared,
)
from scanloom.io.dicom.geometry.stack import (
    MIN_SLICES,
    Stack,
    duplicate_position_error,
    fill_gaps,
    stack_slices,
)
from scanloom.io.dicom.header.elements import CONTRADICTING_ELEMENT, FLOAT_PIXELS
from scanloom.io.dicom.header.header import (
    PATIENT_KEYWORDS,
    Header,
    HeaderCache,
    parsing,
    read_headers,
)
from scanloom.io.dicom.header.parser import has_contradicting_groups, read_first_bytes
from scanloom.io.dicom.pixels.voxels import (
    check_decodable,
    check_size,
    read_values,
    same_pixels,
    value_dtype,
)
from scanloom.io.dicom.slice_attributes import SERIES_ATTRIBUTES
from scanloom.io.dicom.sop_classes import has_reversed_rows, is_multiframe, rejection_reason
from scanloom.io.dicom.splitting import Volumes, split_volumes
from scanloom.io.dicom.suv import suv_factor, tracer
from scanloom.io.scan import DicomSource, Scan, SourceSlice
from scanloom.io.session import current_session
from scanloom.io.system.unpacking import UnpackedFiles, is_gzip
from scanloom.io.voxel_values import rounding_flags, voxel_limit

_PADDING_LIMIT, _ACQUISITION = tags.PIXEL_PADDING_RANGE_LIMIT, tags.MR_ACQUISITION_TYPE
_SUV_ROUNDING = 1e-5
"""Largest relative difference of equal factors: weight or dose may be written in several ways."""
_FLOAT32_BITS = 24  # precision of float32


def read_dicom(
    files: Sequence[Path], phase: int | None = None, options: ReadOptions = ReadOptions()
) -> Scan:
    """Read one volume of a series.

    Parameters
    ----------
    files : sequence of Path
        Files of the series, in any order.
    phase : int or None
        Number of the volume in a series of several, from 0, in the order of `SLICE_ATTRIBUTES`.
    options : ReadOptions
        Its modality is used only if the headers name no known one; voxels are never NaN.

    Raises
    ------
    ScanError
        With a reason code for each fault or ambiguity; nothing is guessed.
    """
    headers = _usable_headers(files)
    stack = _stack_volume(headers, phase, options.gaps)
    _check_duplicates(stack)
    array = read_values(stack.slices, voxel_limit(options))
    padding, padding_limit = _padding(stack.real)
    fill_gaps(array, stack.slices, padding, padding_limit)
    stated = stack.real[0].header.modality  # which slices share
    modality = stated if stated in MODALITIES else options.modality
    unit: Unit = "unknown" if modality is None else "a.u."
    # Only a CT whose rescale gives Hounsfield units (DICOM PS3.3 C.8.2.1.1.2)
    if modality == "CT" and all(s.hounsfield for s in stack.real):
        unit = "HU"
    factor, is_factor_doubtful = _suv_factor(stack.real) if modality == "PT" else (None, False)
    flags = list(stack.flags)
    if stack.twins:
        flags.append(Flag.DUPLICATES_DROPPED)
    if is_factor_doubtful or differ_in_records(stack.real):
        flags.append(Flag.SLICES_DIFFER)
    if modality == "CT" and unit != "HU":
        flags.append(Flag.NOT_HOUNSFIELD)
    if _is_rounded(stack, array):
        flags.append(Flag.VALUES_ROUNDED)
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
        acquisition="3D" if stack.real[0].header.elements.text(_ACQUISITION) == "3D" else "2D",
        suv_factor=factor,
    )
    return Scan(volume, _source(stack))


def dicom_outline(
    files: Sequence[Path], phase: int | None, gaps: Gaps, limit: int | None
) -> tuple[Grid, np.dtype[Any]]:
    """Return the grid and dtype of the volume that `read_dicom` would return; same errors.

    Pixels are read only where slices share a position: whether they were sent twice, or differ.
    So int16 may turn out to be int32. Without `limit`, the size of the voxels is not checked.
    """
    headers = _usable_headers(files)
    current_session().cache(HeaderCache).put(headers)  # `read_dicom` usually follows
    stack = _stack_volume(headers, phase, gaps)
    outline = _outline(stack)
    if limit is not None:
        check_size(stack.slices, limit)
    return outline


def dicom_source(files: Sequence[Path], phase: int | None, gaps: Gaps) -> DicomSource:
    """Return the source of the volume that `read_dicom` would return; errors as `dicom_outline`."""
    headers = _usable_headers(files)
    current_session().cache(HeaderCache).put(headers)
    return _source(_stack_volume(headers, phase, gaps))


def count_dicom_volumes(files: Sequence[Path]) -> int:
    """Return the number of volumes that `phase` counts, of which some may be refused."""
    headers = _usable_headers(files)
    current_session().cache(HeaderCache).put(headers)  # its volumes are usually probed next
    slices = _split_slices(headers)
    several = not have_distinct_frames_of_reference(slices)
    return len(split_volumes(slices).groups) if several else 1


def probe_headers(headers: Sequence[Header], phase: int | None = None) -> Grid:
    """Return the grid of the volume that headers describe; errors as for `read_dicom`.

    Pixels are read only where slices share a position: whether they were sent twice, or differ.
    """
    return _outline(_stack_volume(headers, phase, "refuse"))[0]


def _outline(stack: Stack) -> tuple[Grid, np.dtype[Any]]:
    check_decodable(stack.real)
    _check_duplicates(stack)
    shape = (stack.real[0].columns, stack.real[0].rows, len(stack.slices))
    return Grid(shape, stack.affine), value_dtype(stack.real)


def _split_slices(headers: Sequence[Header]) -> list[Slice]:
    """Return the slices of all files, in an order that does not depend on file names."""
    _check_faults(headers)
    slices: list[Slice] = []
    multiframe_headers: list[Header] = []
    for header in headers:
        if is_multiframe(header):
            multiframe_headers.append(header)
        elif is_mosaic(header):
            slices += mosaic_slices(header)
        elif is_uih_grid(header):
            slices += uih_grid_slices(header)
        else:
            slices.append(single_slice(header))
    frames = multiframe_slices(multiframe_headers)
    reasons = [frame_rejection_reason(frame) for frame in frames]
    slices += [frame for frame, reason in zip(frames, reasons, strict=True) if reason is None]
    if not slices:
        raise ScanError(next(filter(None, reasons)), "no frame is a slice of a volume")
    return sorted(slices, key=lambda s: (s.header.sop_instance, s.header.path_string, s.frame))


def _check_faults(headers: Sequence[Header]) -> None:
    """Refuse several patients, contradictory repeated elements, float pixels and reversed rows."""
    distinct = {h.shared: h for h in headers}.values()
    # Before the series is split: volumes of several patients are not phases to choose from
    patients = max(_count_values(list(distinct), n) for n in range(len(PATIENT_KEYWORDS)))
    if patients > 1:
        detail = f"{len(headers)} files with one series UID belong to {patients} patients"
        raise ScanError(Reason.SEVERAL_PATIENTS, detail)
    if any(map(has_reversed_rows, distinct)):
        raise ScanError(Reason.REVERSED_ROWS, "an EPI series with reversed polarity")
    floats = sum(header.elements.faults & FLOAT_PIXELS > 0 for header in headers)
    if floats:
        detail = f"{floats} of {len(headers)} files have floating-point pixels"
        raise ScanError(Reason.PIXEL_TYPE, detail)
    contradictory = sum(
        header.elements.faults & CONTRADICTING_ELEMENT > 0
        or (is_multiframe(header) and has_contradicting_groups(header.path, header.elements))
        for header in headers
    )
    if contradictory:
        detail = f"{contradictory} of {len(headers)} files repeat an element with another value"
        raise ScanError(Reason.HEADER_CONTRADICTS, detail)


def _count_values(headers: Sequence[Header], n: int) -> int:
    """Return how many values `Header.patient` has at `n`, in any character set.

    Only values that differ as bytes are decoded: of equal ones the character set may be missing.
    """
    header_of = {header.patient[n]: header for header in headers if header.patient[n]}
    if all(value.isascii() and b"\x1b" not in value for value in header_of):
        return len(header_of)
    return len({header.decoded_patient(n) for header in header_of.values()})


def _stack_volume(headers: Sequence[Header], phase: int | None, gaps: Gaps) -> Stack:
    """Return the stack of the only volume, or of the chosen one; PHASES if none was chosen."""
    slices = _split_slices(headers)
    if have_distinct_frames_of_reference(slices):
        return stack_across_frames_of_reference(slices, phase, gaps)
    volumes = split_volumes(slices)
    if phase is None and len(volumes.groups) > 1:
        stack = _stack_resent(slices, gaps)
        if stack is not None:
            return stack
    return _stack_chosen(volumes, phase, gaps)


def _stack_chosen(volumes: Volumes, phase: int | None, gaps: Gaps) -> Stack:
    """Return the stack of one of several volumes; PHASES if none was chosen.

    SLICE_GAP if slices at its ends are missing and gaps are refused.
    """
    try:
        slices, missing = volumes.choose(phase)
    except ScanError as error:
        if phase is None:
            _check_any_readable(volumes, error)
        raise
    if missing and gaps == "refuse":
        detail = (
            f"{counted(missing, 'slice')} missing at the ends that other volumes of the series have"
        )
        raise ScanError(Reason.SLICE_GAP, detail)
    stack = stack_slices(slices, gaps)
    if missing:
        stack = stack.with_flag(Flag.FILES_LOST)
    return stack.with_flag(Flag.SLICES_SET_ASIDE) if volumes.crossing else stack


def _check_any_readable(volumes: Volumes, choice: ScanError) -> None:
    """Refuse several volumes of which no choice would be read, with the reason of the first.

    `choice` says how many there are.
    """
    first: ScanError | None = None
    for group in volumes.groups:
        try:
            check_decodable(stack_slices(group, "interpolate").real)
        except ScanError as error:
            first = first or error
        else:
            return
    if first is not None:
        raise ScanError(first.reason, f"{first.detail}, in the first of: {choice.detail}")


def _stack_resent(slices: Sequence[Slice], gaps: Gaps) -> Stack | None:
    """Return the stack of one volume that was sent repeatedly; None if slices differ."""
    try:
        stack = stack_slices(slices, gaps, SERIES_ATTRIBUTES)
        if first_disagreement(slices) and len({kept for kept, _ in stack.twins}) < len(stack.real):
            return None  # parts of several series, of which only some are the same
        same = all(same_pixels(kept, duplicate) for kept, duplicate in stack.twins)
    except ScanError:
        return None
    return stack if same and stack.twins else None


def _source(stack: Stack) -> DicomSource:
    first = next((s for s in stack.real if s.header.frame_of_reference), stack.real[0])
    return DicomSource(
        first=first.header.read_dataset(),
        slices=tuple(None if slice_ is None else _source_slice(slice_) for slice_ in stack.slices),
        spacing=tuple(decimal_strings(first.spacing)),
        orientation=tuple(decimal_strings(first.orientation)),
    )


def _source_slice(slice_: Slice) -> SourceSlice:
    return SourceSlice(
        sop_class=slice_.header.sop_class,
        sop_instance=slice_.header.sop_instance,
        frame=slice_.frame + 1 if slice_.multiframe else None,
        position=tuple(decimal_strings(slice_.position)),
    )


def _usable_headers(files: Sequence[Path]) -> list[Header]:
    """Return the headers of the files that hold slices, from the cache if they are in it."""
    session = current_session()
    by_path: dict[Path, Header | ScanError | None] = {
        path: session.cache(HeaderCache).take(path) for path in files
    }
    missing = [path for path, header in by_path.items() if header is None]
    by_path.update(zip(missing, read_headers(missing), strict=True))
    headers = []
    for header in by_path.values():
        if isinstance(header, ScanError):
            raise header
        if header is not None:
            headers.append(header)
    gzipped = {header.path for header in headers if header.elements.gzipped}
    # Files that were gzipped when indexed may have been replaced since
    gzipped = {path for path in gzipped if is_gzip(read_first_bytes(path))}
    if gzipped:  # unpacking failed when they were indexed: retry it, or raise its error
        readable_file = session.cache(UnpackedFiles).readable_file
        return _usable_headers(
            [readable_file(str(path), gzipped=path in gzipped) for path in by_path]
        )
    usable = [header for header in headers if rejection_reason(header) is None]
    if not usable:
        reasons = [rejection_reason(header) for header in headers]
        raise ScanError(next(filter(None, reasons), Reason.NO_IMAGES), "no slices in this series")
    return usable


def _suv_factor(slices: Sequence[Slice]) -> tuple[float | None, bool]:
    """Return `Volume.suv_factor`, and whether it is None since slices differ in its attributes.

    Headers keep no nested sequences, in which PET names its tracer and dose: slices are compared
    here, and not by the index. Several tracers are MIXED_SLICES.
    """
    headers = {id(slice_.header): slice_.header for slice_ in slices}.values()
    with parsing("tracer and dose"):
        datasets = [header.read_dataset() for header in headers]
        tracers = [name for dataset in datasets if (name := tracer(dataset))]
        factors = [suv_factor(dataset) for dataset in datasets]
    if len(set(tracers)) > 1:
        detail = f"Radiopharmaceutical has {len(set(tracers))} values in {len(slices)} slices"
        raise ScanError(Reason.MIXED_SLICES, detail)
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or not np.allclose(known, known[0], rtol=_SUV_ROUNDING, atol=0):
        return None, bool(known)
    return known[0], False


def _is_rounded(stack: Stack, array: NDArray[Any]) -> bool:
    """Return whether the values were converted to float32 and lost precision."""
    return array.dtype.kind == "f" and any(
        rounding_flags(array[:, :, k], np.dtype(np.int32), slice_.slope, slice_.intercept)
        for k, slice_ in enumerate(stack.slices)
        if slice_ is not None and slice_.header.format.allocated > _FLOAT32_BITS
    )


def _check_duplicates(stack: Stack) -> None:
    """Refuse slices at one position that hold different pixels: DUPLICATE_SLICES or SLICE_GAP."""
    if not all(same_pixels(kept, duplicate) for kept, duplicate in stack.twins):
        raise duplicate_position_error(stack)


def _padding(slices: Sequence[Slice]) -> tuple[float | None, float | None]:
    """Return PixelPaddingValue and PixelPaddingRangeLimit after rescale (PS3.3 C.7.5.1.1.2).

    Two None if the attributes are missing or slices differ.
    """
    values = {_slice_padding(slice_) for slice_ in slices}
    return values.pop() if len(values) == 1 else (None, None)


def _slice_padding(slice_: Slice) -> tuple[float | None, float | None]:
    header = slice_.header
    if header.padding is None:
        return None, None
    limit = None
    if len(header.elements.raw(_PADDING_LIMIT)) == 2:
        limit = header.elements.number(_PADDING_LIMIT, 0, signed=header.format.signed)
    value = header.padding * slice_.slope + slice_.intercept
    return value, None if limit is None else limit * slice_.slope + slice_.intercept


# --- a frame of reference for each slice ----------------------------------------------------------
# Some anonymisers replace every UID by a new one, and overlook that slices share this one.
# Positions are not comparable across frames of reference; but slices do not form one complete
# regular stack by chance.


def have_distinct_frames_of_reference(slices: Sequence[Slice]) -> bool:
    """Return whether all slices have a frame of reference, and no two have the same."""
    if len(slices) < MIN_SLICES or len(unique_by_shared(slices)) < len(slices):
        return False
    frames = {slice_.header.frame_of_reference for slice_ in slices}
    return len(frames) == len(slices) and "" not in frames


def stack_across_frames_of_reference(
    slices: Sequence[Slice], phase: int | None, gaps: Gaps
) -> Stack:
    """Return the one stack of slices whose frames of reference all differ.

    Raises
    ------
    ScanError
        FRAME_OF_REFERENCE if they form several stacks, or slices share a position: nothing shows
        which of them belong together. Errors of the stack as in `stack_slices`.
    """
    blank = []
    for slice_ in slices:
        header = copy(slice_.header)
        header.frame_of_reference = ""
        blank.append(replace(slice_, header=header))
    volumes, stack = split_volumes(blank), None
    if len(volumes.groups) == 1 and not volumes.crossing:
        stack = stack_slices(volumes.choose(phase)[0], gaps)
    if stack is None or stack.twins:
        count = len(slices)
        detail = f"{count} slices have {count} frames of reference, and do not form a single stack"
        raise ScanError(Reason.FRAME_OF_REFERENCE, detail)
    return stack.with_flag(Flag.FRAMES_OF_REFERENCE)
