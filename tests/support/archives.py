"""A messy archive for tests, with the expected outcome of each file."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path

import nibabel
import numpy as np
from pydicom import DataElement, Dataset, config, dcmread, dcmwrite
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

from support.write_dicom import Words, noise, plane, uid, write_series

USED = ("used", "")
Outcomes = dict[str, tuple[str, str]]

SHAPE = (12, 10, 5)
STRANGE = ["two\nlines", "grüße ☢", "-rf", "[a-z]*", "a\\b", "x" * 200, os.fsdecode(b"no \xff utf")]
"""Names that a file system takes, and that programs stumble on."""


def write_archive(root: Path) -> Outcomes:
    """Draw the archive; return outcome and reason code of each file, by its path below the root."""
    expected: Outcomes = {}
    for write in (_studies, _packed, _disc, _bids, _damaged, _no_volumes, _links, _volumes):
        for path, outcome in write(root).items():
            expected[os.path.relpath(path, root)] = outcome
    return expected


def series(
    folder: Path, name: str, study: str = "one", count: int = 5, **more: object
) -> list[Path]:
    """Write a series whose files have neither suffix nor order."""
    attributes = Words(
        name=name, study=study, modality=str(more.pop("modality", "CT")), more=dict(more)
    )
    paths = write_series(
        folder / f".{name}", noise((*SHAPE[:2], count), seed=count), words=attributes
    )
    moved = [path.rename(folder / f"{name}{path.stem}") for path in paths]
    (folder / f".{name}").rmdir()
    return moved


def _studies(root: Path) -> Outcomes:
    """Return several series and studies in one folder, one of them in two folders too."""
    mixed, far = root / "mixed", root / "far" / "away"
    mixed.mkdir()
    far.mkdir(parents=True)
    used = series(mixed, "a") + series(mixed, "b", modality="MR", count=4)
    used += series(mixed, "c", study="two", count=6)
    split = series(mixed, "d", study="two", count=7)
    used += [split[0].rename(far / "slice"), *split[1:]]
    strange = series(mixed, "e", count=len(STRANGE))
    subfolder = root / STRANGE[0] / STRANGE[1]
    subfolder.mkdir(parents=True)
    used += [p.rename(subfolder / name) for p, name in zip(strange, STRANGE, strict=True)]
    return dict.fromkeys(used, USED)


def _packed(root: Path) -> Outcomes:
    folder = root / "packed"
    folder.mkdir()
    outcomes: Outcomes = {}
    for path in series(folder, "gz", count=4):
        packed = path.with_name(path.name + ".dcm.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        outcomes[str(packed)] = USED
    write_zip(folder / "inside.zip")
    outcomes[str(folder / "inside.zip")] = ("skipped", "NESTED_ARCHIVE")
    text = folder / "notes.txt.gz"
    text.write_bytes(gzip.compress(b"no image " * 100))
    return outcomes | {str(text): ("skipped", "NOT_AN_IMAGE")}


def write_zip(path: Path, name: str = "zipped") -> list[str]:
    """Write a zip archive of a series and a text; return the names of the slices."""
    folder = path.with_name(f".{name}")
    folder.mkdir()
    members = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for n, file in enumerate(series(folder, name, count=4)):
            members.append(f"deep/er/{'' if n else '../../'}{file.name}")
            pack.writestr(members[-1], file.read_bytes())
        pack.writestr("deep/read me", "no image")
    shutil.rmtree(folder)
    return members


def _disc(root: Path) -> Outcomes:
    disc = root / "disc"
    (disc / "IMAGES").mkdir(parents=True)
    paths = series(disc / "IMAGES", "DISC", count=4)
    write_dicomdir(disc / "DICOMDIR", [("IMAGES", path.name) for path in paths])
    return {str(disc / "DICOMDIR"): ("skipped", "NOT_AN_IMAGE")} | {str(p): USED for p in paths}


def write_dicomdir(path: Path, names: list[tuple[str, ...]]) -> None:
    """Write a directory of a disc that names these files."""
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.1.3.10"
    ds.file_meta.MediaStorageSOPInstanceUID = uid("disc")
    ds.FileSetID = "DISC"
    records = []
    for components in names:
        record = Dataset()
        record.DirectoryRecordType = "IMAGE"
        names_of = DataElement(
            "ReferencedFileID", "CS", list(components), validation_mode=config.IGNORE
        )
        record.add(names_of)
        records.append(record)
    ds.DirectoryRecordSequence = records
    with warnings.catch_warnings():  # of names that lead out of the disc
        warnings.simplefilter("ignore")
        dcmwrite(path, ds, enforce_file_format=True)


def _bids(root: Path) -> Outcomes:
    bids = root / "bids"
    scan, mask = bids / "sub-01/anat/sub-01_T1w.nii.gz", bids / "derivatives/sub-01_T1w.nii.gz"
    for path in (scan, mask):
        path.parent.mkdir(parents=True)
        nifti(path)
    description = bids / "dataset_description.json"
    description.write_text(json.dumps({"Name": "x", "BIDSVersion": "1.8.0"}))
    left_out = ("skipped", "LEFT_OUT")
    return {str(scan): USED, str(mask): left_out, str(description): ("skipped", "NOT_AN_IMAGE")}


def nifti(path: Path, seed: int = 0) -> None:
    """Write a volume that says where it lies."""
    kind = nibabel.Nifti1Pair if path.suffix == ".hdr" else nibabel.Nifti1Image
    image = kind(noise(seed=seed), np.diag([1.0, 2.0, 3.0, 1.0]))
    image.header.set_qform(image.affine, 1)
    image.header.set_sform(image.affine, 1)
    image.to_filename(path)


def _damaged(root: Path) -> Outcomes:
    folder = root / "damaged"
    folder.mkdir()
    outcomes: Outcomes = {}
    for n, (name, share, code) in enumerate((("cut", 0.97, "TRUNCATED"), ("gap", 0, "SLICE_GAP"))):
        paths = series(folder, name, count=6 + n)
        data = paths[2].read_bytes()
        paths[2].write_bytes(data[: int(len(data) * share)])
        for path in paths:
            outcomes[str(path)] = ("failed", code)
        if not share:
            outcomes[str(paths[2])] = ("skipped", "NOT_AN_IMAGE")  # an empty file
    broken = series(folder, "broken", count=1)[0]
    data = broken.read_bytes()
    broken.write_bytes(data[:132] + b"\x02\x00\x00\x00ZZ" + data[138:])
    (folder / "broken.nii.gz").write_bytes(b"\x1f\x8bno gzip" * 9)
    (folder / "broken.nrrd").write_text("no NRRD")
    names = ("broken.nii.gz", "broken.nrrd")
    outcomes |= {str(folder / name): ("failed", "DAMAGED") for name in names}
    return outcomes | {str(broken): ("failed", "DAMAGED")}


def _no_volumes(root: Path) -> Outcomes:
    folder = root / "others"
    folder.mkdir()
    outcomes: Outcomes = {}
    kinds: dict[str, dict[str, object]] = {
        "LOCALIZER": {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"]},
        "SECONDARY_CAPTURE": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.7"},
        "PROJECTION": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.1.1"},
        "COLOR": {"PhotometricInterpretation": "RGB", "SamplesPerPixel": 3},
        "NOT_AN_IMAGE": {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.11"},
        "DERIVED": {"ImageType": ["DERIVED", "SECONDARY", "MPR"]},
    }
    for code, more in kinds.items():
        for path in series(folder, code, **more):
            outcomes[str(path)] = ("skipped", code)
    for path in series(folder, "few", count=2):
        outcomes[str(path)] = ("failed", "TOO_FEW_SLICES")
    scouted = series(folder, "scouted")
    scout = dcmread(scouted[0])
    scout.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    scout.SOPInstanceUID = scout.file_meta.MediaStorageSOPInstanceUID = uid("scout")
    dcmwrite(folder / "scout", scout)
    outcomes[str(folder / "scout")] = ("skipped", "LOCALIZER")
    (folder / "Thumbs.db").write_bytes(bytes(300))
    (folder / "empty").touch()
    names = ("Thumbs.db", "empty")
    outcomes |= {str(folder / name): ("skipped", "NOT_AN_IMAGE") for name in names}
    return outcomes | dict.fromkeys(map(str, scouted), USED)


def _links(root: Path) -> Outcomes:
    folder = root / "links"
    folder.mkdir()
    (folder / "loop").symlink_to(root, target_is_directory=True)
    (folder / "self").symlink_to("self")
    target = sorted((root / "mixed").iterdir())[0]
    (folder / "again").symlink_to(target)
    (folder / "nowhere").symlink_to("absent")
    os.mkfifo(folder / "pipe")  # opening it would wait for ever
    return {
        str(folder / "again"): ("skipped", "DUPLICATE_LINK"),
        str(folder / "nowhere"): ("failed", "UNREADABLE"),
        str(folder / "self"): ("failed", "UNREADABLE"),
        str(folder / "pipe"): ("skipped", "NOT_AN_IMAGE"),
    }


def _volumes(root: Path) -> Outcomes:
    folder = root / "volumes"
    folder.mkdir()
    geometry = plane("sagittal")
    nifti(folder / "plain.nii", seed=1)
    image = nibabel.Nifti1Pair(noise(seed=2), geometry.affine)
    image.header.set_sform(geometry.affine, 1)
    image.to_filename(folder / "pair.hdr")
    (folder / "scan.mhd").write_text(
        "ObjectType = Image\nNDims = 3\nDimSize = 4 5 6\nElementType = MET_UCHAR\n"
        "TransformMatrix = 1 0 0 0 1 0 0 0 1\nOffset = 0 0 0\nElementSpacing = 1 1 1\n"
        "BinaryData = True\n"
        "ElementDataFile = scan.raw\n"
    )
    (folder / "scan.raw").write_bytes(bytes(range(120)))
    (folder / "alone.raw").write_bytes(bytes(range(120)))
    names = ("plain.nii", "pair.hdr", "pair.img", "scan.mhd", "scan.raw")
    outcomes = dict.fromkeys((str(folder / name) for name in names), USED)
    return outcomes | {str(folder / "alone.raw"): ("skipped", "NOT_AN_IMAGE")}
