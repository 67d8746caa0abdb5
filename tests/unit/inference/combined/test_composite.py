"""Models of several networks: against TotalSegmentator's steps by SciPy and nibabel."""

from __future__ import annotations

from dataclasses import replace

import nibabel
import numpy as np
import pytest
from scipy import ndimage

from scanloom.cards.card import ModelCard, ReferenceDirection
from scanloom.cards.check import LEAST_ML
from scanloom.cards.graph import needed_parts, numbers_in
from scanloom.convert.conversion import load_card
from scanloom.core import ComputeOptions, Flag, Grid, StepTimer, Volume
from scanloom.engine.prepare import estimate_case
from scanloom.inference.combined import make_predictor
from scanloom.inference.geometry import grid_for_parts
from scanloom.inference.memory import base_bytes, window_values
from scanloom.inference.predictor import TorchPredictor
from scanloom.ops.measure import centroids
from support.totalsegmentator_folders import write_task

FULL = ComputeOptions(precision="float32")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return a folder with weights of tasks."""
    folder = tmp_path_factory.mktemp("weights")
    for task in ("total_fastest", "total_mr", "liver_segments", "liver_vessels"):
        write_task(folder, task)
    return folder


def scan(spacing, shape, codes, modality="CT", dtype=np.int16) -> Volume:
    """Return a scan of smooth noise with whole numbers, whose axes are turned."""
    rng = np.random.default_rng(5)
    values = ndimage.gaussian_filter(rng.standard_normal(shape), 1.5) * 1500
    values = np.round(values) if dtype is np.int16 else values
    turn = np.zeros((4, 4))
    for axis, (row, sign) in enumerate(nibabel.orientations.axcodes2ornt(codes)):
        turn[int(row), axis] = sign
    turn[3, 3] = 1.0
    affine = turn @ np.diag([*spacing, 1.0])
    unit = "HU" if modality == "CT" else "a.u."
    return Volume(np.asfortranarray(values.astype(dtype)), Grid(shape, affine), unit, modality)


def home_labels(card: ModelCard, volume: Volume) -> np.ndarray:
    """Return labels by TotalSegmentator's steps, without its crop; networks are ours."""
    source = nibabel.Nifti1Image(np.asarray(volume.array, np.float64), volume.grid.affine)
    image = nibabel.as_closest_canonical(source)
    zooms, values = np.array(image.header.get_zooms()), image.get_fdata()
    spacing = zooms
    if card.grid.spacing is not None and not np.array_equal(zooms, card.grid.spacing):
        spacing = np.array(card.grid.spacing)
        values = ndimage.zoom(values, zooms / spacing, mode="nearest", order=1).astype(np.int32)
    grid = Grid(values.shape, np.diag([*spacing.astype(np.float64), 1.0]))
    small = Volume(np.asfortranarray(values), grid, volume.unit, volume.modality)
    united = np.zeros(values.shape, np.uint8)
    for submodel in card.parts:
        labels = TorchPredictor(submodel, FULL, device="cpu").predict(small).layers[0].labels
        mapped = numbers_in(card, submodel)[labels]
        united[mapped > 0] = mapped[mapped > 0]
    if spacing is not zooms:
        ratio = np.array(image.shape) / united.shape
        united = ndimage.zoom(united, ratio, mode="nearest", order=0)
    back = nibabel.orientations.ornt_transform(
        nibabel.orientations.axcodes2ornt("RAS"), nibabel.io_orientation(source.affine)
    )
    return nibabel.Nifti1Image(united, image.affine).as_reoriented(back).get_fdata()


@pytest.mark.parametrize(
    ("task", "volume"),
    [
        ("total_fastest", scan((3.0, 3.0, 3.0), (40, 36, 30), "RAS")),
        ("total_fastest", scan((2.3, 2.3, 5.0), (44, 40, 20), "LPI", dtype=np.float32)),
        ("total_fastest", scan((6.0, 6.0, 6.0), (18, 17, 16), "PIR", dtype=np.float32)),
        ("total_mr", scan((3.0, 2.6, 4.1), (14, 15, 9), "SRA", "MR")),
    ],
    ids=["twice", "other orientation", "own spacing", "two parts"],
)
def test_labels_are_those_of_totalsegmentators_steps(weights, task, volume):
    """Resampled corner to corner, truncated, united, mapped back by nearest neighbour."""
    card = load_card(weights, {"task": task})

    segmentation = make_predictor(card, FULL, device="cpu").predict(volume)

    np.testing.assert_array_equal(segmentation.layers[0].labels, home_labels(card, volume))
    assert len(np.unique(segmentation.layers[0].labels)) > 5


