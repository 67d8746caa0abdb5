"""Read damaged scans in a process of its own, so that a crash or a hang is seen and named.

    python -m fuzz.worker KIND FIRST COUNT FOLDER

A line of JSON for every scan: {"number", "code"}: a reason's code, or "" where it was read. The
number of the scan that is being read stands in FOLDER/now.
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np

from fuzz.mutate import damaged
from fuzz.seeds import good_neighbour
from scanloom.core import Reason, ScanError
from scanloom.io.index.build import build_index
from scanloom.io.index.series import find_series
from scanloom.io.read import read_scan
from support.write_dicom import noise

DEADLINE = 300  # s a scan: its own deadlines are shorter
BATCH = 20  # scans that lie in one folder


def read_all(folder: Path) -> str:
    """Read each series of a folder; return the code of the last reason."""
    code = ""
    try:
        all_series = find_series(folder)
    except ScanError as error:
        return error.code
    for series in all_series:
        for phase in (None, 0):
            try:
                read_scan(series, phase=phase)
                break
            except ScanError as error:
                if error.reason is Reason.INTERNAL:  # a fault, in a child process
                    raise
                code = error.code
    return code


def check_batch(folder: Path, files: int) -> str | None:
    """Return the fault in the counts of a batch or in its undamaged series; None without one."""
    counts = build_index([folder], bytes(32), processes=1).counts()
    if not counts.pop("found") == sum(counts.values()) == files:
        return f"{files} files, counted as {counts}"
    for series in find_series(folder):
        if series.files[0].is_relative_to(folder / "neighbour"):
            volume = read_scan(series).volume
            if np.array_equal(volume.array, noise((7, 6, 4), seed=5).astype(np.int16) - 1024):
                return None
    return "the good neighbour was not read"


def run(kind: str, first: int, count: int, folder: Path) -> None:
    """Go through the scans of these numbers."""
    warnings.simplefilter("ignore")
    for begin in range(first, first + count, BATCH):
        batch = folder / str(begin)
        good_neighbour(batch / "neighbour")
        for number in range(begin, min(begin + BATCH, first + count)):
            (folder / "now").write_text(str(number))
            faulthandler.dump_traceback_later(DEADLINE, exit=True)
            scan = batch / str(number)
            scan.mkdir()
            for name, data in damaged(kind, number).files.items():
                (scan / name).write_bytes(data)
            report(number, lambda scan=scan: {"code": read_all(scan)})
        faulthandler.dump_traceback_later(BATCH * DEADLINE, exit=True)
        files = sum(path.is_file() for path in batch.rglob("*"))
        report(begin, lambda batch=batch, files=files: {"batch": check_batch(batch, files)})
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(batch)


def report(number: int, work) -> None:
    """Print the result of the work, or its unexpected exception."""
    try:
        reported = work()
    except Exception:  # noqa: BLE001 - that is what is looked for
        reported = {"error": traceback.format_exc()}
    print(json.dumps({"number": number, **reported}), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
