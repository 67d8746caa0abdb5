"""Series become cases, or are excluded with a reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scanloom.core import Reason
from scanloom.engine.outcomes import Outcome
from scanloom.engine.workflow.schema import Workflow, make_workflow
from scanloom.engine.workflow.selection import Inputs, select
from scanloom.io.index.inspection import SeriesInfo
from scanloom.io.index.storage import IndexedSeries, Run

CHEST = SeriesInfo(
    modality="CT",
    shape=(512, 512, 300),
    spacing=(0.7, 0.7, 1.0),
    plane="axial",
    body_part="CHEST",
    date="20250102101500",
    image_type="ORIGINAL\\PRIMARY\\AXIAL",
    kernel="B30f",
    description="Thorax 1.0 B30f",
)


def series(name: str, *, study: str = "s1", **changes: object) -> IndexedSeries:
    info = CHEST._replace(**changes)
    fields = {"id": name, "study": study, "kind": "dicom", "study_uid": "1.2", "series_uid": "1.3"}
    empty = IndexedSeries._make([None] * len(IndexedSeries._fields))
    return empty._replace(**fields, files=(0,), info=info)


def workflow(policy: dict[str, object] | None = None, **select: object) -> Workflow:
    return make_workflow(name="w", models=["m"], select=select, policy=policy or {})


def split(
    candidates: list[IndexedSeries], definition: Workflow
) -> tuple[list[Inputs], list[Outcome]]:
    """Return the inputs of cases, and the series that are left out."""
    left_out: list[Outcome] = []
    return list(select(candidates, definition, (), left_out.append)), left_out


def outcome(candidate: IndexedSeries, definition: Workflow) -> Reason | None:
    chosen, excluded = split([candidate], definition)
    assert len(chosen) + len(excluded) == 1
    return excluded[0].reason if excluded else None


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("modality", ["PT", "CT"], "MR"),
        ("body_part", "chest", "HEAD"),
        ("description", "thor(ax|acic)", "abdomen"),
        ("not_description", "topogram", "b30f"),
        ("image_type", ["original", "AXIAL"], "DERIVED"),
        ("kernel", "^B3", "^B7"),
        ("contrast", False, True),
        ("orientation", "axial", "sagittal"),
        ("min_slices", 300, 301),
        ("min_spacing", 1.0000001, 1.5),
        ("max_spacing", 0.9999999, 0.8),
    ],
)
def test_each_key_selects_and_excludes(key: str, right: object, wrong: object) -> None:
    candidate = series("a", contrast=False)
    assert outcome(candidate, workflow(**{key: right})) is None
    assert outcome(candidate, workflow(**{key: wrong})) is Reason.NOT_SELECTED


def test_a_modality_that_no_file_states_is_the_detail() -> None:
    """The policy's modality counts for such a series only."""
    nifti = series("a", modality="")
    _, [excluded] = split([nifti], workflow(modality="CT"))
    assert excluded.reason is Reason.NOT_SELECTED
    assert excluded.detail == "by select.modality: its files do not state the modality"
    assert outcome(nifti, workflow({"modality": "CT"}, modality="CT")) is None
    _, [excluded] = split([series("a", modality="MR")], workflow({"modality": "CT"}, modality="CT"))
    assert excluded.detail == "by select.modality"


def test_failed_series_are_reported_unless_not_selected() -> None:
    definition = workflow(modality="CT", orientation="axial")
    gap = {"reason": "SLICE_GAP", "detail": "3", "shape": (), "spacing": (), "plane": ""}
    assert outcome(series("a", **gap), definition) is Reason.SLICE_GAP
    assert outcome(series("a", modality="MR", **gap), definition) is Reason.NOT_SELECTED
    assert outcome(series("a", modality="", **gap), definition) is Reason.SLICE_GAP
    assert outcome(series("a", modality="MR", reason="LOCALIZER"), definition) is Reason.LOCALIZER


@pytest.mark.parametrize(
    ("reason", "policy"),
    [
        ("SLICE_GAP", {"gaps": "interpolate"}),
        ("PHASES", {"phases": "all"}),
        ("FOUR_D", {"phases": "first"}),
        ("ORIENTATION_UNKNOWN", {"orientation": "RAS"}),
    ],
)
def test_the_policy_admits_series_that_are_refused_otherwise(
    reason: str, policy: dict[str, object]
) -> None:
    candidate = series("a", reason=reason, shape=(), spacing=(), plane="")
    assert outcome(candidate, workflow()) is Reason[reason]
    assert outcome(candidate, workflow(policy)) is None


def test_the_best_and_the_newest_of_each_study() -> None:
    old_thin = series("old_thin", date="20200101")
    new_thick = series("new_thick", date="20240101", spacing=(0.7, 0.7, 5.0), shape=(512, 512, 60))
    derived = series("derived", date="20250101", image_type="DERIVED\\SECONDARY")
    second_study = series("other", study="s2", date="19990101")
    candidates = [derived, new_thick, old_thin, second_study]

    def ids(choose: str, **more: object) -> list[str]:
        return [chosen.id for (chosen,) in split(candidates, workflow(choose=choose, **more))[0]]

    assert ids("all") == ["derived", "new_thick", "old_thin", "other"]
    assert ids("best") == ["old_thin", "other"]
    assert ids("best", prefer_spacing=5.0) == ["new_thick", "other"]
    assert ids("newest") == ["derived", "other"]
    assert ids("newest", image_type="ORIGINAL") == ["new_thick", "other"]


def test_all_series_are_selected_as_they_come() -> None:
    def coming() -> Iterator[IndexedSeries]:
        yield series("a")
        raise AssertionError("read ahead")

    assert next(select(coming(), workflow(), (), list.append)) == (series("a"),)


def test_inputs_come_by_the_first_series_of_their_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are sorted in memory, and whatever the studies are called."""
    channels = {"t1": {"description": "t1"}, "t2": {"description": "t2"}}
    definition = make_workflow(name="w", models=["m"], channels=channels)
    candidates = [
        IndexedSeries(
            *(name, study, "dicom", "1.2", f"1.3.{n}", (Run(0, n, n + 1),), True),
            CHEST._replace(description=description),
        )
        for n, (name, study, description) in enumerate(
            [
                ("a", "z", "t2"),
                ("b", "y", "t1"),
                ("c", "y", "other"),
                ("d", "x", "t1"),
                ("e", "z", "t1"),
                ("f", "y", "t2"),
                ("g", "z", "t1"),
            ]
        )
    ]
    expected = [("e", "a"), ("b", "f")]
    for at_once in (100, 2):
        monkeypatch.setattr("scanloom.io.index.storage.SORTED_AT_ONCE", at_once)
        chosen, left_out = split(candidates, definition)
        assert [tuple(each.id for each in inputs) for inputs in chosen] == expected
        assert left_out == [
            ("g", "NOT_SELECTED", "by channels"),
            ("c", "NOT_SELECTED", "by channels"),
            ("d", "CHANNEL_MISSING", "t2"),
        ]
