from __future__ import annotations

import numpy as np
import pytest

from scanloom.core import MODALITIES, Grid, Volume

GRID = Grid((4, 3, 2), np.eye(4))


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_first_index_runs_fastest(order):
    """Whatever comes in, memory is in Fortran order, and values stay where they are."""
    array = np.arange(24, dtype=np.int16).reshape(4, 3, 2).copy(order=order)

    volume = Volume(array, GRID, "HU", "CT")

    assert volume.array.flags.f_contiguous
    np.testing.assert_array_equal(volume.array, array)
    assert np.shares_memory(volume.array, array) == (order == "F")


def test_a_volume_can_not_be_written_to():
    """The volume is read-only; the caller's own array stays as it was."""
    array = np.zeros((4, 3, 2), np.int16, order="F")

    volume = Volume(array, GRID, "HU", "CT")

    with pytest.raises(ValueError, match="read-only"):
        volume.array[0, 0, 0] = 1
    array[0, 0, 0] = 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.float16, np.float64])
@pytest.mark.parametrize("modality", [*MODALITIES, None])
def test_numbers_of_any_modality_are_fine(dtype, modality):
    """Integers and floats, of the modalities that are told apart or of an unknown one."""
    volume = Volume(np.zeros((4, 3, 2), dtype), GRID, "unknown", modality)

    assert (volume.array.dtype, volume.modality, volume.flags) == (dtype, modality, ())


@pytest.mark.parametrize(
    ("array", "modality", "says"),
    [
        (np.zeros((4, 3, 3)), "CT", "does not fit grid"),
        (np.zeros((4, 3)), "CT", "does not fit grid"),
        (np.zeros((4, 3, 2), bool), "CT", "must hold numbers"),
        (np.zeros((4, 3, 2), complex), "CT", "must hold numbers"),
        (np.zeros((4, 3, 2), np.longdouble), "CT", "at most 64 bits"),
        (np.zeros((4, 3, 2)), "XA", "modality must be one of"),
        (np.zeros((4, 3, 2)), "", "modality must be one of"),
    ],
)
def test_what_is_no_volume_can_not_be_made(array, modality, says):
    """Shape, numbers and modality are checked once, when it is made."""
    with pytest.raises(ValueError, match=says):
        Volume(array, GRID, "HU", modality)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
@pytest.mark.parametrize("name", ["padding", "padding_limit"])
@pytest.mark.parametrize("value", [10**400, "air", [-1024]], ids=["huge", "text", "list"])
def test_padding_that_is_no_number_is_refused(dtype, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        Volume(np.zeros((4, 3, 2), dtype), GRID, "HU", "CT", **{name: value})


def test_a_masked_array_is_refused():
    """Its mask would be lost without a word."""
    with pytest.raises(TypeError, match="masked"):
        Volume.from_array(np.ma.masked_less(np.ones((4, 3, 2)), 0), GRID.affine)


def test_padding_equals_its_voxels_in_any_precision():
    array = np.full((4, 3, 2), -200.1, np.float32)
    volume = Volume(array, GRID, "HU", "CT", padding=-200.1)
    assert volume.is_padding(volume.array).all()
    assert volume.is_padding(volume.array.astype(np.float64)).all()
    assert Volume(array.astype(np.int16), GRID, "HU", "CT", padding=-200.1).padding == -200.1
    assert not Volume(array, GRID, "HU", "CT", padding=1e300).is_padding(array).any()
