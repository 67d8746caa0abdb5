from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.transform import Rotation

from scanloom.core import Code, Flag, Grid, Layer, Segmentation, Volume
from scanloom.ops.measure import measure
from scanloom.review.preview.content import About, Plane, PreviewContent, choose_content
from scanloom.review.preview.page import (
    HEADER_HEIGHT,
    MARGIN,
    TEXT,
    TILE_MAP_KEYWORD,
    Legend,
    Planes,
    arrange_planes,
    caption_lines,
    draw_preview,
    draw_thumbnail,
    legend_entries,
    legend_notes,
    text_width,
)
from scanloom.review.preview.slicing import AXIAL, CORONAL, SAGITTAL
from support.empty_share import empty_share
from support.review_phantoms import BODY, FRONT, HEAD, LEFT, MARKERS, case, stored, structure, torso
from support.selections import one_in

ABOUT = About("abcdefghijklmnopqrstuvwxyz", "CT")
ORDERS = [
    "".join(codes)
    for axes in itertools.permutations(["RL", "AP", "SI"])
    for codes in itertools.product(*axes)
]


def drawn(path, volume, segmentations, measurements, flags=(), about=ABOUT) -> np.ndarray:
    draw_preview(volume, segmentations, measurements, flags, path, about)
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def planes_of(content: PreviewContent, flags=()) -> Planes:
    """Return the arrangement of a page."""
    results = content.segmentations, content.measurements
    legend = Legend(
        tuple(legend_entries(*results, content.color_of)), tuple(legend_notes(*results, flags))
    )
    main, second, third = (plane.area.size for plane in content.planes)
    return arrange_planes(main, second, third, legend.heights())


def panels(page: np.ndarray, scan) -> dict[str, tuple[np.ndarray, Plane]]:
    """Cut the planes out of a page of a scan with its results."""
    content = choose_content(*scan)
    cut = {}
    first = content.planes[0]
    names = ("scan", "axial", "coronal", "sagittal")
    for name, plane, frame in zip(
        names, (first, *content.planes), planes_of(content).frames, strict=True
    ):
        x, y = frame.corner[0] + MARGIN, frame.corner[1] + HEADER_HEIGHT
        cut[name] = page[y : y + frame.picture[1], x : x + frame.picture[0]], plane
    return cut


def centre_of(panel: tuple[np.ndarray, Plane], color) -> tuple[float, float] | None:
    """Return where a marker lies in a plane, in LPI mm."""
    pixels, plane = panel
    at = center(pixels, color)
    if at is None:
        return None
    x, y = (
        low + share * mm for low, share, mm in zip(plane.area.low, at, plane.area.size, strict=True)
    )
    return x, y


def center(panel: np.ndarray, color) -> tuple[float, float] | None:
    """Return where a marker lies in a panel: shares of its width and height."""
    channel = int(np.argmax(color))
    other_channels = [n for n in range(3) if n != channel]
    seen = (panel[..., channel] - panel[..., other_channels].max(axis=-1)) > 70
    if not seen.any():
        return None
    rows, columns = np.nonzero(seen)
    return columns.mean() / panel.shape[1], rows.mean() / panel.shape[0]


def test_left_front_and_head_are_where_radiologists_look(tmp_path):
    """Left of the patient on the right, front up in axial and left in sagittal planes, head up."""
    scan = case(*torso())
    page = drawn(tmp_path / "p.png", *scan)
    affine = torso()[2]
    left_edge, front, head = (
        -(affine @ (*index, 1))[:3]
        for index in ((9, 24.5, 19.5), (29.5, 42, 19.5), (29.5, 24.5, 30.5))
    )

    seen = panels(page, scan)

    assert centre_of(seen["axial"], LEFT) == pytest.approx(left_edge[[0, 1]], abs=4)
    assert centre_of(seen["axial"], FRONT) == pytest.approx(front[[0, 1]], abs=4)
    assert centre_of(seen["coronal"], LEFT) == pytest.approx(left_edge[[0, 2]], abs=4)
    assert centre_of(seen["coronal"], HEAD) == pytest.approx(head[[0, 2]], abs=4)
    assert centre_of(seen["sagittal"], FRONT) == pytest.approx(front[[1, 2]], abs=4)
    assert centre_of(seen["sagittal"], HEAD) == pytest.approx(head[[1, 2]], abs=4)
    assert centre_of(seen["sagittal"], LEFT) is None
    assert centre_of(seen["scan"], LEFT) is None


