"""Whole files to be damaged: small scans of every format, drawn, nobody's."""

from __future__ import annotations

import bz2
import gzip
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import imagecodecs
import nibabel
import numpy as np
from pydicom import dcmread, dcmwrite
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)

from support.write_dicom import Coding, Geometry, Words, noise, write_series
from support.write_multiframe import Frame, item, write_enhanced, write_mosaic

SHAPE = (9, 8, 3)
JPEG = "1.2.840.10008.1.2.4."
STREAMS = {  # transfer syntax of each coding, and what encodes a plane
    "rle": ("1.2.840.10008.1.2.5", None),
    "jpeg": (JPEG + "50", lambda p: imagecodecs.jpeg8_encode((p & 255).astype(np.uint8))),
    "jpeg lossless": (JPEG + "70", imagecodecs.ljpeg_encode),
    "jpeg-ls": (JPEG + "80", imagecodecs.jpegls_encode),
    "jpeg2000": (
        JPEG + "90",
        lambda p: imagecodecs.jpeg2k_encode(p, codecformat="j2k", reversible=True),
    ),
    "htj2k": (JPEG + "201", lambda p: imagecodecs.htj2k_encode(p, reversible=True)),
}


@dataclass(frozen=True)
class Seed:
    """Files of one scan, by name; those in `targets` are the ones to damage."""

    files: dict[str, bytes]
    targets: tuple[str, ...]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@cache
def seeds(kind: str) -> tuple[Seed, ...]:
    """Return the scans of a kind: "dicom", "nifti", "nrrd", "mha" or "stream"."""
    makers = {
        "dicom": _dicom,
        "nifti": _nifti,
        "nrrd": _nrrd,
        "mha": _mha,
        "stream": _streams,
    }
    return makers[kind]()


def _series(coding: Coding, **more: object) -> Seed:
    with TemporaryDirectory() as name:
        write_series(Path(name), noise(SHAPE), coding=coding, words=Words(more=more))
        files = _files(Path(name))
    return Seed(files, tuple(files))


def _dicom() -> tuple[Seed, ...]:
    nested = [
        item(ReferencedSOPClassUID="1.2", PurposeOfReferenceCodeSequence=[item(CodeValue="1")])
    ]
    return (
        _series(Coding(), ReferencedImageSequence=nested * 2),
        _series(Coding(syntax=ImplicitVRLittleEndian), ReferencedImageSequence=nested),
        _series(Coding(allocated=8, stored=8, signed=False)),
        _rewritten(DeflatedExplicitVRLittleEndian),
        _enhanced(),
        _mosaic(),
    )


def _rewritten(syntax: str) -> Seed:
    """A series in a transfer syntax that pydicom writes by itself."""
    with TemporaryDirectory() as name:
        for path in write_series(Path(name), noise(SHAPE)):
            dataset = dcmread(path)
            dataset.file_meta.TransferSyntaxUID = syntax
            dcmwrite(path, dataset)
        files = _files(Path(name))
    return Seed(files, tuple(files))


def _enhanced() -> Seed:
    with TemporaryDirectory() as name:
        stored = noise(SHAPE)
        frames = [Frame(stored[:, :, k], Geometry(), k) for k in range(SHAPE[2])]
        write_enhanced(Path(name, "enhanced.dcm"), frames)
        return Seed(_files(Path(name)), ("enhanced.dcm",))


def _mosaic() -> Seed:
    with TemporaryDirectory() as name:
        write_mosaic(Path(name, "mosaic.dcm"), noise(SHAPE), Geometry())
        return Seed(_files(Path(name)), ("mosaic.dcm",))


def _nifti() -> tuple[Seed, ...]:
    return tuple(
        _nifti_file(name, kind, endian, fourth)
        for name, kind, endian, fourth in (
            ("a.nii", nibabel.Nifti1Image, "<", 1),
            ("a.nii", nibabel.Nifti1Image, ">", 1),
            ("a.nii.gz", nibabel.Nifti1Image, "<", 2),
            ("a.nii", nibabel.Nifti2Image, "<", 1),
            ("a.nii.gz", nibabel.Nifti2Image, ">", 1),
            ("a.hdr", nibabel.Nifti1Pair, "<", 1),
        )
    )


def _nifti_file(name: str, kind: type, endian: str, fourth: int) -> Seed:
    affine = np.diag((-0.8, -0.9, 2.5, 1))
    array = noise((*SHAPE, fourth))
    header = kind.header_class(endianness=endian)
    header.set_data_dtype(np.dtype(np.int16).newbyteorder(endian))
    image = kind(array if fourth > 1 else array[..., 0], affine, header)
    image.set_qform(affine, 1)
    image.set_sform(affine, 1)
    with TemporaryDirectory() as folder:
        image.to_filename(Path(folder, name))
        files = _files(Path(folder))
    return Seed(files, tuple(files))


