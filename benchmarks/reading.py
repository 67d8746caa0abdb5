"""Compare the reading of a folder of real scans with other programs: a table.

    python benchmarks/reading.py FOLDER [--all]

FOLDER holds groups of cases (`ct/ge_head_tilt_dicom/...`). Each case is indexed by itself, each of
its series is read, and every volume compared with a witness: `expected.json`, a reference NIfTI
(`Ref_dcm2niix`, `Ref_dicom2nifti`, `Ref_nifti`), nibabel, SimpleITK, or a plain stack by pydicom.
A line for each series, only those that differ without `--all` for the equal ones; then the account
of files. The exit code is 1 if any volume differs from its witness or a file is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import SimpleITK
from meter import SAMPLE, parse, unavailable
from nibabel.orientations import io_orientation, ornt_transform
from pydicom import dcmread

from scanloom.core import Flag, ScanError, Series, Volume
from scanloom.io.formats import MAX_VOLUMES
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.storage import IndexedSeries
from scanloom.io.read import read_scan

REFERENCES = ("Ref_dcm2niix", "Ref_dicom2nifti", "Ref_nifti")
FACTORS = {"philips_epi_oblique": 0.0055279}
"""The reference holds private floats of the maker; MANIFEST.md of the scans says the factor."""
MM = 1e-3
NONE = "no witness"


@dataclass(frozen=True)
class Line:
    """The outcome of one series."""

    path: str
    files: int
    status: str
    reason: str
    shape: str
    verdict: str

    @property
    def wrong(self) -> bool:
        """Whether it differs from its witness, or reading says other than the index."""
        return "DIFFERS" in self.verdict


def judge(index: Index, indexed: IndexedSeries, case: Path, root: Path) -> Line:
    """Read a series and compare it."""
    series = index.as_series(indexed)
    first = Path(indexed.first)
    path = str((first if indexed.kind != "dicom" else first.parent).relative_to(root))
    reason = indexed.info.reason
    shape = "x".join(map(str, indexed.info.shape))
    try:
        volume = read_scan(series).volume if indexed.slices else None
        shape = "x".join(map(str, volume.grid.shape)) if volume else ""
        code = ""
    except ScanError as error:
        volume, code = None, error.code
    if volume is None and code in ("PHASES", "FOUR_D"):
        verdict = of_phases(series, case)
    elif volume is None:
        verdict = indexed.info.detail
    else:
        verdict = of_volume(volume, series, case, first)
    if indexed.slices and code != reason and not (reason == "DERIVED" and not code):
        verdict = f"index says {reason or 'used'}; {verdict}"
    return Line(path, indexed.n_files, indexed.status, code or reason, shape, verdict)


def of_phases(series: Series, case: Path) -> str:
    """Compare each volume of a series that holds several."""
    verdicts: Counter[str] = Counter()
    for phase in range(MAX_VOLUMES):
        try:
            volume = read_scan(series, phase=phase).volume
        except ScanError as error:
            if error.code in ("PHASES", "FOUR_D"):  # there are no more
                break
            verdicts[error.code] += 1
        else:
            verdicts[of_volume(volume, series, case, series.files[0], phase)] += 1
    listed = ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
    return f"{verdicts.total()} volumes: {listed}"


def of_volume(
    volume: Volume, series: Series, case: Path, first: Path, phase: int | None = None
) -> str:
    """Return the verdict of witnesses about a volume: the first that knows it decides."""
    if series.kind == "nifti":
        return by_nibabel(volume, first, phase)
    if series.kind == "itk":
        return by_simpleitk(volume, first)
    verdicts = [*by_expected(volume, series, first), *by_reference(volume, case, phase)]
    differing = [verdict for verdict in verdicts if verdict.startswith("DIFFERS")]
    if differing and len(differing) == len(verdicts):
        return differing[0]
    equal = [verdict for verdict in verdicts if not verdict.startswith("DIFFERS")]
    if equal:
        return equal[0]
    return NONE if phase is not None else by_pydicom(volume, series)


def by_expected(volume: Volume, series: Series, first: Path) -> Iterator[str]:
    """Yield verdicts by the entries of expected.json for the series."""
    for parent in first.parents[:-1]:
        beside = parent.with_name(f"{parent.name}.expected.json")
        file = beside if beside.exists() else parent / "expected.json"
        if not file.exists():
            continue
        for entry in json.loads(file.read_text()).get("series", []):
            known = entry.get("volume")
            mine = entry.get("series_uid") == series.series_uid
            subfolder = str(first.parent.relative_to(parent))
            if (
                known
                and mine
                and subfolder in (entry.get("folder", "."), *entry.get("folders", ()))
            ):
                values = np.ascontiguousarray(volume.array.T.astype("<f4")).tobytes()
                same = hashlib.sha256(values).hexdigest() == known["sha256"]
                near = np.allclose(volume.grid.affine, known["affine_ijk_to_RAS"], atol=MM)
                yield verdict_of(same, near, "expected.json")
        return


def by_reference(volume: Volume, case: Path, phase: int | None) -> Iterator[str]:
    """Yield verdicts by the reference files of a case that have this size."""
    factor = FACTORS.get(case.name, 1.0)
    for name in REFERENCES:
        for path in sorted(case.glob(f"{name}/*.nii*")):
            whole = nibabel.load(path)
            if whole.ndim == 4 and (phase or 0) < whole.shape[3]:
                whole = whole.slicer[..., phase or 0]
            if whole.ndim != 3 or sorted(whole.shape) != sorted(volume.grid.shape):
                continue
            yield compared(volume, whole, name, factor)


def compared(volume: Volume, image: Any, name: str, factor: float = 1.0) -> str:
    """Compare with an image whose axes may be flipped and permuted."""
    axes = [io_orientation(affine) for affine in (image.affine, volume.grid.affine)]
    image = image.as_reoriented(ornt_transform(*axes))
    if image.shape != volume.grid.shape:
        return f"DIFFERS from {name}: shape"
    values = np.asanyarray(image.dataobj) * factor
    same = np.allclose(volume.array, values, rtol=1e-6 if factor == 1 else 1e-4)
    return verdict_of(same, np.allclose(volume.grid.affine, image.affine, atol=MM), name)


def by_nibabel(volume: Volume, path: Path, phase: int | None) -> str:
    """Compare with nibabel."""
    image = nibabel.load(path)
    values = np.asanyarray(image.dataobj)
    if phase is not None and values.ndim > 3:
        values = values.reshape((*values.shape[:3], -1), order="F")[..., phase]
    same = np.allclose(volume.array, values.reshape(volume.grid.shape), rtol=1e-6)
    rounded = Flag.AFFINE_ROUNDED in volume.flags  # its directions were made orthogonal
    off = np.abs(volume.grid.affine - image.affine).max()
    return verdict_of(same, off <= (10 if rounded else 1) * MM, "nibabel")


def by_simpleitk(volume: Volume, path: Path) -> str:
    """Compare with SimpleITK."""
    image = SimpleITK.ReadImage(str(path))
    steps = np.array(image.GetDirection()).reshape(3, 3) * image.GetSpacing()
    affine = np.eye(4)
    affine[:3] = np.diag([-1, -1, 1]) @ np.c_[steps, image.GetOrigin()]
    same = np.array_equal(volume.array.T, SimpleITK.GetArrayViewFromImage(image))
    return verdict_of(same, np.allclose(volume.grid.affine, affine, atol=MM), "SimpleITK")


def by_pydicom(volume: Volume, series: Series) -> str:
    """Compare with slices in order of position, each decoded by pydicom's own means."""
    slices = {}
    for path in series.files:
        ds = dcmread(path)
        if int(ds.get("NumberOfFrames", 1) or 1) > 1 or "ImagePositionPatient" not in ds:
            return NONE
        normal = np.cross(ds.ImageOrientationPatient[:3], ds.ImageOrientationPatient[3:])
        values = ds.pixel_array * float(ds.get("RescaleSlope", 1)) + float(
            ds.get("RescaleIntercept", 0)
        )
        slices[round(float(normal @ ds.ImagePositionPatient), 3)] = (values, ds)
    placed = [slices[depth] for depth in sorted(slices)]
    if len(placed) != volume.grid.shape[2] or placed[0][0].shape != volume.grid.shape[1::-1]:
        return NONE
    stack = np.stack([values.T for values, _ in placed], -1)
    ends = [np.array(ds.ImagePositionPatient, float) for _, ds in (placed[0], placed[-1])]
    ours = [volume.grid.world((0, 0, k)) * (-1, -1, 1) for k in (0, len(placed) - 1)]
    return verdict_of(
        np.allclose(volume.array, stack, rtol=1e-6), np.allclose(ends, ours, atol=0.1), "pydicom"
    )


