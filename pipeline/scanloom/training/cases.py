"""Pairs of image and label map for a training: found, split by their names, and checked."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from scanloom.core import Grid, Reason, ScanError, Volume, read_error
from scanloom.io.formats import VOLUME_SUFFIXES
from scanloom.io.read import load_volume
from scanloom.io.system.regular_files import read_regular_file
from scanloom.training.label_sets import (
    MAX_LIST_BYTES,
    Names,
    case_name,
    plain_name,
    recorded,
    scan_name,
    value_names,
)
from scanloom.training.recipe import Data, TrainingRecipe

Split = Literal["training", "validation", "testing"]
SPLITS: Final[tuple[Split, ...]] = ("training", "validation", "testing")


@dataclass(frozen=True)
class Pair:
    """An image and its label map; `fold` is that of the list, which other pairs may lack.

    A label map of which images are drawn has no image.
    """

    image: Path | None
    label: Path
    fold: int | None = None

    @property
    def name(self) -> str:
        """The image's file name without suffix, by which cases are split."""
        return case_name((self.image or self.label).name)

    @property
    def files(self) -> dict[str, Path]:
        """The files by their key in MONAI's list."""
        return {"label": self.label} | ({} if self.image is None else {"image": self.image})


@dataclass(frozen=True)
class LeftOut:
    """A case that is not trained on, and the reason."""

    case: str
    problem: str


def find_cases(data: Data, folder: Path, fold: int = 0) -> dict[Split, list[Pair]]:
    """Return the pairs of a recipe's data by their part in the training.

    Parameters
    ----------
    folder : Path
        Folder that the paths of the recipe are relative to.
    fold : int
        Number, from 0, of the part of the cases that validates, if the recipe or the list has
        folds.

    Raises
    ------
    ScanError
        TRAINING_DATA if a folder or list can't be read, no pair is in it, two cases have one name,
        images have several channels, too few cases are left for training or a fold, there is no
        such fold, or the recipe splits cases whose dataset has folds.
    """
    if data.images is not None and data.labels is not None:
        listed: dict[Split, list[Pair]] = {
            "training": _in_folders(folder / data.images, folder / data.labels)
        }
    elif data.label_maps is not None:
        maps = _volumes(folder / data.label_maps)
        if not maps:
            raise ScanError(Reason.TRAINING_DATA, "no label map is in the folder")
        fold_of = recorded((folder / data.label_maps).parent, "fold")
        listed = {
            "training": [Pair(None, file, fold_of.get(case_name(file.name))) for file in maps]
        }
    elif data.msd is not None:
        listed = _listed(folder / data.msd / "dataset.json")
    else:
        listed = _listed(folder / str(data.datalist))
    pairs = {split: listed.get(split, []) for split in SPLITS}
    counts = Counter(pair.name for split in SPLITS for pair in pairs[split])
    if not counts:
        detail = "the list has no case with a label map: name the folders, images and labels"
        raise ScanError(Reason.TRAINING_DATA, detail)
    if equal := [name for name, count in counts.items() if count > 1]:
        detail = "two cases have the same file name, by which they are told apart"
        raise ScanError(Reason.TRAINING_DATA, detail, equal[0])
    folds = {pair.fold for pair in pairs["training"] + pairs["validation"]} - {None}
    if folds:
        _take_fold(pairs, data, fold)
    # in the order of hashes: the same parts for the same names, in whatever order they are listed
    ranked = sorted(pairs["training"], key=lambda pair: hashlib.sha256(pair.name.encode()).digest())
    pairs["testing"] += ranked[: data.hold_out]
    ranked = ranked[data.hold_out :]
    if data.folds is not None:
        if not 0 <= fold < data.folds:
            raise ScanError(Reason.TRAINING_DATA, f"the folds are 0 to {data.folds - 1}")
        if data.folds > len(ranked):
            detail = f"{data.folds} folds need as many cases, there are {len(ranked)}"
            raise ScanError(Reason.TRAINING_DATA, detail)
        pairs["validation"] += ranked[fold :: data.folds]
        ranked = [pair for n, pair in enumerate(ranked) if n % data.folds != fold]
    elif fold and not folds:
        raise ScanError(Reason.TRAINING_DATA, "neither the recipe nor its list has folds")
    else:
        pairs["validation"] += ranked[: data.validation]
        ranked = ranked[data.validation :]
    pairs["training"] = ranked
    if not ranked:
        raise ScanError(Reason.TRAINING_DATA, f"no case is left for training, of {len(counts)}")
    return {split: sorted(pairs[split], key=lambda pair: pair.name) for split in SPLITS}