@pytest.mark.sampled(7)
@pytest.mark.parametrize("codes", one_in(7, ORDERS))
def test_the_picture_does_not_hang_on_how_the_scan_is_stored(codes, tmp_path, torso_page):
    """All 48 orders of the axes give the same pixels (below the line that names the order)."""
    array, labels, affine = torso()
    (array, turned), (labels, _) = stored(array, affine, codes), stored(labels, affine, codes)

    page = drawn(tmp_path / "p.png", *case(array, labels, turned))

    np.testing.assert_array_equal(page[HEADER_HEIGHT - 7 :], torso_page[HEADER_HEIGHT - 7 :])


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
    content = choose_content(
        *case(np.full(shape, -1000, np.int16), labels, affine, (structure(1, "Ball", (255, 0, 0)),))
    )
    world = Grid(shape, affine).world(middle)
    area = content.planes[1].view.field_of_view(direction)
    plane = Plane(content.planes[1].view, direction, -float(world[direction.normal]), area, "")

    pixels = np.asarray(content.picture(plane, tuple(round(mm * 2) for mm in area.size)))

    columns, rows = centre_of((pixels.astype(int), plane), (255, 0, 0))
    assert (columns, rows) == pytest.approx(
        (-world[direction.across], -world[direction.down]), abs=1.5
    )
    height, width = (np.ptp(n) / 2 for n in np.nonzero(pixels[..., 0] > 60))
    assert width == pytest.approx(24, abs=5)
    assert height == pytest.approx(24, abs=5)


@pytest.mark.parametrize(
    ("shape", "spacing", "normal"),
    [
        ((60, 50, 8), (1, 1, 5), "Axial"),
        ((8, 50, 60), (5, 1, 1), "Sagittal"),
        ((50, 4, 60), (1, 1, 1), "Coronal"),
    ],
)
def test_slices_of_tilted_and_thin_stacks_are_shown_as_acquired(shape, spacing, normal):
    """The main plane and all tiles are stored slices, voxel by voxel; the tilt is said."""
    affine = np.eye(4)
    turn = Rotation.from_euler("xyz", (12, 8, 0), degrees=True).as_matrix()
    affine[:3, :3] = turn @ np.diag(spacing)
    array = np.random.default_rng(0).integers(-160, 240, shape).astype(np.int16)
    content = choose_content(*case(array, (array > 0).astype(np.uint8), affine))

    main = content.planes[0]
    cut = main.view.cut(array, main.direction, main.position, None)

    assert main.direction.name == normal
    assert f"{normal}, tilted" in main.name
    axis = int(np.argmin(shape))
    stored = {np.sort(s.ravel()).tobytes() for s in np.moveaxis(array, axis, 0)}
    assert np.sort(cut.values.ravel()).tobytes() in stored
    assert len(content.tiles) == shape[axis]
    assert {t.direction.name for t in content.tiles} == {normal}


