from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.transform import Rotation

from scanloom.core import Flag, Grid, Layer, Segmentation, Volume
from scanloom.ops.measure import measure
from scanloom.review.preview.content import choose_subject
from scanloom.review.preview.layout import MARGIN, arrange_mosaic, arrange_planes
from scanloom.review.preview.preview import HEADER_HEIGHT, RULE_Y, draw_preview
from scanloom.review.preview.slicing import AXIAL, CORONAL, SAGITTAL, Raster
from support.review_phantoms import BODY, FRONT, HEAD, LEFT, MARKERS, case, stored, structure, torso
from support.selections import one_in

ORDERS = [
    "".join(codes)
    for axes in itertools.permutations(["RL", "AP", "SI"])
    for codes in itertools.product(*axes)
]

FIELD = (240, 250, 240)
"""mm that the phantom's field of view has along R, A and S."""


def drawn(path, volume, segmentations, measurements, flags=()) -> np.ndarray:
    draw_preview(volume, segmentations, measurements, flags, path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def panels(page: np.ndarray, mm) -> dict[str, np.ndarray]:
    """Cut the three planes out of a page, for a field of view of (R, A, S) mm."""
    planes = arrange_planes((mm[0], mm[1]), (mm[0], mm[2]), (mm[1], mm[2]))
    cut = {}
    for name, frame in zip(("axial", "coronal", "sagittal"), planes.frames, strict=True):
        x, y = frame.corner[0] + MARGIN, frame.corner[1] + HEADER_HEIGHT
        cut[name] = page[y : y + frame.picture[1], x : x + frame.picture[0]]
    return cut


def center(panel: np.ndarray, color) -> tuple[float, float] | None:
    """Return where a marker lies in a panel: shares of its width and height."""
    channel = int(np.argmax(color))
    others = [n for n in range(3) if n != channel]
    seen = (panel[..., channel] - panel[..., others].max(axis=-1)) > 70
    if not seen.any():
        return None
    rows, columns = np.nonzero(seen)
    return columns.mean() / panel.shape[1], rows.mean() / panel.shape[0]


def test_left_front_and_head_are_where_radiologists_look(tmp_path):
    """Left of the patient on the right, front up in axial and left in sagittal planes, head up."""
    page = drawn(tmp_path / "p.png", *case(*torso()))

    seen = panels(page, FIELD)

    assert center(seen["axial"], LEFT) == pytest.approx((1 - 9.5 / 60, 0.5), abs=0.02)
    assert center(seen["axial"], FRONT) == pytest.approx((0.5, 1 - 42.5 / 50), abs=0.02)
    assert center(seen["coronal"], LEFT) == pytest.approx((1 - 9.5 / 60, 0.5), abs=0.02)
    assert center(seen["coronal"], HEAD) == pytest.approx((0.5, 1 - 31 / 40), abs=0.02)
    assert center(seen["sagittal"], FRONT) == pytest.approx((1 - 42.5 / 50, 0.5), abs=0.02)
    assert center(seen["sagittal"], HEAD) == pytest.approx((0.5, 1 - 31 / 40), abs=0.02)
    assert center(seen["sagittal"], LEFT) is None


@pytest.mark.parametrize("codes", one_in(7, ORDERS))
def test_the_picture_does_not_hang_on_how_the_scan_is_stored(codes, tmp_path, torso_page):
    """All 48 orders of the axes give the same pixels (below the line that names the order)."""
    array, labels, affine = torso()
    (array, turned), (labels, _) = stored(array, affine, codes), stored(labels, affine, codes)

    page = drawn(tmp_path / "p.png", *case(array, labels, turned))

    np.testing.assert_array_equal(page[RULE_Y + 1 :], torso_page[RULE_Y + 1 :])


@pytest.fixture(scope="module", name="torso_page")
def _torso_page(tmp_path_factory):
    return drawn(tmp_path_factory.mktemp("page") / "p.png", *case(*torso()))


@pytest.mark.parametrize("direction", [AXIAL, CORONAL, SAGITTAL])
@pytest.mark.parametrize("kind", ["oblique", "sheared"])
def test_a_tilted_scan_is_shown_upright(direction, kind):
    """A ball lies, in the picture of a patient plane, where its world position says."""
    affine = np.diag([2.0, 2.0, 3.0, 1.0])
    if kind == "oblique":
        turn = np.eye(4)
        turn[:3, :3] = Rotation.from_euler("xyz", (25, -20, 30), degrees=True).as_matrix()
        affine = turn @ affine
    else:
        affine[1, 2] = 1.1
    affine[:3, 3] = 20, -50, 70
    shape, middle = (50, 44, 30), np.array([30, 15, 18])
    away = (np.indices(shape).T - middle) @ affine[:3, :3].T
    labels = (np.linalg.norm(away, axis=-1) < 12).T.astype(np.uint8)
    subject = choose_subject(
        *case(np.full(shape, -1000, np.int16), labels, affine, (structure(1, "Ball", (255, 0, 0)),))
    )
    area = subject.view.field_of_view(direction)
    world = Grid(shape, affine).world(middle)

    size = (round(area.size[0] * 2), round(area.size[1] * 2))
    picture = subject.picture(direction, -float(world[direction.normal]), Raster(area, size))

    pixels = np.asarray(picture).astype(int)
    columns, rows = (np.array(center(pixels, (255, 0, 0))) * area.size + area.low).tolist()
    assert (columns, rows) == pytest.approx(
        (-world[direction.across], -world[direction.down]), abs=1.5
    )
    height, width = (np.ptp(n) / 2 for n in np.nonzero(pixels[..., 0] > 60))
    assert width == pytest.approx(24, abs=5)
    assert height == pytest.approx(24, abs=5)


def test_proportions_are_the_patients(tmp_path):
    """A ball is round in all three planes, however flat the voxels are."""
    spacing = np.array([1.0, 1.0, 8.0])
    shape = (120, 120, 16)
    away = (np.indices(shape).T - np.array([60, 60, 8])) * spacing
    labels = (np.linalg.norm(away, axis=-1) < 44).T.astype(np.uint8)
    one = (structure(1, "Ball", (255, 0, 0)),)

    page = drawn(
        tmp_path / "p.png",
        *case(np.full(shape, -1000, np.int16), labels, np.diag([*spacing, 1]), one),
    )

    for panel in panels(page, (120, 120, 128)).values():
        height, width = (np.ptp(n) for n in np.nonzero(panel[..., 0] > 60))
        assert height == pytest.approx(width, rel=0.12)
        assert 80 < width < 300


def test_every_tile_shows_another_slice():
    """The mosaic's slices lie in the structure, from head to foot, none of them twice."""
    subject = choose_subject(*case(*torso()))

    places = subject.tiles(len(arrange_mosaic(subject.slices, subject.area.size).frames))

    world = -np.array(places)
    assert (np.diff(world) < 0).all()
    assert len(world) >= 10
    assert world.min() >= 30 + 6 * 5
    assert world.max() <= 30 + 6 * 34


def test_the_planes_go_through_the_largest_structure():
    """Of two structures, the planes cut the larger where it is widest."""
    array, labels, affine = torso()
    labels[:] = 0
    labels[2:5, 2:5, 2:5] = 2
    labels[20:30, 10:20, 10:20] = 3
    subject = choose_subject(*case(array, labels, affine))

    index = Grid(array.shape, affine).index(-subject.center)

    assert labels[tuple(np.rint(index).astype(int))] == 3


def test_equal_input_gives_equal_bytes(tmp_path):
    """Nothing of the time or the machine gets into the file."""
    hashes = set()
    for name in ("a.png", "b.png"):
        drawn(tmp_path / name, *case(*torso()), [Flag.SHEARED])
        hashes.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())

    assert len(hashes) == 1
    with Image.open(tmp_path / "a.png") as image:
        assert image.info == {}


