"""One message for whatever goes wrong; foreign text never."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import pytest
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from scanloom.cli.console import OutputMode, console, error_boundary, print_resume_command
from scanloom.core import Reason, ScanError

SECRET = "Doe^Jane"


def ended_by(error: BaseException, manner: OutputMode) -> int:
    with pytest.raises(typer.Exit) as end, error_boundary(manner):
        raise error
    return int(end.value.exit_code)


def test_scan_error_says_what_why_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code = ended_by(ScanError(Reason.SLICE_GAP, "slice 4 of 10 is missing"), OutputMode())

    text = capsys.readouterr()
    assert code == 65
    assert text.out == ""
    assert text.err == (
        f"scanloom: slice 4 of 10 is missing (SLICE_GAP). {Reason.SLICE_GAP.advice}.\n"
    )


def test_a_pipe_gets_whole_lines_that_end_without_spaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a terminal's width only if COLUMNS says one."""
    long = " ".join(["/archive/patient/study"] * 10)
    table = Table.grid(padding=(0, 2))
    table.add_row("time", "0:00:01")
    table.add_row("path", long)
    monkeypatch.delenv("COLUMNS", raising=False)
    console().print(table)
    assert capsys.readouterr().out == f"time  0:00:01\npath  {long}\n"

    monkeypatch.setenv("COLUMNS", "60")
    console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "time  0:00:01"
    assert 40 < max(map(len, lines)) <= 60
    assert " ".join(line[6:] for line in lines[1:]) == long


def test_no_width_breaks_a_word_of_a_table_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = ("model", "version", "format", "title")
    row = ("hippocampus_mr", "0.1.0", "MONAI bundle", "Anterior and posterior hippocampus")
    for width in (40, 50, 60, 80, 200):
        table = Table(*titles, box=SIMPLE_HEAD, pad_edge=False)
        table.add_row(*row)
        monkeypatch.setenv("COLUMNS", str(width))
        console().print(table)
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= width
        words = [word for text in (*titles, *row) for word in text.split()]
        assert sorted(shown.replace("─", "").split()) == sorted(words), width


def test_no_cell_of_a_table_that_fits_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table("structure", "Dice", box=None, padding=(0, 2, 0, 0))
    table.add_row("bone", "0.940 (0.923 to 0.970)")
    monkeypatch.setenv("COLUMNS", str(len("structure") + len("0.940 (0.923 to 0.970)") + 4))
    console().print(table)
    assert capsys.readouterr().out.splitlines()[1:] == ["bone       0.940 (0.923 to 0.970)"]


def test_a_word_longer_than_the_screen_is_broken_and_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("sha256", "0123456789" * 6)
    monkeypatch.setenv("COLUMNS", "40")
    console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert "".join(line[8:] for line in lines) == "0123456789" * 6


@pytest.mark.parametrize("columns", ["0", "1", "10", "-5", "abc"])
def test_no_width_hides_a_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("model", "ct_tissue")
    monkeypatch.setenv("COLUMNS", columns)
    console().print(table)
    assert capsys.readouterr().out == "model  ct_tissue\n"


def test_json_has_the_same_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    ended_by(ScanError(Reason.DISK_FULL, "no space"), OutputMode(json=True))

    text = capsys.readouterr()
    error = json.loads(text.out)["error"]
    assert (error["code"], error["detail"], error["retry"]) == ("DISK_FULL", "no space", True)
    assert text.err == ""


