"""Indexing archives: scanloom beside a loop of pydicom, and a second time.

    python benchmarks/index.py [--files 20000] [--rounds 3] [--folder DIR]

Drawn files: a CT header of about 100 elements with sequences, each file with UIDs, position and
number of its own, 300 a series. Rounds go through all in turn in one run, on warm files; medians.
Processor seconds are those of all processes: on a busy machine their ratio says more than rates do.
Memory, and growth with the archive: `archive_index.py`.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from meter import machine, parse

SERIES = 300
CORES = len(os.sched_getaffinity(0))
UID, POSITION, NUMBER = b"1.2.826.0.1.3680043.10.9%014d", b"%012.3f", b"%08d"
KEY = b"benchmark" * 3 + b"12345"


def template(syntax: str) -> bytes:
    """Return a file with marks where series, instance, position and number go."""
    from pydicom import Dataset, dcmwrite
    from pydicom.dataset import FileMetaDataset

    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = syntax
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = marks(UID, 1)
    ds.ImageType, ds.Modality = ["ORIGINAL", "PRIMARY", "AXIAL"], "CT"
    ds.StudyInstanceUID, ds.SeriesInstanceUID = marks(UID, 2), marks(UID, 3)
    ds.FrameOfReferenceUID = "1.2.3.4"
    ds.InstanceNumber = marks(NUMBER, 4)
    ds.ImagePositionPatient = ["-250", "-250", marks(POSITION, 5)]
    ds.ImageOrientationPatient, ds.PixelSpacing = [1, 0, 0, 0, 1, 0], ["0.9765625", "0.9765625"]
    ds.RescaleSlope, ds.RescaleIntercept, ds.RescaleType = "1", "-1024", "HU"
    ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
    ds.Rows = ds.Columns = 16
    ds.BitsAllocated = ds.BitsStored = 16
    ds.HighBit, ds.PixelRepresentation = 15, 1
    for keyword in ["Study", "Series", "Acquisition", "Content"]:
        setattr(ds, f"{keyword}Date", "20250102")
        setattr(ds, f"{keyword}Time", "101500.000000")
    for keyword in [
        "Manufacturer",
        "InstitutionName",
        "StationName",
        "StudyDescription",
        "SeriesDescription",
        "ManufacturerModelName",
        "PatientName",
        "PatientID",
        "DeviceSerialNumber",
        "SoftwareVersions",
        "ProtocolName",
        "AccessionNumber",
        "ReferringPhysicianName",
        "PatientComments",
        "StudyID",
        "OperatorsName",
        "PerformingPhysicianName",
        "RequestingPhysician",
        "AdmissionID",
    ]:
        setattr(ds, keyword, "scanloom")
    ds.FilterType = ds.ScanOptions = "SCANLOOM"
    for keyword in [
        "SliceThickness",
        "KVP",
        "DataCollectionDiameter",
        "ReconstructionDiameter",
        "DistanceSourceToDetector",
        "DistanceSourceToPatient",
        "GantryDetectorTilt",
        "TableHeight",
        "SliceLocation",
        "PatientSize",
        "PatientWeight",
        "FocalSpots",
        "SingleCollimationWidth",
        "TotalCollimationWidth",
        "TableSpeed",
        "SpiralPitchFactor",
    ]:
        setattr(ds, keyword, 1)
    for keyword in [
        "SeriesNumber",
        "AcquisitionNumber",
        "ExposureTime",
        "XRayTubeCurrent",
        "Exposure",
        "GeneratorPower",
    ]:
        setattr(ds, keyword, "1")
    ds.BodyPartExamined, ds.PatientSex, ds.PatientPosition = "CHEST", "O", "HFS"
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = "1", "SCT", "scanloom"
    for keyword in [
        "ProcedureCodeSequence",
        "RequestAttributesSequence",
        "ReferencedStudySequence",
        "AnatomicRegionSequence",
        "PerformedProtocolCodeSequence",
    ]:
        setattr(ds, keyword, [item])
    block = ds.private_block(0x0009, "SCANLOOM BENCHMARK", create=True)
    for n in range(1, 30):
        block.add_new(n, "LO", f"private {n}")
    ds.PixelData = bytes(512)
    ds["PixelData"].VR = "OW"
    buffer = BytesIO()
    dcmwrite(buffer, ds, enforce_file_format=True)
    return buffer.getvalue()


def marks(form: bytes, number: int) -> str:
    """Return text of the length of `form`, which stands nowhere else."""
    return (form % (990_000 + number)).decode()


def draw(folder: Path, count: int, kind: str) -> None:
    """Write that many files, 300 to a series and a folder."""
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    whole = template(
        {"implicit": ImplicitVRLittleEndian, "big endian": ExplicitVRBigEndian}.get(
            kind, ExplicitVRLittleEndian
        )
    )
    for n in range(count):
        series, k = divmod(n, SERIES)
        series_folder = folder / f"{series:05d}"
        if k == 0:
            series_folder.mkdir(parents=True)
        data = whole
        for form, mark, value in (
            (UID, 1, n),
            (UID, 2, series // 3),
            (UID, 3, 1_000_000 + series),
            (NUMBER, 4, k),
            (POSITION, 5, k * 1.25),
        ):
            data = data.replace(marks(form, mark).encode(), form % value)
        (series_folder / f"IM{k:05d}").write_bytes(shaped(data, kind))


def shaped(data: bytes, kind: str) -> bytes:
    """Return the file as this kind has it."""
    if kind == "no preamble":
        return data[132:]
    if kind == "deflated":
        return deflated(data)
    return data


def deflated(data: bytes) -> bytes:
    """Return the file with its data set deflated."""
    from pydicom import dcmread, dcmwrite

    ds = dcmread(BytesIO(data))
    ds.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1.99"
    buffer = BytesIO()
    dcmwrite(buffer, ds, enforce_file_format=True)
    return buffer.getvalue()


def by_pydicom(folder: Path) -> int:
    """Read one file after the other, as scripts do."""
    from pydicom import dcmread

    return sum(1 for path in files(folder) if dcmread(path, stop_before_pixels=True, force=True))


def by_scanloom(folder: Path) -> int:
    """Index without having seen any of it."""
    from scanloom.io.index.build import build_index, cached_index_path

    shutil.rmtree(cached_index_path([folder]).parent, ignore_errors=True)
    counts = build_index([folder], KEY).counts()
    assert counts["used"] == counts["found"], counts
    return counts["found"]


def again(folder: Path) -> int:
    """Index an unchanged folder again."""
    from scanloom.io.index.build import build_index

    index = build_index([folder], KEY)
    assert index.opened == 0
    return index.counts()["found"]


def files(folder: Path) -> Iterator[str]:
    """Give all files below a folder."""
    for root, _, names in os.walk(folder):
        yield from (f"{root}/{name}" for name in names)


def spent() -> float:
    """Return processor seconds of this process and of those that ended."""
    used = [
        resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def rate(work: Callable[[Path], int], folder: Path) -> tuple[float, float]:
    """Return files a second, and files a processor second."""
    start, before = time.perf_counter(), spent()
    count = work(folder)
    return count / (time.perf_counter() - start), count / (spent() - before)


def compare(folder: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Return median rates of all ways, in turn."""
    ways: tuple[Callable[[Path], int], ...] = (by_pydicom, by_scanloom, again)
    rates: dict[str, list[tuple[float, float]]] = {way.__name__: [] for way in ways}
    for way in ways:
        way(folder)  # warm
    for _ in range(rounds):
        for way in ways:
            rates[way.__name__].append(rate(way, folder))
    return {
        name: (statistics.median(v for v, _ in values), statistics.median(v for _, v in values))
        for name, values in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=20_000, help="Of each plain kind.")
    parser.add_argument("--others", type=int, default=6_000, help="Files of each other kind.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Where to draw files; default a temporary one.")
    parser.add_argument("--real", type=Path, action="append", default=[], help="Real folders too.")
    options = parse(parser, files=300, others=30, rounds=1)
    print(machine())
    base = Path(tempfile.mkdtemp(dir=options.folder))
    os.environ["XDG_CACHE_HOME"] = str(base / "cache")
    try:
        measure(base, options)
    finally:
        shutil.rmtree(base)


