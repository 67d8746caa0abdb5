"""Coverage-guided fuzzing of each header reader: `make fuzz` (atheris; not part of the suite).

    FUZZ_TARGET=nifti python fuzz/fuzz_headers.py [libFuzzer options] [corpus folder ...]

A reader may raise ScanError; anything else is a finding, which libFuzzer writes to a file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["scanloom", "nibabel.nifti1", "nibabel.wrapstruct"]):
    from scanloom.core import ReadOptions, ScanError
    from scanloom.io.dicom.header import parser
    from scanloom.io.dicom.header.elements import decode_elements
    from scanloom.io.dicom.header.header import read_headers
    from scanloom.io.formats import FORMATS
    from scanloom.io.volumes.metaimage_header import parse_metaimage
    from scanloom.io.volumes.nrrd_header import parse_nrrd

NIFTI, ITK = FORMATS["nifti"], FORMATS["itk"]
LIMIT = 1 << 24  # bytes of voxels: what is asked here is whether headers are judged right
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


def _written(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def fuzz_nifti(data: bytes) -> None:
    path = _written("a.nii", data)
    for phase, orientation in ((None, None), (0, "RAS")):
        options = ReadOptions(nan="padding", orientation=orientation, max_size=LIMIT)
        try:
            grid, dtype = NIFTI.probe((path,), phase, options)
        except ScanError:
            continue
        volume = NIFTI.read((path,), phase, options).volume
        assert (volume.grid.shape, volume.array.dtype) == (grid.shape, dtype)


def _fuzz_text(data: bytes, name: str, parse: Callable[..., object]) -> None:
    try:
        parse(data, whole=True)
    except ScanError:
        return
    path = _written(name, data)
    for phase, orientation in ((None, None), (0, "RAS")):
        options = ReadOptions(nan="padding", orientation=orientation, max_size=LIMIT)
        try:
            grid, dtype = ITK.probe((path,), phase, options)
        except ScanError:
            continue
        volume = ITK.read((path,), phase, options).volume
        assert (volume.grid.shape, volume.array.dtype) == (grid.shape, dtype)


def fuzz_nrrd(data: bytes) -> None:
    _fuzz_text(b"NRRD000" + data, "a.nrrd", parse_nrrd)


def fuzz_metaimage(data: bytes) -> None:
    _fuzz_text(data, "a.mha", parse_metaimage)


def fuzz_dicom(data: bytes) -> None:
    path = _written("a.dcm", data)
    list(read_headers([path]))
    elements = parser.parse_plain(path, parser.read_first_bytes(path))
    assert elements is None or decode_elements(elements.packed()) == elements


def quietly(target: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """A ScanError is an answer."""

    def run(data: bytes) -> None:
        with contextlib.suppress(ScanError):
            target(data)

    return run


TARGETS = {
    "dicom": fuzz_dicom,
    "nifti": fuzz_nifti,
    "nrrd": fuzz_nrrd,
    "metaimage": fuzz_metaimage,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    atheris.Setup(sys.argv, quietly(TARGETS[os.environ["FUZZ_TARGET"]]))
    atheris.Fuzz()
