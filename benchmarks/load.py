"""300 uncompressed CT slices into an int16 volume in HU: scanloom beside plain ways to do it.

    python benchmarks/load.py [--rounds 5]

Rounds go through all ways in turn, in one warm process; medians, and ratios to "pydicom headers +
readinto": the least that a program can do that reads headers by pydicom. The aim is 1.5 at most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from meter import machine, median, parse, table
from study import SHAPE, study

Read = Callable[[Path], Any]  # folder to (I, J, K) or (K, J, I) values


def by_scanloom(folder: Path) -> Any:
    """Find, check and read, as every command does."""
    import scanloom

    return scanloom.load_volume(folder).array


def headers_and_readinto(folder: Path) -> Any:
    """Read headers by pydicom, then each slice's pixels straight into their place."""
    import pydicom

    slices = []
    for path in folder.iterdir():
        with path.open("rb") as file:
            header = pydicom.dcmread(file, stop_before_pixels=True)
            slices.append((float(header.ImagePositionPatient[2]), path, file.tell() + 12, header))
    slices.sort(key=lambda entry: entry[0])
    first = slices[0][3]
    values = np.empty((len(slices), first.Rows, first.Columns), np.int16)
    for (_, path, start, header), plane in zip(slices, values, strict=True):
        with path.open("rb", buffering=0) as file:
            file.seek(start)  # behind tag, VR and length of PixelData
            file.readinto(memoryview(plane).cast("B"))
        plane += np.int16(header.RescaleIntercept)
    return values.T


def by_simpleitk(folder: Path) -> Any:
    """Let GDCM sort and read."""
    import SimpleITK

    names = SimpleITK.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder))
    return SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(names)).T


def plain_pydicom(folder: Path) -> Any:
    """Read as most scripts do."""
    import pydicom

    slices = [pydicom.dcmread(path) for path in folder.iterdir()]
    slices.sort(key=lambda s: float(s.ImagePositionPatient[2]))
    planes = [s.pixel_array * float(s.RescaleSlope) + float(s.RescaleIntercept) for s in slices]
    return np.stack(planes).astype(np.int16).T


WAYS: dict[str, Read] = {
    "pydicom headers + readinto": headers_and_readinto,
    "scanloom.load_volume": by_scanloom,
    "SimpleITK": by_simpleitk,
    "pydicom loop": plain_pydicom,
}


def main() -> None:
    """Time all ways, check that they agree, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slices", type=int, default=SHAPE[2])
    options = parse(parser, rounds=1, slices=20)
    rounds, folder = options.rounds, study(options.slices).dicom
    print(machine("scanloom", "pydicom", "SimpleITK", "numpy"), "\n")
    walls: dict[str, list[float]] = {name: [] for name in WAYS}
    cpus: dict[str, list[float]] = {name: [] for name in WAYS}
    truth = headers_and_readinto(folder)
    for turn in range(rounds + 1):
        for name, read in WAYS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            values = read(folder)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if turn == 0:  # it warms up, and is checked
                if not np.array_equal(values, truth):
                    raise SystemExit(f"{name} reads other values")
                continue
            walls[name].append(wall)
            cpus[name].append(cpu)
    base = next(iter(WAYS))
    rows = [
        [
            name,
            1000 * median(walls[name]),
            1000 * median(cpus[name]),
            median(walls[name]) / median(walls[base]),
            median(cpus[name]) / median(cpus[base]),
        ]
        for name in WAYS
    ]
    print(table(["way", "wall ms", "cpu ms", "wall x", "cpu x"], rows))


if __name__ == "__main__":
    main()