def verdict_of(same: bool, near: bool, name: str) -> str:
    """Return a verdict in words."""
    if same and near:
        return f"equal to {name}"
    return f"DIFFERS from {name}: {'' if same else 'voxels '}{'' if near else 'affine'}"


def cases_of(root: Path) -> list[Path]:
    """Return the folders two levels below the root."""
    return sorted(path for path in root.glob("*/*") if path.is_dir())


def _sample() -> Path:
    """Return a folder with the sample study as its only case."""
    root = Path(tempfile.mkdtemp())
    shutil.copytree(SAMPLE, root / "sample" / SAMPLE.name)
    return root


def main() -> None:
    """Print the table and the account."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--all", action="store_true", help="Also lines of what is equal.")
    options = parse(parser, folder=_sample() if "--smallest" in sys.argv else None)
    if options.folder is None:
        unavailable("a folder of real scans: name it")
    root = options.folder.resolve()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    total: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    wrong = 0
    for case in cases_of(root):
        index = build_index([case], bytes(32))
        total.update(index.counts())
        for series in index.series:
            line = judge(index, series, case, root)
            wrong += line.wrong
            verdicts[line.verdict if line.verdict.startswith("equal") else line.status] += 1
            if options.all or not line.verdict.startswith("equal"):
                print(
                    f"{line.path[:64]:64} {line.files:4} {line.status:7} {line.reason:19} "
                    f"{line.shape:12} {line.verdict}",
                    flush=True,
                )
        apart = Counter(file.outcome[1] for file in index.files() if file.series is None)
        for code, count in apart.items():
            print(f"{case.relative_to(root)!s:64} {count:4} files of no series: {code}")
    whole = build_index([root], bytes(32)).counts()
    beside = sum(path.is_file() for path in root.glob("*")) + sum(
        path.is_file() for path in root.glob("*/*")
    )
    print(dict(verdicts))
    print(f"cases: {dict(total)}, beside them {beside} files; all at once: {whole}")
    on_disk = sum(len(names) for _, _, names in os.walk(root))
    lost = total["found"] + beside != on_disk or whole["found"] != on_disk
    print(f"{on_disk} files on the disk; {wrong} series wrong" + ("; FILES LOST" if lost else ""))
    sys.exit(1 if wrong or lost else 0)


if __name__ == "__main__":
    main()
