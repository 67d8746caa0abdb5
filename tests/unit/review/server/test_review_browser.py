"""The review in a real browser: right pictures, by keyboard, on a phone, checked by axe-core.

Needs playwright and a Chromium (SCANLOOM_CHROMIUM, or on the path), and axe-core as for the report.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image

from scanloom.review.verdicts.log import read_verdicts
from support.axe import axe_core, violations
from support.outline_contrast import contrasts
from support.review_browser import (
    Running,
    asked,
    chromium,
    opened,
    picture_of,
    until,
    wait_for_frames,
)
from support.review_cases import RECIPE, affine_of, publish, scan_array

pytestmark = pytest.mark.reference

__all__ = ["chromium"]

LPS = np.diag((-1.0, -1.0, 1.0, 1.0))
SIDES = {"left": (0.1, 0.5), "right": (0.9, 0.5), "top": (0.5, 0.1), "bottom": (0.5, 0.9)}
"""Points near the borders of a picture, as shares of its width and height."""
PIXELS = """(name) => {
  const canvas = document.querySelector(`#${name} canvas`);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return [canvas.width, canvas.height, Number(canvas.dataset.index), Array.from(data)];
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    publish_three(folder)
    return folder


def publish_three(folder: Path, recipe: str = RECIPE) -> None:
    scans = (scan_array(1), scan_array(2), scan_array(3, (9, 17, 12)))
    affines = (affine_of("LAS", 20.0), affine_of("PIR", shear=0.8), affine_of("SPL"))
    publish(folder, scans[0], affines[0], "one", also=("image",), recipe=recipe)
    publish(folder, scans[1], affines[1], "two", first=300, layers=2, recipe=recipe)
    publish(folder, scans[2], affines[2], "three", recipe=recipe)


@pytest.fixture
def running(folder: Path, tmp_path: Path) -> Iterator[Running]:
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out, copy_function=shutil.copy2)
    server = Running(out, folder / "key", "--reviewers", "anna,ben")
    server.out = out
    yield server
    server.stop()


def open_case(tab: Any, name: str) -> None:
    tab.click(f"text={name}")
    tab.wait_for_selector(f"body[data-opened='{name}']")


def shown(tab: Any, plane: str) -> tuple[int, np.ndarray]:
    width, height, index, data = tab.evaluate(PIXELS, plane)
    return index, np.array(data, np.uint8).reshape(height, width, 4)[..., :3]


def expected(folder: Path, about: dict[str, Any], plane: str, index: int) -> np.ndarray:
    """Return a plane as drawn, from the files and the rules that the page states."""
    stored = nib.load(folder)
    array, at = np.asarray(stored.dataobj), about["planes"][plane]
    to_lps, of_file = np.array(about["affine"]), LPS @ stored.affine
    voxel = np.zeros((at["height"], at["width"], 3))
    voxel[..., at["normal"]] = index
    voxel[..., at["down"]], voxel[..., at["across"]] = np.indices((at["height"], at["width"]))
    mm = voxel @ to_lps[:3, :3].T + to_lps[:3, 3]
    source = np.rint((mm - of_file[:3, 3]) @ np.linalg.inv(of_file[:3, :3]).T).astype(int)
    return array[tuple(np.moveaxis(source, -1, 0))]


def coloured(values: np.ndarray, layers: list[tuple[np.ndarray, Any]], window: Any) -> np.ndarray:
    low, high = window["low"], window["high"]
    grey = np.floor((values.clip(low, high) - low) / (high - low) * 255 + 0.5)
    picture = np.repeat(grey[..., None], 3, axis=2)
    for labels, layer in layers:
        for each in layer["labels"]:
            colour = [int(each["color"][n : n + 2], 16) for n in (1, 3, 5)]
            inside = labels == each["value"]
            picture[inside] = np.floor(picture[inside] * 0.6 + np.array(colour) * 0.4 + 0.5)
    return picture


def test_pixels_are_the_scan_windowed_and_coloured(
    chromium: Any, running: Any, folder: Path
) -> None:
    tab, messages = opened(chromium, running.links["anna"])
    for case in sorted((running.out / "cases").iterdir()):
        open_case(tab, case.name)
        about = asked(tab, f"/api/case/{case.name}").json()
        scan = scan_of(folder, about, case)
        tab.keyboard.press("o")  # fill instead of outlines
        for plane in ("axial", "coronal", "sagittal"):
            tab.locator(f"#{plane}").focus()
            tab.keyboard.press("ArrowDown")
            index = about["planes"][plane]["count"] // 2 + 1
            tab.wait_for_selector(f"#{plane} canvas[data-index='{index}']", state="attached")
            picture = shown(tab, plane)[1]
            layers = [
                (expected(case / layer["file"], about, plane, index), layer)
                for layer in about["layers"]
            ]
            values = expected(scan, about, plane, index)
            np.testing.assert_allclose(
                picture, coloured(values, layers, about["windows"][0]), atol=1
            )
        tab.go_back()
        tab.wait_for_selector("#filters button")
    assert messages == []


def scan_of(folder: Path, about: dict[str, Any], case: Path) -> Path:
    """Return the file of the scan of a case, by its shape and labels."""
    labels = np.asarray(nib.load(case / about["layers"][0]["file"]).dataobj) > 0
    for path in sorted((folder / "scans").iterdir()):
        array = np.asarray(nib.load(path).dataobj)
        if array.shape == labels.shape and ((array > 300) == labels).all():
            return path
    raise AssertionError(case)