def measure(base: Path, options: Any) -> None:
    """Print all figures."""
    print(
        f"{'':28}{'pydicom /s':>12}{'scanloom /s':>12}{'ratio':>8}{'x cores':>9}{'again us':>10}"
        f"{'cpu ratio':>11}{'again cpu us':>14}"
    )
    kinds = {"explicit": options.files, "implicit": options.files}
    kinds |= dict.fromkeys(("deflated", "big endian", "no preamble"), options.others)
    for kind, count in kinds.items():
        draw(base / kind, count, kind)
        line(kind, compare(base / kind, options.rounds))
        shutil.rmtree(base / kind)
    for folder in options.real:
        line(folder.name, compare(copies(folder, base / "real", options.others), options.rounds))
        shutil.rmtree(base / "real")


def copies(source: Path, folder: Path, count: int) -> Path:
    """Copy the files of a folder again and again, into folders of their own."""
    names = [p for p in sorted(source.iterdir()) if p.is_file() and p.suffix != ".json"]
    for n in range(max(count // len(names), 1)):
        target = folder / f"{n:05d}"
        target.mkdir(parents=True)
        for name in names:
            shutil.copyfile(name, target / name.name)
    return folder


def line(name: str, rates: dict[str, tuple[float, float]]) -> None:
    """Print a line of the first table."""
    theirs, ours, second = (rates[k] for k in ("by_pydicom", "by_scanloom", "again"))
    times = ours[0] / theirs[0]
    print(
        f"{name:28}{theirs[0]:12.0f}{ours[0]:12.0f}{times:8.1f}{times / CORES:9.2f}"
        f"{1e6 / second[0]:10.1f}{ours[1] / theirs[1]:11.1f}{1e6 / second[1]:14.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
