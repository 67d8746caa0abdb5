"""Outliers of a cohort are named, and usual values are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scanloom.core import Flag, Measurement
from scanloom.core.measurement import Range, ReferenceRange
from scanloom.review.outliers import (
    MIN_COHORT,
    REVIEW_THRESHOLD,
    Cohort,
    Finding,
    find_outliers,
    risk_score,
)

BOX = ((0, 0, 0), (9, 9, 9))


def measurement(label: str, ml: float = 100.0, **changes: Any) -> Measurement:
    fields = {
        "model": "m",
        "label": label,
        "number": 1,
        "voxels": int(ml * 1000),
        "volume_ml": ml,
        "unit": "HU",
        "mean": 50.0,
        "sd": 10.0,
        **dict.fromkeys(("p05", "p25", "median", "p75", "p95"), 50.0),
        "box": BOX,
        "components": 1,
    }
    return Measurement(**{**fields, **changes})


def cohort(count: int = 30) -> dict[str, list[Measurement]]:
    rng = np.random.default_rng(1)
    return {
        f"c{n:02d}": [measurement("liver", float(1500 * np.exp(rng.normal(0, 0.15))))]
        for n in range(count)
    }


def findings_of(
    cases: dict[str, list[Measurement]],
    axes: dict[str, str] | None = None,
    references: dict[str, list[ReferenceRange]] | None = None,
) -> dict[str, list[Finding]]:
    usual = Cohort((m for measurements in cases.values() for m in measurements), references)
    of_case = (axes or {}).get
    return {case: find_outliers(cases[case], usual, of_case(case, "")) for case in cases}


def kinds(cases: dict[str, list[Measurement]], case: str) -> list[str]:
    return [doubt.kind for doubt in findings_of(cases)[case]]


def test_usual_cases_raise_no_doubt() -> None:
    assert not any(findings_of(cohort()).values())


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"ml": 150.0}, "volume"),
        ({"ml": 15000.0}, "volume"),
        ({"ml": 1500.0, "mean": 400.0}, "intensity"),
        ({"ml": 1500.0, "components": 40}, "parts"),
        ({"ml": 1500.0, "flags": (Flag.TOUCHES_BORDER,)}, "border"),
        ({"ml": 0.0, "mean": None, "box": None}, "empty"),
    ],
)
def test_what_stands_out_is_named(changes: dict[str, Any], kind: str) -> None:
    cases = cohort()
    cases["odd"] = [measurement("liver", **changes)]

    assert kinds(cases, "odd") == [kind]
    assert max(cases, key=lambda case: risk_score(findings_of(cases)[case])) == "odd"


def test_what_is_seldom_there_is_not_missed() -> None:
    cases = cohort(30)
    for n, measurements in enumerate(cases.values()):
        measurements.append(measurement("lung", 100.0 if n % 3 else 0.0))
        measurements.append(measurement("rib", 0.0 if n % 3 else 100.0))

    doubts = {(d.structure, d.text) for doubts in findings_of(cases).values() for d in doubts}
    assert doubts == {("lung", "not found, though it usually is")}


def test_a_few_cases_are_no_cohort() -> None:
    cases = cohort(MIN_COHORT - 2)
    cases["odd"] = [measurement("liver", 15.0)]

    assert kinds(cases, "odd") == []


def test_an_unusual_value_is_told_with_its_place() -> None:
    cases = cohort()
    cases["odd"] = [measurement("liver", 15000.0)]

    [doubt] = findings_of(cases)["odd"]

    assert doubt.value == (("m", "liver", "volume"), 15000.0)
    assert doubt.text.startswith("15000 ml is large (usually ")
    assert doubt.subjects == tuple(cases["odd"])


def test_without_a_cohort_values_are_compared_with_the_card() -> None:
    usual = [ReferenceRange("liver", "mean_hu", Range(20.0, 90.0), "A page.")]
    cases = {"a": [measurement("liver", mean=50.0)], "b": [measurement("liver", mean=-104.0)]}

    doubts = findings_of(cases, references={"m": usual})

    assert doubts["a"] == []
    assert [d.text for d in doubts["b"]] == ["mean -104 HU is low (reference range 20 to 90 HU)"]
    assert risk_score(doubts["b"]) >= REVIEW_THRESHOLD
    arbitrary = {"b": [measurement("liver", mean=-104.0, unit="a.u.")]}
    assert findings_of(arbitrary, references={"m": usual})["b"] == []
    assert findings_of(cases, references={"other": usual})["b"] == []


def test_arbitrary_units_are_not_compared() -> None:
    cases = cohort()
    cases["odd"] = [measurement("liver", 1500.0, mean=900.0, unit="a.u.")]

    assert kinds(cases, "odd") == []


def test_a_cohort_replaces_the_reference_range() -> None:
    usual = [ReferenceRange("liver", "mean_hu", Range(0.0, 1.0), "A page.")]

    assert not any(findings_of(cohort(), references={"m": usual}).values())


def pair(name: str, left: int, right: int, ml: tuple[float, float] = (100.0, 100.0)) -> Any:
    boxes = [((x, 0, 0), (x + 9, 9, 9)) for x in (left, right)]
    return [
        measurement(f"{name}_{side}", v, box=box)
        for side, v, box in zip(("left", "right"), ml, boxes, strict=True)
    ]


def test_unequal_sides() -> None:
    assert kinds({"c": pair("kidney", 50, 10, (160.0, 40.0))}, "c") == ["imbalance"]
    assert kinds({"c": pair("kidney", 50, 10, (0.4, 0.1))}, "c") == []


@pytest.mark.parametrize(
    ("axes", "left", "right", "expected"),
    [
        ("LPS", 50, 10, []),
        ("LPS", 10, 50, ["side"]),
        ("RAS", 10, 50, []),
        ("RAS", 50, 10, ["side"]),
        ("PLS", 10, 50, []),  # the first axis is not the one
        ("LPS", 10, 12, []),  # on top of one another
        ("", 10, 50, []),
    ],
)
def test_swapped_sides(axes: str, left: int, right: int, expected: list[str]) -> None:
    doubts = findings_of({"c": pair("kidney", left, right)}, {"c": axes})["c"]
    assert [doubt.kind for doubt in doubts] == expected


def test_what_was_odd_of_the_scan_is_told_once() -> None:
    flags = (Flag.HU_IMPLAUSIBLE, Flag.SHEARED)
    cases = {"c": [measurement("liver", flags=flags), measurement("lung", flags=flags)]}
    [doubt] = findings_of(cases)["c"]
    assert (doubt.kind, doubt.text) == ("scan", Flag.HU_IMPLAUSIBLE.text)
    assert risk_score([doubt]) >= REVIEW_THRESHOLD


def test_more_doubts_weigh_more() -> None:
    cases = cohort()
    cases["one"] = [measurement("liver", 150.0)]
    cases["two"] = [measurement("liver", 150.0, mean=400.0, components=50)]
    doubts = findings_of(cases)

    assert risk_score(doubts["two"]) > risk_score(doubts["one"]) > risk_score(doubts["c00"]) == 0