@pytest.mark.parametrize("ratio", [1, 2])
def test_outlines_stand_out_from_the_scan_and_end_at_voxels(
    chromium: Any, running: Any, folder: Path, ratio: int
) -> None:
    """By screenshots without and with labels: 3 to 1 at the edge of each structure; also for
    neighbours, and where a pixel of the screen is none of the slice."""
    context = chromium.new_context(
        viewport={"width": 1400, "height": 900}, device_scale_factor=ratio
    )
    tab = context.new_page()
    tab.goto(running.links["anna"])
    tab.wait_for_selector("#filters button", state="attached")
    for case in sorted((running.out / "cases").iterdir()):
        open_case(tab, case.name)
        about = asked(tab, f"/api/case/{case.name}").json()
        index, _ = shown(tab, "axial")
        tab.evaluate(BARE)
        drawn = picture_of(tab, "axial")
        tab.keyboard.press("h")
        alone = picture_of(tab, "axial")
        left, top, wide, high = tab.evaluate(PLACE)
        rows, columns = (
            np.floor(((np.arange(n) + 0.5) / ratio - low) / length * count).astype(int)
            for n, low, length, count in (
                (alone.shape[0], top, high, about["planes"]["axial"]["height"]),
                (alone.shape[1], left, wide, about["planes"]["axial"]["width"]),
            )
        )
        for layer in about["layers"]:
            labels = expected(case / layer["file"], about, "axial", index)
            inside = np.zeros(alone.shape[:2], int)
            y, x = (
                (n >= 0) & (n < size) for n, size in zip((rows, columns), labels.shape, strict=True)
            )
            inside[np.ix_(y, x)] = labels[np.ix_(rows[y], columns[x])]
            found = contrasts(alone, drawn, inside)
            assert found or not labels.any()
            for number, each in found.items():
                assert (each >= 3).mean() > 0.95, (case.name, number)
        tab.keyboard.press("h")
        tab.go_back()
        tab.wait_for_selector("#filters button")
    context.close()


BARE = """() => {
  for (const each of document.querySelectorAll(".line, .letter")) each.style.display = "none";
}"""
PLACE = """() => {
  const style = document.querySelector("#axial canvas").style;
  return [style.left, style.top, style.width, style.height].map(parseFloat);
}"""


