"""Indexing a growing archive of tiny DICOM files: memory and time a file, fresh and again.

    python benchmarks/archive_index.py [--series 100 1000 10000] [--files 30] [--folder DIR]
        [--unread 10000 100000 1000000]

Each file is a CT header and 8 x 8 pixels, `--files` to a series and a folder, 3 series to a study;
one note lies in every tenth folder. Memory is the peak of the indexing process (ru_maxrss) and,
apart, of the largest process that helped it; time is processor time, of all of them. Every point is
a process of its own; "again" is another one, over the unchanged archive. Files are in the page
cache.

A second table is of parts that were written without files, three to a series; the last series of
each part goes on in the next one. It has what it takes to put the parts together, to find them
unchanged, and to go through all series and all files. The list of the files is made, not read, and
its time left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from meter import machine, parse, table

KEY = b"benchmark" * 3 + b"12345"
SERIES_A_STUDY, FOLDERS_A_NOTE = 3, 10
FOLDERS_A_PATIENT = 300
SLICES = 3  # files of a series without files
UID, POSITION = "1.2.826.0.1.3680043.10.9%012d", "%012.3f"

_MEASURE = """
import json, os, resource, sys
from scanloom.io.index.build import build_index
start = sum(os.times()[:4])
index = build_index([sys.argv[1]], bytes.fromhex(sys.argv[2]))
counts = index.counts()
seconds = sum(os.times()[:4]) - start
peaks = [resource.getrusage(who).ru_maxrss * 1024 for who in (0, -1)]
numbers = [seconds, index.opened, counts["found"], counts["used"], len(index.series)]
print(json.dumps(numbers + peaks))
"""


_UNREAD = """
import json, resource, sys, time
import archive_index
from scanloom.io.index import build
walk = archive_index.GeneratedWalk(sys.argv[1], int(sys.argv[2]))
start = time.process_time()
for _ in walk.folders():
    pass
listed = time.process_time()
index = build._built(archive_index.store_of(sys.argv[1]), walk, archive_index.KEY, 1)
built = time.process_time()
peaks = [resource.getrusage(0).ru_maxrss * 1024]
count = sum(not one.info.reason for one in index.series)
read = time.process_time()
peaks += [resource.getrusage(0).ru_maxrss * 1024]
used = sum(file.outcome[0] == "used" for file in index.files()) if "files" in sys.argv else 0
ended = time.process_time()
peaks += [resource.getrusage(0).ru_maxrss * 1024]
seconds = [built - listed - (listed - start), read - built, ended - read]
print(json.dumps([count, used, index.opened, len(index.catalogue.parts), seconds, peaks]))
"""


def template() -> bytes:
    """Return a file with marks where the UIDs of study, series and instance and the position go."""
    from pydicom import Dataset, dcmwrite
    from pydicom.dataset import FileMetaDataset

    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1"
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = UID % 990_001
    ds.StudyInstanceUID, ds.SeriesInstanceUID = UID % 990_002, UID % 990_003
    ds.FrameOfReferenceUID, ds.Modality = "1.2.3.4", "CT"
    ds.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    ds.ImagePositionPatient = ["0", "0", POSITION % 990_004]
    ds.ImageOrientationPatient, ds.PixelSpacing = [1, 0, 0, 0, 1, 0], ["1", "1"]
    ds.RescaleSlope, ds.RescaleIntercept, ds.RescaleType = "1", "-1024", "HU"
    ds.SamplesPerPixel, ds.PhotometricInterpretation = 1, "MONOCHROME2"
    ds.Rows = ds.Columns = 8
    ds.BitsAllocated = ds.BitsStored = 16
    ds.HighBit, ds.PixelRepresentation = 15, 1
    ds.PatientID = ds.PatientName = "benchmark"
    ds.PixelData = bytes(128)
    ds["PixelData"].VR = "OW"
    buffer = BytesIO()
    dcmwrite(buffer, ds, enforce_file_format=True)
    return buffer.getvalue()


def draw(folder: Path, first: int, last: int, files: int) -> None:
    """Write the series from `first` to before `last`."""
    whole = template()
    for series in range(first, last):
        place = folder / f"{series // FOLDERS_A_PATIENT:05d}" / f"{series:07d}"
        place.mkdir(parents=True)
        own = whole.replace((UID % 990_002).encode(), (UID % (series // SERIES_A_STUDY)).encode())
        own = own.replace((UID % 990_003).encode(), (UID % (10**9 + series)).encode())
        for k in range(files):
            data = own.replace((UID % 990_001).encode(), (UID % (series * files + k)).encode())
            data = data.replace((POSITION % 990_004).encode(), (POSITION % k).encode())
            (place / f"{k:05d}.dcm").write_bytes(data)
        if series % FOLDERS_A_NOTE == 0:
            (place / "note.txt").write_text("a note")


def measure(folder: Path) -> list[Any]:
    """Return seconds, numbers of files opened, found and used, and of series, and both peaks."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(folder), KEY.hex()],
        capture_output=True,
        text=True,
        check=True,
    )
    answer: list[Any] = json.loads(done.stdout)
    return answer


def points(folder: Path, sizes: list[int], files: int) -> Iterator[list[Any]]:
    """Let the archive grow, and yield a row of the table for each size."""
    drawn = 0
    for series in sorted(sizes):
        draw(folder / "archive", drawn, series, files)
        drawn = series
        shutil.rmtree(folder / "cache", ignore_errors=True)
        fresh, again = measure(folder / "archive"), measure(folder / "archive")
        (seconds, _, found, used, known, *peaks), second = fresh, again
        if (used, known, second[1]) != (series * files, series, 0):
            raise SystemExit(f"{used} files in {known} series are used, {second[1]} opened again")
        mib = [peak / 2**20 for peak in (*peaks, second[5])]
        yield [series, found, 1e6 * seconds / found, 1e6 * second[0] / found, *mib]