def _take_fold(pairs: dict[Split, list[Pair]], data: Data, fold: int) -> None:
    """Let a fold of the dataset validate: who wrote it knows which cases are of one patient."""
    if data.hold_out or data.validation or data.folds is not None:
        detail = "the dataset has the fold of its cases: no hold_out, validation or folds beside it"
        raise ScanError(Reason.TRAINING_DATA, detail)
    listed = pairs["training"] + pairs["validation"]
    folds = sorted({pair.fold for pair in listed if pair.fold is not None})
    if fold not in folds:
        detail = f"the folds of the dataset are {', '.join(map(str, folds))}"
        raise ScanError(Reason.TRAINING_DATA, detail)
    # a case without a fold stays where the list has it
    validating = [p for p in pairs["validation"] if p.fold is None]
    pairs["validation"] = validating + [p for p in listed if p.fold == fold]
    pairs["training"] = [p for p in listed if p.fold != fold and p not in validating]


def without_partner(data: Data, folder: Path) -> list[LeftOut]:
    """Return the images of a folder without a label map of their name, and the other way around."""
    if data.images is None or data.labels is None:
        return []
    images, labels = _two_folders(folder / data.images, folder / data.labels)
    return [
        LeftOut(name, f"no {'label map' if name in images else 'image'} of this name")
        for name in sorted(images.keys() ^ labels.keys())
    ]


