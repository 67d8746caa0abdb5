"""Codes are those of the standard, and colours can be told apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from scanloom.cards import codes
from scanloom.cards.codes import ABNORMAL, ANATOMY, LEFT, RIGHT, SUBSTANCE, TISSUE, coding, color
from scanloom.core import Code

CATEGORIES, LATERALITY, TYPES, BRAIN = 7150, 244, 7151, 7140


def standard() -> dict[str, Any]:
    """Return pydicom's dictionary of SNOMED CT: meanings and context groups by value."""
    from pydicom.sr._concepts_dict import concepts

    meanings: dict[str, dict[str, set[int]]] = {}
    for entries in concepts["SCT"].values():
        for value, (meaning, groups) in entries.items():
            meanings.setdefault(value, {}).setdefault(meaning, set()).update(groups)
    return meanings


STANDARD = standard()


def is_in(code: Code, group: int) -> bool:
    return code.scheme == "SCT" and group in STANDARD.get(code.value, {}).get(code.meaning, ())


def test_every_type_is_in_the_standard_with_its_meaning() -> None:
    """PS3.16 CID 7151, and CID 7140 for volumes of the brain, word for word."""
    wrong = [
        code for _, code in codes._TABLE.values() if not (is_in(code, TYPES) or is_in(code, BRAIN))
    ]

    assert wrong == []
    assert len(codes._TABLE) > 100


def test_further_types_have_the_meaning_of_the_standard() -> None:
    """TotalSegmentator's codes are beyond PS3.16, or its word for word."""
    types = {coding.type for coding in codes._exact_names().values()}
    in_standard = [
        code
        for code in types
        if any(TYPES in groups for groups in STANDARD.get(code.value, {}).values())
    ]

    assert len(in_standard) > 5
    assert all(is_in(code, TYPES) for code in in_standard)


@pytest.mark.parametrize("category", [ANATOMY, TISSUE, SUBSTANCE, ABNORMAL])
def test_categories_are_those_of_cid_7150(category: Code) -> None:
    assert is_in(category, CATEGORIES)


@pytest.mark.parametrize("side", [LEFT, RIGHT])
def test_sides_are_those_of_cid_244(side: Code) -> None:
    assert is_in(side, LATERALITY)