def test_directions_between_structures_are_compared(weights):
    card = load_card(weights, {"task": "total_mr"})
    volume = scan((3.0, 3.0, 3.0), (24, 24, 18), "RAS", "MR")
    found = centroids(make_predictor(card, FULL, device="cpu").predict(volume))
    start, end, *_ = (label for label, (ml, _) in found.items() if ml > LEAST_ML)
    never = ReferenceDirection((start,), (end,), (1.0, 2.0, 3.0), 1e-3, "")

    changed = replace(card, reference_directions=(never,))
    result = make_predictor(changed, FULL, device="cpu").predict(volume)

    assert Flag.DIRECTION_IMPLAUSIBLE in result.flags


def test_all_parts_share_one_resampling(weights):
    """The step "resample" of the whole scan runs once; parts see the small scan."""
    steps = []
    card = load_card(weights, {"task": "total_mr"})
    predictor = make_predictor(card, FULL, device="cpu")
    shapes = []
    for member in predictor.parts:
        known = member.predict

        def predict(volume, *arguments, known=known, **named):
            shapes.append(volume.array)
            return known(volume, *arguments, **named)

        member.predict = predict

    predictor.predict(scan((3.0, 3.0, 3.0), (12, 12, 9), "RAS", "MR"), StepTimer(steps.append))

    assert [array.shape for array in shapes] == [(24, 24, 18)] * 2
    assert shapes[0] is shapes[1]


@pytest.mark.parametrize("task", ["liver_segments", "liver_vessels"])
def test_scan_is_cropped_to_the_structures_of_a_rough_model(weights, task):
    """The box has TotalSegmentator's margin in voxels; labels lie at their places in the scan."""
    volume = scan((3.0, 2.4, 4.0), (40, 45, 24), "LPS")
    card = load_card(weights, {"task": task})
    rough = make_predictor(card.stage.card, FULL, device="cpu").predict(volume).layers[0]
    extent = {
        s.label: np.argwhere(rough.labels == s.number)
        for s in rough.structures
        if (rough.labels == s.number).any()
    }
    label = min(extent, key=lambda name: np.ptp(extent[name], axis=0).max())
    card = replace(card, stage=replace(card.stage, labels=(label,)))

    labels = make_predictor(card, FULL, device="cpu").predict(volume).layers[0].labels

    margin = (np.array([20, 20, 20]) / np.float32([3.0, 2.4, 4.0])).astype(int)
    first = np.maximum(extent[label].min(axis=0) - margin, 0)
    last = np.minimum(extent[label].max(axis=0) + 1 + margin, volume.array.shape)
    box = tuple(slice(a, b) for a, b in zip(first, last, strict=True))
    assert any(b - a < n for a, b, n in zip(first, last, volume.array.shape, strict=True))
    crop = np.asfortranarray(volume.array[box])
    affine = volume.grid.affine.copy()
    affine[:3, 3] = (volume.grid.affine @ [*first, 1])[:3]
    inside = replace(volume, array=crop, grid=Grid(crop.shape, affine))
    expected = np.zeros(volume.array.shape)
    expected[box] = home_labels(card, inside) if card.grid.spacing else labels[box]
    np.testing.assert_array_equal(labels, expected)
    assert labels.any()


def test_scan_without_the_structures_has_an_empty_result(weights):
    """No box, no labels: as TotalSegmentator."""
    card = load_card(weights, {"task": "liver_segments"})
    card = replace(card, stage=replace(card.stage, labels=("no_such_label",)))
    clock = StepTimer()

    segmentation = make_predictor(card, FULL, device="cpu").predict(
        scan((6.0, 6.0, 6.0), (16, 16, 16), "RAS"), clock
    )

    assert segmentation.model == card.name
    assert not segmentation.layers[0].labels.any()
    assert segmentation.layers[0].structures == card.structures
    assert "crop" in clock.notes


