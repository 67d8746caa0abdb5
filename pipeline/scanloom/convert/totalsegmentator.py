"""Read folders with weights of TotalSegmentator as model cards.

A task consists of networks of nnU-Net, one for each group of structures, in folders as
`Dataset291_TotalSegmentator_part1_organs_1559subj/nnUNetTrainerNoMirroring__nnUNetPlans__3d_fullres`.
TotalSegmentator resamples the scan, truncates it to whole numbers, and gives the result to nnU-Net
as a scan of its own, without mirroring; labels are united on that grid.

The tasks are from the table that `docs/write_totalsegmentator.py` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from scanloom.cards.card import (
    Argmax,
    Channel,
    Cleaning,
    FastPreset,
    KeepLargest,
    ModelCard,
    NetworkGrid,
    RemoveSmall,
    Stage,
    Truncate,
    Weights,
)
from scanloom.convert.download.addresses import CLEANED_BY_SHAPE, TOTALSEGMENTATOR_CLEANED
from scanloom.convert.files import NO_OPTIONS, TASK_FILE, damaged, read_json, truncate, unsupported
from scanloom.convert.nnunet import name_structures, read_nnunet
from scanloom.core import Reason, ScanError, Structure, did_you_mean, slug

ATTRIBUTION: Final = (
    "TotalSegmentator (Wasserthal et al., Radiology: Artificial Intelligence 2023, "
    "doi:10.1148/ryai.230024); nnU-Net (Isensee et al., Nature Methods 2021)"
)
LICENSED: Final = "TotalSegmentator licence (non-commercial use, or a bought licence)"
"""Licence of weights that are given only to holders of one; that of the others is Apache-2.0."""
_CLEANING: Final[Mapping[str, tuple[Cleaning, ...]]] = {
    "body": (
        KeepLargest((1,), connectivity=6, when="before"),
        RemoveSmall((2,), 50_000.0, connectivity=6, when="before"),
    ),
}
"""Cleaning that is part of a task: the trunk and the extremities."""
_CROPS_SUBSETS: Final = {"total": "total_fastest", "total_mr": "total_mr_fastest"}
"""Model that crops the scan of a task to the structures that are requested (`roi_subset`)."""
_SUBSET_MARGIN_MM: Final = 20.0
_PREFIX: Final = "totalsegmentator_"


class TaskDataset(NamedTuple):
    """Weights of one network: nnU-Net's number, folder, and release; "" if not published."""

    number: int
    folder: str
    release: str


class TaskNetwork(NamedTuple):
    """A network of a task, and the names of its classes by number."""

    dataset: TaskDataset
    classes: Mapping[int, str]


class TaskCrop(NamedTuple):
    """A task whose structures crop the scan for another one; the margin is in mm."""

    mode: str
    labels: tuple[str, ...]
    margin: float


@dataclass(frozen=True)
class Mode:
    """A task at one of its resolutions.

    Parameters
    ----------
    name, task : str
        Task and resolution ("total_fast"), and TotalSegmentator's name of the task ("total").
    modality : str
        "CT" or "MR".
    licensed : bool
        Whether the weights are given only to holders of a licence.
    parts : tuple of TaskNetwork
        Its networks; labels of later ones lie over those of earlier ones.
    classes : mapping of int to str
        Names of the task's structures by number.
    trainer, configuration : str
        Names in the folders of the weights.
    folds : tuple of int or None
        Folds whose scores are averaged; None for all that there are.
    spacing : (x, y, z) or None
        Spacing to which scans are resampled, mm; None leaves it to nnU-Net.
    step : float
        Distance between windows, in window sizes.
    crop : TaskCrop or None
        Task that crops the scan.
    remove_outside : bool
        Whether structures are removed that are not near others of the cropping task.
    """

    name: str
    task: str
    modality: str
    licensed: bool
    parts: tuple[TaskNetwork, ...]
    classes: Mapping[int, str]
    trainer: str
    configuration: str
    folds: tuple[int, ...] | None
    spacing: tuple[float, float, float] | None
    step: float
    crop: TaskCrop | None
    remove_outside: bool


@cache
def modes() -> Mapping[str, Mode]:
    """Return all tasks at all resolutions, by name."""
    table = _table()
    classes = {task: _classes(names) for task, names in table["classes"].items()}
    tasks = {}
    for name, entry in table["modes"].items():
        own = classes[entry["task"]]
        parts = tuple(
            TaskNetwork(datasets()[int(number)], own if names == "all" else _classes(names))
            for number, names in entry["parts"].items()
        )
        spacing, crop, folds = entry["spacing"], entry["crop"], entry["folds"]
        changed = {
            "parts": parts,
            "folds": None if folds is None else tuple(folds),
            "spacing": spacing and tuple(spacing),
            "crop": crop and TaskCrop(crop["mode"], tuple(crop["labels"]), crop["margin_mm"]),
        }
        tasks[name] = Mode(name=name, classes=own, **{**entry, **changed})
    return MappingProxyType(tasks)