@pytest.mark.parametrize(
    ("name", "meaning", "side", "category"),
    [
        ("spleen", "Spleen", None, ANATOMY),
        ("Left-Inf-Lat-Vent", "Inferior Horn of Lateral Ventricle", LEFT, ANATOMY),
        ("ctx-rh-precuneus", "Parietal lobe", RIGHT, ANATOMY),
        ("ctx-lh-entorhinal", "Entorhinal Cortex", LEFT, ANATOMY),
        ("Right-VentralDC", "Diencephalon", RIGHT, ANATOMY),
        ("Left-Thalamus-Proper*", "Thalamus", LEFT, ANATOMY),
        ("CC_Mid_Anterior", "Corpus callosum", None, ANATOMY),
        ("CSF", "Cerebrospinal Fluid", None, SUBSTANCE),
        ("Grey Matter", "Gray Matter", None, ANATOMY),
        ("brain mask", "Brain", None, ANATOMY),
        ("kidney_left", "Kidney", LEFT, ANATOMY),
        ("Right Kidney", "Kidney", RIGHT, ANATOMY),
        ("Left Kideny", "Kidney", LEFT, ANATOMY),
        ("Kidney_L", "Kidney", LEFT, ANATOMY),
        ("Parotid_R", "Parotid gland", RIGHT, ANATOMY),
        ("Right adrenal gland", "Adrenal gland", RIGHT, ANATOMY),
        ("lung_upper_lobe_left", "Upper lobe of lung", LEFT, ANATOMY),
        ("left lung upper lobe", "Upper lobe of lung", LEFT, ANATOMY),
        ("heart_atrium_left", "Left atrium", None, ANATOMY),
        ("vertebrae_L5", "L5 vertebra", None, ANATOMY),
        ("Vertebra_L_5", "L5 vertebra", None, ANATOMY),
        ("vertebrae_T12", "T12 vertebra", None, ANATOMY),
        ("rib_left_7", "Seventh rib", LEFT, ANATOMY),
        ("left rib", "Rib", LEFT, ANATOMY),
        ("Portal and Splenic Veins", "Portal vein", None, ANATOMY),
        ("IVC", "Inferior vena cava", None, ANATOMY),
        ("urinary_bladder", "Bladder", None, ANATOMY),
        ("bladder", "Bladder", None, ANATOMY),
        ("3rd-Ventricle", "Third ventricle", None, ANATOMY),
        ("lv_pool", "Left ventricle", None, ANATOMY),
        ("lungs", "Lung", None, ANATOMY),
        ("fat", "Fat", None, TISSUE),
        ("adipose tissue", "Fat", None, TISSUE),
        ("inferior_vena_cava", "Inferior vena cava", None, ANATOMY),
        ("iliac_vena_left", "Common iliac vein", LEFT, ANATOMY),
        ("soft_tissue", "Soft tissue", None, TISSUE),
        ("Bones", "Bone", None, TISSUE),
        ("gluteus_maximus_right", "Gluteus maximus muscle", RIGHT, ANATOMY),
        ("gas", "Gas", None, SUBSTANCE),
        ("body gas", "Gas", None, SUBSTANCE),
        ("gas inside the body", "Gas", None, SUBSTANCE),
        ("pancreatic tumor", "Neoplasm", None, ABNORMAL),
        ("left kidney cyst", "Cyst", LEFT, ABNORMAL),
    ],
)
def test_names_are_understood(name: str, meaning: str, side: Code | None, category: Code) -> None:
    coded = coding(name)

    assert coded.known
    assert (coded.type.meaning, coded.laterality, coded.category) == (meaning, side, category)


@pytest.mark.parametrize("name", ["central gland", "left-handed thing", "x", "left right kidney"])
def test_unknown_names_claim_nothing(name: str) -> None:
    coded = coding(name)

    assert not coded.known or name == "left right kidney"
    assert coded.type.meaning in ("Tissue", "Kidney")
    assert coded.laterality == (LEFT if name.startswith("left-") else None)


@pytest.mark.parametrize("name", ["L 5", "l_5", "L 4 - L 5", "Disc L 4 L 5", "spinal canal L-3"])
def test_levels_of_the_spine_are_on_no_side(name: str) -> None:
    assert coding(name).laterality is None


@pytest.mark.parametrize("name", ["Rib L 5", "Kidney_L 1", "level L 3"])
def test_a_letter_before_a_number_is_else_a_side(name: str) -> None:
    assert coding(name).laterality == LEFT


def test_colours_can_be_told_apart() -> None:
    """No two of 120 are equal, and neighbours are far from each other."""
    rgb = np.array([color(n) for n in range(1, 121)], dtype=float)

    assert len({tuple(c) for c in rgb}) == 120
    assert rgb.min() >= 0
    assert rgb.max() <= 255
    assert np.abs(np.diff(rgb, axis=0)).sum(axis=1).min() > 120
    first = rgb[:12]
    assert min(np.abs(a - b).sum() for a, b in itertools.combinations(first, 2)) > 60


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Cerebral-White-Matter", "Cerebral white matter"),
        ("kidney_left", "Kidney left"),
        ("brain mask", "Brain mask"),
        ("Left Lower Lobe", "Left lower lobe"),
        ("Vertebra L1", "Vertebra L1"),
        ("3rd-Ventricle", "3rd ventricle"),
        ("VentralDC", "VentralDC"),
        ("Gas inside the body, not in the lungs", "Gas inside the body, not in the lungs"),
    ],
)
def test_names_are_shown_with_spaces(name: str, shown: str) -> None:
    assert codes.shown_name(name) == shown
