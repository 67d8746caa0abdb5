"""One ball, stored in all 48 axis orders: the same place after reading, and in the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, ornt_transform

import scanloom
from scanloom.cards.card import Checks
from scanloom.core import (
    Case,
    Layer,
    Outputs,
    ReadOptions,
    ScanError,
    Segmentation,
    Series,
    StepTimer,
    Volume,
)
from scanloom.core.measurement import Range
from scanloom.engine import steps
from scanloom.engine.prepare import estimate_case
from scanloom.inference.engines.selection import torch_choice
from support.case_folders import ORDERS, directions, turned
from support.model_cards import card, structures

CENTRE = np.array((7.0, -11.0, 19.0))  # RAS mm
RADIUS = 9.0
NEAR, VOLUME = 0.5, 0.02  # mm; share of the ball's volume
EXTENT = np.array((36.0, 38.0, 42.0))  # mm along R, A, S, so that shapes differ by order
FORMS = (("sform", 20.0), ("qform", 20.0), ("both", 0.0), ("qform", 0.0), ("sform", 0.0))
STEP = {"R": 0.9, "A": 1.0, "S": 1.2}


def ball(order: str, *, oblique: float = 0.0, middle: np.ndarray = CENTRE) -> tuple:
    """Return a soft ball (I, J, K) whose axes follow `order`, and its affine."""
    axes = directions(order)
    along = [int(np.abs(axes[:, n]).argmax()) for n in range(3)]
    spacing = np.array([STEP["RAS"[n]] for n in along])
    shape = tuple(int(EXTENT[n] / s) for n, s in zip(along, spacing, strict=True))
    affine = np.eye(4)
    affine[:3, :3] = turned(axes, oblique) * spacing
    affine[:3, 3] = middle - affine[:3, :3] @ ((np.array(shape) - 1) / 2 + 0.25)
    world = np.moveaxis(np.indices(shape), 0, -1) @ affine[:3, :3].T + affine[:3, 3]
    far = np.linalg.norm(world - CENTRE, axis=-1)
    return np.clip((RADIUS - far) * 500 + 500, 0, 1000).astype(np.int16), affine


class Threshold:
    """Calls everything above 500 the one structure."""

    device_name, precision_name, changes = "cpu", "float32", ""
    engine = torch_choice("the test's own formula")

    def __init__(self, weights: Path) -> None:
        self.card = card(weights, structures=structures(1), checks=Checks(hounsfield=False))

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        labels = np.asfortranarray((volume.array > 500).astype(np.uint8))
        return Segmentation(self.card.name, (Layer(labels, self.card.structures),), volume.grid)


@pytest.fixture(scope="module")
def threshold(tmp_path_factory):
    weights = tmp_path_factory.mktemp("model") / "weights"
    weights.write_bytes(b"none")
    return Threshold(weights)


def segmented(path: Path, folder: Path, threshold: Threshold, orientation=None) -> Path:
    """Take a file through load, segment and write; return the label map."""
    case = Case(
        "a" * 26,
        Series("nifti", (path,)),
        Outputs(),
        "h",
        "r",
        ReadOptions(orientation=orientation),
    )
    folder.mkdir()
    loaded = steps.load(case)
    volume = loaded.scan.volume
    estimate = estimate_case(volume.grid, volume.array.dtype, [threshold.card])
    steps.write(steps.segment(loaded, [threshold]), folder, estimate)
    return folder / "segmentation.nii.gz"


def place_of(array: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, float]:
    """Return centre (RAS mm) and volume (mm^3) of the voxels above half of the maximum."""
    index = np.argwhere(array > array.max() / 2)
    centre = index.mean(axis=0) @ affine[:3, :3].T + affine[:3, 3]
    return centre, len(index) * abs(np.linalg.det(affine[:3, :3]))


def check_ball(array, affine, centre=CENTRE):
    position, volume = place_of(np.asarray(array), affine)
    np.testing.assert_allclose(position, centre, atol=NEAR)
    assert volume == pytest.approx(4 / 3 * np.pi * RADIUS**3, rel=VOLUME)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("order", "forms", "oblique"),
    [(order, *FORMS[n % len(FORMS)]) for n, order in enumerate(ORDERS)],
)
def test_a_ball_keeps_its_position_in_every_axis_order(order, forms, oblique, tmp_path, threshold):
    array, affine = ball(order, oblique=oblique)
    image = nibabel.Nifti1Image(array, None)
    image.set_sform(affine, 1 if forms != "qform" else 0)
    image.set_qform(affine, 1 if forms != "sform" else 0)
    image.to_filename(tmp_path / "ball.nii.gz")

    volume = scanloom.load_volume(tmp_path / "ball.nii.gz")
    check_ball(volume.array, volume.grid.affine)
    if oblique == 0:
        assert volume.grid.axis_codes == order

    result = nibabel.load(segmented(tmp_path / "ball.nii.gz", tmp_path / "case", threshold))
    check_ball(result.dataobj, result.affine)
    assert (int(result.header["sform_code"]) > 0) == (forms != "qform")


@pytest.mark.slow
def test_a_stated_orientation_gives_one_segmentation_for_48_orders(tmp_path, threshold):
    """A file that does not say how it lies: `orientation` does, and the order changes nothing."""
    array, affine = ball("RAS")
    array = np.roll(array, (5, -4, 6), axis=(0, 1, 2))  # not in the middle, which is the origin
    scan = nibabel.Nifti1Image(array, np.diag([*np.linalg.norm(affine[:3, :3], axis=0), 1]))
    results, places = set(), []
    for order in ORDERS:
        change = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(order))
        image = scan.as_reoriented(change)
        image.header["sform_code"] = image.header["qform_code"] = 0
        path = tmp_path / f"{order}.nii.gz"
        nibabel.Nifti1Image(image.dataobj, None, image.header).to_filename(path)
        result = nibabel.load(segmented(path, tmp_path / order, threshold, order))
        assert nibabel.aff2axcodes(result.affine) == tuple(order)
        canonical = nibabel.as_closest_canonical(result)
        results.add(np.asarray(canonical.dataobj).tobytes(order="F"))
        places.append(canonical.affine)
    assert len(results) == 1
    np.testing.assert_allclose(np.array(places), np.array(places[:1] * 48), atol=1e-4)
    check_ball(result.dataobj, result.affine, centre=place_of(*centred(array, scan.affine))[0])


def centred(array: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the array with its middle at the origin, as an unsaid position is understood."""
    moved = affine.copy()
    moved[:3, 3] = -affine[:3, :3] @ ((np.array(array.shape) - 1) / 2)
    return array, moved


def test_no_model_sees_a_scan_that_a_check_refuses(tmp_path, threshold):
    array, affine = ball("RAS")
    nibabel.Nifti1Image(array, affine).to_filename(tmp_path / "ball.nii.gz")
    case = Case("a" * 26, Series("nifti", (tmp_path / "ball.nii.gz",)), Outputs(), "h", "r")
    loaded, seen = steps.load(case), []

    class Watched(Threshold):
        def predict(self, volume: Volume, *args: object, **options: object) -> Segmentation:
            seen.append("predict")
            return super().predict(volume)

    watched = Watched(threshold.card.weights.file)
    steps.segment(loaded, [watched])
    assert seen == ["predict"]

    never = Checks(hounsfield=False, high=Range(9000.0, 9001.0), refuse=("intensity",))
    watched.card = replace(watched.card, checks=never)
    with pytest.raises(ScanError, match="IMPLAUSIBLE"):
        steps.segment(loaded, [watched])
    assert seen == ["predict"]
