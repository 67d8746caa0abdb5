"""Scans whose every word is a canary: text fields, descriptions, names of files and folders.

Each scan lies in a folder of a plain number, which the command line gets. Names of series, files
and folders below it are a second canary, since a terminal shows them to whoever has the scans.
Messages contain no other; files of a result, tables and `--json` contain none.
"""

from __future__ import annotations

import gzip
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
import numpy as np
import pyarrow.parquet as pq
import SimpleITK as sitk
from PIL import Image
from pydicom import Dataset, config
from pydicom.datadict import DicomDictionary
from pydicom.uid import RLELossless

from support.write_dicom import Coding, Words, noise, write_series

CANARY = "CANARY^ZoëGañdía"
SHOWN = "MAGPIE Döla"
"""Name of a series, file or folder: a terminal shows it to who has the scans, nothing else does."""
PATIENT_BIRDS = ("CANARY", "ZoëGañdía")
BIRDS = (*PATIENT_BIRDS, "MAGPIE", "Döla")
NUMBER = "31415926"
"""Stands for a number until the file is written; then canary takes its place."""

TEXT = ("AE", "LO", "LT", "PN", "SH", "ST", "UC", "UR", "UT")
CODES = ("BodyPartExamined", "PatientSex", "ScanOptions", "Laterality", "PatientPosition")
NUMBERS = ("KVP", "PatientWeight", "SliceLocation", "StudyDate", "StudyTime", "InstanceNumber")
DECIDES = ("RescaleType",)

Scan = Callable[[Path], None]


def fill(k: int, ds: Dataset) -> None:
    """Write the canary into every text field there is, a private one, and one in a sequence."""
    ds.SpecificCharacterSet = "ISO_IR 192"
    for tag, (vr, _, _, _, keyword) in DicomDictionary.items():
        if vr in TEXT and tag >> 16 > 2 and keyword and keyword not in DECIDES:
            setattr(ds, keyword, CANARY)
    ds.SeriesDescription = SHOWN
    for keyword in CODES:
        setattr(ds, keyword, "CANARY")
    ds.private_block(0x0099, CANARY, create=True).add_new(1, "LO", CANARY)
    item = Dataset()
    item.CodeMeaning = CANARY
    ds.RequestAttributesSequence = [item]


def fill_latin(k: int, ds: Dataset) -> None:
    fill(k, ds)
    ds.SpecificCharacterSet = "ISO_IR 100"


def fill_numbers(k: int, ds: Dataset) -> None:
    fill(k, ds)
    for keyword in NUMBERS:
        setattr(ds, keyword, NUMBER)


@contextmanager
def unchecked() -> Iterator[None]:
    """Let pydicom write values that the standard forbids, without warnings."""
    modes = ("reading_validation_mode", "writing_validation_mode")
    before = {mode: getattr(config.settings, mode) for mode in modes}
    try:
        for mode in modes:
            setattr(config.settings, mode, config.IGNORE)
        yield
    finally:
        for mode, value in before.items():
            setattr(config.settings, mode, value)


def slices(folder: Path, modality: str = "CT", name: str = "", **more: object) -> list[Path]:
    """Write a series below `folder`; all its names are canaries."""
    attributes = Words(modality, f"{folder.name}{name}", study=folder.name)
    below = folder / f"{SHOWN} {name}"
    edit = more.pop("edit", fill)
    with unchecked():
        paths = write_series(below, noise(), words=attributes, edit=edit, **more)
    return [path.rename(path.with_name(f"{SHOWN}_{path.name}")) for path in paths]


def plain(folder: Path) -> None:
    slices(folder)


def compressed(folder: Path) -> None:
    slices(folder, edit=fill_latin, coding=Coding(syntax=RLELossless))


def truncated(folder: Path) -> None:
    path = slices(folder)[2]
    path.write_bytes(path.read_bytes()[:-300])


def cut_in_the_header(folder: Path) -> None:
    path = slices(folder)[2]
    path.write_bytes(path.read_bytes()[:3000])


def cut_stream(folder: Path) -> None:
    for path in slices(folder, coding=Coding(syntax=RLELossless)):
        path.write_bytes(path.read_bytes()[:-40])


def broken_lengths(folder: Path) -> None:
    """Each header ends in an element that claims more than there is, in a sequence."""
    for path in slices(folder):
        data = path.read_bytes()
        at = data.rindex(CANARY.encode())
        path.write_bytes(data[: at - 2] + b"\xff\x7f" + data[at:])


def gap(folder: Path) -> None:
    slices(folder)[2].unlink()


def magnetic(folder: Path) -> None:
    slices(folder, "MR")


def several(folder: Path) -> None:
    slices(folder, name="a")
    slices(folder, name="b")


def unknown_syntax(folder: Path) -> None:
    for path in slices(folder, coding=Coding(syntax=RLELossless)):
        rle, canary = b"1.2.840.10008.1.2.5\0", b"1.2.CANARY.1.2.5.666"
        path.write_bytes(path.read_bytes().replace(rle, canary))


def words_for_numbers(folder: Path) -> None:
    for path in slices(folder, edit=fill_numbers):
        path.write_bytes(path.read_bytes().replace(NUMBER.encode(), b"CANARY^1"))


