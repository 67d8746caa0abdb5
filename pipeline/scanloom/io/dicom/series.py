"""A DICOM series into a `Scan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scanloom.core import Flag, Grid, Reason, ScanError, Volume
from scanloom.core.volume import MODALITIES, Unit
from scanloom.io.dicom.headers import SHELF, Header, quiet, read_headers
from scanloom.io.dicom.kinds import skip_reason
from scanloom.io.dicom.pixels import read_values, same_content
from scanloom.io.dicom.slices import Slice, single_slice
from scanloom.io.dicom.stack import Stack, contradiction, stack_slices
from scanloom.io.scan import DicomSource, Scan, SourceSlice
from scanloom.io.seg_source import decimals


def read_dicom(files: Sequence[Path], modality: str | None = None) -> Scan:
    """Read the slices of one series.

    Parameters
    ----------
    files : sequence of Path
        In any order.
    modality : str or None
        Used only where the headers name none.

    Raises
    ------
    ScanError
        By the code of what is wrong; nothing is guessed.
    """
    headers = _headers(files)
    stack = stack_slices([single_slice(h) for h in headers])
    with quiet():  # decoders
        dropped = _drop_twins(stack)
        array = read_values(stack.slices)
    said = headers[0].modality if headers[0].modality in MODALITIES else None
    modality = said or modality
    unit = _unit(stack.slices, modality)
    flags = list(stack.flags)
    if dropped:
        flags.append(Flag.DUPLICATES_DROPPED)
    if modality == "CT" and unit != "HU":
        flags.append(Flag.NOT_HOUNSFIELD)
    if any(s.header.burned_in for s in stack.slices):
        flags.append(Flag.BURNED_IN)
    volume = Volume(
        array=array,
        grid=Grid(array.shape, stack.affine),
        unit=unit,
        modality=modality,
        padding=_padding(stack.slices),
        flags=tuple(flags),
    )
    return Scan(volume, _source(stack.slices))


def _source(slices: Sequence[Slice]) -> DicomSource:
    first = slices[0]
    return DicomSource(
        first=first.header.read_dataset(),
        slices=tuple(_source_slice(one) for one in slices),
        spacing=tuple(decimals(first.spacing)),
        orientation=tuple(decimals(first.orientation)),
    )


def _source_slice(one: Slice) -> SourceSlice:
    return SourceSlice(
        sop_class=one.header.sop_class,
        sop_instance=one.header.sop_instance,
        frame=None,
        position=tuple(decimals(one.position)),
    )


def dicom_outline(files: Sequence[Path]) -> tuple[Grid, np.dtype[Any]]:
    """Return grid and type that `read_dicom` would give, from the headers alone; same errors."""
    headers = _headers(files)
    SHELF.put(headers)  # they are about to be read
    return headers_outline(headers)


def headers_outline(headers: Sequence[Header]) -> tuple[Grid, np.dtype[Any]]:
    """Return what `dicom_outline` does, of headers that are known; those of the index."""
    stack = stack_slices([single_slice(h) for h in headers])
    first = stack.slices[0].header
    rescaled = {(s.slope, s.intercept) for s in stack.slices}
    whole = all(float(n).is_integer() for pair in rescaled for n in pair)
    shape = (first.columns, first.rows, len(stack.slices))
    return Grid(shape, stack.affine), np.dtype(np.int16 if whole else np.float32)


def _headers(files: Sequence[Path]) -> list[Header]:
    """Return the headers of the files, those that were found a moment ago from memory."""
    taken: dict[Path, Header | ScanError | None] = {path: SHELF.take(path) for path in files}
    missing = [path for path, header in taken.items() if header is None]
    taken.update(zip(missing, read_headers(missing), strict=True))
    headers = []
    for header in taken.values():
        if isinstance(header, ScanError):
            raise header
        if header is not None:
            headers.append(header)
    usable = [header for header in headers if skip_reason(header) is None]
    if not usable:
        reasons = [skip_reason(header) for header in headers]
        raise ScanError(next(filter(None, reasons), Reason.NO_IMAGES), "no slices in this series")
    return usable


def _drop_twins(stack: Stack) -> int:
    """Return how many slices are there twice.

    Raises
    ------
    ScanError
        DUPLICATE_SLICES or PHASES if slices at one place hold different pixels.
    """
    for k, twin in stack.twins:
        if not same_content(stack.slices[k], twin):
            raise contradiction(stack)
    return len(stack.twins)


def _unit(slices: Sequence[Slice], modality: str | None) -> Unit:
    """Hounsfield units only for CT that says so (DICOM PS3.3 C.8.2.1.1.2)."""
    hounsfield = modality == "CT" and all(
        h.rescale_given and h.rescale_type in ("", "HU") and not h.multi_energy
        for h in (s.header for s in slices)
    )
    if hounsfield:
        return "HU"
    return "a.u." if modality is not None else "unknown"


def _padding(slices: Sequence[Slice]) -> float | None:
    """Return PixelPaddingValue after rescale, None where there is none or slices differ."""
    values = {
        None if s.header.padding is None else s.header.padding * s.slope + s.intercept
        for s in slices
    }
    return values.pop() if len(values) == 1 else None
