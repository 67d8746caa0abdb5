"""One message for whatever goes wrong; foreign text only with --debug."""

from __future__ import annotations

import json
import logging
import warnings

import pytest
import typer

from scanloom.cli.console import Manner, speaking
from scanloom.core import Reason, ScanError

SECRET = "Doe^Jane"


def ended_by(error: BaseException, manner: Manner) -> int:
    with pytest.raises(typer.Exit) as end, speaking(manner):
        raise error
    return int(end.value.exit_code)


def test_scan_error_says_what_why_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code = ended_by(ScanError(Reason.SLICE_GAP, "slice 4 of 10 is missing"), Manner())

    text = capsys.readouterr()
    assert code == 65
    assert text.out == ""
    assert text.err == (
        f"scanloom: slice 4 of 10 is missing (SLICE_GAP). {Reason.SLICE_GAP.advice}.\n"
    )


def test_json_has_the_same_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    ended_by(ScanError(Reason.DISK_FULL, "no space"), Manner(json=True))

    text = capsys.readouterr()
    error = json.loads(text.out)["error"]
    assert (error["code"], error["detail"], error["retry"]) == ("DISK_FULL", "no space", True)
    assert text.err == ""


@pytest.mark.parametrize("debug", [False, True])
def test_foreign_text_shows_with_debug_only(
    debug: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ended_by(RuntimeError(SECRET), Manner(debug=debug))

    text = capsys.readouterr()
    assert code == 1
    assert "INTERNAL" in text.err
    assert "RuntimeError" in text.err
    assert (SECRET in text.err) == debug
    assert ("Traceback" in text.err) == debug


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_by(KeyboardInterrupt(), Manner()) == 130
    assert "Interrupted" in capsys.readouterr().err


def test_libraries_are_not_heard(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with speaking(Manner()):
        warnings.warn(SECRET, stacklevel=1)
        logging.getLogger("foreign").error(SECRET)

    text = capsys.readouterr()
    assert SECRET not in text.out + text.err + caplog.text
    assert logging.root.manager.disable == logging.NOTSET


def test_debug_shows_the_cause_of_a_case_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(Manner(debug=True)):
        logging.getLogger("scanloom.engine.segment").debug("the cause")

    assert "the cause" in capsys.readouterr().err
