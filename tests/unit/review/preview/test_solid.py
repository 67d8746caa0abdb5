"""Shaded views: sides, order along the line of sight, proportions, light; when there are none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from scanloom.core import Code, Grid, Layer, Segmentation, Volume
from scanloom.core.grid import Box
from scanloom.ops.measure import measure
from scanloom.review.preview import solid
from scanloom.review.preview.content import choose_content
from scanloom.review.preview.page import PANEL, arrange_pair, draw_page
from scanloom.review.preview.slicing import View
from scanloom.review.preview.solid import FRONT, LEFT, Solid, solid_of
from support.case_folders import ORDERS, directions, turned
from support.review_phantoms import structure, torso

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
COLORS = (RED, GREEN, BLUE)


def grid_of(codes: str = "RAS", spacing=(2.0, 2.0, 2.0), oblique=0.0, tilt=0.0) -> Grid:
    axes = turned(directions(codes), oblique)
    affine = np.eye(4)
    affine[:3, :3] = axes * spacing
    affine[:3, 2] += np.tan(np.radians(tilt)) * spacing[2] * axes[:, 1]
    return Grid(tuple(round(96 / mm) for mm in spacing), affine)


def balls(grid: Grid, *places: tuple[tuple[float, float, float], float]) -> Segmentation:
    """Return balls at RAS mm from the middle of the scan, with a radius; later ones lie above."""
    index = np.stack(np.indices(grid.shape), axis=-1)
    middle = grid.world((np.array(grid.shape) - 1) / 2)
    labels = np.zeros(grid.shape, np.uint8, order="F")
    for number, (place, radius) in enumerate(places, 1):
        distance = np.linalg.norm(grid.world(index) - middle - place, axis=-1)
        labels[distance < radius] = number
    structures = tuple(
        replace(structure(n, f"Ball {n}"), color=color)
        for n, color in enumerate(COLORS[: len(places)], 1)
    )
    return Segmentation("model", (Layer(labels, structures),), grid)


def boxes_of(*segmentations: Segmentation) -> dict[tuple[str, int], Box]:
    found = {}
    for s in segmentations:
        for layer in s.layers:
            for number in np.unique(layer.labels)[1:]:
                at = np.argwhere(layer.labels == number)
                first, last = at.min(axis=0).tolist(), at.max(axis=0).tolist()
                found[s.model, int(number)] = Box(tuple(first), tuple(last))
    return found


def made(*segmentations: Segmentation, slice_axis: int = 2) -> Solid | None:
    view = View(segmentations[0].grid)
    whole = np.zeros(3), np.array(view.shape) - 1.0
    colors = {(s.model, x.number): x.color for s in segmentations for x in s.structures}
    return solid_of(view, segmentations, boxes_of(*segmentations), colors, whole, slice_axis)


def pictures(*segmentations: Segmentation) -> tuple[np.ndarray, np.ndarray]:
    """Return front and left view (H, W, 3) at 2 pixels per mm."""
    drawn = made(*segmentations)
    assert drawn is not None
    shown = []
    for direction in (FRONT, LEFT):
        width, height = (round(2 * mm) for mm in drawn.area(direction).size)
        shown.append(np.asarray(drawn.picture(direction, (width, height))).astype(int))
    return shown[0], shown[1]


def where(picture: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Return the pixels (N, 2), down and across, that have the hue of a pure colour."""
    channel = int(np.argmax(color))
    others = [n for n in range(3) if n != channel]
    return np.argwhere((picture[..., channel] > 40) & (picture[..., others].max(axis=-1) < 20))


SIDES = [((-30.0, 0.0, 0.0), 13.0), ((0.0, 30.0, 0.0), 13.0), ((0.0, 0.0, 30.0), 13.0)]
"""Left red, anterior green, superior blue."""
STORED = [(codes, 0.0, 0.0) for codes in ORDERS[::5]] + [
    ("RAS", 20.0, 0.0),
    ("PIR", 35.0, 0.0),
    ("LPS", 0.0, 18.0),
]


@pytest.mark.parametrize(("codes", "oblique", "tilt"), STORED)
def test_sides_are_where_radiologists_look(codes: str, oblique: float, tilt: float) -> None:
    """However the scan is stored; oblique and sheared stacks stand upright."""
    front, left = pictures(balls(grid_of(codes, (2.0, 2.0, 2.0), oblique, tilt), *SIDES))

    red, green, blue = (where(front, color).mean(axis=0) for color in COLORS)
    assert red[1] > green[1] + 50  # the patient's left on the right
    assert blue[0] < green[0] - 50
    assert abs(red[0] - green[0]) < 4
    red, green, blue = (where(left, color).mean(axis=0) for color in COLORS)
    assert green[1] < red[1] - 50  # facing left
    assert blue[0] < red[0] - 50


@pytest.mark.parametrize("codes", ["RAS", "LPS", "SAL"])
@pytest.mark.parametrize("oblique", [0.0, 15.0])
def test_the_nearer_structure_hides_the_other(codes: str, oblique: float) -> None:
    grid = grid_of(codes, (1.5, 1.5, 1.5), oblique)
    along_p = balls(grid, ((0, 24, 0), 19.0), ((0, -24, 0), 18.0), ((-35, 0, 0), 10.0))
    front, left = pictures(along_p)
    assert len(where(front, RED)) > 500
    assert len(where(front, GREEN)) == 0
    assert min(len(where(left, color)) for color in COLORS) > 500
    along_l = balls(grid, ((24, 0, 0), 18.0), ((-24, 0, 0), 19.0), ((0, 35, 0), 10.0))
    front, left = pictures(along_l)
    assert len(where(left, RED)) == 0
    assert len(where(left, GREEN)) > 500


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 3.0), (2.0, 1.0, 1.5), (1.5, 1.5, 1.5)])
def test_a_ball_is_round(spacing) -> None:
    for picture in pictures(balls(grid_of("LPS", spacing), ((0, 0, 0), 40.0))):
        at = where(picture, RED)
        height, width = at.max(axis=0) - at.min(axis=0) + 1
        assert abs(height - 160) < 10
        assert abs(width - 160) < 10
        assert len(at) == pytest.approx(np.pi * 80**2, rel=0.05)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (1.0, 1.0, 3.0)])