def store_of(folder: str) -> Any:
    """Return a store of parts that is no output folder's."""
    from scanloom.io.index.storage import IndexStore

    @contextmanager
    def writable(place: Path) -> Iterator[None]:
        place.mkdir(exist_ok=True)
        yield

    return IndexStore(Path(folder) / "index.parquet", writable)


class GeneratedWalk:
    """Lists an archive that is not there: a folder for each series, in parts that are full.

    The last series of a part goes on in the first folder of the next one.
    """

    def __init__(self, folder: str, count: int) -> None:
        from scanloom.io.index.parts import PART_FILES
        from scanloom.io.index.walk import list_files

        files = [e for e in list_files([f"{folder}/one"]) if e.path.endswith(".dcm")]
        self.halves = files[:SLICES], files[SLICES:]
        self._count, self._in_part = count, PART_FILES // SLICES

    def parts(self) -> Iterator[list[tuple[int, bool, str, list[Any]]]]:
        """Yield the folders of each part: series, whether it goes on in it, folder, files."""
        for start in range(0, self._count - 1, self._in_part - 1):
            numbers = range(start, min(start + self._in_part, self._count))
            yield [self._folder(n, goes_on=0 < start == n) for n in numbers]

    def _folder(self, n: int, *, goes_on: bool) -> tuple[int, bool, str, list[Any]]:
        place = f"/archive/{n // FOLDERS_A_PATIENT:05d}/{n:07d}-{goes_on:d}"
        files = [
            entry._replace(path=f"{place}/{k}", inode=n * SLICES + k)
            for k, entry in enumerate(self.halves[goes_on])
        ]
        return n, goes_on, place, files

    def folders(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the folders of all series."""
        for part in self.parts():
            yield from (each[2:] for each in part)

    def links(self, _: Any) -> list[Any]:
        """Return no links."""
        return []


def unread_parts(folder: Path, count: int) -> None:
    """Write parts of that many series without files."""
    from scanloom.io.identity import key_fingerprint, study_id
    from scanloom.io.index import parts as reading
    from scanloom.io.index.storage import Part, part_name, write_part
    from scanloom.io.index.workers import HeaderWorkers

    draw(folder / "one", 0, 1, 2 * SLICES)
    store, walk = store_of(str(folder)), GeneratedWalk(str(folder), count)
    halves = [
        reading.read_part(half, reading.KnownFiles(), KEY, HeaderWorkers(1))[0]
        for half in walk.halves
    ]
    for folders in walk.parts():
        made = Part([], [], [], [], [], [], [])
        for group, (n, goes_on, place, entries) in enumerate(folders):
            study, series = UID % (n // SERIES_A_STUDY), UID % (10**9 + n)
            first, one = len(made.entries), halves[goes_on]
            made.entries += entries
            made.infos += [info._replace(study=study, series=series) for info in one.infos]
            runs = reading.runs_of(range(first, first + SLICES))
            made.series.append(
                one.series[0]._replace(
                    id=study_id(series, KEY),  # as evenly distributed as those of series
                    study_uid=study,
                    series_uid=series,
                    files=runs,
                    path=place,
                )
            )
            made.groups.extend([group] * SLICES)
            made.keys.append(n)
        made.reasons += [""] * len(made.entries)
        made.faults += [""] * len(made.entries)
        write_part(made, store, part_name(made.entries, key_fingerprint(KEY)))


def unread_point(folder: Path, count: int) -> list[Any]:
    """Return the numbers of series and parts, us a series for each step, and peaks in MiB."""
    folder.mkdir()
    unread_parts(folder, count)
    answers = []
    for more in ([], [], ["files"]):  # new, unchanged, and unchanged with all files
        done = subprocess.run(
            [sys.executable, "-c", _UNREAD, str(folder), str(count), *more],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(json.loads(done.stdout))
    shutil.rmtree(folder)
    if any((series, opened) != (count, 0) for series, _, opened, *_ in answers):
        raise SystemExit(f"of {count} series without files, {answers} were found")
    (*_, parts, merging, peaks), (*_, again, peaks_again), (*_, whole, peaks_whole) = answers
    us = [1e6 * seconds / count for seconds in (merging[0], again[0], again[1], whole[2])]
    mib = [peak / 2**20 for peak in (peaks[0], peaks_again[1], peaks_whole[2])]
    return [count, parts, *us, *mib, again[0]]


def main() -> None:
    """Draw, index, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--series", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--files", type=int, default=30, help="Files of each series.")
    parser.add_argument("--unread", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="Where to draw; default a temporary one.")
    options = parse(parser, series=[3, 6], files=3, unread=[5])
    print(machine(), "\n")
    base = Path(tempfile.mkdtemp(dir=options.folder))
    os.environ["XDG_CACHE_HOME"] = str(base / "cache")
    start = time.perf_counter()
    try:
        rows = list(points(base, options.series, options.files))
        unread = [unread_point(base / "unread", count) for count in options.unread]
    finally:
        shutil.rmtree(base)
    head = ["series", "files", "us a file", "again, us", "MiB", "helper MiB", "again MiB"]
    print(table(head, rows))
    print(
        f"\nMemory at the largest archive is {rows[-1][4] / rows[0][4]:.2f} x that at the smallest."
    )
    head = ["series", "parts", "us a series", "again, us", "reading, us", "all files, us"]
    print(table([*head, "MiB", "again MiB", "files MiB", "again, s"], unread))
    print(f"{time.perf_counter() - start:.0f} s in all.")


if __name__ == "__main__":
    main()
