"""The table of TotalSegmentator's tasks."""

from __future__ import annotations

from pathlib import Path

from scanloom.cards import codes
from scanloom.cards.codes import LEFT, TISSUE, coding
from scanloom.convert import totalsegmentator
from scanloom.convert.download import addresses
from scanloom.convert.totalsegmentator import datasets, modes
from scanloom.core import slug

TASKS = Path(totalsegmentator.__file__).with_suffix(".json")
CODES = Path(codes.__file__).with_name("codes.json")


def test_counts():
    """60 tasks at all resolutions, as read in TotalSegmentator 2.18."""
    table = modes().values()

    assert len(table) == 60
    assert len({mode.task for mode in table}) == 52
    assert sorted(mode.name for mode in table if len(mode.parts) > 1) == [
        *("headneck_muscles", "total", "total_mr", "total_v3")
    ]
    assert sum(mode.licensed for mode in table) == 18
    assert sum(mode.crop is not None for mode in table) == 26
    assert sum(mode.spacing is None for mode in table) == 6


def test_crops_refer_to_structures_of_their_tasks():
    """Each cropping task has the structures; the margin is 20 mm unless it is a model's own."""
    crops = {mode.name: mode.crop for mode in modes().values() if mode.crop}

    for crop in crops.values():
        assert set(crop.labels) <= set(modes()[crop.mode].classes.values())
    assert {name for name, crop in crops.items() if crop.margin != 20.0} == {"teeth"}
    assert crops["liver_segments_mr"].mode == "total_mr_fast"
    assert crops["lung_vessels"].mode == "total_fast"
    assert crops["abdominal_muscles"].mode == "body_fast"


def test_parts_cover_their_tasks():
    """The parts of a task have its structures, each with a label that is a slug of its own."""
    for mode in modes().values():
        union = {name for submodel in mode.parts for name in submodel.classes.values()}
        assert union == set(mode.classes.values())
        assert len({slug(name) for name in union}) == len(union)


def test_downloads_have_the_datasets_of_the_tasks():
    """The store's table of addresses agrees with the table of tasks."""
    for name, numbers in addresses.TOTALSEGMENTATOR_TASKS.items():
        mode = modes()[name]
        assert {submodel.dataset.number for submodel in mode.parts} <= set(numbers)
        if mode.crop:
            assert {p.dataset.number for p in modes()[mode.crop.mode].parts} <= set(numbers)
    for release, folders in addresses.TOTALSEGMENTATOR_DATASETS.items():
        for folder in folders:
            dataset = datasets()[int(folder[7:10])]
            assert (dataset.folder, f"{dataset.release}-weights") == (folder, release)


def test_all_structures_of_total_have_codes():
    """117 structures, none unknown, ribs and muscles told apart."""
    names = modes()["total"].classes.values()
    types = {name: coding(name).type for name in names}

    assert all(coding(name).known for name in names)
    assert TISSUE not in types.values()
    assert len({types[f"rib_left_{n}"] for n in range(1, 13)}) == 12
    assert types["gluteus_minimus_left"].meaning == "Gluteus minimus muscle"
    assert types["portal_vein_and_splenic_vein"].meaning == "Portal vein and splenic vein"
    assert coding("iliopsoas_left").laterality == LEFT
    assert coding("hip_implant").category.meaning == "Physical object"


def test_tables_are_small():
    """The files that ship with the package."""
    assert sum(file.stat().st_size for file in (TASKS, CODES)) < 500_000
