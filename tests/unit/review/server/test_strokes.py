"""A stroke changes exactly the voxels that the rule of a disc in mm says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scanloom.review.server import drafts as module
from scanloom.review.server.drafts import LabelDraft, Stroke

SHAPE, SPACING = (17, 13, 9), (0.8, 1.5, 3.0)
PLANES = {"axial": (2, 0, 1), "coronal": (1, 0, 2), "sagittal": (0, 1, 2)}


def labels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 4, SHAPE).astype(np.uint8)


def expected(array: np.ndarray, stroke: Stroke) -> np.ndarray:
    """Return the array with a stroke, voxel by voxel."""
    after, points = array.copy(), np.array(stroke.points, float)
    step = np.array((SPACING[stroke.across], SPACING[stroke.down]))
    pairs = [*itertools.pairwise(points)] or [(points[0], points[0])]
    for index in np.ndindex(array.shape):
        if index[stroke.normal] != stroke.index:
            continue
        here = np.array((index[stroke.across], index[stroke.down])) * step
        distances = []
        for begin, end in pairs:
            along = (end - begin) * step
            t = np.clip((here - begin * step) @ along / max(along @ along, 1e-12), 0, 1)
            distances.append(np.linalg.norm(here - begin * step - t * along))
        is_wanted = stroke.only is None or array[index] in stroke.only
        if min(distances) <= stroke.radius_mm + 1e-6 and is_wanted:
            after[index] = stroke.label
    return after


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("radius", [0.3, 2.0, 4.1])
@pytest.mark.parametrize("points", [[(4, 3)], [(2, 2), (9.5, 6)], [(-3, 0), (4, 4), (30, 5)]])
@pytest.mark.parametrize("only", [None, (1, 2)])
def test_strokes_paint_what_the_rule_says(
    plane: str, radius: float, points: list[tuple[float, float]], only: tuple[int, ...] | None
) -> None:
    array = labels()
    draft = LabelDraft([array], SPACING)
    stroke = Stroke(0, *PLANES[plane], 4, points, radius, 3, only)

    count = draft.stroke(stroke)

    after = expected(array, stroke)
    np.testing.assert_array_equal(draft.layer(0), after)
    assert count == np.count_nonzero(after != array)
    assert draft.changed == ({0: count} if count else {})
    np.testing.assert_array_equal(array, labels())


@pytest.mark.parametrize("step", [0.3, 0.6, 0.7, 0.9, 1.1])
@pytest.mark.parametrize("reach", [1, 2, 3])
def test_a_brush_has_the_same_form_everywhere(step: float, reach: int) -> None:
    """Also where voxels lie just on its edge, whatever their distance is rounded to."""
    forms = set()
    for centre in range(4, 36):
        draft = LabelDraft([np.zeros((40, 40, 1), np.uint8)], (step, step, 1.0))
        stroke = Stroke(0, 2, 0, 1, 0, [(centre, centre)], round(reach * step, 10), 1)
        draft.stroke(stroke)
        offsets = np.argwhere(draft.layer(0)[..., 0]) - centre
        forms.add(offsets.tobytes())
    i, j = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disc = np.argwhere(i**2 + j**2 <= reach**2) - reach
    assert forms == {disc.tobytes()}


def both(draft: LabelDraft) -> np.ndarray:
    return np.stack([draft.layer(0), draft.layer(1)])


def test_undo_and_redo_follow_the_strokes() -> None:
    draft = LabelDraft([labels(), labels()], SPACING)
    strokes = [Stroke(n % 2, 2, 0, 1, n, [(n, n)], 3.0, n % 4) for n in range(8)]
    states = [both(draft)]
    for stroke in strokes:
        if draft.stroke(stroke):
            states.append(both(draft))
    assert len(states) > 5

    for state in states[-2::-1]:
        assert draft.undo()
        np.testing.assert_array_equal(both(draft), state)
    assert not draft.undo()
    assert draft.changed == {}
    for state in states[1:]:
        assert draft.redo()
        np.testing.assert_array_equal(both(draft), state)
    assert not draft.redo()
    draft.undo()
    assert draft.stroke(Stroke(0, 2, 0, 1, 4, [(4, 4)], 9.0, 3))
    assert len(draft.undone) == 0


def test_memory_of_strokes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strokes that can't be undone any more stay: they are still to be saved."""
    array = np.zeros((128, 128, 4), np.uint8, order="F")
    draft = LabelDraft([array], (1.0, 1.0, 1.0))
    monkeypatch.setattr(module, "MAX_UNDO_BYTES", 64 << 10)
    for n in range(40):
        draft.stroke(Stroke(0, 2, 0, 1, n % 4, [(3 * n, 60)], 40.0, 1 + n % 3))

    assert 1 < len(draft.done) < 20
    assert sum(each.nbytes for each in draft.done) <= 64 << 10
    while draft.undo():
        pass
    assert draft.has_strokes
    assert draft.changed
    assert len(draft.undone) < 20
    draft.stroke(Stroke(0, 2, 0, 1, 0, [(60, 60)], 200.0, 3))
    assert len(draft.done) == 1


def test_strokes_outside_change_nothing() -> None:
    draft = LabelDraft([labels()], SPACING)

    assert draft.stroke(Stroke(0, 2, 0, 1, 4, [(500, 500)], 3.0, 1)) == 0
    with pytest.raises(IndexError):
        draft.stroke(Stroke(0, 2, 0, 1, 9, [(1, 1)], 3.0, 1))
    assert len(draft.done) == 0