def test_the_planes_do_not_move_when_tools_open(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"], 1400)
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    before = [tab.locator(f"#{name}").bounding_box() for name in ("axial", "coronal")]
    tab.keyboard.press("b")
    tab.wait_for_selector("#brush-label", state="visible")
    assert [tab.locator(f"#{name}").bounding_box() for name in ("axial", "coronal")] == before


def test_the_legend_is_in_view_and_the_body_fills_the_field(chromium: Any, running: Any) -> None:
    """At 1400 x 900, without scrolling."""
    tab, _ = opened(chromium, running.links["anna"], 1400)
    for case in sorted((running.out / "cases").iterdir()):
        open_case(tab, case.name)
        for item in tab.locator("#layers li").all():
            box = item.bounding_box()
            assert box["y"] + box["height"] <= 900
        tab.go_back()
        tab.wait_for_selector("#filters button")


def test_keys_are_shown_on_every_page(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("?")
    assert tab.is_visible("#help")
    tab.click("#close")
    tab.wait_for_selector("#help", state="hidden")
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    tab.keyboard.press("?")
    assert tab.is_visible("#help")


def test_a_slider_keeps_its_own_keys_only(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"], 1400)
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name, slider = tab.inner_text("#name"), tab.locator("#axial input[type=range]")
    slider.focus()
    before = int(slider.input_value())
    tab.keyboard.press("ArrowRight")
    assert int(slider.input_value()) == before + 1
    tab.keyboard.press("b")
    tab.wait_for_selector("#brush-label", state="visible")
    slider.focus()
    tab.keyboard.press("b")
    tab.keyboard.press("n")
    tab.wait_for_function("(name) => document.querySelector('#name').innerText !== name", arg=name)


def test_values_and_places_are_those_of_simpleitk(
    chromium: Any, running: Any, folder: Path
) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    case = next(c for c in (running.out / "cases").iterdir() if (c / "image.nii.gz").exists())
    open_case(tab, case.name)
    image = sitk.ReadImage(str(case / "image.nii.gz"))
    for keys in (["ArrowDown"], ["ArrowRight", "ArrowRight"], ["Alt+ArrowDown"], ["2", "ArrowUp"]):
        before = tab.inner_text("#readout")
        for key in keys:
            tab.keyboard.press(key)
        until(tab, lambda before=before: tab.inner_text("#readout") != before)
        mm, value = position(tab)
        assert value == image.GetPixel(image.TransformPhysicalPointToIndex(mm.tolist()))


def test_a_whole_review_by_keyboard(chromium: Any, running: Any) -> None:
    tab, messages = opened(chromium, running.links["ben"])
    tab.keyboard.press("n")
    for decision in "aer":
        tab.wait_for_selector("body[data-opened]")
        name = tab.inner_text("#name")
        tab.keyboard.press(decision)
        tab.keyboard.press("c")
        tab.keyboard.type("seen")
        tab.keyboard.press("Escape")
        tab.keyboard.press("s")
        if decision != "r":
            tab.wait_for_selector(f"body[data-opened]:not([data-opened='{name}'])")
    tab.wait_for_selector("text='Saved. No case is open any more.'")
    kept = read_verdicts(running.out)
    assert [each.decision for each in kept] == ["accept", "edit", "reject"]
    assert all(each.comment and each.seconds > 0 for each in kept)
    tab.keyboard.press("u")
    until(tab, lambda: read_verdicts(running.out)[-1].undoes == 3)
    assert messages == []


def take_brush(tab: Any) -> str:
    """Open the next case and take the brush; return the name of the case."""
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    tab.keyboard.press("b")
    tab.fill("#radius", "3")
    return str(tab.inner_text("#name"))


def test_a_correction_by_brush(chromium: Any, running: Any) -> None:
    tab, messages = opened(chromium, running.links["anna"])
    name = take_brush(tab)
    tab.locator("#axial").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=voxels changed")
    tab.click("#save-correction")
    tab.wait_for_selector("text=Saved as revision 1")
    assert (running.out / "review" / "revisions" / name / "1" / "SHA256SUMS").is_file()
    assert all("409" in each for each in messages)  # slices that were fetched ahead come too late


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium: Any, running: Any, width: int, scheme: str) -> None:
    script = axe_core()
    tab, _ = opened(chromium, running.links["anna"], width, scheme)
    tab.evaluate(script)
    faults = violations(tab)
    tab.locator("#rows a").first.click()
    tab.wait_for_selector("body[data-opened]")
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    tab.evaluate(script)
    faults += violations(tab)
    tab.keyboard.press("b")
    faults += violations(tab)
    tab.click("#turn")
    tab.wait_for_selector("#solid[data-drawn]")
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    faults += violations(tab)
    tab.keyboard.press("?")
    faults += violations(tab)
    assert faults == []


def judged(tab: Any) -> list[str]:
    tab.evaluate(axe_core())
    return violations(tab)


def test_an_empty_folder_and_no_access_are_told(
    chromium: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "cases").mkdir(parents=True)
    server = Running(tmp_path / "out", folder / "key")
    try:
        tab, messages = opened(chromium, server.links["reviewer"], 390)
        assert "No case has a result yet" in tab.inner_text("#status")
        assert not tab.is_visible("#filters")
        assert not tab.is_visible("table")
        assert judged(tab) == []
        assert messages == []
        stranger = chromium.new_context().new_page()
        stranger.goto(server.links["reviewer"])
        stranger.wait_for_selector("h1:has-text('no access')")
        assert judged(stranger) == []
    finally:
        server.stop()


def test_a_case_that_is_gone_shows_no_picture(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    assert tab.is_visible("#axial")
    gone = tab.locator("#name").inner_text()[::-1]
    tab.evaluate(
        f"history.pushState(null, '', '/r1/case/{gone}'); dispatchEvent(new Event('popstate'))"
    )
    tab.wait_for_selector("#status.error")
    assert tab.inner_text("#status") == "There is no such case."
    assert not tab.is_visible("#axial")
    assert not tab.is_visible("#verdict")
    assert judged(tab) == []
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")


LONG_DRAG = """() => {
  const figure = document.querySelector("#axial");
  const box = figure.querySelector("canvas").getBoundingClientRect();
  const send = (kind, n) => figure.dispatchEvent(new PointerEvent(kind, {
    pointerId: 1, bubbles: true,
    clientX: box.x + box.width * (n % 2 ? 0.3 : 0.6),
    clientY: box.y + box.height * (0.3 + n / 25000),
  }));
  send("pointerdown", 0);
  for (let n = 1; n < 9000; n++) send("pointermove", n);
  send("pointerup", 0);
}"""


def test_a_drag_of_thousands_of_places_is_painted(chromium: Any, running: Any) -> None:
    """By the brush in parts."""
    tab, messages = opened(chromium, running.links["anna"])
    name = take_brush(tab)
    box = tab.locator("#axial canvas").first.bounding_box()
    tab.mouse.move(box["x"], box["y"])  # the pointer is known from then on
    tab.evaluate(LONG_DRAG)
    tab.wait_for_selector("text=voxels changed")
    until(tab, lambda: asked(tab, f"/api/case/{name}/draft").json()["undo"] > 1)
    assert not [each for each in messages if "400" in each]


def fingers(session: Any, kind: str, *places: tuple[float, float]) -> None:
    points = [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(places)]
    session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})


def test_touch_moves_zooms_and_paints_on_a_phone(chromium: Any, running: Any) -> None:
    tab, messages = opened(chromium, running.links["anna"], 390)
    session = tab.context.new_cdp_session(tab)
    tab.tap("#rows a >> nth=0")
    tab.wait_for_selector("body[data-opened]")
    tab.tap("#coronal .enlarge")
    assert tab.get_attribute("#coronal", "class").split()[1:] == ["active", "main"]
    tab.evaluate("scrollTo(0, 0)")
    box = tab.locator("#coronal canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 4, box["y"] + box["height"] / 2
    before = tab.inner_text("#readout")
    fingers(session, "touchStart", (x, y))
    fingers(session, "touchEnd")
    until(tab, lambda: tab.inner_text("#readout") != before)
    moved = tab.inner_text("#readout")
    fingers(session, "touchStart", (x + 20, y))
    fingers(session, "touchStart", (x + 20, y), (x + 60, y))
    fingers(session, "touchMove", (x, y), (x + 80, y))
    fingers(session, "touchEnd")
    twice, canvas = pytest.approx(2 * box["width"]), tab.locator("#coronal canvas").first
    until(tab, lambda: canvas.bounding_box()["width"] == twice)
    assert tab.inner_text("#readout") == moved
    tab.tap("#correct")
    tab.evaluate("scrollTo(0, 0)")
    for tool in ("brush-label", "radius", "eraser", "stroke-undo", "discard", "save-correction"):
        position = tab.locator(f"#{tool}").bounding_box()  # in reach of a thumb, under the picture
        assert 600 < position["y"] < position["y"] + position["height"] <= 900, tool
    figure = tab.locator("#coronal").bounding_box()
    assert figure["y"] + figure["height"] < tab.locator(".tools").bounding_box()["y"]
    fingers(session, "touchStart", (x, y))
    fingers(session, "touchMove", (x + 30, y))
    fingers(session, "touchEnd")
    tab.wait_for_selector("text=voxels changed")
    assert messages == []


def test_the_brush_paints_the_structure_at_the_crosshair(chromium: Any, running: Any) -> None:
    """Until the crosshair moves, the structure that a person chooses instead stays."""
    tab, messages = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    painted = "document.querySelector('#brush-label').selectedOptions[0].textContent"
    about = asked(tab, f"/api/case/{tab.inner_text('#name')}").json()
    structures = [each for layer in about["layers"] for each in layer["labels"]]
    names = tab.locator("#layers button.name").all_inner_texts()
    assert len(names) > 1
    for name in reversed(names):
        tab.click(f"#layers button.name >> text={name}")
        centre = next(each["centre"] for each in structures if each["name"] == name)
        for plane in about["planes"]:
            index = centre[about["planes"][plane]["normal"]]
            tab.wait_for_selector(f"#{plane} canvas[data-index='{index}']", state="attached")
        tab.keyboard.press("b")
        here = tab.inner_text("#readout").split(" · ")[2:]
        assert tab.evaluate(painted) == (here[-1] if here and name not in here else name)
        tab.keyboard.press("b")
    tab.keyboard.press("b")
    tab.select_option("#brush-label", label=names[-1])
    tab.locator("#axial").focus()
    tab.keyboard.press("b")
    tab.keyboard.press("b")
    assert tab.evaluate(painted) == names[-1]
    assert messages == []


def test_strokes_that_are_not_saved_stay_when_the_case_is_left(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name = tab.inner_text("#name")
    tab.keyboard.press("b")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=voxels changed")
    tab.keyboard.press("n")
    tab.wait_for_function("name => document.querySelector('#name').textContent !== name", arg=name)
    tab.wait_for_selector("body[data-opened]")
    tab.keyboard.press("p")
    tab.wait_for_selector(f"body[data-opened='{name}']")
    assert "1 stroke of your correction not saved yet" in tab.inner_text("#status")
    assert tab.get_attribute("#correct", "aria-pressed") == "true"
    tab.click("#save-correction")
    tab.wait_for_selector("text=Saved as revision 1")


def test_strokes_from_two_windows_are_all_painted(chromium: Any, running: Any) -> None:
    """Of 40 strokes at once from two windows none is lost; a window says that both painted."""
    tab, messages = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name, twin = tab.inner_text("#name"), tab.context.new_page()
    twin.goto(tab.url)
    twin.wait_for_selector(f"body[data-opened='{name}']")
    address = f"/api/case/{name}"
    about = asked(twin, address).json()
    axial, layer = about["planes"]["axial"], about["layers"][0]
    boxes = []
    for each in (tab, twin):
        each.keyboard.press("b")
        each.fill("#radius", "1.3")
        each.locator("#axial").focus()
        for _ in range(8):
            each.keyboard.press("-")  # the whole slice
        boxes.append(each.locator("#axial canvas").first.bounding_box())
    pixels = [(i, j) for i in range(axial["width"]) for j in range(axial["height"])][:80:2]
    for n, (i, j) in enumerate(pixels):
        box, window = boxes[n % 2], (tab, twin)[n % 2]
        x = box["x"] + (i + 0.5) * box["width"] / axial["width"]
        window.mouse.click(x, box["y"] + (j + 0.5) * box["height"] / axial["height"])

    shape, index = (axial["height"], axial["width"]), axial["count"] // 2
    slice_address = f"{address}/labels/0/axial/{index}-{index}"
    expected = np.frombuffer(asked(twin, slice_address).body(), np.uint8).reshape(shape).copy()
    y, x = np.indices(shape)
    for i, j in pixels:
        across, down = (x - i) * axial["pixel_mm"][0], (y - j) * axial["pixel_mm"][1]
        expected[across**2 + down**2 <= 1.3**2] = layer["labels"][0]["value"]
    painted = f"{slice_address}?draft=1"
    until(tab, lambda: asked(twin, painted).body() == expected.tobytes())
    message = "Another window changed this correction"
    until(tab, lambda: any(message in each.inner_text("#status") for each in (tab, twin)))
    assert all("409" in text for text in messages)


def test_strokes_wait_for_a_server_that_does_not_answer(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    address = f"/api/case/{tab.inner_text('#name')}/draft"
    tab.route("**/stroke", lambda route: route.abort())
    tab.keyboard.press("b")
    for key in ("Enter", "ArrowDown", "Enter"):
        tab.keyboard.press(key)
    tab.wait_for_selector("#status.error:has-text('2 strokes not painted yet')")
    assert asked(tab, address).json()["undo"] == 0

    tab.unroute("**/stroke")

    tab.wait_for_selector("text=voxels changed")
    assert asked(tab, address).json()["undo"] == 2


def test_strokes_on_a_result_that_was_replaced_are_told(chromium: Any, running: Any) -> None:
    """Those that were painted, and those that came too late."""
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name = tab.inner_text("#name")
    tab.keyboard.press("b")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("text=voxels changed")
    second_tab, _ = opened(chromium, running.links["ben"])
    open_case(second_tab, name)
    for key in ("b", "x", "Enter"):
        second_tab.keyboard.press(key)
    second_tab.wait_for_selector("text=voxels changed")
    second_tab.click("#save-correction")
    second_tab.wait_for_selector("text=Saved as revision 1")

    for key in ("ArrowDown", "Enter"):
        tab.keyboard.press(key)

    tab.wait_for_selector("#status.error:has-text('Not painted: 1 stroke.')")
    assert "1 stroke of yours were painted on the new one" in tab.inner_text("#status")
    tab.click("#save-correction")
    tab.wait_for_selector("text=Saved as revision 2")


def test_a_verdict_that_is_not_saved_stays_when_the_case_is_left(
    chromium: Any, running: Any
) -> None:
    tab, messages = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name = tab.inner_text("#name")
    tab.keyboard.press("a")
    tab.keyboard.press("c")
    tab.keyboard.type("looks <b>odd")
    tab.keyboard.press("Escape")
    tab.keyboard.press("n")
    tab.wait_for_function("name => document.querySelector('#name').textContent !== name", arg=name)
    tab.wait_for_selector("body[data-opened]")
    assert tab.input_value("#comment") == ""
    assert tab.is_disabled("#save")

    tab.go_back()

    tab.wait_for_selector(f"body[data-opened='{name}']")
    assert tab.input_value("#comment") == "looks <b>odd"
    assert tab.inner_text("#decided").startswith("Not saved yet.")
    dialogs = list[str]()
    tab.once("dialog", lambda dialog: (dialogs.append(dialog.type), dialog.dismiss()))
    tab.keyboard.press("l")
    until(tab, lambda: dialogs == ["beforeunload"])
    tab.keyboard.press("s")
    tab.wait_for_function("name => document.querySelector('#name').textContent !== name", arg=name)
    [verdict] = read_verdicts(running.out)
    assert (verdict.case, verdict.decision, verdict.comment) == (name, "accept", True)
    tab.wait_for_selector("body[data-opened]")
    tab.keyboard.press("l")
    tab.wait_for_selector("#filters button")
    assert messages == []


def test_a_window_shows_the_verdict_of_another_before_it_replaces_it(
    chromium: Any, running: Any
) -> None:
    tab, messages = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name = tab.inner_text("#name")
    second_tab = tab.context.new_page()
    second_tab.goto(tab.url)
    second_tab.wait_for_selector("body[data-opened]")
    tab.keyboard.press("a")
    tab.keyboard.press("c")
    tab.keyboard.type("of the first window")
    tab.keyboard.press("Escape")
    tab.keyboard.press("s")
    tab.wait_for_function("name => document.querySelector('#name').textContent !== name", arg=name)

    for key in "rs":
        second_tab.keyboard.press(key)
    second_tab.wait_for_selector("#status.error:has-text('another window')")

    assert [each.decision for each in read_verdicts(running.out)] == ["accept"]
    assert second_tab.input_value("#comment") == "of the first window"
    assert second_tab.inner_text("#decided").startswith("Not saved yet. Yours: Accept, ")
    assert second_tab.get_attribute("[data-decision=reject]", "aria-pressed") == "true"
    second_tab.fill("#comment", "of the second one")
    second_tab.click("#save")
    second_tab.wait_for_function(
        "name => document.querySelector('#name').textContent !== name", arg=name
    )
    kept = read_verdicts(running.out)
    assert [(each.decision, each.comment) for each in kept] == [("accept", True), ("reject", True)]
    assert all("409" in message for message in messages)


def test_a_case_that_was_corrected_by_another_is_opened_anew(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name = tab.inner_text("#name")
    second_tab, _ = opened(chromium, running.links["ben"])
    open_case(second_tab, name)
    for key in ("b", "Enter"):
        second_tab.keyboard.press(key)
    second_tab.wait_for_selector("text=voxels changed")
    second_tab.click("#save-correction")
    second_tab.wait_for_selector("text=Saved as revision 1")
    tab.fill("#comment", "mine")
    tab.click("[data-decision=accept]")
    tab.click("#save")

    tab.wait_for_selector("#status.error:has-text('replaced')")

    tab.wait_for_selector(f"body[data-opened='{name}']")
    assert tab.input_value("#comment") == "mine"
    assert tab.is_disabled("#save")
    assert read_verdicts(running.out) == []
    tab.click("[data-decision=accept]")
    tab.click("#save")
    tab.wait_for_function("name => document.querySelector('#name').textContent !== name", arg=name)
    assert len(read_verdicts(running.out)) == 1


def test_open_pages_follow_a_run_that_replaces_results(chromium: Any, running: Any) -> None:
    """The list, the page of a case, and that of one that it fetched ahead."""
    listed, _ = opened(chromium, running.links["anna"])
    sources = "[...document.querySelectorAll('img.thumbnail[src]')].map((each) => each.src)"
    listed.wait_for_function(f"() => {sources}.length === 3")
    before = listed.evaluate(sources)
    first, second, _ = asked(listed, "/api/worklist").json()["names"]
    tab = listed.context.new_page()
    tab.goto(listed.url)
    tab.wait_for_selector("#rows a")
    open_case(tab, first)
    tab.wait_for_load_state("networkidle")

    publish_three(running.out.parent, recipe="q" * 64)

    listed.bring_to_front()
    changed = f"(old) => {sources}.filter((each) => !old.includes(each)).length === 3"
    listed.wait_for_function(changed, arg=before)
    tab.bring_to_front()
    replaced = "#status.error:has-text('The result was replaced')"
    tab.keyboard.press("b")
    tab.wait_for_selector(replaced)
    tab.wait_for_selector(f"body[data-opened='{first}']")
    tab.keyboard.press("n")
    tab.wait_for_selector(f"body[data-opened='{second}']")
    tab.wait_for_selector(replaced)
    for key in ("b", "Enter"):
        tab.keyboard.press(key)
    tab.wait_for_selector("text=voxels changed")


def test_keys_move_the_focus_and_places_are_told(chromium: Any, running: Any) -> None:
    tab, _ = opened(chromium, running.links["anna"])
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.closest('#rows') !== null")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("body[data-opened]")
    assert tab.evaluate("document.activeElement.id") == "axial"
    tab.keyboard.press("2")
    assert tab.evaluate("document.activeElement.id") == "coronal"
    before = tab.inner_text("#coronal .where")
    tab.keyboard.press("ArrowDown")
    until(tab, lambda: tab.inner_text("#coronal .where") != before)
    told = f"{tab.inner_text('#coronal .where')}: L "
    until(tab, lambda: tab.text_content("#told").startswith(told))
    picture = shown(tab, "coronal")[1]
    tab.keyboard.press("]")
    until(tab, lambda: (shown(tab, "coronal")[1] != picture).any())
    assert tab.inner_text("#status").startswith("Window ")


def test_news_leave_the_focus_and_filters_stand_in_the_address(chromium: Any, running: Any) -> None:
    anna, _ = opened(chromium, running.links["anna"])
    ben, _ = opened(chromium, running.links["ben"])
    anna.keyboard.press("ArrowDown")
    anna.keyboard.press("ArrowDown")
    kept = anna.evaluate("document.activeElement.href")
    ben.keyboard.press("n")
    ben.wait_for_selector("body[data-opened]")
    ben.keyboard.press("a")
    ben.keyboard.press("s")
    anna.wait_for_selector("text=Accepted 1", timeout=15000)
    assert anna.evaluate("document.activeElement.href") == kept
    anna.click("text=Accepted 1")
    anna.fill("#search", "threshold")
    anna.select_option("#model", "threshold")
    anna.reload()
    anna.wait_for_selector("#rows tr")
    assert anna.inner_text("#count") == "1 of 3 cases"
    assert anna.input_value("#model") == "threshold"
    assert anna.input_value("#search") == "threshold"


def test_a_long_list_is_sent_by_pages_and_then_by_what_changed(
    chromium: Any, folder: Path, tmp_path: Path
) -> None:
    """Scrolled to its end and back, by copies of a case; a verdict changes one row."""
    out, count = tmp_path / "out", 420
    shutil.copytree(folder / "out", out, copy_function=shutil.copy2)
    case = next((out / "cases").iterdir())
    for n in range(count - 3):
        shutil.copytree(case, out / "cases" / f"{n:026}", copy_function=os.link)
    server = Running(out, folder / "key", "--reviewers", "anna,ben")
    try:
        tab, messages = opened(chromium, server.links["anna"])
        tab.wait_for_selector("#rows tr")
        names = asked(tab, "/api/worklist?rows=0-999").json()["names"]
        assert len(names) == count
        answers = list[Any]()
        tab.on("response", lambda a: "list?" in a.url and a.status == 200 and answers.append(a))
        for end in (100, 200, 300, 400, count):
            tab.wait_for_selector(f"#rows a.id >> text={names[end - 1]}", state="attached")
            tab.evaluate("scrollTo(0, document.body.scrollHeight)")
        until(tab, lambda: names[-1] in tab.locator("#rows tr").last.inner_text())
        until(tab, lambda: not tab.locator("#end").inner_text())
        assert 0 < tab.locator("#rows tr:not(.gap)").count() < count  # others left gaps
        for answer in answers:
            assert len(answer.json()["cases"]) <= 100

        tab.evaluate("scrollTo(0, 0)")
        tab.wait_for_selector(f"#rows a.id >> text={names[0]}", timeout=15_000)
        shown = tab.locator("#rows tr:not(.gap) a.id")
        until(tab, lambda: shown.all_inner_texts()[:100] == names[:100])
        third = tab.locator("#rows tr:not(.gap)").nth(2)
        tab.locator("#rows a.id").nth(2).focus()

        ben, _ = opened(chromium, server.links["ben"])
        ben.goto(f"{ben.url}case/{names[2]}")
        ben.wait_for_selector("body[data-opened]")
        answers.clear()
        ben.keyboard.press("a")
        ben.keyboard.press("s")
        tab.wait_for_selector("text=Accepted 1", timeout=15_000)
        assert "Accepted" in third.inner_text()
        assert tab.evaluate("document.activeElement.textContent") == names[2]
        news = [answer.json() for answer in answers]
        assert [[row["id"] for row in each["cases"]] for each in news] == [[names[2]]]

        tab.click("text=Open 419")
        tab.wait_for_function(
            "() => document.getElementById('count').textContent.startsWith('419 of')"
        )
        ben.wait_for_function(
            "name => document.querySelector('#name').textContent === name", arg=names[3]
        )
        ben.wait_for_selector("body[data-opened]")
        ben.keyboard.press("r")
        ben.keyboard.press("s")
        tab.wait_for_selector("text=Rejected 1", timeout=15_000)
        shown = tab.locator("#rows tr:not(.gap) a.id").all_inner_texts()
        assert shown[:100] == [*names[:2], *names[4:102]]
        assert messages == []
    finally:
        server.stop()


def axis_orders() -> list[str]:
    """Return the 24 right-handed orders of axes."""
    faults = []
    for order, signs in itertools.product(
        itertools.permutations(range(3)), itertools.product((0, 1), repeat=3)
    ):
        codes = "".join(
            ("LR", "PA", "IS")[axis][sign] for axis, sign in zip(order, signs, strict=True)
        )
        if np.linalg.det(affine_of(codes)[:3, :3]) > 0:
            faults.append(codes)
    return faults


@pytest.fixture(scope="module")
def turned_scans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """Return a folder with a case of each order of axes, every second oblique; scans by case."""
    folder, scans = tmp_path_factory.mktemp("turned"), dict[str, Path]()
    for n, codes in enumerate(axis_orders()):
        case = publish(folder, scan_array(n), affine_of(codes, 20.0 * (n % 2)), codes)
        scans[case.name] = folder / "scans" / f"{codes}.nii.gz"
    return folder, scans


def position(tab: Any) -> tuple[np.ndarray, int]:
    """Return the crosshair's LPS mm and value, as the page states them."""
    text = tab.inner_text("#readout")
    signs = {"L": 1, "R": -1, "P": 1, "A": -1, "S": 1, "I": -1}  # as DICOM has it
    places = re.findall(r"([LRPASI]) ([\d.]+)", text)[:3]
    mm = [signs[letter] * float(n) for letter, n in places]
    return np.array(mm), int(re.search(r"mm · (-?\d+)", text)[1])


def letter(direction: np.ndarray) -> str:
    """Return the letter of the side to which an LPS direction runs."""
    axis = int(np.abs(direction).argmax())
    return ("RL", "AP", "IS")[axis][int(direction[axis] > 0)]


TOWARDS = {"L": (1, 0, 0), "P": (0, 1, 0), "S": (0, 0, 1)}
TOWARDS |= {o: tuple(-n for n in TOWARDS[x]) for o, x in zip("RAI", "LPS", strict=True)}
"""LPS direction of each letter."""
VIEWS = {"front": "ARLSI", "back": "PLRSI", "left": "LAPSI", "right": "RPASI"}
VIEWS |= {"top": "SLRAP", "feet": "IRLAP"}
"""Letters to the viewer, then at the left, right, top and bottom of a view from a side."""
SOLID = """() => document.querySelector("#solid canvas").toDataURL()"""


def open_3d(tab: Any, name: str) -> None:
    tab.keyboard.press("4")
    tab.wait_for_selector(f"#solid[data-drawn='{name}']")


def seen_in_3d(tab: Any) -> np.ndarray:
    """Return the picture of the view in 3-D, without the crosshair."""
    wait_for_frames(tab)
    content = base64.b64decode(tab.evaluate(SOLID).partition(",")[2])
    with Image.open(io.BytesIO(content)) as image:
        picture = np.asarray(image.convert("RGB"))
    cross = (picture > (200, 150, 0)).all(axis=2)
    return np.where(cross[..., None], 0, picture)


def test_a_click_in_every_3d_view_goes_to_the_nearest_voxel_of_the_file(
    chromium: Any, running: Any
) -> None:
    """Clicks farther right and up lie towards the letters there, with nothing before them."""
    tab, messages = opened(chromium, running.links["anna"])
    origin = tab.url
    for case in sorted((running.out / "cases").iterdir()):
        tab.goto(f"{origin}case/{case.name}")
        tab.wait_for_selector(f"body[data-opened='{case.name}']")
        layers = asked(tab, f"/api/case/{case.name}").json()["layers"]
        files = [nib.load(case / layer["file"]) for layer in layers]
        taken = np.logical_or.reduce([np.asarray(file.dataobj) > 0 for file in files])
        to_voxel = np.linalg.inv(LPS @ files[0].affine)
        open_3d(tab, case.name)
        free = []
        for side, letters in VIEWS.items():
            tab.click(f"[data-side={side}]")
            assert "".join(tab.inner_text(f"#solid .letter.{s}") for s in SIDES) == letters[1:]
            picture = seen_in_3d(tab)
            hits = np.argwhere(picture.any(axis=2))
            hits = hits[np.random.default_rng(0).permutation(len(hits))[:8]]
            box = tab.locator("#solid canvas").bounding_box()
            places = []
            for row, column in hits:
                y, x = (np.array((row, column)) + 0.5) / picture.shape[:2]
                tab.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
                wait_for_frames(tab)
                assert "Part" in tab.inner_text("#readout"), (case.name, side)
                places.append(position(tab)[0])
            for direction, along in ((letters[2], hits[:, 1]), (letters[3], -hits[:, 0])):
                assert np.corrcoef(places @ np.array(TOWARDS[direction]), along)[0, 1] > 0.9
            for mm in places:
                ray = mm + np.arange(4, 60, 0.5)[:, None] * TOWARDS[letters[0]]
                index = np.rint(ray @ to_voxel[:3, :3].T + to_voxel[:3, 3]).astype(int)
                inside = ((index >= 0) & (index < taken.shape)).all(axis=1)
                free.append(not taken[tuple(index[inside].T)].any())
        assert np.mean(free) > 0.9  # a point reaches into the pixels around its own
    assert messages == []


def test_the_3d_view_turns_hides_and_shows_strokes(chromium: Any, running: Any) -> None:
    tab, messages = opened(chromium, running.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    name = tab.inner_text("#name")
    assert not tab.is_visible("#solid")
    open_3d(tab, name)
    front = seen_in_3d(tab)
    for key, other in (("ArrowLeft", "ArrowRight"), ("ArrowUp", "ArrowDown")):
        tab.keyboard.press(key)
        assert (seen_in_3d(tab) != front).any()
        tab.keyboard.press(other)
        np.testing.assert_array_equal(seen_in_3d(tab), front)
    box = tab.locator("#solid canvas").bounding_box()
    tab.mouse.move(box["x"] + 100, box["y"] + 100)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 280, box["y"] + 100, steps=4)  # half a degree a pixel
    tab.mouse.up()
    wait_for_frames(tab)
    # what lies in front goes along with the pointer: the viewer goes to the patient's right
    assert tab.inner_text("#solid .where").startswith("From R")
    tab.click("[data-side=front]")
    np.testing.assert_array_equal(seen_in_3d(tab), front)

    ticks = tab.locator("#layers input[type=checkbox]")
    for n in range(ticks.count()):
        ticks.nth(n).uncheck()
    assert not seen_in_3d(tab).any()
    tab.click("#all")
    np.testing.assert_array_equal(seen_in_3d(tab), front)

    tab.keyboard.press("b")
    tab.fill("#radius", "8")
    tab.click("#eraser")
    tab.locator("#axial").focus()
    with tab.expect_response(re.compile("surface/0.*draft=1")):
        tab.keyboard.press("Enter")
    until(tab, lambda: (seen_in_3d(tab) != front).any())
    with tab.expect_response(re.compile("surface/0.*draft=1")):
        tab.click("#stroke-undo")
    until(tab, lambda: (seen_in_3d(tab) == front).all())
    tab.click("#turn")
    assert not tab.is_visible("#solid")
    assert messages == []


def test_pixels_of_24_axis_orders(
    chromium: Any, turned_scans: tuple[Path, dict[str, Path]]
) -> None:
    """Each canvas equals SimpleITK's voxels at its places in mm, windowed and coloured."""
    folder, scans = turned_scans
    server = Running(folder / "out", folder / "key")
    try:
        tab, messages = opened(chromium, server.links["reviewer"])
        origin = tab.url
        for n, (name, scan) in enumerate(scans.items()):
            tab.goto(f"{origin}case/{name}")
            tab.wait_for_selector(f"body[data-opened='{name}']")
            tab.keyboard.press("o")  # fill instead of outlines
            about = asked(tab, f"/api/case/{name}").json()
            for plane in ("axial", "coronal", "sagittal"):
                middle = about["planes"][plane]["count"] // 2
                tab.locator(f"#{plane}").focus()
                tab.keyboard.press("ArrowDown" if n % 3 else "ArrowUp")
                target = middle + (1 if n % 3 else -1)
                canvas = f"#{plane} canvas[data-index='{target}']"
                tab.wait_for_selector(canvas, state="attached")
                index, picture = shown(tab, plane)
                assert index == target
                files = [(folder / "out" / "cases" / name / e["file"], e) for e in about["layers"]]
                layers = [(by_simpleitk(f, about, plane, index), e) for f, e in files]
                values = by_simpleitk(scan, about, plane, index)
                drawn = coloured(values, layers, about["windows"][0])
                assert np.ptp(drawn) > 100
                np.testing.assert_allclose(picture, drawn, atol=1, err_msg=f"{scan.name} {plane}")
        assert messages == []
    finally:
        server.stop()


def by_simpleitk(file: Path, about: dict[str, Any], plane: str, index: int) -> np.ndarray:
    """Return the voxels of a file at the places, in LPS mm, of a plane's pixels."""
    image, at, to_lps = sitk.ReadImage(str(file)), about["planes"][plane], np.array(about["affine"])
    values = np.zeros((at["height"], at["width"]))
    for row, column in np.ndindex(values.shape):
        voxel = np.zeros(3)
        voxel[[at["normal"], at["down"], at["across"]]] = index, row, column
        mm = to_lps[:3, :3] @ voxel + to_lps[:3, 3]
        values[row, column] = image.GetPixel(image.TransformPhysicalPointToIndex(mm.tolist()))
    return values


def test_sides_places_and_values_of_24_axis_orders(
    chromium: Any, turned_scans: tuple[Path, dict[str, Path]]
) -> None:
    folder, scans = turned_scans
    assert len(scans) == 24
    server = Running(folder / "out", folder / "key")
    try:
        tab, messages = opened(chromium, server.links["reviewer"])
        origin = tab.url
        for name, scan in scans.items():
            tab.goto(f"{origin}case/{name}")
            tab.wait_for_selector(f"body[data-opened='{name}']")
            image = sitk.ReadImage(str(scan))
            for plane in ("axial", "coronal", "sagittal"):
                tab.locator(f"#{plane}").focus()
                for _ in range(8):
                    tab.keyboard.press("-")  # the whole slice
                box = tab.locator(f"#{plane} canvas").first.bounding_box()
                faults = {}
                for side, (x, y) in SIDES.items():
                    before = tab.inner_text("#readout")
                    tab.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
                    until(tab, lambda before=before: tab.inner_text("#readout") != before)
                    faults[side], value = position(tab)
                    index = image.TransformPhysicalPointToIndex(faults[side].tolist())
                    assert value == image.GetPixel(index), (scan.name, plane, side)
                shown_letters = {s: tab.inner_text(f"#{plane} .letter.{s}") for s in SIDES}
                across, down = faults["right"] - faults["left"], faults["bottom"] - faults["top"]
                assert shown_letters == {
                    "right": letter(across),
                    "left": letter(-across),
                    "bottom": letter(down),
                    "top": letter(-down),
                }, (scan.name, plane)
        assert messages == []
    finally:
        server.stop()
