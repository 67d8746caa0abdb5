"""Samples of an archive: what is sampled, what is opened, and how far the totals are off."""

from __future__ import annotations

import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom import Dataset

from scanloom.core import ScanError
from scanloom.io.index.build import Index, build_index
from scanloom.io.index.sample import LEAST, FolderSample
from support.write_dicom import noise, write_series

KEY = b"k" * 32
Draw = Callable[[np.random.Generator, int], list[int]]


def write_tree(root: Path, folders: dict[str, list[int]]) -> Path:
    """Write a file for each number of a folder, into a folder of its own: a series with files."""
    for name, series in folders.items():
        (root / name).mkdir(parents=True)
        for number, files in enumerate(series):
            place = root / name / f"series{number}"
            place.mkdir()
            for k in range(files):
                (place / f"{k}.txt").touch()
    return root


def patients(count: int, files: int = 2) -> dict[str, list[int]]:
    return {f"patient{n:04d}": [files] for n in range(count)}


def write_scan(folder: Path, study: str, series: str) -> None:
    """Write a DICOM series of three slices."""

    def edit(_: int, dataset: Dataset) -> None:
        dataset.StudyInstanceUID, dataset.SeriesInstanceUID = study, series

    write_series(folder, noise((4, 4, 3)), edit=edit)


def counted(sample: FolderSample, index: Index) -> dict[str, np.ndarray]:
    """Return the number of files of each reason in each unit."""
    counts: dict[str, np.ndarray] = {}
    for file in index.files():
        amounts = counts.setdefault("/".join(file.outcome), np.zeros(len(sample.units)))
        amounts[sample.unit_of(file.entry.path)] += 1
    return counts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_same_command_gives_the_same_sample(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "in", patients(100))

    first, again = (FolderSample([root], 0.3, KEY).units for _ in range(2))
    other = FolderSample([root], 0.3, KEY, seed=1).units

    assert first == again != other
    assert len(first) == 30


def test_a_study_is_never_divided(tmp_path: Path) -> None:
    """20 patients of two studies of two series: studies are sampled, though series are more."""
    study = [f"1.2.3.{n}" for n in range(40)]
    for n in range(40):
        for series in range(2):
            folder = tmp_path / "in" / f"patient{n // 2}" / f"study{n}" / f"series{series}"
            write_scan(folder, study[n], f"{study[n]}.{series}")

    sample = FolderSample([tmp_path / "in"], 0.5, KEY)

    assert sample.found == 40
    assert {Path(unit.path).name[:5] for unit in sample.units} == {"study"}
    assert FolderSample([tmp_path / "in"], 0.5, KEY, whole="series").found == 80
    with pytest.raises(ScanError, match="a study lies in several of these paths"):
        FolderSample(sorted((tmp_path / "in" / "patient1" / "study2").iterdir()), 0.5, KEY)


def test_all_units_together_are_the_archive(tmp_path: Path) -> None:
    """Loose files, empty folders, links, zips and DICOM: each file counts once, with its reason."""
    root = write_tree(tmp_path / "in", patients(30))
    write_series(root / "patient0003" / "ct", noise())
    (root / "empty" / "inside").mkdir(parents=True)
    (root / "loose.txt").touch()
    outside = write_tree(tmp_path / "outside", {"a": [3]})
    (root / "linked").symlink_to(outside)
    (root / "patient0001" / "again").symlink_to(root / "patient0002")
    (root / "patient0004" / "deep").symlink_to(tmp_path / "outside")
    (root / "patient0005" / "file").symlink_to(root / "loose.txt")
    (root / "loose.link").symlink_to(root / "patient0002" / "series0" / "0.txt")
    with zipfile.ZipFile(root / "scans.zip", "w") as packed:
        packed.writestr("inside.txt", "text")

    for archives in (False, True):
        sample = FolderSample([root], 1000, KEY, archives=archives)
        counts = counted(sample, sample.index())
        index = build_index([root], KEY, archives=archives)
        whole = Counter("/".join(file.outcome) for file in index.files())
        assert {name: each.sum() for name, each in counts.items()} == dict(whole)
        for name, amounts in counts.items():
            estimate = sample.total(amounts)
            assert estimate.low == estimate.total == estimate.high == whole[name]


def packed(folder: Path, kind: str) -> Path:
    """Replace a folder by an archive."""
    archive = Path(shutil.make_archive(str(folder), kind, folder))
    shutil.rmtree(folder)
    return archive


