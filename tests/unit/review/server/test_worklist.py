"""The list follows changes of an output folder, without reading all of it again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.engine.revisions import Correction, publish_revision
from scanloom.review.revisions import latest_result, read_label_maps, revision_number
from scanloom.review.server.state import Worklist
from support.review_cases import affine_of, publish, scan_array, seen


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    for n in range(3):
        publish(folder, scan_array(n), affine_of(), str(n))
    return folder


@pytest.fixture
def out(three: Path, tmp_path: Path) -> Path:
    shutil.copytree(three / "out", tmp_path / "out", copy_function=shutil.copy2)
    return tmp_path / "out"


def correct(out: Path, name: str, key: Path) -> Path:
    latest = latest_result(out, name)
    [(file, before)] = read_label_maps(latest).items()
    labels: Any = before.copy()
    labels[:2, :2, :2] = np.where(labels[:2, :2, :2] == 1, 2, 1)
    correction = Correction({file: labels}, "r1", "file", revision_number(latest))
    return publish_revision(out, name, correction, key)


def test_a_correction_is_listed_and_no_other_case_is_read(out: Path, three: Path) -> None:
    worklist = Worklist(out)
    worklist.refresh()
    first, name, third = worklist.cases
    before = {**worklist.cases}
    revision = correct(out, name, three / "key")

    worklist.update(name)

    assert list(worklist.cases) == [first, name, third]
    assert worklist.cases[name].seen == seen(revision)
    assert worklist.cases[name].revision == 1
    assert all(worklist.cases[each] is before[each] for each in (first, third))
    version = worklist.version
    worklist.update(name)
    assert worklist.version == version


def test_a_look_after_corrections_reads_the_corrected_cases_only(out: Path, three: Path) -> None:
    worklist = Worklist(out)
    worklist.refresh()
    names, before = list(worklist.cases), {**worklist.cases}
    for name in names[:2]:
        correct(out, name, three / "key")

    worklist._read_changes()

    assert [worklist.cases[name].revision for name in names] == [1, 1, 0]
    assert worklist.cases[names[2]] is before[names[2]]
    assert {name: worklist.findings[name] for name in names}.keys() == set(names)


def test_damaged_removed_and_new_cases_are_noticed_by_name(out: Path, tmp_path: Path) -> None:
    worklist = Worklist(out)
    worklist.refresh()
    damaged, removed, kept = worklist.cases
    (out / "cases" / damaged / "segments.json").write_text("{}")
    (out / "cases" / removed).rename(tmp_path / removed)

    worklist.update(damaged)
    worklist.update(removed)
    worklist.update("a" * 26)

    assert (list(worklist.cases), worklist.damaged) == ([kept], {damaged})
    (tmp_path / removed).rename(out / "cases" / removed)
    worklist.update(removed)
    assert list(worklist.cases) == [kept, removed]