def test_a_long_title_of_a_narrow_plane_has_lines(tmp_path):
    """It is not cut off, and the letter of the upper side stands below it."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", (12, 8, 25), degrees=True).as_matrix()
    shape = (40, 50, 40)
    labels = np.zeros(shape, np.uint8)
    labels[10:30, 10:40, 10:30] = 1
    scan = case(np.full(shape, -1000, np.int16), labels, affine)
    content = choose_content(*scan)
    frame = planes_of(content).frames[1].moved(MARGIN, HEADER_HEIGHT)
    assert text_width(content.planes[0].name, 14) > frame.width

    page = drawn(tmp_path / "page.png", *scan)

    second = page[frame.y + 26 : frame.y + 38, frame.x + 6 : frame.x + 40]
    assert (second > 180).any()
    middle = page[frame.y + 42 : frame.y + 56]
    x = frame.x + frame.width // 2
    assert (middle[:, x - 8 : x + 8] > 180).any()


def test_a_title_that_is_cut_off_ends_with_an_ellipsis():
    """It would read as a whole one: without the place in mm."""
    lines = caption_lines("Axial, tilted 14.4°, turned 25.0°, slice 6 of 10, S 13 mm", 86)
    assert lines == ["Axial, tilted", "14.4°, turned", "25.0°, slice…"]


@pytest.mark.parametrize(
    ("angles", "said"),
    [
        ((0, 0, 20), "Axial, turned 20.0°, slice"),
        ((0, 0, -40), "Axial, turned 40.0°, slice"),
        ((0, 0, 0.3), "Axial, slice"),
        ((12, 0, 0), "Axial, tilted 12.0°, slice"),
    ],
)
def test_a_turn_within_the_plane_is_said(angles, said):
    """Slices are shown as acquired, so that the letters of the sides are off by this angle."""
    affine = np.eye(4)
    turn = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
    affine[:3, :3] = turn @ np.diag((1, 1, 5))
    array = np.random.default_rng(0).integers(-160, 240, (60, 50, 8)).astype(np.int16)
    content = choose_content(*case(array, (array > 0).astype(np.uint8), affine))
    assert content.planes[0].name.startswith(said)


def test_slices_of_a_scan_that_is_turned_a_little_are_those_stated():
    """Slices that leave the patient's plane by half a voxel are shown by number, not by place."""
    affine, shape = np.eye(4), (100, 100, 60)
    affine[:3, :3] = Rotation.from_euler("xyz", (-0.28, 0.28, 0), degrees=True).as_matrix()
    array = np.full(shape, -1000, np.int16)
    array[:50, :50] = np.arange(60)  # the body, beside the middle: its slices, by number
    content = choose_content(*case(array, (array >= 0).astype(np.uint8), affine))

    assert content.planes[0].view.upright
    for plane in (content.planes[0], *content.tiles):
        shown = plane.view.cut(array, plane.direction, plane.position, None).values.max()
        number = plane.short.partition(":")[0]
        assert number == str(60 - shown)


def test_planes_are_cropped_to_the_body_and_all_structures():
    """10 mm around the body; a structure outside of it, an error, is shown too."""
    array, labels, affine = np.full((100, 100, 60), -1000, np.int16), None, np.diag([3.0, 3, 3, 1])
    array[40:60, 40:60, 10:50] = 40
    labels = (array > 0).astype(np.uint8)
    tight = choose_content(*case(array, labels, affine)).planes[0].area
    labels[5, 50, 30] = 2
    wide = choose_content(*case(array, labels, affine)).planes[0].area

    assert tight.size == pytest.approx((80, 80), abs=7)
    assert wide.high[0] >= -5 * 3 + 10


def test_proportions_are_the_patients(tmp_path):
    """A ball is round in all three planes, however flat the voxels are."""
    spacing = np.array([1.0, 1.0, 8.0])
    shape = (120, 120, 16)
    away = (np.indices(shape).T - np.array([60, 60, 8])) * spacing
    labels = (np.linalg.norm(away, axis=-1) < 44).T.astype(np.uint8)
    scan = case(
        np.full(shape, -1000, np.int16),
        labels,
        np.diag([*spacing, 1]),
        (structure(1, "Ball", (255, 0, 0)),),
    )

    seen = panels(drawn(tmp_path / "p.png", *scan), scan)

    for name in ("axial", "coronal", "sagittal"):
        red = seen[name][0][..., 0] - seen[name][0][..., 1] > 60
        height, width = (np.ptp(n) for n in np.nonzero(red))
        assert height == pytest.approx(width, rel=0.12)
        assert width > 80


def test_every_structure_is_in_a_tile():
    """Also structures of one slice. It begins just before the first, and ends just after the last.

    The body goes on for three slices before, and as many behind them.
    """
    array, labels, affine = torso()
    labels[30, 24, 11] = 9
    more = (*MARKERS, structure(9, "Spot"))
    content = choose_content(*case(array, labels, affine, more))

    cuts = [t.view.cut(labels, t.direction, t.position, None).values for t in content.tiles]

    assert set(np.unique(cuts)) == {0, 1, 2, 3, 4, 9}
    assert len(cuts) == 12  # beside shaded views
    assert [t.short.split(":")[0] for t in content.tiles][::11] == ["4", "37"]
    assert [cut.any() for cut in cuts] == [False, *[True] * 10, False]


