"""Read the values of a stack: decode and rescale each slice directly into the output array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Reason, ScanError, format_bytes
from scanloom.core.process import core_count
from scanloom.io.dicom.geometry.slices import Slice, Tile
from scanloom.io.dicom.header.header import Header, PixelFormat
from scanloom.io.dicom.pixels.frame import (
    MAX_OVERHEAD_BYTES,
    FrameRef,
    FrameTable,
    check_native_length,
    find_frame_tables,
    frame_ref,
    inflation_bytes,
    is_decodable,
    read_stored_samples,
    sample_range,
    slice_frame_ref,
    stored_dtype,
)
from scanloom.io.system.messages import register
from scanloom.io.system.sandbox import SandboxLimits, report_progress, run_sandboxed, shared_empty
from scanloom.io.voxel_values import VOXEL_LIMIT_BYTES

_MAX_THREADS = 8
"""Most reader threads: with more, disk or memory bandwidth is the limit."""
SCRATCH = 24
"""Decoder memory per sample, in bytes: OpenJPEG keeps two int32 copies and the codestream."""
SPARE = 384 << 20
"""Bytes that decoding a series may use on top of its values, or on top of the limit."""
_PYDICOM_BYTES = 48 << 20
"""Memory to import pydicom, which a child process does where a header's overlays are asked for."""
_THREAD_BYTES = 24 << 20
"""Fixed memory of a decoder thread: its stack and decoder state of constant size."""
_MIN_TIMEOUT_S = 20.0
"""Decoding timeout of a small slice; most take 0.03 s."""
_MIN_BYTES_PER_S = 1 << 20
"""Decoding rate below which a decoder counts as stuck; decoders reach at least 15 MB/s."""

_MAX_RESCALE = 1e15
"""Largest slope or intercept; larger ones are damage and would overflow int64 and float32."""
_MIN_SLOPE = 1e-30
"""Smallest slope; smaller ones would underflow float32."""


for _record_type in (FrameRef, PixelFormat, Tile):  # child processes decode by them
    register(_record_type)


class _DoesNotFitError(Exception):
    """Raised if a value exceeds the range of the output dtype."""


def read_values(slices: Sequence[Slice | None], limit: int = VOXEL_LIMIT_BYTES) -> NDArray[Any]:
    """Read all slices as slope * stored + intercept.

    Compressed pixels are decoded in a child process.

    Parameters
    ----------
    slices : sequence of Slice or None
        Slices of one size; None for a missing slice, whose values are 0.
    limit : int
        Largest size of the values, in bytes.

    Returns
    -------
    (columns, rows, slices) array, the first axis fastest in memory
        int16, else int32, if all slopes and intercepts are whole numbers and the values fit;
        float32 otherwise.

    Raises
    ------
    ScanError
        RESCALE, PIXEL_TYPE, TOO_LARGE, TRUNCATED, DAMAGED, DECODE_TIMEOUT, DECODER, UNREADABLE or
        OUT_OF_MEMORY.
    """
    check_decodable([s for s in slices if s])
    check_size(slices, limit)
    frames = [slice_frame_ref(s) if s else None for s in slices]
    dtypes: tuple[type, ...] = (np.int16, np.int32, np.float32)
    # The smallest first: nearly all scans fit it, and only the others are read again
    for dtype in dtypes if value_dtype([f for f in frames if f]).kind == "i" else dtypes[-1:]:
        values = _read_as(dtype, frames, limit)
        if values is not None:
            return values.T
    raise AssertionError("every value fits float32")


def check_decodable(slices: Sequence[Slice]) -> None:
    """Refuse rescales, pixel formats, sizes and encodings that are invalid or unsupported.

    Headers alone decide, except where more bytes follow the pixels than they need.

    Raises
    ------
    ScanError
        RESCALE, PIXEL_TYPE, DECODER or DAMAGED; TRUNCATED or UNREADABLE if such bytes can't be
        read.
    """
    if any(s.header.lookup_table for s in slices):
        raise ScanError(Reason.RESCALE, "the values need a modality lookup table")
    for slope, intercept in {(s.slope, s.intercept) for s in slices}:
        if not (math.isfinite(slope) and math.isfinite(intercept)) or slope == 0:
            detail = "a rescale slope or intercept is missing or not finite, or a slope is 0"
            raise ScanError(Reason.RESCALE, detail)
        if max(abs(slope), abs(intercept)) > _MAX_RESCALE or abs(slope) < _MIN_SLOPE:
            raise ScanError(Reason.RESCALE, "a rescale slope or intercept is out of range")
    if len({s.rescaled for s in slices}) > 1:
        raise ScanError(Reason.RESCALE, "slices differ in RescaleType, or some have no rescale")
    for pixel_format in {s.header.format for s in slices}:
        stored_dtype(pixel_format)
    if any(s.rows * s.columns < 1 for s in slices):
        raise ScanError(Reason.DAMAGED, "a slice has no rows or no columns")
    if not all(is_decodable(syntax) for syntax in {s.header.syntax for s in slices}):
        raise ScanError(Reason.DECODER, "the transfer syntax is not supported")
    for header in {id(s.header): s.header for s in slices}.values():
        check_native_length(frame_ref(header))


