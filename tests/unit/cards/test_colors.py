"""Colours of structures, judged by scikit-image's CIEDE2000 and a published simulation."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from skimage.color import deltaE_ciede2000, rgb2lab

from scanloom.cards import codes
from scanloom.cards.card import Argmax
from scanloom.cards.codes import LEFT, RIGHT, coding
from scanloom.convert import onnx_model
from scanloom.convert.meshnet import LabelFields, make_structures
from scanloom.convert.monai.metadata import StructureFields, TensorFormat
from scanloom.convert.monai.network import read_structures
from scanloom.convert.nnunet import name_structures
from scanloom.core import Code, Structure

FOLDER = Path(codes.__file__).parent
TABLE = {
    code: row
    for rows in json.loads((FOLDER / "colors.json").read_text())["systems"].values()
    for code, row in rows.items()
}
_ANATOMY = json.loads(Path(__file__).with_name("neighbors.json").read_text())
NEIGHBORS, PAIRED = _ANATOMY["neighbors"], _ANATOMY["paired"]
TISSUES = ("39607008", "74947009", "55603005", "87784001", "272673000")
"""Structures of ct_tissue, all of which are neighbours."""
DEUTAN = np.array(
    [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]
)
"""Deuteranopia, severity 1.0: Machado, Oliveira and Fernandes 2009, doi 10.1109/TVCG.2009.113."""


def structure(code: str, number: int = 1, side: Code | None = None, color=(9, 9, 9)) -> Structure:
    type_ = Code(code, "SCT", "Thing")
    return Structure(f"s{number}", number, "Thing", type_, type_, color, side)


def deutan(rgb) -> np.ndarray:
    """Return the sRGB colour that a deuteranope sees."""
    share = np.asarray(rgb) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = (DEUTAN @ linear).clip(0, 1)
    return 255 * np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)


def difference(a, b) -> float:
    lab = [rgb2lab(np.asarray(c, float)[None, None] / 255) for c in (a, b)]
    return float(deltaE_ciede2000(*lab)[0, 0])


def least_difference(a: str, b: str) -> float:
    """Return the difference of two codes, to a normal and to a deutan reader.

    Both structures of a pair are on the same side.
    """
    sides = [(None, RIGHT) if code in PAIRED else (None,) for code in (a, b)]
    pairs = (
        itertools.product(*sides) if len(sides[0]) != len(sides[1]) else zip(*sides, strict=True)
    )
    seen = [
        (codes.table_color(structure(a, side=s)), codes.table_color(structure(b, side=t)))
        for s, t in pairs
    ]
    return min(min(difference(x, y), difference(deutan(x), deutan(y))) for x, y in seen)


def test_neighbours_are_told_apart_also_by_a_deutan_reader() -> None:
    code_of = {row[0]: code for code, row in TABLE.items()}
    pairs = [(code_of[a], code_of[b]) for a, neighbors in NEIGHBORS.items() for b in neighbors]

    least = min(least_difference(a, b) for a, b in pairs)

    assert len(pairs) > 300
    assert least >= 11


def tissue_difference(a: str, b: str) -> float:
    x, y = (codes.table_color(structure(code)) for code in (a, b))
    return min(difference(x, y), difference(deutan(x), deutan(y)))


def test_tissues_are_far_apart() -> None:
    assert min(tissue_difference(*pair) for pair in itertools.combinations(TISSUES, 2)) >= 20


@pytest.mark.parametrize("side", [None, RIGHT])
def test_no_colour_is_near_white_or_the_grey_of_bone(side: Code | None) -> None:
    for code in TABLE:
        rgb = codes.table_color(structure(code, side=side))
        assert all(difference(rgb, (g, g, g)) >= 19.9 for g in range(130, 256, 25)), TABLE[code]


def test_left_and_right_have_one_hue() -> None:
    left_side, right = (
        structure("64033007", n, side) for n, side in enumerate((LEFT, RIGHT), start=1)
    )

    shown = codes.display_colors((left_side, right))

    hues = [rgb2lab(np.array(shown[n])[None, None] / 255)[0, 0, 1:] for n in (1, 2)]
    angles = [np.degrees(np.arctan2(b, a)) for a, b in hues]
    assert angles[0] == pytest.approx(angles[1], abs=4)
    assert difference(shown[1], shown[2]) > 8


def test_pairs_of_one_code_keep_their_hues_and_stand_apart() -> None:
    """As the two parts of both hippocampi do, whose code is that of the whole."""
    parts = [codes.coded_structure(f"{p}_hippocampus", 1, "Hippocampus") for p in ("front", "back")]
    sided = [codes.sided(part, side) for side in ("left", "right") for part in parts]
    structures = [replace(s, number=n) for n, s in enumerate(sided, start=1)]

    shown = codes.display_colors(structures)

    for left_side, right in ((1, 3), (2, 4)):
        assert shown[right] == tuple(round(c * codes.RIGHT_SHADE) for c in shown[left_side])
    for one, other in itertools.product((1, 3), (2, 4)):
        seen = shown[one], shown[other]
        assert min(difference(*seen), difference(*map(deutan, seen))) >= 20


def test_pairs_that_the_table_lacks_have_one_hue() -> None:
    """Whichever side comes first."""
    for names in (("masseter_right", "masseter_left"), ("sartorius_left", "sartorius_right")):
        structures = of_nnunet("liver", *names)
        shown = codes.display_colors(structures)
        of_side = {s.laterality: shown[s.number] for s in structures}
        assert of_side[RIGHT] == tuple(round(c * codes.RIGHT_SHADE) for c in of_side[LEFT])


def test_sides_that_do_not_match_are_no_pairs() -> None:
    labels = ("lobe_upper_left", "lobe_lower_left", "lobe_middle_right")
    structures = [codes.coded_structure(label, n, label) for n, label in enumerate(labels, start=1)]
    assert [len(pair) for pair in codes._pairs(structures)] == [1, 1, 1]


@pytest.mark.parametrize("code", ["45653009", "78961009", "48535007"])
def test_right_structures_of_dull_colours_keep_their_hue_too(code: str) -> None:
    shown = codes.display_colors([structure(code, 1, LEFT), structure(code, 2, RIGHT)])
    assert shown[2] == tuple(round(c * codes.RIGHT_SHADE) for c in shown[1])


def test_all_structures_of_totalsegmentator_have_their_own_colour() -> None:
    file = FOLDER.parent / "convert" / "totalsegmentator.json"
    tasks = json.loads(file.read_text())["classes"]
    codings = [coding(name) for name in tasks["total"].values()]
    structures = [structure(c.type.value, n, c.laterality) for n, c in enumerate(codings, start=1)]

    shown = codes.display_colors(structures)

    assert len(set(shown.values())) == len(structures) >= 117
    assert all(codes.system_of(s) != codes.OTHER for s in structures)


def test_structures_of_two_models_have_their_own_colours() -> None:
    """Also the same structure of both, which lie on each other."""
    of_each = [structure("10200004"), structure("64033007", 2)]

    shown = codes.colors_of_models([("a", of_each), ("b", of_each)])

    assert len(set(shown.values())) == 4
    assert shown["a", 1] == tuple(TABLE["10200004"][1:])
    assert all(max(rgb) - min(rgb) >= 60 for rgb in shown.values())


def test_a_code_that_is_not_in_the_table_keeps_the_models_colour_unless_it_is_grey() -> None:
    unknown = [structure("1", n, color=c) for n, c in ((1, (200, 10, 10)), (2, (90, 90, 90)))]

    shown = codes.display_colors([*unknown, structure("1", 3, color=(200, 10, 10))])

    assert shown[1] == (200, 10, 10)
    assert max(shown[2]) - min(shown[2]) >= 60
    assert len(set(shown.values())) == 3


def test_the_table_has_meanings_and_a_licence() -> None:
    about = json.loads((FOLDER / "colors.json").read_text())["about"]
    assert "3D Slicer" in about
    assert "Apache-2.0" in about
    assert TABLE["10200004"][0] == "Liver"
    assert set(codes.systems()) > {"Bones", "Muscles", "Findings"}


# --- colours of results ---------------------------------------------------------------------------


def of_nnunet(*names: str) -> tuple[Structure, ...]:
    return name_structures(list(names), list(range(1, len(names) + 1)))


def of_a_bundle(*names: str) -> tuple[Structure, ...]:
    channels = {str(n): name for n, name in enumerate(("background", *names))}
    output = TensorFormat(num_channels=len(channels), channel_def=channels)
    return read_structures(output, Argmax(), {})


def of_brainchop(*names: str) -> tuple[Structure, ...]:
    labels = [LabelFields(number=n, name=name) for n, name in enumerate(("background", *names))]
    return make_structures(labels, len(labels))


def of_onnx(*names: str) -> tuple[Structure, ...]:
    return onnx_model._structures(list(names))


CONVERTERS = [of_nnunet, of_a_bundle, of_brainchop, of_onnx]
NAMES = ("spleen", "kidney_left", "kidney_right", "liver", "vertebrae_L1", "Hippocampus")


@pytest.mark.parametrize("convert", CONVERTERS)
def test_every_converter_gives_a_structure_the_colour_of_its_code(convert) -> None:
    """In any model, whatever its number: in DICOM SEG and surfaces as in pictures."""
    for names in (NAMES, NAMES[::-1], ("pancreas", *NAMES)):
        structures = convert(*names)
        shown = codes.display_colors(structures)
        assert all(s.color == codes.table_color(s) == shown[s.number] for s in structures)


@pytest.mark.parametrize("convert", CONVERTERS)
def test_structures_without_a_code_of_their_own_have_a_colour_of_their_own(convert) -> None:
    structures = convert("zone 1", "zone 2", "liver", "zone 3", "corpus callosum", "cc posterior")
    assert len({s.color for s in structures}) == len(structures)
    assert structures[2].color == tuple(TABLE["10200004"][1:])


def test_a_colour_that_the_model_states_is_kept_and_given_to_no_other() -> None:
    liver = tuple(TABLE["10200004"][1:])
    spleen = StructureFields(color=liver)
    output = TensorFormat(
        num_channels=3, channel_def={"0": "background", "1": "liver", "2": "spleen"}
    )
    first, second = read_structures(output, Argmax(), {"spleen": spleen})
    assert second.color == liver
    assert first.color != liver


def test_all_tasks_of_totalsegmentator_agree_on_colours() -> None:
    """But for several structures of a task with the same code and side, which differ."""
    file = FOLDER.parent / "convert" / "totalsegmentator.json"
    tasks = json.loads(file.read_text())["classes"]
    compared = 0
    for task in tasks.values():
        structures = name_structures(list(task.values()), [int(n) for n in task])
        coded = [codes.table_color(s) for s in structures]
        for s, color in zip(structures, coded, strict=True):
            if color is not None and coded.count(color) == 1:
                assert s.color == color, s.label
                compared += 1
    assert compared > 200