def test_the_planes_go_where_most_structures_are():
    """Not through the largest structure alone, and through each where it is wide."""
    array, labels, affine = torso()
    labels[:] = 0
    labels[20:40, 10:40, 5:12] = 3  # the largest
    labels[20:30, 10:20, 25:29] = 2
    labels[40:45, 10:20, 24:30] = 4
    content = choose_content(*case(array, labels, affine))

    axial = next(plane for plane in content.planes if plane.direction is AXIAL)
    cut = axial.view.cut(labels, axial.direction, axial.position, None).values

    assert np.bincount(cut.ravel(), minlength=5)[2:].tolist() == [100, 0, 50]


def test_the_planes_go_through_the_middle_of_a_structure():
    """The largest slice of a wedge is at its end; those of nearly its area qualify."""
    array, labels, affine = torso()
    labels[:] = 0
    for k in range(10, 30):
        labels[20:40, 10 : 10 + k, k] = 2
    content = choose_content(*case(array, labels, affine))

    axial = next(plane for plane in content.planes if plane.direction is AXIAL)

    cut = axial.view.cut(labels, axial.direction, axial.position, None).values
    assert 0.75 * 29 <= np.count_nonzero(cut) / 20 <= 27


@pytest.mark.parametrize("share", [0.55, 0.8])
def test_only_the_largest_structure_may_have_no_fill(share):
    """Two halves of a body: the smaller is filled however large it is."""
    array, labels, affine = torso()
    labels[:] = 0
    edge = 5 + round(50 * share)
    labels[5:edge, 5:45, 5:35] = 2
    labels[edge:55, 5:45, 5:35] = 3
    array[:] = np.where(labels, 40, -1000)
    content = choose_content(*case(array, labels, affine))

    assert content.layers[0].filled[[2, 3]].tolist() == [False, True]


def test_equal_input_gives_equal_bytes(tmp_path):
    """Nothing of the time or the machine gets into the file."""
    hashes = set()
    for name in ("a.png", "b.png"):
        drawn(tmp_path / name, *case(*torso()), [Flag.SHEARED])
        hashes.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())

    assert len(hashes) == 1
    with Image.open(tmp_path / "a.png") as image:
        assert list(image.info) == [TILE_MAP_KEYWORD]