@cache
def datasets() -> Mapping[int, TaskDataset]:
    """Return the weights of all networks, by number."""
    table = _table()["datasets"]
    known = {int(number): TaskDataset(int(number), *values) for number, values in table.items()}
    return MappingProxyType(known)


def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return table


def _classes(names: Mapping[str, str]) -> Mapping[int, str]:
    return MappingProxyType({int(number): name for number, name in names.items()})


def is_totalsegmentator(folder: Path) -> bool:
    """Return whether a folder holds weights of TotalSegmentator, or is one of its datasets."""
    return bool(_datasets_in(folder)) or _number_of(folder) is not None


def read_totalsegmentator(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> ModelCard:
    """Read a task of TotalSegmentator.

    Parameters
    ----------
    folder : Path
        Contains the folders of the task's datasets, and of the task that crops the scan for it.
        Or one dataset's folder.
    options : mapping
        "task" is the task's name. Without it, it is the one that `totalsegmentator.json` or the
        folder's name states, else the only one whose datasets are there.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED if a card can't express the task; MODEL_DAMAGED if a dataset is missing;
        MODEL_UNKNOWN for another option or task, or if several tasks are possible; or as
        `read_nnunet`.
    """
    if not {"task"}.issuperset(options):
        raise ScanError(Reason.MODEL_UNKNOWN, "the only option of TotalSegmentator's is task")
    chosen = options.get("task")
    if chosen is not None and chosen not in modes():
        detail = f"there is no task {truncate(chosen)!r}; {did_you_mean(chosen, list(modes()))}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    present, number = _datasets_in(folder), _number_of(folder)
    stated = modes()[chosen] if chosen is not None else None
    if not present and number is not None:
        present = {number: folder}
        mode = stated or _only_mode({number})
        if mode.crop:
            present = {**_datasets_in(folder.resolve().parent), **present}
        return _read(mode, present)
    return _read(stated or _stated(folder) or _only_mode(set(present)), present)


def _datasets_in(folder: Path) -> Mapping[int, Path]:
    """Return the datasets in a folder by number."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    return {number: entry for entry in entries if (number := _number_of(entry)) and entry.is_dir()}


def _number_of(folder: Path) -> int | None:
    """Return the number of TotalSegmentator's dataset in a folder, by the folder's name.

    A model store writes names in lower case.
    """
    return _numbers().get(slug(folder.resolve().name))


@cache
def _numbers() -> Mapping[str, int]:
    return {slug(dataset.folder): dataset.number for dataset in datasets().values()}


def _stated(folder: Path) -> Mode | None:
    """Return the task that a folder states, None if it states none."""
    if (folder / TASK_FILE).is_file():
        content = read_json(folder, TASK_FILE)
        name = content.get("task") if isinstance(content, dict) else None
        if not isinstance(name, str) or name not in modes():
            hint = did_you_mean(str(name), list(modes()))
            raise damaged(f"{TASK_FILE} has no known task ({truncate(str(name))!r}); {hint}")
        return modes()[name]
    name = slug(folder.name)
    return modes().get(name) or modes().get(name.removeprefix(_PREFIX))


def _only_mode(numbers: set[int]) -> Mode:
    """Return the only task of some datasets; tasks that crop for it do not count."""
    complete = [mode for mode in modes().values() if _is_complete(mode, numbers)]
    crops = {mode.crop.mode for mode in complete if mode.crop}
    complete = [mode for mode in complete if mode.name not in crops] or complete
    if len(complete) == 1:
        return complete[0]
    if complete:
        names = ", ".join(mode.name for mode in complete[:8])
        detail = f"there are weights of several tasks: choose one by NAME:task={complete[0].name}"
        raise ScanError(Reason.MODEL_UNKNOWN, f"{detail} ({names})")
    candidates = [
        m for m in modes().values() if numbers & {part.dataset.number for part in m.parts}
    ]
    mode = candidates[0]
    missing = [part.dataset for part in mode.parts if part.dataset.number not in numbers]
    raise _missing(mode, missing[0])


def _missing(mode: Mode, dataset: TaskDataset) -> ScanError:
    return damaged(f"{mode.name} needs {dataset.folder}, which is not in the folder")


def _read(mode: Mode, present: Mapping[int, Path]) -> ModelCard:
    """Return the card of a task."""
    if mode.remove_outside:
        detail = "removal of structures by their distance from those of another task"
        raise unsupported(f"{mode.name}: {detail}")
    if mode.task in TOTALSEGMENTATOR_CLEANED:
        raise unsupported(f"{mode.name}: {CLEANED_BY_SHAPE}")
    parts = tuple(_read_part(part, mode, present) for part in mode.parts)
    first, stage, subset = parts[0], None, None
    if mode.crop is not None:
        rough = _read(modes()[mode.crop.mode], present)
        stage = _crop_by(rough, mode.crop.margin, map(slug, mode.crop.labels))
    resolution = "" if mode.spacing is None else f", {mode.spacing[0]:.3g} mm"
    card = ModelCard(
        name=f"{_PREFIX}{mode.name}",
        version=mode.parts[0].dataset.release or first.weights.sha256[:12],
        title=f"TotalSegmentator {mode.task}{resolution}",
        description=f"{len(mode.classes)} structures by {len(parts)} network(s) of nnU-Net",
        intended_use="",
        license=LICENSED if mode.licensed else "Apache-2.0",
        attribution=ATTRIBUTION,
        channels=(Channel(mode.modality, mode.modality),),
        network=first.network,
        weights=first.weights,
        grid=NetworkGrid("RAS", mode.spacing, alignment="ends" if mode.spacing else "first"),
        window=first.window,
        structures=name_structures(list(mode.classes.values()), list(mode.classes)),
        after=(Truncate(),) if mode.spacing else (),
        restore="labels",
        cleaning=_CLEANING.get(mode.task, ()),
        stage=stage,
        parts=parts,
        fast=_coarser(mode, present),
    )
    rough_mode = modes().get(_CROPS_SUBSETS.get(mode.task, ""))
    if rough_mode is not None and _is_complete(rough_mode, present):
        rough = card if rough_mode is mode else _read(rough_mode, present)
        subset = _crop_by(rough, _SUBSET_MARGIN_MM)
    return replace(card, subset=subset)


def _is_complete(mode: Mode, present: Mapping[int, Path] | set[int]) -> bool:
    return all(part.dataset.number in present for part in mode.parts)


def _crop_by(rough: ModelCard, margin: float, labels: Iterable[str] = ()) -> Stage:
    """Return the stage that crops a scan; TotalSegmentator stores the crop as whole numbers."""
    return Stage(replace(rough, subset=None), "crop", tuple(labels), margin, steps=(Truncate(),))


def _coarser(mode: Mode, present: Mapping[int, Path]) -> FastPreset | None:
    """Return the preset that runs the task's model of 3 mm, as TotalSegmentator's own `--fast`.

    None if the task has none, or its weights are not there.
    """
    coarser = modes().get(f"{mode.task}_fast")
    if coarser is None or coarser is mode or mode.name != mode.task or coarser.crop:
        return None
    if coarser.classes != mode.classes or not _is_complete(coarser, present):
        return None
    return FastPreset(card=replace(_read(coarser, present), subset=None))


def _read_part(part: TaskNetwork, mode: Mode, present: Mapping[int, Path]) -> ModelCard:
    """Return the card of one network of a task."""
    dataset = part.dataset
    if dataset.number not in present:
        raise _missing(mode, dataset)
    base = read_nnunet(_model_folder(present[dataset.number], mode))
    if not isinstance(base.decision, Argmax) or len(base.channels) != 1 or base.stage:
        raise unsupported(f"{dataset.folder}: regions, several channels or a cascade")
    weights = _folds(base, mode)
    (channel,) = base.channels
    return replace(
        base,
        name=f"dataset{dataset.number:03d}",
        channels=(replace(channel, name=mode.modality, modality=mode.modality),),
        grid=replace(base.grid, orientation=None, as_nifti=False),
        window=replace(base.window, overlap=1 - mode.step, mirror=()),
        weights=weights[0],
        folds=weights[1:],
        structures=_structures(base, part, mode),
    )


def _model_folder(folder: Path, mode: Mode) -> Path:
    """Return the folder of a dataset's model; usually, the plans are named nnUNetPlans."""
    usual = folder / f"{mode.trainer}__nnUNetPlans__{mode.configuration}"
    if usual.is_dir():
        return usual
    models = sorted(folder.glob(f"{mode.trainer}__*__{mode.configuration}"))
    if len(models) != 1:
        detail = f"{truncate(folder.name)} has no {mode.trainer}__nnUNetPlans__{mode.configuration}"
        raise damaged(detail)
    return models[0]


def _folds(card: ModelCard, mode: Mode) -> tuple[Weights, ...]:
    """Return the weights of the folds that the task uses."""
    weights = (card.weights, *card.folds)
    if mode.folds is None:
        return weights
    by_name = {each.file.parent.name: each for each in weights}
    missing = [fold for fold in mode.folds if f"fold_{fold}" not in by_name]
    if missing:
        raise damaged(f"{mode.name} needs fold_{missing[0]}")
    return tuple(by_name[f"fold_{fold}"] for fold in mode.folds)


def _structures(card: ModelCard, part: TaskNetwork, mode: Mode) -> tuple[Structure, ...]:
    """Return the structures of a network by TotalSegmentator's names.

    Labels that the task does not have only help the network; they are removed from results.
    """
    numbers = [structure.number for structure in card.structures]
    if not set(part.classes) <= set(numbers):
        raise damaged(f"{part.dataset.folder} has fewer labels than {mode.name}")
    names = [part.classes.get(number, f"auxiliary_{number}") for number in numbers]
    return name_structures(names, numbers)
