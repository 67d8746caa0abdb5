"""Records of failed cases: whole, replaced, and gone when there is a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scanloom.core import CaseRecord, Flag, Reason
from scanloom.io.output.failures import is_failure, previous_failure, remove_failure, write_failure


def record(reason: Reason | None, detail: str = "seen") -> CaseRecord:
    return CaseRecord("abc", reason, detail, (Flag.SHEARED,), None)


def test_a_failure_says_why_and_what_to_do(tmp_path: Path) -> None:
    path = write_failure(tmp_path / "out", record(Reason.SLICE_GAP), "recipe")

    assert path == tmp_path / "out" / "failed" / "abc.json"
    assert json.loads(path.read_text()) == {
        "schema": 2,
        "case": "abc",
        "outcome": "failed",
        "reason": "SLICE_GAP",
        "detail": "seen",
        "advice": Reason.SLICE_GAP.advice,
        "retry": False,
        "flags": [{"code": "SHEARED", "text": Flag.SHEARED.text}],
        "recipe": "recipe",
        "source_stamp": "",
    }


def test_the_last_one_stays_until_there_is_a_result(tmp_path: Path) -> None:
    write_failure(tmp_path, record(Reason.SLICE_GAP), "one")
    path = write_failure(tmp_path, record(Reason.OUT_OF_MEMORY), "two")
    assert json.loads(path.read_text())["reason"] == "OUT_OF_MEMORY"
    assert list(path.parent.iterdir()) == [path]
    remove_failure(tmp_path, "abc")
    assert not path.exists()
    remove_failure(tmp_path, "abc")


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        (None, False),
        (Reason.MODALITY, False),  # skipped: nothing went wrong
        (Reason.STALE, False),
        (Reason.OLDER_VERSION, False),  # of the result that is there
        (Reason.DISK_FULL, False),
        (Reason.OUTPUT_UNWRITABLE, False),
        (Reason.TRUNCATED, True),
        (Reason.INTERNAL, True),
    ],
)
def test_what_a_failure_is(reason: Reason | None, counts: bool) -> None:
    assert is_failure(record(reason)) == counts


def test_only_a_known_case_has_a_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="requires a case id"):
        write_failure(tmp_path, record(None), "recipe")


def test_a_failure_counts_for_the_same_recipe_and_the_same_files_alone(tmp_path: Path) -> None:
    """Files that were repaired, or slices that came later, are tried again."""
    write_failure(tmp_path, record(Reason.SLICE_GAP), "recipe", "ten files")

    def before(recipe: str, stamp: str) -> bool:
        return previous_failure(tmp_path, "abc", recipe, stamp) is not None

    assert before("recipe", "ten files")
    assert not before("recipe", "twenty files")
    assert not before("another", "ten files")