def test_light_is_that_of_a_smooth_ball(spacing) -> None:
    """Steps of voxels and slices do not show: Lambert's law on the ball itself is the reference."""
    front, _ = pictures(balls(grid_of("LPS", spacing), ((0, 0, 0), 40.0)))
    at = where(front, RED)
    middle = (at.max(axis=0) + at.min(axis=0)) / 2
    y, x = (at - middle).T / 80
    inner = np.hypot(x, y) < 0.8
    depth = np.sqrt(1 - x[inner] ** 2 - y[inner] ** 2)
    normal = np.stack([x[inner], y[inner], depth], axis=-1)
    facing = np.maximum(normal @ solid.LIGHT / np.linalg.norm(solid.LIGHT), 0)
    expected = solid.AMBIENT + solid.DIFFUSE * facing
    light = front[at[inner, 0], at[inner, 1], 0] / 255
    assert np.corrcoef(light, expected)[0, 1] > 0.88


def test_fewer_and_flatter_structures_have_no_view() -> None:
    grid = grid_of("LPS")
    labels = balls(grid, ((0, 0, 0), 40.0)).layers[0].labels.copy()
    flat = labels.copy()
    flat[..., :18] = flat[..., 30:] = 0  # 12 slices
    ball = structure(1, "Ball")
    for kept, axis, worth in ((labels, 2, True), (flat, 2, False), (0 * labels, 2, False)):
        layer = Layer(np.asfortranarray(kept), (ball,))
        assert (made(Segmentation("model", (layer,), grid), slice_axis=axis) is not None) is worth


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        ("55603005", True),
        ("1", True),
        ("39937001", True),
        ("12738006", False),
        ("272673000", False),
    ],
)
def test_what_would_hide_all_others_is_left_out(code: str, left_out: bool) -> None:
    """Fat, skin and unknown things that span the body; not a brain, nor bones."""
    grid = grid_of("LPS")
    hull, inner = structure(1, "Hull"), structure(2, "Inner")
    hull = replace(hull, type=Code(code, "SCT", "Hull"))
    labels = np.ones(grid.shape, np.uint8, order="F")
    labels[10:40, 12:38, 8:44] = 2
    labels[0, 0, 0] = 0
    segmentation = Segmentation("model", (Layer(labels, (hull, inner)),), grid)
    drawn = made(segmentation)
    assert drawn is not None
    assert drawn.left_out == (("Hull",) if left_out else ())
    assert drawn.labels.max() == (1 if left_out else 2)


def test_a_large_structure_inside_the_body_is_shown() -> None:
    drawn = made(balls(grid_of("LPS"), ((0, 0, 0), 38.0), ((0, 0, 0), 5.0)))
    assert drawn is not None
    assert drawn.left_out == ()


def test_models_and_layers_lie_on_each_other() -> None:
    grid = grid_of("LPS")
    first, second = balls(grid, ((0, 0, 0), 30.0)), balls(grid, ((0, 20, 0), 15.0))
    green = replace(second.structures[0], color=GREEN)
    second = Segmentation("other", (Layer(second.layers[0].labels, (green,)),), grid)
    front, _ = pictures(first, second)
    assert len(where(front, RED)) > 500
    assert len(where(front, GREEN)) == pytest.approx(np.pi * 30**2, rel=0.15)


def test_two_views_stand_beside_or_above_each_other_whichever_is_larger() -> None:
    wide = arrange_pair((100, 50), (120, 50), (400, 400))
    tall = arrange_pair((50, 100), (60, 100), (400, 400))
    assert wide[0].x == wide[1].x
    assert wide[0].y < wide[1].y
    assert tall[0].y == tall[1].y
    assert tall[0].x < tall[1].x
    for frames, sizes in ((wide, ((100, 50), (120, 50))), (tall, ((50, 100), (60, 100)))):
        scales = [f.picture[0] / size[0] for f, size in zip(frames, sizes, strict=True)]
        assert scales[0] == pytest.approx(scales[1], rel=0.02)
        for frame in frames:
            assert frame.picture[0] <= frame.width
            assert frame.picture[1] <= frame.height
            assert frame.x + frame.width <= 400
            assert frame.y + frame.height <= 400


def test_the_page_has_both_views_in_place_of_four_slices(tmp_path) -> None:
    """Its size stays."""
    array, labels, affine = torso()
    grid = Grid(array.shape, affine)
    organ = Code("10200004", "SCT", "Liver")
    structures = tuple(replace(structure(n, f"S{n}"), type=organ) for n in range(1, 5))
    volume = Volume(array, grid, "HU", "CT")
    segmentation = Segmentation("model", (Layer(labels, structures),), grid)
    content = choose_content(volume, (segmentation,), measure(segmentation, volume))
    assert content.solid is not None
    assert len(content.tiles) == 12
    without = replace(content, solid=None, tiles=(*content.tiles, *content.tiles[:4]))
    for name, each in (("a", content), ("b", without)):
        draw_page(each, (), tmp_path / name)
    with Image.open(tmp_path / "a") as page, Image.open(tmp_path / "b") as other:
        assert page.size == other.size
        corner = np.asarray(page)[-60:-40, -400:-40]
    assert (corner == PANEL).all(axis=-1).any()
