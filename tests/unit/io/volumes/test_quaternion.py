"""Rotations as a NIfTI's qform holds them, judged by its readers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel.nifti1 import Nifti1Header
from scipy.spatial.transform import Rotation

from scanloom.core import Grid
from scanloom.io.volumes.nifti import (
    MAX_DISPLACEMENT_MM,
    quaternion_from_affine,
    rotations_from_quaternions,
)
from support import case_folders

SHAPE, SPACING = (512, 512, 300), (0.5, 0.5, 1.0)


def affine_of(axes: np.ndarray, turn: Rotation | None = None) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = (turn.as_matrix() if turn else np.eye(3)) @ axes * SPACING
    return affine


def bare(b: float, c: float, d: float) -> np.ndarray:
    """The formula of nifti1.h, nothing else."""
    a = math.sqrt(max(0.0, 1 - (b * b + c * c + d * d)))
    return np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
        ]
    )


def by_nibabel(b: float, c: float, d: float) -> np.ndarray:
    header = Nifti1Header()
    header["pixdim"][:4] = 1
    header["quatern_b"], header["quatern_c"], header["quatern_d"] = b, c, d
    return np.asarray(header.get_qform())[:3, :3]


def by_itk(b: float, c: float, d: float, path: Path) -> np.ndarray:
    header = case_folders.header_with(quatern_b=b, quatern_c=c, quatern_d=d, qform_code=1)
    return case_folders.by_itk(case_folders.header_file(path, header))[:3, :3]


def farthest(rotation: np.ndarray, affine: np.ndarray) -> float:
    """mm between a corner by a rotation and by an affine."""
    if np.linalg.det(affine[:3, :3]) < 0:
        rotation = rotation @ np.diag((1, 1, -1))
    off = rotation * np.linalg.norm(affine[:3, :3], axis=0) - affine[:3, :3]
    return float(
        np.linalg.norm(off @ (case_folders.CORNERS * (np.array(SHAPE) - 1)).T, axis=0).max()
    )


@pytest.mark.parametrize("codes", case_folders.ORDERS)
def test_an_axis_order_is_said_exactly(codes: str, tmp_path: Path) -> None:
    """24 of the 48 are half a turn, a = 0, or mirrored half turns."""
    affine = affine_of(case_folders.directions(codes))
    bcd = quaternion_from_affine(affine, SHAPE)
    assert bcd is not None
    assert all(float(np.float32(x)) == x for x in bcd)
    readings = [bare(*bcd), by_nibabel(*bcd), by_itk(*bcd, tmp_path / "x.nii")]
    readings.append(rotations_from_quaternions(np.array([bcd]))[0])
    for rotation in readings:
        assert farthest(rotation, affine) < 1e-3


VECTORS = st.tuples(*[st.floats(-1, 1) for _ in range(3)]).filter(lambda v: np.linalg.norm(v) > 0.1)
ANGLES = st.floats(-7, 0).map(lambda n: 10.0**n)


def turn(vector: tuple[float, ...], angle: float) -> Rotation:
    return Rotation.from_rotvec(np.array(vector) / np.linalg.norm(vector) * angle)


@settings(max_examples=150)
@given(codes=st.sampled_from(case_folders.ORDERS), vector=VECTORS, angle=ANGLES)
def test_what_is_said_is_near_for_all_readers(
    codes: str, vector: tuple[float, ...], angle: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    affine = affine_of(case_folders.directions(codes), turn(vector, angle))
    bcd = quaternion_from_affine(affine, SHAPE)
    if bcd is None:
        return
    path = tmp_path_factory.getbasetemp() / "reading.nii"
    for rotation in (bare(*bcd), by_nibabel(*bcd), by_itk(*bcd, path)):
        assert farthest(rotation, affine) <= MAX_DISPLACEMENT_MM + 1e-3


@pytest.mark.parametrize("angle", [1e-4, 3e-4, 1e-3, 2e-3])
def test_a_hair_off_half_a_turn_is_not_said(angle: float) -> None:
    """float32 has no quaternion within 0.01 mm there: the plain one is up to 0.7 mm off."""
    affine = affine_of(case_folders.directions("LPS"), turn((0, 0, 1), angle))
    assert quaternion_from_affine(affine, SHAPE) is None
    assert (
        quaternion_from_affine(affine, (8, 8, 8)) is not None
    )  # so small a grid has no far corner


@pytest.mark.parametrize("angle", [1e-7, 1e-6, 1e-5, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("codes", ["LPS", "RAS", "LSA", "ASR"])
def test_other_turns_are_said(codes: str, angle: float) -> None:
    """A qform is there wherever float32 has one, and from the head's usual tilt on it has."""
    assert (
        quaternion_from_affine(
            affine_of(case_folders.directions(codes), turn((1, 2, 3), angle)), SHAPE
        )
        is not None
    )


def test_axes_that_lean_are_not_said() -> None:
    affine = affine_of(case_folders.directions("LPS"))
    affine[0, 1] += 9e-5 * SPACING[1]
    assert not Grid(SHAPE, affine).sheared
    assert quaternion_from_affine(affine, SHAPE) is None


@pytest.mark.parametrize("quaternion", [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.1, -0.7, 0.3)])
def test_rotations_are_those_of_scipy(quaternion: tuple[float, ...]) -> None:
    rest = math.sqrt(1 - sum(x * x for x in quaternion))
    expected = Rotation.from_quat((*quaternion, rest)).as_matrix()
    np.testing.assert_allclose(
        rotations_from_quaternions(np.array([quaternion]))[0], expected, atol=1e-15
    )
