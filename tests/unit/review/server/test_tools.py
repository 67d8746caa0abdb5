"""Tools change the voxels that scikit-image, SimpleITK and geometry say, and survive a restart."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk
from skimage.measure import points_in_poly

from scanloom.review.server.drafts import LabelDraft, Region, Stroke
from scanloom.review.server.tools import (
    Canvas,
    Values,
    erase_islands,
    fill_between,
    paint_between,
    paint_polygon,
    smooth,
)
from support.review_cases import change

SPACING = (0.8, 1.5, 3.0)
PLANES = {"axial": (2, 0, 1), "coronal": (1, 0, 2), "sagittal": (0, 1, 2)}


def noise(shape: tuple[int, int, int] = (17, 13, 9)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4, shape).astype(np.uint8)


def after(labels: np.ndarray, region: Region | None) -> np.ndarray:
    """Return the labels of a draft with a step, which undo takes back."""
    draft = LabelDraft([labels], SPACING)
    if region is None:
        return labels
    assert draft.apply(region) > 0
    changed = draft.layer(0).copy()
    draft.undo()
    np.testing.assert_array_equal(draft.layer(0), labels)
    draft.redo()
    np.testing.assert_array_equal(draft.layer(0), changed)
    return changed


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("only", [None, (1, 2)])
def test_a_polygon_paints_the_voxels_inside(plane: str, only: tuple[int, ...] | None) -> None:
    """A star that leaves the picture, by scikit-image's even-odd rule."""
    labels = noise()
    normal, across, down = PLANES[plane]
    points = [(-2.3, 3.1), (11.7, 4.2), (1.4, 8.6), (4.9, -3.3), (8.2, 30.4)]
    stroke = Stroke(0, normal, across, down, 4, points, 1.0, 3, only)

    painted = after(labels, paint_polygon(Canvas(0, labels, SPACING), stroke))

    expected = labels.copy()
    for index in np.ndindex(labels.shape):
        inside = points_in_poly([(index[across], index[down])], points)[0]
        wanted = only is None or labels[index] in only
        if index[normal] == 4 and inside and wanted:
            expected[index] = 3
    np.testing.assert_array_equal(painted, expected)
    assert (painted != labels).any()


@pytest.mark.parametrize("shape", ["brush", "polygon"])
def test_with_a_range_only_what_lies_in_it_is_painted(shape: str) -> None:
    labels, image = noise(), np.random.default_rng(1).integers(-99, 99, (17, 13, 9))
    points = [(8.0, 6.0)] if shape == "brush" else [(1.0, 1.0), (14.0, 2.0), (6.0, 11.0)]
    stroke, canvas = Stroke(0, 2, 0, 1, 4, points, 6.0, 3), Canvas(0, labels, SPACING)
    if shape == "brush":
        whole = LabelDraft([labels], SPACING)
        whole.stroke(stroke)
        without, paint = whole.layer(0), paint_between
    else:
        without, paint = after(labels, paint_polygon(canvas, stroke)), paint_polygon

    painted = after(labels, paint(canvas, stroke, Values(image, -20, 50)))

    in_range = (image >= -20) & (image <= 50)
    np.testing.assert_array_equal(painted, np.where(in_range, without, labels))
    assert (painted != labels).sum() > 10


@pytest.mark.parametrize("plane", PLANES)
def test_between_two_discs_is_a_cone(plane: str) -> None:
    """Radii of 12 and 4 mm, ten slices apart, to a voxel; what was between them is replaced."""
    normal, across, down = PLANES[plane]
    labels = np.zeros((60, 60, 60), np.uint8)
    mm = (np.indices(labels.shape).T - 30.0) * (0.8, 1.5, 0.9)
    radius = np.hypot(mm[..., across], mm[..., down]).T
    slices = np.indices(labels.shape)[normal]
    labels[(slices == 20) & (radius <= 12)] = 1
    labels[(slices == 30) & (radius <= 4)] = 1
    labels[(slices == 25) & (radius > 15)] = 1
    labels[(slices == 25) & (radius > 15) & (radius < 20)] = 2
    canvas = Canvas(0, labels, (0.8, 1.5, 0.9))

    filled = after(labels, fill_between(canvas, 1, normal, 30, 20))

    for index in range(21, 30):
        inside = (filled == 1) & (slices == index)
        expected = (slices == index) & (radius <= 12 - 0.8 * (index - 20))
        differs = inside ^ expected  # by a voxel of at most 1.5 mm
        assert (np.abs(radius[differs] - 12 + 0.8 * (index - 20)) < 1.6).all()
    outside = (slices <= 20) | (slices >= 30)
    assert (filled[outside] == labels[outside]).all()
    with pytest.raises(IndexError):
        fill_between(canvas, 1, normal, 20, 99)


def test_a_slice_without_a_border_is_filled_from_alike_on_all_sides() -> None:
    labels = np.zeros((9, 9, 7), np.uint8)
    labels[..., 0] = labels[3:6, 3:6, 6] = 1

    filled = after(labels, fill_between(Canvas(0, labels, SPACING), 1, 2, 0, 6))

    np.testing.assert_array_equal(filled, filled[::-1, ::-1])
    assert filled[..., 1].all()
    assert (filled[4, 4] == 1).all()


