"""The header of an Analyze 7.5 image, read as that of a NIfTI pair that says nothing of its axes.

Its field `orient` is no help: programs wrote 0 whatever the axes were. SPM kept a factor of the
values, and others a shift, in fields that Analyze leaves free; where one is there, readers differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scanloom.core import Reason, ScanError

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1PairHeader

_BYTES = 348
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8"}
_MM = 2  # of xyzt_units
_FREE = ("funused1", "funused2")


def is_analyze(start: bytes) -> bool:
    """Whether a file without the magic of NIfTI starts as an Analyze header does."""
    return len(start) >= _BYTES and _order(start) is not None


def _order(start: bytes) -> str | None:
    """Return the byte order in which size and number of dimensions are possible."""
    for order in ("<", ">"):
        size = np.frombuffer(start, f"{order}i4", 1)[0]
        dimensions = np.frombuffer(start, f"{order}i2", 1, 40)[0]
        if size == _BYTES and 1 <= dimensions <= 7:
            return order
    return None


def analyze_as_nifti(start: bytes) -> Nifti1PairHeader:
    """Return an Analyze header as one of NIfTI, both form codes 0.

    Raises
    ------
    ScanError
        PIXEL_TYPE, RESCALE, BAD_GEOMETRY or DAMAGED.
    """
    from nibabel.analyze import AnalyzeHeader
    from nibabel.nifti1 import Nifti1PairHeader

    order = _order(start) or "<"
    analyze = AnalyzeHeader(start[:_BYTES], endianness=order, check=False)
    code = int(analyze["datatype"])
    if code not in _TYPES:
        raise ScanError(Reason.PIXEL_TYPE, "its data type is no plain number of Analyze")
    factor, shift = (float(analyze[name]) for name in _FREE)
    if factor not in (0, 1) or shift != 0:  # NaN is neither
        raise ScanError(Reason.RESCALE, "an Analyze header with a factor of its values")
    units = bytes(analyze["vox_units"].item()).strip(b"\0 ").lower()
    if units not in (b"", b"mm"):
        raise ScanError(Reason.BAD_GEOMETRY, "its lengths are not in millimetres")
    header = Nifti1PairHeader(endianness=order, check=False)
    for name in ("dim", "datatype", "bitpix", "pixdim", "vox_offset"):
        header[name] = analyze[name]
    header["xyzt_units"] = _MM
    return header
