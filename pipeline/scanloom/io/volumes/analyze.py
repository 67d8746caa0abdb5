"""Convert an Analyze 7.5 header to that of a NIfTI pair without an orientation.

The `orient` field is not used: programs wrote 0 whatever the axes were. SPM stored a scale factor,
and others an offset, in unused Analyze fields. Readers differ in whether they apply them, so a
header with either is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scanloom.core import Reason, ScanError

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1PairHeader

_HEADER_BYTES = 348
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8"}
_UNITS_MM = 2  # NIFTI_UNITS_MM of xyzt_units
_SCALING_FIELDS = ("funused1", "funused2")


def is_analyze(start: bytes) -> bool:
    """Return whether the start of a file without the NIfTI magic is an Analyze header."""
    return len(start) >= _HEADER_BYTES and _byte_order(start) is not None


def _byte_order(start: bytes) -> str | None:
    """Return the byte order in which header size and number of dimensions are valid."""
    for order in ("<", ">"):
        size = np.frombuffer(start, f"{order}i4", 1)[0]
        dimensions = np.frombuffer(start, f"{order}i2", 1, 40)[0]
        if size == _HEADER_BYTES and 1 <= dimensions <= 7:
            return order
    return None


def analyze_as_nifti(start: bytes) -> Nifti1PairHeader:
    """Return an Analyze header as a NIfTI header with both form codes 0.

    Raises
    ------
    ScanError
        PIXEL_TYPE, RESCALE, BAD_GEOMETRY or DAMAGED.
    """
    from nibabel.analyze import AnalyzeHeader
    from nibabel.nifti1 import Nifti1PairHeader

    order = _byte_order(start) or "<"
    analyze = AnalyzeHeader(start[:_HEADER_BYTES], endianness=order, check=False)
    code = int(analyze["datatype"])
    if code not in _TYPES:
        raise ScanError(Reason.PIXEL_TYPE, "the Analyze data type is not a plain number")
    slope, intercept = (float(analyze[name]) for name in _SCALING_FIELDS)
    if slope not in (0, 1) or intercept != 0:  # NaN is neither
        raise ScanError(Reason.RESCALE, "the Analyze header has a scale factor or an offset")
    units = bytes(analyze["vox_units"].item()).strip(b"\0 ").lower()
    if units not in (b"", b"mm"):
        raise ScanError(Reason.BAD_GEOMETRY, "the units of the Analyze header are not millimetres")
    header = Nifti1PairHeader(endianness=order, check=False)
    for name in ("dim", "datatype", "bitpix", "pixdim", "vox_offset"):
        header[name] = analyze[name]
    header["xyzt_units"] = _UNITS_MM
    return header
