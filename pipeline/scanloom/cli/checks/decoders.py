"""Check decoders: encode a small frame in each transfer syntax, and read it as scans are read."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.cli.checks.machine import CheckResult
from scanloom.core import ScanError

if TYPE_CHECKING:
    from pydicom import Dataset

TOPIC = "decoders"
SHAPE = (24, 32)
LOSSY = 6
"""Largest difference of a lossy frame, in grey levels of 256."""

PYDICOM = "pydicom"
"""Encoder for RLE, which imagecodecs only decodes."""

_PS = "1.2.840.10008.1.2"


@dataclass(frozen=True)
class Syntax:
    """A transfer syntax (DICOM PS3.5 10) with an encoder and its bit depth.

    `encoder` is a function of imagecodecs, PYDICOM, or None for uncompressed samples.
    """

    name: str
    uid: str
    encoder: str | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    bits: int = 16
    tolerance: int = 0


SYNTAXES = (
    Syntax("implicit little endian", _PS),
    Syntax("explicit little endian", f"{_PS}.1"),
    Syntax("deflated", f"{_PS}.1.99"),
    Syntax("RLE", f"{_PS}.5", PYDICOM),
    Syntax("JPEG baseline", f"{_PS}.4.50", "jpeg8_encode", (("level", 95),), 8, LOSSY),
    Syntax("JPEG lossless (57)", f"{_PS}.4.57", "ljpeg_encode"),
    Syntax("JPEG lossless (70)", f"{_PS}.4.70", "ljpeg_encode"),
    Syntax("JPEG-LS", f"{_PS}.4.80", "jpegls_encode"),
    Syntax("JPEG-LS near-lossless", f"{_PS}.4.81", "jpegls_encode", (("level", 2),), 16, 2),
    Syntax("JPEG 2000 lossless", f"{_PS}.4.90", "jpeg2k_encode", (("codecformat", "j2k"),)),
    Syntax("JPEG 2000", f"{_PS}.4.91", "jpeg2k_encode", (("codecformat", "j2k"),)),
    Syntax("HTJ2K lossless", f"{_PS}.4.201", "htj2k_encode"),
)


def check_decoders() -> Iterator[CheckResult]:
    """Decode a frame in each transfer syntax with the reader of scans."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for syntax in SYNTAXES:
            yield _check(syntax, Path(folder) / f"{syntax.uid}.dcm")


def _check(syntax: Syntax, file: Path) -> CheckResult:
    frame = _frame(syntax.bits)
    try:
        _save(frame, syntax, file)
    except Exception as exc:  # noqa: BLE001 - a failing encoder only skips the check
        seen = f"not checked: encoding failed ({type(exc).__name__})"
        return CheckResult(TOPIC, syntax.name, "warn", seen, "pip install --upgrade imagecodecs")
    advice = "pip install --upgrade imagecodecs pylibjpeg pyjpegls pylibjpeg-openjpeg"
    try:
        decoded = decode(file)
    except ScanError as exc:
        return CheckResult(TOPIC, syntax.name, "bad", f"{exc.detail} ({exc.code})", advice)
    except Exception as exc:  # noqa: BLE001 - the next check must run
        return CheckResult(TOPIC, syntax.name, "bad", f"fails ({type(exc).__name__})", advice)
    off = int(np.abs(decoded.astype(np.int64) - frame).max())
    if off > syntax.tolerance:
        return CheckResult(TOPIC, syntax.name, "bad", f"wrong values, off by up to {off}", advice)
    return CheckResult(TOPIC, syntax.name, "ok", "exact" if off == 0 else f"within {off}")


def decode(file: Path) -> NDArray[Any]:
    """Return the stored samples (rows, columns) of a file, read like a series; errors likewise."""
    from scanloom.core import Reason
    from scanloom.io.dicom.header.header import read_headers
    from scanloom.io.dicom.pixels.frame import stored_dtype
    from scanloom.io.dicom.pixels.voxels import read_stored_frame

    [header] = read_headers([file])
    if isinstance(header, ScanError):
        raise header
    if header is None:
        raise ScanError(Reason.DAMAGED, "not recognised as DICOM")
    samples = np.empty((header.rows, header.columns), stored_dtype(header.format))
    read_stored_frame(header, samples)
    return samples


def _frame(bits: int) -> NDArray[Any]:
    """Return a frame with gradients and an edge that uses the highest bit."""
    rows, columns = np.indices(SHAPE)
    values = rows * 5 + columns * 2 + 40 * (columns > SHAPE[1] // 2)
    return np.asarray(values if bits == 8 else values * 257 + 3, f"<u{bits // 8}")


def _save(frame: NDArray[Any], syntax: Syntax, file: Path) -> None:
    from pydicom.encaps import encapsulate

    dataset = _header(frame, syntax)
    if syntax.encoder is None:
        dataset.PixelData = frame.tobytes()
    elif syntax.encoder == PYDICOM:
        dataset.compress(syntax.uid, frame)
    else:
        import imagecodecs

        encode: Callable[..., bytes] = getattr(imagecodecs, syntax.encoder)
        dataset.PixelData = encapsulate([encode(frame, **dict(syntax.arguments))])
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = True
    dataset.save_as(file, enforce_file_format=True)


def _header(frame: NDArray[Any], syntax: Syntax) -> Dataset:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage

    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax.uid
    dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, "2.25.1"
    dataset.Modality = "CT"
    dataset.Rows, dataset.Columns = frame.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = syntax.bits
    dataset.HighBit, dataset.PixelRepresentation = syntax.bits - 1, 0
    return dataset
