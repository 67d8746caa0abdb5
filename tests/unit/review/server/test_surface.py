"""Points of the 3-D view: on the surface that SciPy finds, with slopes out of the structure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.ndimage import generic_filter

from scanloom.review.server import surface as module
from scanloom.review.server.cases import describe, open_case
from scanloom.review.server.surface import STEPS_PER_VOXEL, surface
from support.review_cases import affine_of, change, publish, scan_array

Points = tuple[float, NDArray[Any], NDArray[Any], NDArray[Any]]


def decoded(content: bytes) -> Points:
    """Return the size of a cell, and places, labels and slopes of points."""
    count = (len(content) - 4) // 11
    places = np.frombuffer(content, "<u2", 3 * count, 4).reshape(count, 3) / STEPS_PER_VOXEL
    labels = np.frombuffer(content, "<u2", count, 4 + 6 * count)
    slopes = np.frombuffer(content, "i1", 3 * count, 4 + 8 * count).reshape(count, 3)
    return float(np.frombuffer(content, "<f4", 1)[0]), places, labels, slopes


def is_surface(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the voxels of structures with another label beside a face."""
    faces = np.zeros((3, 3, 3), bool)
    for axis in range(3):
        np.moveaxis(faces, axis, 0)[:, 1, 1] = True
    differs = generic_filter(labels.astype(float), np.ptp, footprint=faces, mode="constant")
    return (differs > 0) & (labels > 0)


@pytest.mark.parametrize("turned", [False, True])
def test_points_are_the_voxels_with_another_label_beside_them(turned: bool) -> None:
    labels = np.random.default_rng(0).integers(0, 3, (9, 14, 11)).astype(np.uint16) * 300
    labels[2:7, 3:10, 2:8] = 300
    view = labels[::-1].T if turned else labels
    cell, places, numbers, _ = decoded(surface(view, (2.0, 2.0, 2.0)))
    voxels = np.floor(places).astype(int)
    assert cell == 2
    np.testing.assert_array_equal(places % 1, 0.5)
    np.testing.assert_array_equal(numbers, view[tuple(voxels.T)])
    expected = np.argwhere(is_surface(view))
    np.testing.assert_array_equal(voxels[np.lexsort(voxels.T[::-1])], expected)


def test_slopes_of_a_ball_point_away_from_its_middle_in_mm() -> None:
    spacing, middle = np.array((0.8, 1.2, 3.0)), np.array((21.0, 24.0, 27.0))
    index = np.moveaxis(np.indices((53, 40, 18)), 0, -1)
    ball = np.linalg.norm((index + 0.5) * spacing - middle, axis=-1) < 15
    cell, places, numbers, slopes = decoded(surface(ball.astype(np.uint8) * 7, spacing))
    away = places * spacing - middle
    length = np.linalg.norm(away, axis=1)
    cosine = (away * slopes).sum(axis=1) / length / np.linalg.norm(slopes.astype(float), axis=1)
    assert cell == pytest.approx(0.8)
    assert set(numbers) == {7}
    assert np.abs(length - 15).max() < 3
    assert np.median(cosine) > 0.95
    assert np.mean(cosine > 0.8) > 0.9  # slices of 3 mm are terraces
    np.testing.assert_allclose(np.linalg.norm(slopes.astype(float), axis=1), 127, atol=1.5)


def test_a_small_structure_has_small_cells_and_noise_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labels = np.zeros((120, 120, 100), np.uint8)
    labels[50:62, 50:62, 50:62] = 1
    assert len(decoded(surface(labels, (1.0, 1.0, 1.0)))[1]) == 12**3 - 10**3
    monkeypatch.setattr(module, "MAX_POINTS", 4000)
    noise = np.random.default_rng(0).integers(0, 4, (60, 60, 50)).astype(np.uint8)
    cell, places, numbers, _ = decoded(surface(noise, (1.0, 1.0, 1.0)))
    assert cell > 2
    assert 1000 < len(places) <= 4000
    np.testing.assert_array_equal(numbers, noise[tuple(np.floor(places).astype(int).T)])


def test_nothing_has_no_surface_and_a_long_axis_is_refused(server: Any) -> None:
    assert surface(np.zeros((5, 6, 7), np.uint8), (1.0, 1.0, 1.0)) == b""
    with pytest.raises(IndexError, match="8192 voxels"):
        surface(np.ones((8192, 1, 1), np.uint8), (1.0, 1.0, 1.0))
    client, name = server.client(), server.cases[0]
    assert client.get(f"/api/case/{name}/surface/9").status_code == 404
    assert server.client(None).get(f"/api/case/{name}/surface/0").status_code == 403


def test_strokes_of_a_correction_are_on_the_surface_if_asked_for(server: Any) -> None:
    client, name = server.client(), server.cases[0]
    before = client.get(f"/api/case/{name}/surface/0").content
    about = client.get(f"/api/case/{name}").json()
    label = about["layers"][0]["labels"][0]["value"]
    stroke = {"layer": 0, "plane": "axial", "index": 0, "points": [[0, 0]], "label": label}
    assert change(client, name, "stroke", radius_mm=1, only=None, **stroke).is_success
    _, places, numbers, _ = decoded(client.get(f"/api/case/{name}/surface/0?draft=1").content)
    assert client.get(f"/api/case/{name}/surface/0").content == before
    painted = (np.floor(places) == 0).all(axis=1)
    assert set(numbers[painted]) == {label}


def test_only_what_spans_the_body_and_is_no_organ_would_hide_all_others(tmp_path: Path) -> None:
    folder = publish(tmp_path, scan_array(1), affine_of("LAS"))
    case = open_case(tmp_path / "out", folder.name, tmp_path / "key")

    def hulls(case: Any) -> list[bool]:
        return [each["hull"] for each in describe(case)["layers"][0]["labels"]]

    assert not any(hulls(case))
    first = case.measurements[0]
    low, high = np.sort([case.view.index_of(end) for end in first.box], axis=0)
    narrow = replace(case, body=(low, high))
    assert hulls(narrow)[0]
    for entry in case.layers[0].structures:
        entry["type"]["value"], entry["category"]["value"] = "10200004", "123037004"  # liver
    assert not any(hulls(narrow))
