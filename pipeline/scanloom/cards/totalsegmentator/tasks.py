"""TotalSegmentator's tasks, a table that `docs/write_totalsegmentator.py` takes from its package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Dataset:
    """Weights of one network.

    Parameters
    ----------
    number : int
        nnU-Net's number of the dataset.
    folder : str
        Name of its folder.
    release : str
        Release of the weights; empty if they are not published.
    """

    number: int
    folder: str
    release: str


@dataclass(frozen=True)
class Part:
    """A network of a task, and the names of its classes by number."""

    dataset: Dataset
    classes: Mapping[int, str]


@dataclass(frozen=True)
class CropBy:
    """A task whose structures crop the scan for another one; the margin is in mm."""

    mode: str
    labels: tuple[str, ...]
    margin: float


@dataclass(frozen=True)
class Mode:
    """A task at one of its resolutions.

    Parameters
    ----------
    name : str
        Task and resolution: "total", "total_fast".
    task : str
        Name of the task in TotalSegmentator.
    modality : str
        "CT" or "MR".
    licensed : bool
        Whether the weights are given only to holders of a licence.
    parts : tuple of Part
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
    crop : CropBy or None
        Task that crops the scan.
    remove_outside : bool
        Whether structures are removed that are not near others of the cropping task.
    """

    name: str
    task: str
    modality: str
    licensed: bool
    parts: tuple[Part, ...]
    classes: Mapping[int, str]
    trainer: str
    configuration: str
    folds: tuple[int, ...] | None
    spacing: tuple[float, float, float] | None
    step: float
    crop: CropBy | None
    remove_outside: bool


@cache
def modes() -> Mapping[str, Mode]:
    """Return all tasks at all resolutions, by name."""
    table = json.loads(Path(__file__).with_name("tasks.json").read_text(encoding="utf-8"))
    known = datasets()
    classes = {task: _classes(names) for task, names in table["classes"].items()}
    return MappingProxyType(
        {
            name: _mode(name, entry, classes[entry["task"]], known)
            for name, entry in table["modes"].items()
        }
    )


@cache
def datasets() -> Mapping[int, Dataset]:
    """Return the weights of all networks, by number."""
    table = json.loads(Path(__file__).with_name("tasks.json").read_text(encoding="utf-8"))
    return MappingProxyType(
        {int(number): Dataset(int(number), *values) for number, values in table["datasets"].items()}
    )


def _mode(
    name: str, entry: Mapping[str, Any], classes: Mapping[int, str], known: Mapping[int, Dataset]
) -> Mode:
    parts = tuple(
        Part(known[int(number)], classes if names == "all" else _classes(names))
        for number, names in entry["parts"].items()
    )
    spacing, crop, folds = entry["spacing"], entry["crop"], entry["folds"]
    return Mode(
        name=name,
        parts=parts,
        classes=classes,
        folds=None if folds is None else tuple(folds),
        spacing=spacing and (spacing[0], spacing[1], spacing[2]),
        crop=crop and CropBy(crop["mode"], tuple(crop["labels"]), crop["margin_mm"]),
        **{
            key: entry[key]
            for key in ("task", "modality", "licensed", "trainer", "configuration", "step")
        },
        remove_outside=entry["remove_outside"],
    )


def _classes(names: Mapping[str, str]) -> Mapping[int, str]:
    return MappingProxyType({int(number): name for number, name in names.items()})
