"""Tools of a correction in a real browser, also while the picture below them changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.review_browser import Running, asked, chromium, opened, until
from support.review_cases import affine_of, publish, scan_array

pytestmark = pytest.mark.reference

__all__ = ["chromium"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strokes")
    for n, name in enumerate(("one", "two", "three"), 1):
        publish(folder, scan_array(n), affine_of(), name, also=("image",))
    return folder


@pytest.fixture
def tab(folder: Path, tmp_path: Path, chromium: Any) -> Iterator[Any]:
    """A page with a case, in correction, with its axial plane as a whole."""
    out = tmp_path / "out"
    shutil.copytree(folder / "out", out, copy_function=shutil.copy2)
    server = Running(out, folder / "key", "--reviewers", "anna")
    tab, _ = opened(chromium, server.links["anna"])
    tab.keyboard.press("n")
    tab.wait_for_selector("body[data-opened]")
    tab.keyboard.press("b")
    tab.locator("#axial").focus()
    for _ in range(8):
        tab.keyboard.press("-")
    yield tab
    server.stop()


def name_of(tab: Any) -> str:
    return str(tab.inner_text("#name"))


def described(tab: Any) -> Any:
    return asked(tab, f"/api/case/{name_of(tab)}").json()


def changed_slices(tab: Any) -> list[int]:
    """Return the axial slices that the correction of the case changes."""
    plane = described(tab)["planes"]["axial"]
    address = f"/api/case/{name_of(tab)}/labels/0/axial/0-{plane['count'] - 1}"
    before, after = (
        np.frombuffer(asked(tab, address + more).body(), np.uint8).reshape(plane["count"], -1)
        for more in ("", "?draft=1")
    )
    return np.flatnonzero((before != after).any(axis=1)).tolist()


def painted(tab: Any) -> None:
    tab.wait_for_selector("#status:has-text('voxels changed')")


def point(tab: Any, x: float, y: float) -> tuple[float, float]:
    """Return a place of the axial picture, of which x and y are shares."""
    box = tab.locator("#axial canvas").first.bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def test_a_stroke_stays_on_the_slice_that_it_began_on(tab: Any) -> None:
    index = described(tab)["planes"]["axial"]["count"] // 2
    tab.mouse.move(*point(tab, 0.1, 0.1))
    tab.mouse.down()
    tab.mouse.move(*point(tab, 0.3, 0.1))
    tab.mouse.wheel(0, 100)
    tab.mouse.move(*point(tab, 0.5, 0.1))
    tab.mouse.up()
    painted(tab)
    assert changed_slices(tab) == [index]


def test_enter_during_a_stroke_paints_too(tab: Any) -> None:
    tab.mouse.move(*point(tab, 0.1, 0.1))
    tab.mouse.down()
    tab.mouse.move(*point(tab, 0.3, 0.1))
    tab.keyboard.press("Enter")
    tab.mouse.up()
    until(tab, lambda: asked(tab, f"/api/case/{name_of(tab)}/draft").json()["undo"] == 2)


def test_a_polygon_that_is_dragged_stays_on_its_slice(tab: Any) -> None:
    index = described(tab)["planes"]["axial"]["count"] // 2
    tab.keyboard.press("g")
    tab.mouse.move(*point(tab, 0.05, 0.05))
    tab.mouse.down()
    for x, y in ((0.6, 0.05), (0.6, 0.6)):
        tab.mouse.move(*point(tab, x, y))
    tab.mouse.wheel(0, 100)
    tab.wait_for_selector(f"#axial canvas[data-index='{index + 1}']", state="attached")
    for x, y in ((0.3, 0.7), (0.1, 0.5), (0.05, 0.3)):
        tab.mouse.move(*point(tab, x, y))
    tab.mouse.up()
    painted(tab)
    assert changed_slices(tab) == [index]


def test_a_polygon_is_painted_on_the_slice_of_its_corners(tab: Any) -> None:
    index = described(tab)["planes"]["axial"]["count"] // 2
    tab.keyboard.press("g")
    for x, y in ((0.05, 0.05), (0.6, 0.05), (0.05, 0.6)):
        tab.mouse.click(*point(tab, x, y))
    tab.mouse.wheel(0, 100)
    tab.wait_for_selector(f"#axial canvas[data-index='{index + 1}']", state="attached")
    tab.keyboard.press("Enter")
    painted(tab)
    assert changed_slices(tab) == [index]


def test_a_stroke_ends_with_its_case(tab: Any) -> None:
    name = name_of(tab)
    tab.mouse.move(*point(tab, 0.1, 0.1))
    tab.mouse.down()
    tab.mouse.move(*point(tab, 0.3, 0.1))
    tab.keyboard.press("n")
    tab.wait_for_function("name => document.querySelector('#name').textContent !== name", arg=name)
    tab.wait_for_selector("body[data-opened]")
    tab.mouse.move(*point(tab, 0.5, 0.1))
    tab.mouse.up()
    tab.wait_for_timeout(1000)
    for each in (name, name_of(tab)):
        assert asked(tab, f"/api/case/{each}/draft").json()["undo"] == 0


def test_a_drag_beside_the_picture_paints_nothing(tab: Any) -> None:
    x, y = point(tab, 0.5, 0)
    tab.fill("#radius", "1.3")
    top = tab.locator("#axial").bounding_box()["y"] + 4
    assert y - top > 20
    tab.mouse.move(x - 30, top)
    tab.mouse.down()
    tab.mouse.move(x + 30, top)
    tab.mouse.up()
    tab.wait_for_selector("#status:has-text('0 voxels changed')")


def hold_saving(tab: Any, what: str) -> list[Any]:
    """Save a correction or a verdict; return the route of the request, which waits."""
    held: list[Any] = []
    if what == "correction":
        tab.keyboard.press("Enter")
        painted(tab)
        tab.route("**/draft/save", lambda route: held.append(route))
        tab.click("#save-correction")
    else:
        tab.route("**/verdict", lambda route: held.append(route))
        tab.keyboard.press("r")
        tab.keyboard.press("s")
    until(tab, lambda: held)
    return held


def go_on(tab: Any) -> str:
    """Go past the case that is next; return the name of that after it."""
    for _ in range(2):
        before = name_of(tab)
        tab.keyboard.press("n")
        until(tab, lambda before=before: name_of(tab) != before)
        tab.wait_for_selector("body[data-opened]")
    return name_of(tab)


def check_stays(tab: Any, name: str) -> None:
    tab.wait_for_timeout(1000)
    tab.wait_for_selector(f"body[data-opened='{name}']")
    assert tab.url.endswith(name)
    assert name_of(tab) == name


@pytest.mark.parametrize("what", ["correction", "verdict"])
def test_what_is_saved_late_does_not_bring_its_case_back(tab: Any, what: str) -> None:
    held = hold_saving(tab, what)
    other = go_on(tab)
    with tab.expect_response(lambda answer: answer.url == held[0].request.url):
        held[0].continue_()
    if what == "correction":
        tab.wait_for_selector("#status:has-text('saved as revision 1')")
    check_stays(tab, other)


def test_the_next_case_that_is_known_late_is_not_gone_to(tab: Any) -> None:
    held: list[Any] = []
    tab.route(f"**/near/{name_of(tab)}**", lambda route: held.append(route))
    tab.keyboard.press("r")
    tab.keyboard.press("s")
    until(tab, lambda: held)
    other = go_on(tab)
    with tab.expect_response(lambda answer: answer.url == held[0].request.url):
        held[0].continue_()
    check_stays(tab, other)


@pytest.mark.parametrize("what", ["correction", "verdict"])
def test_what_is_refused_late_is_said_of_its_case(tab: Any, what: str) -> None:
    """The case that is shown is not opened again, as if its own result had been replaced."""
    name, held = name_of(tab), hold_saving(tab, what)
    other = go_on(tab)
    tab.evaluate("document.querySelector('#axial').dataset.same = ''")
    held[0].fulfill(status=409, json={"reason": "STALE", "text": "The result was replaced."})
    tab.wait_for_selector(f"#status:has-text('{name}: The result was replaced.')")
    check_stays(tab, other)
    assert tab.locator("#axial[data-same]").count() == 1
    assert tab.locator("#save-correction").is_disabled()
    assert tab.locator("#save").is_disabled()


@pytest.mark.parametrize("shape", ["brush", "polygon"])
def test_an_empty_end_of_a_range_does_not_lift_the_other(tab: Any, shape: str) -> None:
    tab.fill("#radius", "8")
    tab.check("#ranged")
    if shape == "polygon":
        tab.select_option("#shape", "polygon")
    tab.fill("#lowest", "5000")
    tab.fill("#highest", "")
    for x, y in ((0.2, 0.2), (0.8, 0.2), (0.2, 0.8)):
        tab.mouse.click(*point(tab, x, y))
    tab.locator("#axial").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#status:has-text('0 voxels changed')")
    assert changed_slices(tab) == []


def test_brackets_of_keyboards_that_have_them_with_altgr_change_the_window(tab: Any) -> None:
    """To Windows, AltGr is Ctrl and Alt."""
    for key in ("Control+Alt+]", "Alt+["):
        before = tab.inner_text("#status")
        tab.keyboard.press(key)
        until(tab, lambda before=before: tab.inner_text("#status") != before)
        assert tab.inner_text("#status").startswith("Window ")


def test_all_tools_are_there_at_200_percent(tab: Any) -> None:
    tab.set_viewport_size({"width": 640, "height": 400})
    for tool in ("shape", "ranged", "fill", "smooth", "islands", "ruler"):
        assert tab.locator(f"#{tool}").is_visible(), tool


@pytest.mark.parametrize("plane", ["axial", "solid"])
def test_enter_on_a_button_of_a_plane_presses_it(tab: Any, plane: str) -> None:
    tab.keyboard.press("4")
    if plane == "axial":
        tab.locator("#axial .enlarge").focus()
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#axial.main")
    else:
        tab.locator("#solid [data-side=top]").focus()
        tab.keyboard.press("Enter")
        tab.wait_for_selector("#solid .where:has-text('From S')")
        tab.locator("#solid").focus()
        tab.keyboard.press("Enter")
    tab.wait_for_timeout(500)
    assert asked(tab, f"/api/case/{name_of(tab)}/draft").json()["undo"] == 0
