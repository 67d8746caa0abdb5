"""Compressed series of 100 slices: scanloom beside pydicom's own loop, in the same process.

    python benchmarks/decode.py [--rounds 5] [--slices 100]

Rounds go through all codecs and both ways in turn; medians, and pydicom's wall over scanloom's.
The volumes are checked to be equal. scanloom also finds the files and judges their geometry.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from load import Read, by_scanloom, plain_pydicom
from meter import cache, machine, median, parse, table
from study import study

SYNTAXES = {
    "JPEG 2000": "1.2.840.10008.1.2.4.90",
    "JPEG-LS": "1.2.840.10008.1.2.4.80",
    "RLE": "1.2.840.10008.1.2.5",
    "HTJ2K": "1.2.840.10008.1.2.4.201",
    "JPEG lossless": "1.2.840.10008.1.2.4.70",
}
NOT_BY_PYDICOM = ("JPEG lossless",)
"""Without a GPL library pydicom has no decoder for it."""


def compressed(name: str, count: int) -> Path:
    """Return a folder with the first slices of the study, compressed; written once."""
    from pydicom import dcmread
    from pydicom.encaps import encapsulate

    folder = cache("decode", f"{SYNTAXES[name]}-{count}")
    if folder.is_dir() and len(list(folder.iterdir())) == count:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(sorted(study(count).dicom.iterdir())[:count]):
        dataset = dcmread(path)
        if name == "RLE":
            dataset.compress(SYNTAXES[name], generate_instance_uid=False)
        else:
            dataset.PixelData = encapsulate([encoded(name, dataset.pixel_array)])
            dataset["PixelData"].VR = "OB"
            dataset["PixelData"].is_undefined_length = True
            dataset.file_meta.TransferSyntaxUID = SYNTAXES[name]
        dataset.save_as(folder / f"{number:04d}.dcm", enforce_file_format=True)
    return folder


def encoded(name: str, pixels: Any) -> bytes:
    """Return one frame without loss."""
    import imagecodecs

    plain = np.ascontiguousarray(pixels)
    if name == "JPEG 2000":
        return bytes(imagecodecs.jpeg2k_encode(plain, codecformat="j2k", reversible=True, level=0))
    if name == "HTJ2K":
        return bytes(imagecodecs.htj2k_encode(plain))
    plain = plain.view(np.uint16)
    encode = imagecodecs.jpegls_encode if name == "JPEG-LS" else imagecodecs.ljpeg_encode
    return bytes(encode(plain))


def timed(read: Read, folder: Path) -> tuple[float, Any]:
    """Return wall seconds, and values."""
    start = time.perf_counter()
    values = read(folder)
    return time.perf_counter() - start, values


def main() -> None:
    """Time both ways for every codec, check that they agree, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slices", type=int, default=100)
    options = parse(parser, rounds=1, slices=4)
    folders = {name: compressed(name, options.slices) for name in SYNTAXES}
    print(machine("scanloom", "pydicom", "imagecodecs", "numpy"), "\n")
    walls: dict[tuple[str, str], list[float]] = {}
    cold: dict[str, float] = {}
    for turn in range(options.rounds + 1):
        for name, folder in folders.items():
            wall, values = timed(by_scanloom, folder)
            if turn:
                walls.setdefault((name, "scanloom"), []).append(wall)
            else:
                cold[name] = wall
            if name in NOT_BY_PYDICOM:
                continue
            wall, theirs = timed(plain_pydicom, folder)
            if not np.array_equal(values, theirs):
                raise SystemExit(f"{name}: the two read different values")
            if turn:
                walls.setdefault((name, "pydicom"), []).append(wall)
    rows = []
    for name in SYNTAXES:
        ours = median(walls[name, "scanloom"])
        theirs = median(walls[name, "pydicom"]) if (name, "pydicom") in walls else float("nan")
        rows.append([name, 1000 * ours, 1000 * theirs, theirs / ours, 1000 * cold[name]])
    print(table(["codec", "scanloom ms", "pydicom ms", "pydicom x", "first time ms"], rows))


if __name__ == "__main__":
    main()
