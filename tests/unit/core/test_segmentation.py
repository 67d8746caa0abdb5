from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scanloom.core import Code, Grid, Layer, Segmentation, Structure, is_slug

CODE = Code("10200004", "SCT", "Liver")
GRID = Grid((4, 3, 2), np.eye(4))


def structure(number=1, label=None, color=(1, 2, 3)) -> Structure:
    return Structure(label or f"s{number}", number, "Thing", CODE, CODE, color)


def layer(*numbers: int, dtype=np.uint8, shape=(4, 3, 2)) -> Layer:
    return Layer(np.zeros(shape, dtype), tuple(structure(n) for n in numbers))


@pytest.mark.parametrize("text", ["liver", "kidney_left", "ct-tissue", "v2", "2d_unet", "a" * 64])
def test_slugs(text):
    assert is_slug(text)


@pytest.mark.parametrize(
    "text",
    ["", "Liver", "a b", "a__b", "_a", "a-", "a/b", "..", "a.b", "é", "a\n", "a" * 65, "²"],
)
def test_not_slugs(text):
    """Nothing that could be a path, or be written in two ways, is a name."""
    assert not is_slug(text)


@given(st.text(max_size=10))
def test_a_slug_is_ascii_in_small_letters(text):
    if is_slug(text):
        assert text.isascii()
        assert text == text.lower()
        assert not set(text) & set("/\\. \t\n:")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"label": "Left kidney"}, "label is made of"),
        ({"number": 0, "label": "a"}, "number must be"),
        ({"number": 65536, "label": "a"}, "number must be"),
        ({"color": (0, 0)}, "color must be"),
        ({"color": (0, 0, 256)}, "color must be"),
        ({"color": (-1, 0, 0)}, "color must be"),
    ],
)
def test_what_is_no_structure_can_not_be_made(arguments, says):
    with pytest.raises(ValueError, match=says):
        structure(**arguments)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("value", ""),
        ("value", "1\\2"),
        ("scheme", "SCT "),
        ("scheme", "99" + "A" * 15),
        ("meaning", " Liver"),
        ("meaning", "Liver\\left lobe"),
    ],
)
def test_what_dicom_would_alter_is_no_code(field, text):
    with pytest.raises(ValueError, match=r"a code has no text|a scheme has at most"):
        replace(CODE, **{field: text})


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_layer_is_read_only_and_in_fortran_order(order, dtype):
    """Its first index runs fastest; nobody writes to it."""
    labels = np.arange(24).astype(dtype).reshape(4, 3, 2).copy(order=order)

    built = Layer(labels, (structure(),))

    assert built.labels.flags.f_contiguous
    np.testing.assert_array_equal(built.labels, labels)
    with pytest.raises(ValueError, match="read-only"):
        built.labels[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("labels", "numbers", "says"),
    [
        (np.zeros((4, 3), np.uint8), (1,), "labels must be"),
        (np.zeros((4, 3, 2), np.int16), (1,), "labels must be"),
        (np.zeros((4, 3, 2), bool), (1,), "labels must be"),
        (np.zeros((4, 3, 2), np.uint8), (), "do not fit"),
        (np.zeros((4, 3, 2), np.uint8), (256,), "do not fit"),
    ],
)
def test_what_is_no_layer_can_not_be_made(labels, numbers, says):
    with pytest.raises(ValueError, match=says):
        Layer(labels, tuple(structure(n) for n in numbers))


def test_structures_come_layer_by_layer():
    """All structures of all layers, in order; large numbers in a layer of uint16."""
    built = Segmentation("model", (layer(3, 1), layer(300, dtype=np.uint16)), GRID)

    assert [s.number for s in built.structures] == [3, 1, 300]


@pytest.mark.parametrize(
    ("model", "layers", "says"),
    [
        ("My Model", (layer(1),), "name is made of"),
        ("model", (), "at least one layer"),
        ("model", (layer(1, shape=(4, 3, 3)),), "does not fit grid"),
        ("model", (layer(1, 2), layer(2)), "label of each structure must be unique"),
        (
            "model",
            (Layer(np.zeros((4, 3, 2), np.uint8), (structure(1, "a"), structure(1, "b"))),),
            "number of each structure must be unique",
        ),
    ],
)
def test_what_is_no_segmentation_can_not_be_made(model, layers, says):
    """A structure has one label and one number, across layers."""
    with pytest.raises(ValueError, match=says):
        Segmentation(model, layers, GRID)
