"""Write the table of TotalSegmentator's tasks from its package, whose tables are Apache-2.0.

python docs/write_totalsegmentator.py SITE_PACKAGES

SITE_PACKAGES is a folder with the package `totalsegmentator` and its `.dist-info`, such as an
unpacked wheel. Only its tables are imported, none of its dependencies.
"""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydicom.sr._concepts_dict import concepts

from scanloom.cards.codes import SIDES, coding_by_words

PACKAGE: Final = Path(__file__).parents[1] / "pipeline/scanloom"
ABOUT: Final = (
    "Written by docs/write_totalsegmentator.py from the tables of TotalSegmentator (Apache-2.0, "
    "https://github.com/wasserth/TotalSegmentator). `codes`: structures that scanloom's own table "
    "lacks or blurs, each with category, type, its meaning, and side."
)
FEWER_WINDOWS: Final = ("total", "total_v3", "total_mr")
"""Tasks whose windows overlap less, as in `nnUNet_predict_image`."""
CROP_MARGIN_MM: Final = 20.0
"""Margin of a crop unless the task has a `crop_model`: `crop_addon` is ignored otherwise."""
NO_TASK: Final = ("test",)
_MINIMUS: Final = ("75297007", "Gluteus minimus muscle")
_SUBCLAVIAN: Final = ("36765005", "Subclavian artery")
CORRECTED: Final = {
    "gluteus_minimus": _MINIMUS,
    "gluteus_minimus_left": _MINIMUS,
    "gluteus_minimus_right": _MINIMUS,
    "subclavian_artery_left": _SUBCLAVIAN,
    "subclavian_artery_right": _SUBCLAVIAN,
}
"""Codes that have a mistake in TotalSegmentator's table: of another muscle; of the right artery."""
SEGMENTED_TYPES: Final = 7151
"""DICOM's context group of codes for segmented structures."""


def parts_of(tables: Any, task: str) -> Mapping[int, Mapping[int, str]]:
    """Return the classes of each dataset of a task in parts; empty for another task."""
    suffixes = {
        "total": ("class_map_5_parts", "ct"),
        "total_v3": ("class_map_5_parts_total_v3", "ct_v3"),
        "total_mr": ("class_map_parts_mr", "mr"),
        "headneck_muscles": ("class_map_parts_headneck_muscles", "headneck_muscles"),
    }
    if task not in suffixes:
        return {}
    classes, names = suffixes[task]
    by_name = getattr(tables, classes)
    by_number = getattr(tables, f"map_taskid_to_partname_{names}")
    return {number: by_name[name] for number, name in by_number.items() if name != "test"}


def modes_of(configs: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, task and settings of each mode."""
    for task, settings in configs.items():
        if task in NO_TASK:
            continue
        for mode, values in settings.get("sub_modes", {"default": settings}).items():
            suffix = "" if mode == "default" else f"_{mode}"
            yield f"{task}{suffix}".lower(), task, values


def crop_of(task: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the mode that crops the scan for a task, as in `totalsegmentator` of its API."""
    labels = settings.get("crop")
    if not labels:
        return None
    if model := settings.get("crop_model"):
        return {"mode": model, "labels": labels, "margin_mm": float(settings["crop_addon"][0])}
    if {"body_trunc", "body_extremities"} & set(labels):
        mode = "body_fast"
    elif task.endswith("_mr"):
        mode = "total_mr_fast"
    else:
        mode = "total_fast" if settings.get("robust_crop") else "total_fastest"
    return {"mode": mode, "labels": labels, "margin_mm": CROP_MARGIN_MM}


def mode_of(tables: Any, task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a mode."""
    numbers = settings["task_id"]
    numbers = numbers if isinstance(numbers, list) else [numbers]
    classes, parts = tables.class_map[task], parts_of(tables, task)
    spacing = settings.get("resample")
    registry = importlib.import_module("totalsegmentator.registry")
    return {
        "task": task,
        "modality": registry.task_modality(task),
        "licensed": registry.requires_license(task),
        "parts": {n: parts.get(n, classes) if len(numbers) > 1 else "all" for n in numbers},
        "trainer": settings["trainer"],
        "configuration": settings.get("model", "3d_fullres"),
        "folds": settings.get("folds", [0]),
        "spacing": [spacing] * 3 if isinstance(spacing, float) else spacing,
        "step": 0.8 if task in FEWER_WINDOWS else 0.5,
        "crop": crop_of(task, settings),
        "remove_outside": bool(settings.get("remove_outside")),
    }


def standard_meanings() -> dict[str, str]:
    """Return the meanings of codes for segmented structures in pydicom's dictionary."""
    entries = (entry for values in concepts["SCT"].values() for entry in values.items())
    return {value: meaning for value, (meaning, groups) in entries if SEGMENTED_TYPES in groups}


def codes_of(resource: Path) -> dict[str, Any]:
    """Return the codes of structures that scanloom's own table does not have, or blurs."""
    codes, standard = {}, standard_meanings()
    with resource.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            name, kind = row["Structure"], "SegmentedPropertyTypeCodeSequence"
            stated = row[f"{kind}.CodeValue"], row[f"{kind}.CodeMeaning"]
            value, meaning = CORRECTED.get(name, stated)
            meaning = standard.get(value, meaning)
            if coding_by_words(name).type.value == value:
                continue
            category = row["SegmentedPropertyCategoryCodeSequence.CodeValue"]
            side = row["SegmentedPropertyTypeModifierCodeSequence.CodeValue"]
            codes[name] = [category, value, meaning, side if side in SIDES else None]
    return codes


def main() -> None:
    """Write the table."""
    packages = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(packages))
    tables = importlib.import_module("totalsegmentator.map_to_binary")
    configs = importlib.import_module("totalsegmentator.map_tasks_config")
    found = metadata.Distribution.discover(name="TotalSegmentator", path=[str(packages)])
    modes = {n: mode_of(tables, t, s) for n, t, s in modes_of(configs.TASK_CONFIGS)}
    tasks = {mode["task"] for mode in modes.values()}
    used = {int(number) for mode in modes.values() for number in mode["parts"]}
    table = {
        "about": {"about": ABOUT, "version": next(iter(found)).version},
        "datasets": {
            number: [weights["foldername"], weights.get("version", "").removesuffix("-weights")]
            for number, weights in configs.TASK_ID_WEIGHTS_CONFIGS.items()
            if number in used
        },
        "classes": {task: tables.class_map[task] for task in tables.class_map if task in tasks},
        "modes": modes,
    }
    write(PACKAGE / "convert/totalsegmentator.json", table)
    codes = packages / "totalsegmentator/resources/totalsegmentator_snomed_mapping.csv"
    write(PACKAGE / "cards/codes.json", {"about": table["about"], "codes": codes_of(codes)})


def write(file: Path, table: Mapping[str, Mapping[Any, Any]]) -> None:
    """Write a table, one line for each entry."""
    sections = []
    for name, entries in table.items():
        lines = (f"{json.dumps(str(key))}: {json.dumps(entry)}" for key, entry in entries.items())
        sections.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    file.write_text("{\n" + ",\n".join(sections) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