def test_a_scan_with_burned_in_text_gets_no_picture(tmp_path):
    """Neither by the flag of the case nor by the volume's own."""
    volume, segmentations, measurements = case(*torso())
    flagged = Volume(volume.array, volume.grid, "HU", "CT", None, (Flag.BURNED_IN,))

    with pytest.raises(ValueError, match="burned in"):
        draw_preview(volume, segmentations, measurements, [Flag.BURNED_IN], tmp_path / "p.png")
    with pytest.raises(ValueError, match="burned in"):
        draw_preview(flagged, segmentations, measurements, [], tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_flags_and_the_empty_result_are_said(tmp_path):
    """Notes take room on the page: each flag, and that nothing was found."""
    array, labels, affine = torso()
    full = drawn(tmp_path / "a.png", *case(array, labels, affine))
    flagged = drawn(tmp_path / "b.png", *case(array, labels, affine), [Flag.SHEARED])
    empty = drawn(tmp_path / "c.png", *case(array, labels * 0, affine))

    amber = [np.abs(page - (255, 190, 92)).max(axis=-1).__lt__(8).sum() for page in (full, flagged)]
    assert amber[0] < 20 < amber[1]
    assert (np.abs(empty - (255, 190, 92)).max(axis=-1) < 8).sum() > 20
    assert empty[HEADER_HEIGHT:].std() > 5


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
    assert 200 < page.shape[0] < 2000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fill", [np.nan, 0.0, -1e30])
def test_odd_intensities_are_drawn(fill, tmp_path):
    """A scan of one value, of nothing but NaN or with values far away is still a picture."""
    array, labels, affine = torso()
    array = array.astype(np.float32)
    array[::2] = fill

    drawn(tmp_path / "a.png", *case(array, labels, affine, unit="a.u.", modality="MR"))
    drawn(tmp_path / "b.png", *case(array * 0 + fill, labels, affine, unit="a.u.", modality="MR"))


@pytest.mark.thorough
def test_models_and_layers_lie_on_each_other(tmp_path):
    """Structures of two layers and two models are all in the picture and its legend."""
    array, labels, affine = torso()
    grid = Grid(array.shape, affine)
    layers = tuple(
        Layer(np.where(labels == n, n, 0).astype(np.uint8), (MARKERS[n - 1],)) for n in (1, 2, 3)
    )
    segmentation = Segmentation("one", layers, grid)
    two = Segmentation(
        "two", (Layer(np.where(labels == 4, 4, 0).astype(np.uint8), (MARKERS[3],)),), grid
    )
    volume = Volume(array, grid, "HU", "CT")

    measurements = measure(segmentation, volume) + measure(two, volume)

    page = drawn(tmp_path / "p.png", volume, (segmentation, two), measurements)

    for color in (BODY, LEFT, FRONT, HEAD):
        assert (page == color).all(axis=-1).sum() > 150  # the swatch in the legend
    coronal = panels(page, (volume, (segmentation, two), measurements))["coronal"]
    assert centre_of(coronal, LEFT) is not None
    assert centre_of(coronal, HEAD) is not None


@pytest.mark.thorough
def test_a_hundred_structures_are_all_named(tmp_path):
    """The page is longer, and no name is left out; little of it is empty."""
    array, _, affine = torso()
    labels = (np.arange(array.size) % 119).reshape(array.shape).astype(np.uint8)
    many = tuple(structure(n, f"Structure of a long name {n}", (n, 99, 9)) for n in range(1, 119))
    scan = case(array, labels, affine, many)

    page = drawn(tmp_path / "p.png", *scan, tuple(Flag)[:3])

    assert 1000 < page.shape[0] < 2200
    assert empty_share(tmp_path / "p.png") <= 0.15


@pytest.mark.parametrize("flags", [(), (Flag.SHEARED, Flag.MODALITY_UNKNOWN)])
@pytest.mark.parametrize("slices", [8, 40])
def test_at_most_15_percent_of_the_page_are_empty(slices, flags, tmp_path):
    array, labels, affine = (a[..., :slices] if n < 2 else a for n, a in enumerate(torso()))

    drawn(tmp_path / "p.png", *case(array, labels, affine), flags)

    assert empty_share(tmp_path / "p.png") <= 0.15


def test_the_header_has_case_model_and_windows():
    """The modality that was assumed gives CT its window."""
    array, labels, affine = torso()
    lung = replace(structure(1, "Lung"), type=Code("39607008", "SCT", "Lung"))
    scan = case(array, labels, affine, (lung, *MARKERS[1:]), unit="unknown", modality=None)

    content = choose_content(*scan, ABOUT)

    assert content.modality == "CT (assumed)"
    assert content.window_text == "W 400 L 40 HU, in lungs W 1500 L -600 HU"


def test_lungs_are_shown_in_the_lung_window(tmp_path):
    """Vessels in air are seen where the label says lung, and only there."""
    array, labels, affine = torso()
    lung = replace(structure(2, "Lung"), type=Code("39607008", "SCT", "Lung"))
    array[labels == 2] = -800
    array[labels == 3] = -800
    content = choose_content(
        *case(array, labels, affine, (MARKERS[0], lung, MARKERS[2], MARKERS[3]))
    )
    plane = content.planes[0]

    gray = np.asarray(content.picture(plane, (1000, 1000))).astype(int).max(axis=-1)

    low = np.array(plane.area.low)
    at = [
        ((-(affine @ (*i, 1))[:2] - low) / plane.area.size * 1000).astype(int)
        for i in ((9, 24, 20), (30, 42, 20))
    ]
    brightness = [gray[y, x] for x, y in at]
    assert brightness[0] > 80
    assert brightness[1] < 60


def test_the_thumbnail_has_no_text_and_its_size(tmp_path):
    """Three planes with labels in 520 x 200 pixels, equal bytes twice."""
    content = choose_content(*case(*torso()))
    for name in ("a.png", "b.png"):
        draw_thumbnail(content, tmp_path / name)

    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
        assert (image.size, image.format, image.info) == ((520, 200), "PNG", {})
    for color in (LEFT, FRONT, HEAD):
        assert center(pixels, color) is not None
    assert not (pixels == TEXT).all(axis=-1).any()