@pytest.mark.parametrize("debug", [False, True])
def test_foreign_text_never_shows(debug: bool, capsys: pytest.CaptureFixture[str]) -> None:
    code = ended_by(RuntimeError(SECRET), OutputMode(debug=debug))

    text = capsys.readouterr()
    assert code == 1
    assert "INTERNAL" in text.err
    assert "RuntimeError" in text.err
    assert SECRET not in text.err
    assert ("Traceback" in text.err) == debug


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_by(KeyboardInterrupt(), OutputMode()) == 130
    assert capsys.readouterr().err.endswith("no partial output.\n")


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("/on/path/scanloom", "scanloom"),
        ("/elsewhere/scanloom", "/elsewhere/scanloom"),
        (".venv/bin/scanloom", ".venv/bin/scanloom"),
        ("/any/scanloom/__main__.py", f"{sys.executable} -m scanloom"),
    ],
)
def test_the_command_to_resume_can_be_copied(
    program: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/on/path/{name}")
    monkeypatch.setattr(sys, "argv", [program, "segment", "a b", "-o", "out"])
    print_resume_command()

    assert capsys.readouterr().err == f"To resume:\n  {shown} segment 'a b' -o out\n"


def test_libraries_are_not_heard(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with error_boundary(OutputMode()):
        warnings.warn(SECRET, stacklevel=1)
        logging.getLogger("foreign").error(SECRET)

    text = capsys.readouterr()
    assert SECRET not in text.out + text.err + caplog.text
    assert logging.root.manager.disable == logging.NOTSET


def test_debug_shows_the_cause_of_a_case_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with error_boundary(OutputMode(debug=True)):
        logging.getLogger("scanloom.engine.segment").debug("the cause")

    assert "the cause" in capsys.readouterr().err


def test_a_log_file_has_our_messages_with_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.txt"
    for verbose in (False, True):
        with error_boundary(OutputMode(log=file, verbose=verbose)):
            logging.getLogger("scanloom.engine.segment").info("case abc: done")
            logging.getLogger("scanloom.engine.segment").debug("the cause")
            logging.getLogger("foreign").error(SECRET)
        assert ("case abc: done" in capsys.readouterr().err) == verbose

    lines = file.read_text().splitlines()
    assert [line.partition("INFO ")[2] for line in lines] == ["case abc: done"] * 2
    refused = pytest.raises(typer.BadParameter, match="can't be written")
    with refused, error_boundary(OutputMode(log=tmp_path)):
        pass


def test_a_log_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    """logrotate does so; with its folder gone, messages are lost, and nothing else."""
    file = tmp_path / "logs" / "log.txt"
    file.parent.mkdir()
    with error_boundary(OutputMode(log=file)):
        for text in ("first", "second"):
            logging.getLogger("scanloom.engine.segment").info(text)
            file.rename(tmp_path / text)
        file.parent.rmdir()
        logging.getLogger("scanloom.engine.segment").info("lost")
        file.parent.mkdir()
        logging.getLogger("scanloom.engine.segment").info("third")

    found = [path.read_text().split()[-1] for path in (tmp_path / "first", tmp_path / "second")]
    assert [*found, file.read_text().split()[-1]] == ["first", "second", "third"]


def test_debug_tells_the_whole_chain_without_foreign_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cause, context and members of a group: their types and places, no text but ours."""

    def fail() -> None:
        try:
            try:
                raise ExceptionGroup(SECRET, [KeyError(SECRET)])  # noqa: TRY301
            except ExceptionGroup:
                raise OSError(2, SECRET, SECRET)  # noqa: B904 a context, no cause
        except OSError as exc:
            exc.add_note(SECRET)
            raise ScanError(Reason.DAMAGED, "our own words") from exc

    with pytest.raises(typer.Exit), error_boundary(OutputMode(debug=True)):
        fail()

    text = capsys.readouterr().err
    assert SECRET not in text
    assert "our own words" in text
    places = [text.index(kind) for kind in ("KeyError", "ExceptionGroup", "OSError", "ScanError")]
    assert places == sorted(places)
    assert "test_console.py" in text
    assert "in fail" in text


def test_debug_tells_where_libraries_spoke_and_not_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Handlers of libraries are replaced too; afterwards they are as before."""
    library = logging.getLogger("foreign.library")
    own = logging.StreamHandler()
    library.addHandler(own)
    before = logging.getLogRecordFactory(), warnings.showwarning
    try:
        with error_boundary(OutputMode(debug=True)):
            own.setStream(sys.stderr)
            warnings.simplefilter("always")
            warnings.warn(SECRET, UserWarning, stacklevel=1)
            library.error("of %s", SECRET, stack_info=True)
            try:
                raise RuntimeError(SECRET)  # noqa: TRY301
            except RuntimeError:
                library.exception(SECRET)
                logging.getLogger("scanloom.io").debug("ours", exc_info=True)
    finally:
        library.removeHandler(own)

    text = capsys.readouterr().err
    assert SECRET not in text
    assert "UserWarning" in text
    assert text.count("foreign.library") == 2
    assert "ours\nTraceback" in text
    assert (logging.getLogRecordFactory(), warnings.showwarning) == before