def test_a_scan_with_burned_in_text_gets_no_picture(tmp_path):
    """Neither by the flag of the case nor by the volume's own."""
    volume, segmentations, measurements = case(*torso())
    flagged = Volume(volume.array, volume.grid, "HU", "CT", None, (Flag.BURNED_IN,))

    with pytest.raises(ValueError, match="burned in"):
        draw_preview(volume, segmentations, measurements, [Flag.BURNED_IN], tmp_path / "p.png")
    with pytest.raises(ValueError, match="burned in"):
        draw_preview(flagged, segmentations, measurements, [], tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


def test_flags_and_the_empty_result_are_said(tmp_path):
    """What must be known takes room on the page: each flag, and that nothing was found."""
    array, labels, affine = torso()
    full = drawn(tmp_path / "a.png", *case(array, labels, affine))
    flagged = drawn(tmp_path / "b.png", *case(array, labels, affine), [Flag.SHEARED])
    empty = drawn(tmp_path / "c.png", *case(array, labels * 0, affine))

    amber = [np.abs(page - (255, 190, 92)).max(axis=-1).__lt__(8).sum() for page in (full, flagged)]
    assert amber[0] < 20 < amber[1]
    assert (np.abs(empty - (255, 190, 92)).max(axis=-1) < 8).sum() > 20
    assert panels(empty, FIELD)["axial"].std() > 5


@pytest.mark.parametrize(
    ("shape", "spacing", "dtype"),
    [
        ((5, 5, 3), (1, 1, 1), np.int16),
        ((1, 1, 1), (0.1, 0.1, 0.1), np.float32),
        ((64, 48, 4), (1, 1, 10), np.uint8),
        ((200, 8, 4), (1, 1, 10), np.int32),
        ((3, 3, 400), (1, 1, 5), np.uint16),
        ((2, 300, 2), (0.2, 2, 0.2), np.float64),
    ],
)
@pytest.mark.parametrize("tilt", [0, 20])
def test_scans_of_any_shape_are_drawn(shape, spacing, dtype, tilt, tmp_path):
    """Tiny, flat, long and thin scans give a page of sound size."""
    array = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    labels = np.zeros(shape, np.uint16)
    labels[tuple(n // 2 for n in shape)] = 2
    affine = np.diag([*spacing, 1.0])
    affine[:3, :3] = Rotation.from_euler("z", tilt, degrees=True).as_matrix() @ affine[:3, :3]

    page = drawn(tmp_path / "p.png", *case(array, labels, affine, unit="unknown", modality=None))

    assert page.shape[1] == 1600
    assert 300 < page.shape[0] < 1700


@pytest.mark.parametrize("fill", [np.nan, 0.0, -1e30])
def test_odd_intensities_are_drawn(fill, tmp_path):
    """A scan of one value, of nothing but NaN or with values far away is still a picture."""
    array, labels, affine = torso()
    array = array.astype(np.float32)
    array[::2] = fill

    drawn(tmp_path / "a.png", *case(array, labels, affine, unit="a.u.", modality="MR"))
    drawn(tmp_path / "b.png", *case(array * 0 + fill, labels, affine, unit="a.u.", modality="MR"))


def test_models_and_layers_lie_on_each_other(tmp_path):
    """Structures of two layers and two models are all in the picture and its legend."""
    array, labels, affine = torso()
    grid = Grid(array.shape, affine)
    layers = tuple(
        Layer(np.where(labels == n, n, 0).astype(np.uint8), (MARKERS[n - 1],)) for n in (1, 2, 3)
    )
    one = Segmentation("one", layers, grid)
    two = Segmentation(
        "two", (Layer(np.where(labels == 4, 4, 0).astype(np.uint8), (MARKERS[3],)),), grid
    )
    volume = Volume(array, grid, "HU", "CT")

    measurements = measure(one, volume) + measure(two, volume)

    page = drawn(tmp_path / "p.png", volume, (one, two), measurements)

    legend = page[HEADER_HEIGHT:, 1600 - MARGIN - 330 :]
    for color in (BODY, LEFT, FRONT, HEAD):
        assert (legend == color).all(axis=-1).sum() > 50
    coronal = panels(page, FIELD)["coronal"]
    assert center(coronal, LEFT) is not None
    assert center(coronal, HEAD) is not None


def test_a_hundred_structures_fit(tmp_path):
    """The legend names the largest and counts the rest; the page doesn't grow."""
    array, _, affine = torso()
    labels = (np.arange(array.size) % 119).reshape(array.shape).astype(np.uint8)
    many = tuple(structure(n, f"Structure of a long name {n}", (n, 9, 9)) for n in range(1, 119))

    page = drawn(tmp_path / "p.png", *case(array, labels, affine, many), tuple(Flag)[:3])

    assert page.shape[0] < 1300
