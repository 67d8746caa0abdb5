"""`docs/better-model.md` from first to last: run, review, correct, train, compare, run again.

The page's own script runs its commands; the reviewer is `data/play_reviewer.py`.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scanloom.io.output.crosswalk import find_sources, latest_by_id
from support.real_scans import ROOT

PAGE = ROOT / "docs" / "better-model.md"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def names_of(listed: list[dict[str, Any]]) -> set[str]:
    return {Path(each["image"]).name.removesuffix(".nii.gz") for each in listed}


def gain(evaluation: Path, structure: str | None) -> float:
    """Return the lower end of the interval of the difference of Dice."""
    [low] = [
        each["low"]
        for each in read(evaluation / "evaluation.json")["differences"]
        if (each["figure"], each["structure"]) == ("dice", structure)
    ]
    return float(low)


def check(folder: Path) -> None:
    """Check what the commands of the page left in a folder."""
    from play_reviewer import wrong_bone

    out, data, new = folder / "results", folder / "labels", folder / "bone_contrast"
    cases = {case.name for case in (out / "cases").iterdir()}
    sources = latest_by_id(find_sources(out, sorted(cases)))
    scans = {case: Path(sources[case].path).name for case in cases}
    assert {path.name for path in (folder / "archive-truth").iterdir()} == set(scans.values())

    # --- a dataset, with the labels of the reviewer: on the right voxels
    written = read(data / "scanloom.json")["cases"]
    assert {each["case"] for each in written} == cases
    corrected = {each["case"] for each in written if each["revision"]}
    assert 0 < len(corrected) < len(cases)
    for case in corrected:
        [labels] = data.glob(f"labels*/{case}.nii.gz")
        assert not len(wrong_bone(labels, folder / "archive-truth" / scans[case])), case

    # --- a new model, that never saw the subjects who were set aside
    splits = {
        name: names_of(listed)
        for name, listed in read(new / "configs" / "datalist.json").items()
        if name in ("training", "validation", "testing")
    }
    assert splits["testing"] == {each["case"] for each in written if each["test"]}
    assert set.union(*splits.values()) == cases
    of_splits = [{scans[case].split("_")[0] for case in split} for split in splits.values()]
    assert sum(map(len, of_splits)) == len(set.union(*of_splits))

    # --- which is better on them, by the labels that the reviewer left
    count = len(splits["testing"])
    assert read(folder / "evaluation" / "evaluation.json")["cases"] == dict.fromkeys(
        ("first", "second"), count
    )
    assert gain(folder / "evaluation", "bone") > 0

    # --- and at work
    for case in cases:
        models = read(out / "cases" / case / "case.json")["models"]
        assert {each["name"] for each in models} == {"bone_contrast", "ct_tissue"}


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("ignite", "fire", "tensorboard"))), reason="needs the extra train"
)
def test_a_model_trained_on_corrected_results_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), str(ROOT / "data"), *sys.path])
    from write_better_model import Terminal

    terminal = Terminal(tmp_path)
    page = terminal.write(PAGE.read_text(encoding="utf-8"))

    assert page.count("STALE") >= PAGE.read_text(encoding="utf-8").count("STALE") > 0
    check(terminal.folder)