def test_only_requested_parts_run(weights):
    """The other network is not loaded; structures keep their numbers."""
    card = load_card(weights, {"task": "total_mr"})
    volume = scan((3.0, 3.0, 3.0), (12, 12, 9), "RAS", "MR")

    predictor = make_predictor(card, FULL, device="cpu", structures=("brain",))
    labels = predictor.predict(volume).layers[0].labels

    assert [member.name for member in predictor.parts] == ["dataset851"]
    assert predictor.card is card
    numbers = {int(n) for n in numbers_in(card, card.parts[1])}
    assert set(np.unique(labels)) <= numbers


def test_work_and_memory_are_those_of_all_networks(weights):
    """Weights count together, windows too; memory is that of the largest network."""
    card = load_card(weights, {"task": "liver_segments"})
    grid = Grid((64, 64, 40), np.diag([2.0, 2.0, 3.0, 1.0]))
    submodel, stage = card.parts[0], card.stage.card

    inner = window_values(submodel, grid_for_parts(grid, card))
    rough = window_values(stage.parts[0], grid_for_parts(grid, stage))
    assert window_values(card, grid) == inner + rough
    sizes = [w.file.stat().st_size for w in (submodel.weights, stage.parts[0].weights)]
    assert base_bytes([card]) - base_bytes([]) == sum(sizes) + max(sizes)
    whole, alone = (estimate_case(grid, np.int16, [each]) for each in (card, stage))
    assert whole.host["network"] > alone.host["network"]
    needed = needed_parts(load_card(weights, {"task": "total_mr"}), ("brain",))
    assert window_values(needed, grid) < window_values(
        load_card(weights, {"task": "total_mr"}), grid
    )


def test_small_components_are_removed_on_request(weights):
    """Components are removed on the grid of the united labels, before they are mapped back."""
    card = load_card(weights, {"task": "total_mr"})
    volume = scan((1.5, 1.5, 1.5), (20, 18, 16), "RAS", "MR")
    cleaning = replace(FULL, remove_small=200.0)

    plain, cleaned = (
        make_predictor(card, options, device="cpu").predict(volume).layers[0].labels
        for options in (FULL, cleaning)
    )

    expected = np.array(plain)
    for number in np.unique(plain)[1:]:
        components, _ = ndimage.label(plain == number)
        expected[
            (np.bincount(components.ravel()) <= 200.0 / 1.5**3)[components] & (plain == number)
        ] = 0
    np.testing.assert_array_equal(cleaned, expected)
    assert (cleaned != plain).any()


def test_a_requested_structure_has_the_labels_of_the_cropped_scan(tmp_path):
    """TotalSegmentator's `roi_subset`: the rough model's box, then the task on that box."""
    write_task(tmp_path, "total_fastest")
    volume = scan((3.0, 3.0, 3.0), (40, 36, 30), "RAS")
    card = load_card(tmp_path, {"task": "total_fastest"})
    whole = make_predictor(replace(card, subset=None), FULL, device="cpu").predict(volume)
    labels = whole.layers[0].labels
    extent = {
        s.label: np.ptp(np.argwhere(labels == s.number), axis=0).max()
        for s in whole.structures
        if (labels == s.number).any()
    }
    label = min(extent, key=lambda name: extent[name])
    [number] = [s.number for s in whole.structures if s.label == label]
    at = np.argwhere(labels == number)
    margin = int(20 / 3)
    low = np.maximum(at.min(axis=0) - margin, 0)
    high = np.minimum(at.max(axis=0) + margin, np.array(labels.shape) - 1)
    box = tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))
    small = replace(
        volume,
        array=volume.array[box],
        grid=Grid(
            tuple(int(b - a + 1) for a, b in zip(low, high, strict=True)), volume.grid.affine
        ),
    )

    segmentation = make_predictor(card, FULL, device="cpu", structures=[label]).predict(volume)

    expected = np.zeros_like(labels)
    expected[box] = home_labels(card, small)
    np.testing.assert_array_equal(segmentation.layers[0].labels, expected)
    assert expected.shape != small.grid.shape