def test_archives_are_sampled_beside_folders_and_loose_files(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for n in range(33):
        write_scan(root / f"{n:02d}", f"1.3.{n}", f"1.2.{n}")
        if n % 3:
            packed(root / f"{n:02d}", "zip" if n % 3 == 1 else "gztar")
    (root / "loose.txt").touch()

    sample = FolderSample([root], LEAST, KEY, archives=True)
    counts = counted(sample, sample.index())

    assert (sample.found, len(sample.units)) == (34, LEAST + 1)
    assert {Path(unit.path).suffix for unit in sample.units} == {"", ".zip", ".gz"}
    files = [1 if unit.kind == "loose" else 3 for unit in sample.units]
    np.testing.assert_array_equal(sum(counts.values()), files)


@pytest.mark.parametrize("kind", ["zip", "gztar"])
def test_a_study_in_two_archives_is_not_divided(tmp_path: Path, kind: str) -> None:
    for n in range(40):
        folder = tmp_path / "in" / f"patient{n // 2:02d}"
        write_scan(folder / f"{n}", f"1.3.{n // 2}", f"1.2.{n}")
        packed(folder / f"{n}", kind)

    whole = FolderSample([tmp_path / "in"], 1000, KEY, archives=True)

    assert {unit.kind for unit in whole.units} == {"folder"}
    assert whole.found == 20
    divided = FolderSample([tmp_path / "in"], 1000, KEY, archives=True, whole="series")
    assert divided.found == 40


def test_only_the_sample_is_opened_and_once(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for n in range(80):
        write_scan(root / f"{n:03d}", f"1.3.{n}", f"1.2.{n}")

    sample = FolderSample([root], 0.25, KEY)
    index, again = sample.index(), FolderSample([root], 0.25, KEY).index()

    assert (index.opened, again.opened) == (20 * 3, 0)
    estimate = sample.total(np.full(20, 3))
    assert (estimate.sampled, estimate.total) == (60, 240)


@pytest.mark.parametrize("files", [300, 2700])
def test_a_large_folder_outside_the_sample_is_told(tmp_path: Path, files: int) -> None:
    """100 folders of 3 entries, and one of more: half, or nine tenths, of all are in it."""
    root = tmp_path / "in"
    for n in range(101):
        (root / f"{n:03d}").mkdir(parents=True)
        for k in range(files if n == 50 else 3):
            (root / f"{n:03d}" / f"{k}.txt").touch()

    samples = [FolderSample([root], 0.25, KEY, seed=seed) for seed in range(20)]

    large = str(root / "050")
    for sample in samples:
        is_drawn = large in {unit.path for unit in sample.units}
        assert sample.missed == (3 if is_drawn else files) / (300 + files)
        estimate = sample.total([len(list(Path(unit.path).iterdir())) for unit in sample.units])
        assert estimate.low <= 300 + files <= estimate.high
        assert is_drawn or (estimate.total, estimate.high) == (303, 300 + files)


def test_what_can_not_be_sampled_is_refused_with_what_would_do(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "in", patients(100))
    with pytest.raises(ScanError, match=rf"5 of 100 folders .*--sample {LEAST}"):
        FolderSample([root], 0.05, KEY)
    few = write_tree(tmp_path / "few", patients(8))
    with pytest.raises(ScanError, match=r"4 of 8 folders .*leave it out"):
        FolderSample([few], 0.5, KEY)
    with pytest.raises(ScanError, match="0 of 1 folder "):
        FolderSample([few / "patient0000" / "series0"], 0.3, KEY)


def test_a_folder_of_too_many_files_beside_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "in", patients(100))
    for n in range(12):
        (root / f"{n}.dcm").touch()
    monkeypatch.setattr("scanloom.io.index.sample._MOST_LOOSE", 10)
    with pytest.raises(ScanError, match="12 files lie in one folder"):
        FolderSample([root], 0.3, KEY)


def test_an_archive_may_change_meanwhile(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "in", patients(100))
    sample = FolderSample([root], 0.3, KEY)
    shutil.rmtree(sample.units[0].path)
    (Path(sample.units[1].path) / "new.txt").touch()

    counts = counted(sample, sample.index())

    assert counts.pop("failed/UNREADABLE").sum() == 1
    assert sum(each.sum() for each in counts.values()) == len(sample.units) * 2 - 2 + 1


def skewed(rng: np.random.Generator, _: int) -> list[int]:
    return [int(rng.integers(1, 4)) for _ in range(1 + int(rng.lognormal(0.5, 0.9)))]


def by_year(rng: np.random.Generator, year: int) -> list[int]:
    return [int(rng.integers(1, 3)) for _ in range(1 + rng.poisson(0.3 * year))]


def alike(rng: np.random.Generator, _: int) -> list[int]:
    return [2] * int(rng.integers(1, 4))


SAMPLES = 60
SHAPES: dict[str, Draw] = {"patients": skewed, "years": by_year, "hospitals": alike}


def write_archive(
    root: Path, shape: str, folders: int = 600
) -> tuple[Path, dict[str, dict[str, float]]]:
    """Write folders in 12 parents, with an entry a series; return it and each folder's amounts.

    Files, series, those of a modality that a quarter of the parents has, and a reason of one series
    in 50.
    """
    rng = np.random.default_rng(7)
    amounts: dict[str, dict[str, float]] = {}
    for n in range(folders):
        parent = n * 12 // folders
        series, folder = SHAPES[shape](rng, parent), root / f"{2010 + parent}" / f"{n:05d}"
        folder.mkdir(parents=True)
        for number in range(len(series)):
            (folder / f"{number}.txt").touch()
        amounts[str(folder)] = {
            "files": sum(series),
            "series": len(series),
            "other modality": len(series) * (parent % 4 == 3),
            "rare": float((rng.random(len(series)) < 0.02).sum()),
        }
    return root, amounts


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
def test_intervals_hold_the_truth(tmp_path: Path, shape: str) -> None:
    """An interval of 95 % fails in 3 of 60 samples; what no folder of a sample has is not told."""
    root, amounts = write_archive(tmp_path / "in", shape)
    names = next(iter(amounts.values()))
    truth = {name: sum(each[name] for each in amounts.values()) for name in names}
    told, hits, totals = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(SAMPLES):
        sample = FolderSample([root], 0.1, KEY, seed=seed)
        for name in names:
            estimate = sample.total([amounts[unit.path][name] for unit in sample.units])
            told[name] += estimate.sampled > 0
            hits[name] += estimate.low <= truth[name] <= estimate.high
            totals[name] += estimate.total / truth[name]

    for name in names:
        assert told[name] > 0.8 * SAMPLES
        assert hits[name] >= 0.88 * told[name]
        assert 0.85 < totals[name] / SAMPLES < 1.15