def _text_file(name: str, lines: list[str], data: bytes, data_name: str | None = None) -> Seed:
    head = "\n".join(lines).encode()
    if data_name is None:
        return Seed({name: head + data}, (name,))
    return Seed({name: head, data_name: data}, (name, data_name))


def _nrrd() -> tuple[Seed, ...]:
    def seed(encoding: str, data: bytes, detached: str | None = None, more: str = "") -> Seed:
        lines = [
            "NRRD0004",
            "# drawn",
            "type: short",
            "dimension: 3",
            "space: left-posterior-superior",
            f"sizes: {' '.join(map(str, SHAPE))}",
            "space directions: (0.8,0,0) (0,0.9,0) (0,0.1,2.5)",
            "kinds: domain domain domain",
            "endian: little",
            f"encoding: {encoding}",
            "space origin: (11,-23,47)",
            *(() if detached is None else (f"data file: {detached}", "byte skip: -1")),
            *filter(None, [more]),
            "note:=any text",
            "",
            "",
        ]
        name = "a.nrrd" if detached is None else "a.nhdr"
        return _text_file(name, lines, data, detached)

    raw = noise(SHAPE).tobytes("F")
    text = " ".join(map(str, noise(SHAPE).ravel("F"))).encode()
    return (
        seed("raw", raw),
        seed("gzip", gzip.compress(raw, mtime=0)),
        seed("bzip2", bz2.compress(raw)),
        seed("ascii", text),
        seed("raw", raw, "a.raw"),
        seed(
            "gzip", gzip.compress(raw, mtime=0), more="measurement frame: (1,0,0) (0,1,0) (0,0,1)"
        ),
    )


def _mha() -> tuple[Seed, ...]:
    def seed(data: bytes, file: str | None = None, **more: object) -> Seed:
        fields = {
            "ObjectType": "Image",
            "NDims": 3,
            "BinaryData": True,
            "BinaryDataByteOrderMSB": False,
            "CompressedData": False,
            "TransformMatrix": "1 0 0 0 0.8 0.6 0 -0.6 0.8",
            "Offset": "11 -23 47",
            "CenterOfRotation": "0 0 0",
            "AnatomicalOrientation": "RAI",
            "ElementSpacing": "0.8 0.9 2.5",
            "DimSize": " ".join(map(str, SHAPE)),
            "ElementType": "MET_SHORT",
            **more,
            "ElementDataFile": file or "LOCAL",
        }
        lines = [f"{name} = {value}" for name, value in fields.items()]
        return _text_file("a.mhd" if file else "a.mha", [*lines, ""], data, file)

    raw = noise(SHAPE).tobytes("F")
    packed = zlib.compress(raw)
    text = " ".join(map(str, noise(SHAPE).ravel("F"))).encode()
    return (
        seed(raw),
        seed(packed, CompressedData=True, CompressedDataSize=len(packed)),
        seed(packed, CompressedData=True),
        seed(gzip.compress(raw, mtime=0), CompressedData=True),
        seed(text, BinaryData=False),
        seed(raw, "a.raw", HeaderSize=-1),
    )


def _streams() -> tuple[Seed, ...]:
    return tuple(_stream(name) for name in STREAMS)


def _stream(name: str) -> Seed:
    """A series whose planes are compressed; the frame of one is to be damaged."""
    syntax, encode = STREAMS[name]
    small = name == "jpeg"
    coding = Coding(allocated=8 if small else 16, stored=8 if small else 16, signed=False)
    with TemporaryDirectory() as folder:
        for path in write_series(Path(folder), noise((24, 20, 3)) % 256 * 3, coding=coding):
            dataset = dcmread(path)
            pixels = dataset.pixel_array
            if encode is None:
                dataset.compress(syntax, generate_instance_uid=False)
            else:
                dataset.PixelData = encapsulate([encode(np.ascontiguousarray(pixels))])
                dataset["PixelData"].VR = "OB"
                dataset["PixelData"].is_undefined_length = True
                dataset.file_meta.TransferSyntaxUID = syntax
            dcmwrite(path, dataset)
        files = _files(Path(folder))
    return Seed(files, tuple(files))


def good_neighbour(folder: Path) -> None:
    """Write a series that is whole and lies beside the damaged ones."""
    attributes = Words(name="neighbour", study="neighbour")
    coding = Coding(syntax=ExplicitVRLittleEndian)
    write_series(folder, noise((7, 6, 4), seed=5), coding=coding, words=attributes)