def _two_folders(images: Path, labels: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return the images and the label maps of two folders by the names of their cases."""
    return _by_name(images, scan_name), _by_name(labels, lambda file: case_name(file.name))


def _in_folders(images: Path, labels: Path) -> list[Pair]:
    """Return the images that have a label map of the same name, with any suffix."""
    named, by_name = _two_folders(images, labels)
    both = sorted(named.keys() & by_name.keys())
    if not both:
        raise ScanError(Reason.TRAINING_DATA, "no image has a label map of the same file name")
    if any(f"{name}_0001" in named.keys() - by_name.keys() for name in both):
        detail = "the images have several channels (_0001), a training takes one: list its images"
        raise ScanError(Reason.TRAINING_DATA, detail)
    folds = recorded(labels.parent, "fold")
    return [Pair(named[name], by_name[name], folds.get(name)) for name in both]


def _by_name(folder: Path, name_of: Callable[[Path], str]) -> dict[str, Path]:
    """Return the volumes of a folder by the names of their cases, which must be different."""
    files = _volumes(folder)
    named = {name_of(file): file for file in files}
    if len(named) < len(files):
        raise ScanError(Reason.TRAINING_DATA, "two files of a folder have the name of one case")
    return named


def _volumes(folder: Path) -> list[Path]:
    try:
        files = sorted(folder.iterdir())
    except OSError as exc:
        error = read_error(exc, "the folder of images or labels", Reason.TRAINING_DATA)
        raise error.about(str(folder)) from exc
    return [f for f in files if f.name.lower().endswith(VOLUME_SUFFIXES) and f.name[0] != "."]


def check_values(recipe: TrainingRecipe, folder: Path) -> None:
    """Refuse a recipe that has a structure's name for another value than its data has.

    The model would call one structure by the name of the other. Data that are described by no
    `dataset.json` or list, and names that only one of them has, are not compared.

    Raises
    ------
    ScanError
        TRAINING_DATA.
    """
    data = recipe.data
    if data.label_maps is not None:
        return
    if data.labels is not None:
        file = (folder / data.labels).parent / "dataset.json"
    else:
        file = folder / data.msd / "dataset.json" if data.msd else folder / str(data.datalist)
    named: Names | None = None
    with suppress(ScanError, AttributeError):  # none, or of another program
        named = value_names(_document(file))
    for structure in recipe.structures:
        values = (named or {}).get(plain_name(structure.label), structure.values)
        if set(values).isdisjoint(structure.values):
            theirs, own = (" ".join(map(str, each)) for each in (values, structure.values))
            detail = f"{structure.label} is {theirs} in {file.name}, and {own} in the recipe"
            raise ScanError(Reason.TRAINING_DATA, detail)


def _document(file: Path) -> Any:
    try:
        return json.loads(read_regular_file(file, MAX_LIST_BYTES))
    except OSError as exc:
        error = read_error(exc, "the list of cases", Reason.TRAINING_DATA)
        raise error.about(str(file)) from exc
    except (ValueError, RecursionError) as exc:
        detail = "the list of cases is not JSON"
        raise ScanError(Reason.TRAINING_DATA, detail, str(file)) from exc


def _listed(file: Path) -> dict[Split, list[Pair]]:
    """Return the pairs of a JSON list: MONAI's, or the `dataset.json` of the decathlon."""
    document = _document(file)
    try:
        return {
            split: [
                Pair(file.parent / each["image"], file.parent / each["label"], _fold(each))
                for each in document.get(split, [])
                # test images of the decathlon and of Auto3DSeg have no labels
                if split != "testing" or (not isinstance(each, str) and "label" in each)
            ]
            for split in SPLITS
        }
    except (AttributeError, KeyError, TypeError) as exc:
        detail = "the list of cases is not {training: [{image, label}]}"
        raise ScanError(Reason.TRAINING_DATA, detail, str(file)) from exc


def _fold(case: Mapping[str, object]) -> int | None:
    """Return the fold of a listed case, if it names one."""
    fold = case.get("fold")
    if fold is not None and type(fold) is not int:
        raise ScanError(Reason.TRAINING_DATA, "the fold of a listed case is not a number")
    return fold


FARTHEST: Final = 8.0
"""Robust standard deviations from the median, beyond which a case is left out: anatomy of adults
varies by less than 5 in all data seen, a wrong unit or pairing by 20 or more."""
FEWEST: Final = 10
"""Cases below which none is far from the rest: the deviation of so few is unknown."""


def check_cases(
    recipe: TrainingRecipe,
    pairs: Sequence[Pair],
    progress: Callable[[int, int], object],
) -> tuple[dict[Pair, Checked], list[LeftOut]]:
    """Read all cases, and return what is known of those to train on, and those to leave out.

    Left out are unreadable files, a label map on another grid than its image, numbers that no
    structure has, images of one value, and cases far from the rest in spacing, extent, and size
    or brightness of structures.

    Parameters
    ----------
    progress : function
        Called with the number of cases that were checked, and of all.
    """
    good: list[tuple[Pair, Checked]] = []
    left_out: list[LeftOut] = []
    for done, pair in enumerate(pairs, 1):
        result = _examine(recipe, pair)
        if isinstance(result, str):
            left_out.append(LeftOut(pair.name, result))
        else:
            good.append((pair, result))
        progress(done, len(pairs))
    far = far_from_rest([checked.features for _, checked in good])
    left_out += [
        LeftOut(good[n][0].name, f"far from the rest in {feature}") for n, feature in far.items()
    ]
    return {pair: checked for n, (pair, checked) in enumerate(good) if n not in far}, left_out


class Checked(NamedTuple):
    """Results of the check of a case.

    Parameters
    ----------
    features : dict
        Numbers that are alike in all cases; sizes as logarithms.
    structures : frozenset of str
        Labels of the structures that it has.
    sha256 : str
        Of its voxels and grids.
    scan_sha256 : str
        Of those of its image; of the label map if there is none.
    """

    features: dict[str, float]
    structures: frozenset[str]
    sha256: str
    scan_sha256: str


def on_axes_of(grid: Grid, volume: Volume) -> Volume:
    """Return a volume with its axes in the order and direction of a grid's."""
    import nibabel as nib

    # from one to the other: that of an oblique grid to the body may turn with a rounded header
    change = nib.io_orientation(np.linalg.inv(grid.affine) @ volume.grid.affine)
    array = nib.apply_orientation(volume.array, change)
    turn = nib.orientations.inv_ornt_aff(change, volume.grid.shape)
    return replace(volume, array=array, grid=Grid(array.shape, volume.grid.affine @ turn))


def _examine(recipe: TrainingRecipe, pair: Pair) -> str | Checked:
    """Return the problem of a case, or what is known of it."""
    volumes = {}
    for kind, file in (("label map", pair.label), ("image", pair.image)):
        if file is None:
            continue
        try:
            volumes[kind] = load_volume(file, modality=recipe.modality)
        except ScanError as exc:
            return f"the {kind} can't be read: {exc.reason.code}"
    image, label = volumes.get("image"), volumes["label map"]
    if image is not None:
        label = on_axes_of(image.grid, label)
    # a tenth of a voxel: programs that write label maps round the affine
    if image is not None and not image.grid.matches(label.grid, 0.1 * min(image.grid.spacing)):
        return "the grids of image and label map differ"
    numbers, counts = np.unique(label.array, return_counts=True)
    known = {0, *(value for structure in recipe.structures for value in structure.values)}
    if image is None:
        known |= {*recipe.drawing.others}
    unknown = [number for number in numbers.tolist() if number not in known]
    if unknown:
        return f"the label map has {unknown[0]:.9g}, which no structure has"
    if image is not None:
        deviation = float(image.array.std(dtype=np.float64))
        if not np.isfinite(deviation) or deviation == 0.0:
            return "the image has one value only"
    elif not any(numbers):
        return "the label map is empty"
    features = _features(recipe, image, label, dict(zip(numbers.tolist(), counts, strict=True)))
    present = {s.label for s in recipe.structures if not {*s.values}.isdisjoint(numbers.tolist())}
    content, scan_sha256 = hashlib.sha256(), ""
    for _, volume in sorted(volumes.items()):  # the image first
        content.update(f"{volume.array.dtype} {volume.grid.shape}".encode())
        content.update(volume.grid.affine.tobytes())
        content.update(np.ascontiguousarray(volume.array).data)
        scan_sha256 = scan_sha256 or content.hexdigest()
    return Checked(features, frozenset(present), content.hexdigest(), scan_sha256)


def _features(
    recipe: TrainingRecipe, image: Volume | None, label: Volume, counts: Mapping[float, int]
) -> dict[str, float]:
    """Return numbers of a case that are alike in all cases; sizes as logarithms."""
    grid = label.grid
    features = {f"spacing {n}": np.log(each) for n, each in enumerate(grid.spacing)}
    features |= {f"extent {n}": np.log(each) for n, each in enumerate(grid.extent)}
    if image is not None:
        values = image.array.ravel(order="F").astype(np.float64)
        mean, deviation = values.mean(), values.std()
        sums = np.bincount(label.array.ravel(order="F").astype(np.intp), values)
    for structure in recipe.structures:
        count = sum(int(counts.get(value, 0)) for value in structure.values)
        if not count:
            continue
        features[f"size of {structure.label}"] = np.log(count * grid.voxel_volume)
        if image is not None:
            inside = sum(sums[value] for value in structure.values if value in counts) / count
            features[f"brightness of {structure.label}"] = (inside - mean) / deviation
    return {name: float(value) for name, value in features.items()}


def far_from_rest(features: Sequence[Mapping[str, float]]) -> dict[int, str]:
    """Return the feature in which a case is far from the others, by the case's index."""
    far: dict[int, str] = {}
    for name in sorted({name for each in features for name in each}):
        known = [n for n, each in enumerate(features) if name in each]
        if len(known) < FEWEST:
            continue
        values = np.array([features[n][name] for n in known])
        middle = np.median(values)
        # equal values have no deviation: 5 % of a size, and a tenth of the image's, are none
        floor = 0.1 if name.startswith("brightness") else 0.05
        deviation = max(floor, 1.4826 * float(np.median(np.abs(values - middle))))
        for n, value in zip(known, values, strict=True):
            if abs(value - middle) > FARTHEST * deviation:
                far.setdefault(n, name)
    return far