def without_uids(folder: Path) -> None:
    def edit(k: int, ds: Dataset) -> None:
        fill(k, ds)
        ds.StudyInstanceUID = ds.SeriesInstanceUID = ds.FrameOfReferenceUID = ""

    slices(folder, edit=edit)


def words_for_uids(folder: Path) -> None:
    def edit(k: int, ds: Dataset) -> None:
        fill(k, ds)
        ds.StudyInstanceUID = ds.SeriesInstanceUID = ds.FrameOfReferenceUID = NUMBER

    for path in slices(folder, edit=edit):
        path.write_bytes(path.read_bytes().replace(NUMBER.encode(), b"CANARY^1"))


def capture(folder: Path) -> None:
    def edit(k: int, ds: Dataset) -> None:
        fill(k, ds)
        ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"

    slices(folder, edit=edit)


def no_images(folder: Path) -> None:
    (folder / SHOWN).mkdir(parents=True)
    (folder / SHOWN / f"{SHOWN}.txt").write_text(CANARY)
    (folder / SHOWN / f"{SHOWN}.dcm").write_text(CANARY * 100)


def nifti(folder: Path, code: int = 1, suffix: str = ".nii.gz", volumes: int = 1) -> Path:
    folder.mkdir(parents=True)
    array = noise() if volumes == 1 else np.stack([noise(seed=n) for n in range(volumes)], 3)
    array = array - 1024  # HU
    image = nib.Nifti1Image(array, np.diag([2.0, 2.0, 3.0, 1.0]))
    image.set_sform(image.affine, code)
    image.set_qform(image.affine, code)
    for field in ("descrip", "aux_file", "intent_name", "db_name"):
        image.header[field] = CANARY.encode()
    for code, content in [("comment", CANARY), ("afni", f"<xml>{CANARY}</xml>")]:
        image.header.extensions.append(nib.nifti1.Nifti1Extension(code, content.encode()))
    path = folder / f"{SHOWN}{suffix}"
    nib.save(image, path)
    return path


def nifti_image(folder: Path) -> None:
    nifti(folder)


def nifti_without_forms(folder: Path) -> None:
    nifti(folder, code=0)


def nifti_of_times(folder: Path) -> None:
    nifti(folder, volumes=3)


def nifti_cut(folder: Path) -> None:
    path = nifti(folder)
    path.write_bytes(path.read_bytes()[:-200])


def nifti_of_words(folder: Path) -> None:
    path = nifti(folder, suffix=".nii")
    data = bytearray(path.read_bytes())
    data[40:56] = b"CANARY^Zoe CANAR"  # dim
    path.write_bytes(data)


def itk(folder: Path, suffix: str) -> Path:
    folder.mkdir(parents=True)
    image = sitk.GetImageFromArray((noise() - 1024).transpose(2, 1, 0))
    for key in ("Comment", "PatientName", "Name", "Modality"):
        image.SetMetaData(key, CANARY)
    path = folder / f"{SHOWN}{suffix}"
    sitk.WriteImage(image, str(path))
    assert any(name in path.read_bytes() for name in (b"CANARY",))
    return path


def nrrd(folder: Path) -> None:
    itk(folder, ".nrrd")


def mha(folder: Path) -> None:
    itk(folder, ".mha")


def nrrd_of_words(folder: Path) -> None:
    path = itk(folder, ".nrrd")
    path.write_bytes(path.read_bytes().replace(b"left-posterior-superior", b"CANARY-space"))


def mha_of_words(folder: Path) -> None:
    path = itk(folder, ".mha")
    path.write_bytes(path.read_bytes().replace(b"MET_SHORT", b"CANARY_ST"))


def mha_cut(folder: Path) -> None:
    path = itk(folder, ".mha")
    path.write_bytes(path.read_bytes()[:-100])


def detached(folder: Path) -> None:
    path = itk(folder, ".mhd")
    next(path.parent.glob("*raw")).unlink()


USED: tuple[Scan, ...] = (plain, compressed, without_uids, nifti_image, nrrd, mha)
"""Scans that give a result."""
REFUSED: tuple[Scan, ...] = (
    *(truncated, cut_in_the_header, cut_stream, broken_lengths, gap, magnetic, several),
    *(unknown_syntax, words_for_numbers, words_for_uids, capture, no_images),
    *(nifti_without_forms, nifti_of_times, nifti_cut, nifti_of_words),
    *(nrrd_of_words, mha_of_words, mha_cut, detached),
)
"""Scans that may give none, each for a reason of its own."""


def birds(content: bytes, kinds: Sequence[str] = BIRDS) -> list[str]:
    """Return the canaries that are in some bytes, in whatever encoding."""
    low = content.lower()
    forms = [(bird, form) for bird in kinds for form in {bird, unicodedata.normalize("NFD", bird)}]
    return [
        f"{bird} as {code}"
        for bird, form in forms
        for code in ("utf-8", "latin-1", "utf-16-le", "utf-16-be")
        if form.lower().encode(code, "replace") in low
        and "?" not in form.encode(code, "replace").decode(code)
    ]


def contents(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, and the content packed in them."""
    content = path.read_bytes()
    yield content
    if path.suffix == ".gz":
        yield gzip.decompress(content)
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.load()
            yield repr(image.info).encode()
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        yield repr((table.to_pydict(), table.schema.metadata)).encode()