def test_only_the_largest_part_stays() -> None:
    """As by SimpleITK's connected components; islands get the label around them."""
    labels = (np.random.default_rng(2).random((30, 30, 30)) < 0.03).astype(np.uint8)
    labels[8:20, 8:20, 8:20] = 1
    labels[labels == 0] = 2
    labels[:, :, 25:][labels[:, :, 25:] == 2] = 0

    kept = after(labels, erase_islands(Canvas(0, labels, SPACING), 1))

    parts = sitk.ConnectedComponent(sitk.GetImageFromArray((labels == 1).astype(np.uint8)), True)
    largest = sitk.GetArrayFromImage(sitk.RelabelComponent(parts)) == 1
    np.testing.assert_array_equal(kept == 1, largest)
    islands = (labels == 1) & ~largest
    assert set(np.unique(kept[islands][:])) <= {0, 2}
    assert (kept[2:6, 2:6, 2:6][islands[2:6, 2:6, 2:6]] == 2).all()
    assert erase_islands(Canvas(0, kept, SPACING), 1) is None


def test_smoothing_takes_spikes_and_keeps_volumes() -> None:
    """A ball keeps its volume within 3 %; a spike and a hole of one voxel vanish."""
    labels = np.zeros((40, 40, 40), np.uint8)
    ball = np.linalg.norm(np.indices(labels.shape).T - 20.0, axis=-1).T <= 12
    labels[ball] = 1
    labels[20, 20, 33:39] = 1
    labels[20, 20, 20] = 0

    smoothed = smooth(Canvas(0, labels, (1.0, 1.0, 1.0)), 1, 4.0)
    result = after(labels, smoothed)

    assert np.count_nonzero(result == 1) == pytest.approx(np.count_nonzero(ball), rel=0.03)
    assert not result[20, 20, 34:].any()
    assert result[20, 20, 20] == 1


def test_tools_of_the_server_are_steps_that_a_restart_keeps(serve: Any) -> None:
    server = serve()
    client, [name, *_] = server.client(), server.cases
    about = client.get(f"/api/case/{name}").json()
    value = about["layers"][0]["labels"][0]["value"]
    of_tool = {"layer": 0, "label": value}
    axial = {"plane": "axial", "index": 4, "layer": 0, "label": value, "radius_mm": 3.0}
    square = [[1, 1], [6, 1], [6, 6], [1, 6]]

    counts = [
        change(client, name, "stroke", **axial, points=square, shape="polygon").json()["changed"],
        change(
            client, name, "stroke", **{**axial, "index": 1}, points=[[5, 5]], between=[-900, 2000]
        ).json()["changed"],
        change(client, name, "tool", **of_tool, tool="fill", slices=[1, 4]).json()["changed"],
        change(client, name, "tool", **of_tool, tool="islands").json()["changed"],
        change(client, name, "tool", **of_tool, tool="smooth", radius_mm=4.0).json()["changed"],
    ]
    drawn = client.get(f"/api/case/{name}/labels/0/axial/2-3?draft=1").content
    [draft] = server.out.glob("private/drafts/*/*.jsonl")

    assert all(count > 0 for count in counts[:3])
    assert counts[4] > 0
    assert len(draft.read_text().splitlines()) == 1 + sum(count > 0 for count in counts)
    again = serve().client()
    assert again.get(f"/api/case/{name}/draft").json()["undo"] == sum(c > 0 for c in counts)
    assert again.get(f"/api/case/{name}/labels/0/axial/2-3?draft=1").content == drawn
    for wrong in ({"tool": "melt"}, {"label": 9999}, {"layer": 9}):
        body = {**of_tool, "tool": "smooth", **wrong}
        assert change(again, name, "tool", **body).status_code == 400
    body = {**of_tool, "tool": "fill", "slices": [1, 400]}
    assert change(again, name, "tool", **body).status_code == 404


@pytest.mark.parametrize("fault", ["bits", "labels", "box"])
def test_a_damaged_region_is_told(serve: Any, fault: str) -> None:
    """A file that another program changed is no correction."""
    server = serve()
    client, [name, *_] = server.client(), server.cases
    value = client.get(f"/api/case/{name}").json()["layers"][0]["labels"][0]["value"]
    change(client, name, "tool", layer=0, label=value, tool="smooth", radius_mm=4.0)
    [draft] = server.out.glob("private/drafts/*/*.jsonl")
    head, line = map(json.loads, draft.read_text().splitlines())
    region = line["region"]
    match fault:
        case "bits":
            region["bits"] = region["bits"][:-8] + "AAAA===="
        case "labels":
            region["labels"] = "!"
        case "box":
            region["high"] = [10**6, 10**6, 10**6]
    draft.write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")

    answer = serve().client().get(f"/api/case/{name}/draft")

    assert (answer.status_code, answer.json()["reason"]) == (409, "REVIEW_DAMAGED")
