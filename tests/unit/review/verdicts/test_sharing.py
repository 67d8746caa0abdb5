"""Readers of cases stay when the server is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core import Reason, ScanError
from scanloom.review.verdicts.readers import READERS, Readers, kept_readers, share_cases


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "review").mkdir()
    return tmp_path


def test_a_start_without_options_shares_as_before(out: Path) -> None:
    began = share_cases(out, ("r1", "r2"), 0.2, 0.05, begun=False)

    assert share_cases(out, ("r1", "r2")) == began == Readers(("r1", "r2"), 0.2, 0.05)
    assert share_cases(out, ("r2",), 0.2, 0.05) == began
    cases = [str(n) for n in range(50)]
    again = share_cases(out, ("r1",))
    assert all(began.reads(each, "r1", {}) == again.reads(each, "r1", {}) for each in cases)
    assert share_cases(out, ("r3",)).reviewers == ("r1", "r2", "r3")
    assert kept_readers(out).reviewers == ("r1", "r2", "r3")


@pytest.mark.parametrize("shares", [(0.3, None), (0.0, None), (None, 0.1)])
def test_other_shares_are_refused_once_there_are_verdicts(
    out: Path, shares: tuple[float | None, float | None]
) -> None:
    began = share_cases(out, ("r1", "r2"), 0.2, 0.05, begun=False)

    with pytest.raises(ScanError, match="the review began with --") as caught:
        share_cases(out, ("r1", "r2"), *shares)

    assert caught.value.reason is Reason.READERS
    assert kept_readers(out) == began
    assert share_cases(out, ("r3", "r4"), *shares, begun=False).reviewers == ("r3", "r4")


def test_double_reading_needs_two(out: Path) -> None:
    with pytest.raises(ScanError, match="two reviewers"):
        share_cases(out, ("r1",), 0.2, begun=False)
    assert kept_readers(out) == Readers(())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"reviewers": ["r1", "r2"], "double": 7, "repeat": 0}',
        '{"reviewers": ["r1"], "double": 0.2, "repeat": 0}',
        '{"reviewers": 3, "double": 0, "repeat": 0}',
        '{"reviewers": ["r1"], "double": NaN, "repeat": 0}',
    ],
)
def test_a_damaged_file_is_refused(out: Path, content: str) -> None:
    (out / "review" / READERS).write_text(content)
    with pytest.raises(ScanError) as caught:
        share_cases(out, ("r1",))
    assert caught.value.reason is Reason.REVIEW_DAMAGED