def value_dtype(frames: Sequence[Slice | FrameRef]) -> np.dtype[Any]:
    """Return the type of the values by the rescales of slices, if none exceeds 16 bits."""
    rescales = {(f.slope, f.intercept) for f in frames}
    are_integers = all(float(n).is_integer() for pair in rescales for n in pair)
    return np.dtype(np.int16 if are_integers else np.float32)


def check_size(slices: Sequence[Slice | None], limit: int) -> None:
    """Refuse a volume whose values exceed the limit in bytes, as `read_values` does."""
    _check_size([slice_frame_ref(s) for s in slices if s], limit, len(slices))


def _check_size(frames: Sequence[FrameRef], limit: int, count: int) -> None:
    """Refuse values larger than the limit (TOO_LARGE), and invalid sample formats.

    `count` is the number of slices with the missing ones.
    """
    if not frames or any(not f.count for f in frames):
        raise ScanError(Reason.DAMAGED, "a slice has no rows or no columns")
    value_bytes = value_dtype(frames).itemsize
    slice_bytes = max(math.prod(f.shape) * max(value_bytes, f.dtype.itemsize) for f in frames)
    # A frame is more than a slice if that is a tile
    frame_bytes = max(f.count * f.dtype.itemsize for f in frames)
    size = max(slice_bytes * count, frame_bytes)
    if size > limit:
        detail = f"{format_bytes(size)} of voxels, the limit is {format_bytes(limit)}"
        raise ScanError(Reason.TOO_LARGE, detail)


def read_stored_frame(header: Header, frame: int = 0) -> NDArray[Any]:
    """Return the stored samples (rows, columns) of a frame of a file, counted from 0.

    Unused high bits are cleared. Errors are those of `read_values`.
    """
    return _stored([frame_ref(header, frame)])[0]


def same_pixels(first: Slice, second: Slice) -> bool:
    """Whether two slices have equal stored samples and the same rescale."""
    if _encoding(first) != _encoding(second):
        return False
    first_samples, second_samples = _stored([slice_frame_ref(s) for s in (first, second)])
    return bool(np.array_equal(first_samples, second_samples))


def _encoding(slice_: Slice) -> tuple[object, ...]:
    frame = slice_frame_ref(slice_)
    return frame.format, frame.shape, frame.slope, frame.intercept


def _thread_count() -> int:
    """Return the number of reader threads: the cores of this process, up to a maximum."""
    return min(core_count(), _MAX_THREADS)


def _read_as(dtype: type, frames: list[FrameRef | None], limit: int) -> NDArray[Any] | None:
    """Read values (slices, rows, columns) as `dtype`; None if they do not fit."""
    present = [f for f in frames if f]
    shape = (len(frames), *present[0].shape)
    indices = [k for k, f in enumerate(frames) if f]
    if all(f.is_plain for f in present):
        values: NDArray[Any] = np.empty(shape, dtype)
        for k in set(range(len(frames))).difference(indices):
            values[k] = 0
        return values if fill(present, indices, values, _thread_count()) else None
    values = shared_empty(shape, dtype)
    limits, workers = _limits(present, values.nbytes, limit)
    fits = run_sandboxed(fill, present, indices, values, workers, limits=limits)
    return values if fits else None


def _stored(frames: list[FrameRef]) -> list[NDArray[Any]]:
    """Return the stored samples of each frame or tile, (rows, columns)."""
    _check_size(frames, VOXEL_LIMIT_BYTES, len(frames))
    if all(f.is_plain for f in frames):
        return read_stored(frames)
    limits, _ = _limits(frames, 0, VOXEL_LIMIT_BYTES)
    return run_sandboxed(read_stored, frames, limits=limits)


def _limits(frames: list[FrameRef], allocated: int, limit: int) -> tuple[SandboxLimits, int]:
    """Return the resource limits of decoding, and the number of threads.

    Together with the values, for which `allocated` bytes are allocated, memory stays within the
    limit plus `SPARE`.
    """
    # Four: the compressed frame, at most twice its samples, the decoded and the output array
    thread_bytes = _THREAD_BYTES + max(
        SCRATCH * f.count + 4 * f.count * f.dtype.itemsize + MAX_OVERHEAD_BYTES + inflation_bytes(f)
        for f in frames
    )
    available = SPARE + max(0, limit - allocated)
    workers = max(1, min(_thread_count(), available // thread_bytes, len(frames)))
    sizes = [f.count * f.dtype.itemsize + inflation_bytes(f) for f in frames]
    memory = min(available, _PYDICOM_BYTES + _THREAD_BYTES + workers * thread_bytes)
    timeout = _MIN_TIMEOUT_S + max(sizes) / _MIN_BYTES_PER_S
    total_timeout = 2 * _MIN_TIMEOUT_S + sum(sizes) / _MIN_BYTES_PER_S + timeout
    return SandboxLimits(memory, timeout, total_timeout), workers


def read_stored(frames: list[FrameRef]) -> list[NDArray[Any]]:
    """Return the stored samples of each frame or tile (rows, columns), read in this process."""
    frame_tables = find_frame_tables(frames)
    stored = []
    for frame in frames:
        stored.append(shared_empty(frame.shape, frame.dtype))
        buffer = np.empty((frame.rows, frame.columns), frame.dtype) if frame.tile else stored[-1]
        read_stored_samples(frame, buffer, frame_tables)
        if frame.tile:
            np.copyto(stored[-1], _crop_to_tile(frame, buffer))
        report_progress()
    return stored


def fill(frames: list[FrameRef], indices: list[int], values: NDArray[Any], workers: int) -> bool:
    """Read frames, or tiles of frames, into `values` (slices, rows, columns), in this process.

    `indices` are their slices, `workers` the number of threads. Return whether all values fit the
    dtype of `values`. Errors are those of `read_values`.
    """
    tables = find_frame_tables(frames)
    slices_by_frame: dict[tuple[Path, int], list[tuple[FrameRef, NDArray[Any]]]] = {}
    for frame, k in zip(frames, indices, strict=True):
        slices_by_frame.setdefault((frame.path, frame.frame), []).append((frame, values[k]))
    with ThreadPoolExecutor(workers) as pool:
        tasks = {
            file: pool.submit(_read_frame, slices, tables)
            for file, slices in slices_by_frame.items()
        }
        try:
            for (path, _), task in tasks.items():
                if isinstance(error := task.exception(), ScanError):
                    raise error.about(str(path)) from error
                task.result()
        except _DoesNotFitError:
            return False
        finally:
            pool.shutdown(cancel_futures=True)
    return True


def _read_frame(
    slices: list[tuple[FrameRef, NDArray[Any]]], tables: Mapping[Path, FrameTable]
) -> None:
    """Read the slices of one frame, the whole frame or its tiles, each into its output array."""
    first, out = slices[0]
    dtype = first.dtype
    if first.tile is None and out.dtype.kind == "i" and out.dtype.itemsize == dtype.itemsize:
        read_stored_samples(first, out.view(dtype), tables)
        for _, repeated in slices[1:]:
            np.copyto(repeated, out)
        for frame, values in slices:
            _rescale_in_place(frame, values)
    else:
        samples = np.empty((first.rows, first.columns), dtype)
        read_stored_samples(first, samples, tables)
        for frame, values in slices:
            stored = _crop_to_tile(frame, samples)
            if values.dtype.kind == "i":
                _check_fits(frame, stored, values.dtype)
            # Computed in float64
            np.copyto(values, stored * frame.slope + frame.intercept, casting="unsafe")
    report_progress()


def _rescale_in_place(frame: FrameRef, out: NDArray[Any]) -> None:
    """Rescale stored samples to values of the same width; exact modulo 2^bits, as all fit."""
    _check_fits(frame, out.view(frame.dtype), out.dtype)
    slope, intercept = (np.array(int(v)).astype(out.dtype) for v in (frame.slope, frame.intercept))
    if slope != 1:
        np.multiply(out, slope, out=out)
    if intercept != 0:
        np.add(out, intercept, out=out)


def _crop_to_tile(frame: FrameRef, samples: NDArray[Any]) -> NDArray[Any]:
    tile = frame.tile
    if tile is None:
        return samples
    return samples[tile.top : tile.top + tile.rows, tile.left : tile.left + tile.columns]


def _check_fits(frame: FrameRef, stored: NDArray[Any], dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)

    def fits(*samples: int) -> bool:
        values = [int(frame.slope) * sample + int(frame.intercept) for sample in samples]
        return limits.min <= min(values) and max(values) <= limits.max

    # The range of the format first, which costs nothing; then that of the samples
    if not fits(*sample_range(frame.format.stored, signed=frame.format.signed)) and not fits(
        int(stored.min()), int(stored.max())
    ):
        raise _DoesNotFitError
