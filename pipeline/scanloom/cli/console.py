"""Output of commands: results on stdout, everything else on stderr, errors in one format.

Exit codes are those of sysexits.h where it defines one. Streams withstand any encoding, a full disk
and a closed stream.

Tracebacks and logs (`--debug`, `--verbose`, `--log`) hold no text from other libraries: exceptions,
warnings and log lines of theirs quote paths and headers, which name patients. Only their type and
location in the code are shown; scanloom's own text is shown in full.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import logging
import os
import re
import shlex
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scanloom.core import Reason, ScanError
    from scanloom.engine.run import RunResult


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    SOME_FAILED = 1  # also: a problem found by `doctor`, an internal error
    USAGE = 2
    UNUSABLE = 65  # EX_DATAERR: the requested scan, or a model, can't be used; nothing selected
    INPUT_OUTPUT = 74  # EX_IOERR: the disk is full, or OUT is not writable
    INTERRUPTED = 130  # 128 + SIGINT


def exit_of_reason(reason: Reason) -> Exit:
    """Return the exit code of a command that ends with `reason`."""
    from scanloom.core import Reason

    if reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE, Reason.SCRATCH_FULL):
        return Exit.INPUT_OUTPUT
    # Of the program and its machine: neither a scan nor an option is to blame
    internal = reason in (Reason.INTERNAL, Reason.ENVIRONMENT, Reason.NOT_INSTALLED)
    return Exit.SOME_FAILED if internal else Exit.UNUSABLE


def exit_of_scans(outcomes: Sequence[Reason | None], *, strict: bool = False) -> Exit:
    """Return the exit code for one or several scans, by why they have no result (None: they do).

    Among several scans, skipped ones do not count if any other scan has a result, unless `strict`.
    Ambiguous ones count as failed: they were requested and have no result.
    """
    from scanloom.core import Reason

    reasons = [reason for reason in outcomes if reason is not None]
    if not reasons:
        return Exit.OK
    if len(outcomes) == 1:
        return exit_of_reason(reasons[0])
    # a disk that is full comes first: it is why the others failed, and needs another action
    if any(reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE) for reason in reasons):
        return Exit.INPUT_OUTPUT
    failed = strict or any(reason.expects_result for reason in reasons)
    return Exit.SOME_FAILED if failed or len(reasons) == len(outcomes) else Exit.OK


NO_SERIES = frozenset({"NOT_AN_IMAGE", "DUPLICATE_LINK", "LEFT_OUT", "NESTED_ARCHIVE"})
"""Codes of skipped files that are no series of their own."""


def unexamined(reasons: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of files that this machine could not look at, by reason code.

    Their reasons are those that another attempt may remove: no room to unpack an archive, a disk
    or a permission that is missing, a helper process that died. What they hold is unknown, so that
    nobody can say that all selected cases are done. The code of a file without a reason is "".
    """
    from scanloom.core import Reason

    known = {code: Reason[code] for code in reasons if code}
    return {c: reasons[c] for c, r in known.items() if r.outcome == "failed" and r.retry}


def exit_of_nothing(reasons: Mapping[str, int]) -> Exit:
    """Return the exit code if there are files, but nothing to be used."""
    from scanloom.core import Reason

    codes = {exit_of_reason(Reason[code]) for code in unexamined(reasons)}
    return Exit.INPUT_OUTPUT if Exit.INPUT_OUTPUT in codes else Exit.UNUSABLE


def exit_of_run(result: RunResult, *, strict: bool = False) -> Exit:
    """Return the exit code of a run: 0 if every selected case is done.

    Files that could not be examined may belong to selected cases: with them, it is 1. With
    `strict`, a series also counts that failed, waits for a choice, or was skipped for another
    reason than the workflow's selection.
    """
    files = result.totals["files"]
    if result.failed_cases or result.damaged or unexamined(files.get("failed", {})):
        return Exit.SOME_FAILED
    skipped = set(files.get("skipped", ())) - NO_SERIES - {"NOT_SELECTED"}
    incomplete = bool(files.get("failed") or files.get("ambiguous") or skipped)
    return Exit.SOME_FAILED if strict and incomplete else Exit.OK


@contextmanager
def steady_streams() -> Iterator[None]:
    """Escape characters that the encoding lacks; exit with one line if stdout fails.

    A pipe closed by its reader is not reported as an error. Streams that were closed before the
    program started are empty.
    """
    _prepare_streams()
    try:
        try:
            yield
        finally:
            # Here, since Python itself reports a failure at exit with a traceback
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(Exit.SOME_FAILED) from None
    except OSError as exc:
        if not stdout_lost():
            raise
        _discard_output()
        name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
        sys.stderr.write(f"scanloom: the output can't be written to stdout ({name}).\n")
        raise SystemExit(Exit.INPUT_OUTPUT) from None


def stdout_lost() -> bool:
    """Return whether a write to stdout has failed."""
    return isinstance(sys.stdout, _Watched | _Closed) and sys.stdout.lost


def _prepare_streams() -> None:
    closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    for _ in filter(None, closed):
        # otherwise the next opened files become them: the lowest free numbers are taken first
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115  # for good
    if sys.stdout is None:
        sys.stdout = _Closed()
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        encoding, lines = sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = _Watched(
            sys.stdout.detach(), encoding, "backslashreplace", line_buffering=lines
        )
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115  # for good
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discard unwritten output: Python would try to write it again at exit."""
    if isinstance(sys.stdout, _Closed):
        sys.stdout = io.StringIO()
        return
    with suppress(OSError, ValueError):  # not backed by a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Watched(io.TextIOWrapper):
    """A stdout that records whether a write failed."""

    lost = False

    def write(self, text: str, /) -> int:
        with self._watching():
            return super().write(text)

    def flush(self) -> None:
        with self._watching():
            super().flush()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.lost = True
            raise


class _Closed(io.TextIOBase):
    """A stdout that was closed before the program started."""

    lost = False

    def write(self, text: str, /) -> int:
        self.lost = True
        raise OSError(errno.EBADF, "stdout is closed")


_LINE_ENDS = re.compile(r"([\n\t])")
_TRAILING = re.compile(r" +(?=\n)")
_BEYOND_ASCII = re.compile(r"[^\n -~]")
LEAST_WIDTH = 40
"""Columns for which tables are made on a narrower terminal, too: it breaks their lines itself."""
WIDTH = 10_000
"""Columns of a file or a pipe, if COLUMNS does not say another number: no line of a table is broken
or shortened there, as `grep` and logs need it."""


@dataclass(frozen=True)
class OutputMode:
    """Output options of a command."""

    json: bool = False
    debug: bool = False
    quiet: bool = False
    verbose: bool = False
    log: Path | None = None


def console(*, stderr: bool = False) -> Console:
    """Return a rich console; if the stream is not a terminal, lines end without spaces."""
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

    class Clean(Console):
        """Escapes control characters in all text, including text inside renderables."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(clean(text), **options)

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for piece in super().render(renderable, options):
                yield piece if piece.control else Segment(clean(piece.text), piece.style)

        def print(self, *objects: Any, **options: Any) -> None:
            # a sentence is broken by the terminal alone, so that its paths can be copied
            options.setdefault("soft_wrap", all(isinstance(each, str) for each in objects))
            objects = tuple(
                fitted(each, self.width) if isinstance(each, Table) else each for each in objects
            )
            if self.is_terminal:
                super().print(*objects, **options)
                return
            with self.capture() as captured:  # tables fill their last column with spaces
                super().print(*objects, **options)
            self.file.write(_TRAILING.sub("", captured.get()))
            self.file.flush()

    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    stated = columns.isdecimal() and int(columns) > 0
    width = None if stream.isatty() or stated else WIDTH
    made = Clean(file=stream, width=width, highlight=False, emoji=False, markup=False)
    made.width = max(made.width, LEAST_WIDTH)
    return made


def fitted(table: Table, width: int) -> Table:
    """Return a table for a screen: its cells are broken at spaces, and none is cut.

    Where the longest words do not fit beside each other, each row becomes a list of its cells with
    their titles. Words longer than the screen are broken.
    """
    from rich.table import Column, Table

    cells_of = [[str(cell) for cell in column.cells] for column in table.columns]
    rows = [*zip(*cells_of, strict=True)]
    titles = [str(c.header) if table.show_header else "" for c in table.columns]
    columns = [[title, *cells] for title, cells in zip(titles, cells_of, strict=True)]
    longest = [max(map(len, cells), default=0) for cells in columns]
    unbroken = [
        most if column.no_wrap else max((len(w) for text in cells for w in text.split()), default=0)
        for column, cells, most in zip(table.columns, columns, longest, strict=True)
    ]
    _, right, _, left = table.padding
    spare = width - (left + right + (table.box is not None)) * len(columns) - sum(unbroken)
    for column in table.columns:
        column.overflow = "fold"
    missing = sum(longest) - sum(unbroken)
    if missing <= spare:
        return table
    if spare >= 0:
        for column, most, least in zip(table.columns, longest, unbroken, strict=True):
            column.width = least + spare * (most - least) // missing
        return table
    if not table.show_header:
        for column in table.columns[:-1]:
            column.no_wrap = True
        return table
    listed = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for n, row in enumerate(rows):
        if n:
            listed.add_row()
        for title, cell in zip(titles, row, strict=True):
            if cell:
                listed.add_row(title, cell)
    return listed


def clean(text: str) -> str:
    """Return text that is safe for a terminal; line breaks and tabs stay.

    File names and text from headers and models are foreign: see `scanloom.core.printable`.
    """
    from scanloom.core import printable

    if text.isprintable():
        return text
    return "".join(
        piece if piece in ("\n", "\t") else printable(piece) for piece in _LINE_ENDS.split(text)
    )


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a message on stdout or stderr."""
    typer.echo(clean(text), err=err, nl=nl)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a JSON document on stdout: UTF-8, or ASCII if stdout has another encoding.

    Control characters and path bytes that are not UTF-8 are escaped.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    if codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name != "utf-8":
        text = json.dumps(document, indent=2, allow_nan=False)
    typer.echo(_BEYOND_ASCII.sub(_escaped, text))


def _escaped(match: re.Match[str]) -> str:
    """Return a character for JSON, escaped if it is not printable."""
    character = match[0]
    return character if character.isprintable() else json.dumps(character)[1:-1]


def print_result(
    mode: OutputMode, document: Callable[[], Mapping[str, Any]], show: Callable[[], None]
) -> None:
    """Print a result as `mode` says: as a JSON document, as text, or not at all."""
    if mode.json:
        print_json(document())
    elif not mode.quiet:
        show()


@contextmanager
def case_progress(mode: OutputMode, title: str = "cases") -> Iterator[Callable[[int, int], None]]:
    """Show the number of cases that are done, on a terminal and as far as `mode` allows it."""
    if mode.json or mode.quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def error_document(reason: Reason, detail: str) -> dict[str, Any]:
    """Return the JSON object of an error."""
    return {
        "code": reason.code,
        "outcome": reason.outcome,
        "detail": detail,
        "advice": reason.advice,
        "retry": reason.retry,
    }


def format_error(reason: Reason, detail: str, private: str = "") -> str:
    """Return the message of an error: detail, code, advice.

    `private` is the subject: a path comes first, a list of several lines below.
    """
    message = f"{detail} ({reason.code}). {reason.advice}."
    first, *further = private.splitlines() or [""]
    if not further:
        return f"{first}: {message}" if first else message
    return "\n".join([message, *(f"  {line}" for line in (first, *further))])


def warn_of_damaged(out: Path, cases: Sequence[str]) -> None:
    """Report published cases that are unreadable, or of another version, on stderr."""
    from scanloom.core import ScanError
    from scanloom.io.output.layout import case_folder
    from scanloom.io.output.published import read_provenance

    for case in cases:
        try:
            read_provenance(case_folder(out, case))
        except ScanError as error:
            problem = f"case {case} is left out ({error.code}): {error.detail}"
            say(f"scanloom: {problem}. {error.reason.advice}.", err=True)
            continue
        except (OSError, ValueError):
            pass
        lists = f"`scanloom verify {out}` lists its files"
        remedy = "If one was changed or is missing, remove the case's folder and run again."
        say(f"scanloom: case {case} is damaged or can't be read: {lists}. {remedy}", err=True)


def warn_of_unexamined(reasons: Mapping[str, int]) -> None:
    """Report files that this machine could not look at, by counts of reason codes, on stderr."""
    from scanloom.core import Reason, counted

    for code, count in unexamined(reasons).items():
        problem = f"{counted(count, 'file')} could not be looked at ({code})"
        say(f"scanloom: {problem}, so cases may be missing. {Reason[code].advice}.", err=True)


def typed_command() -> str:
    """Return the command line of this process, quoted for a shell."""
    program = Path(sys.argv[0])
    # Typed as `python -m scanloom`; else the name is enough if the shell finds this program by it
    if program.name == "__main__.py":
        prefix = [sys.executable, "-m", "scanloom"]
    elif (installed := shutil.which(program.name)) and Path(installed) == program:
        prefix = [program.name]
    else:
        prefix = [str(program)]
    return shlex.join([*prefix, *sys.argv[1:]])


def print_resume_command() -> None:
    """Print the command that goes on where an interrupted one ended, on stderr."""
    say(f"To resume:\n  {typed_command()}", err=True)


@contextmanager
def error_boundary(manner: OutputMode, *, resumable: bool = False) -> Iterator[None]:
    """Turn any error in the block into a message and an exit code.

    `resumable`: whether the same command continues one that was interrupted.

    Warnings and logs of other libraries may name a patient: `--debug` shows their location in the
    code, never their text.
    """
    from scanloom.core import Reason, ScanError, keep_memory_private, settle_in

    keep_memory_private()
    settle_in()
    try:
        _check_current_folder()
        with _libraries_heard(manner):
            yield
    except ScanError as error:
        _fail(manner, error, error)
    except KeyboardInterrupt as error:
        say("Interrupted. Unfinished scans left no partial output.", err=True)
        if resumable:
            print_resume_command()
        raise typer.Exit(Exit.INTERRUPTED) from error
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except Exception as error:  # foreign text must not reach the user
        if isinstance(error, OSError) and stdout_lost():  # `steady_streams` ends it
            raise
        from scanloom.io.system.disk_errors import disk_error

        internal = ScanError(Reason.INTERNAL, f"unexpected {type(error).__name__}")
        _fail(manner, error, disk_error(error) or internal)


def _check_current_folder() -> None:
    """Refuse a current folder that was removed: MKL ends the process if it can't name it."""
    from scanloom.core import Reason, ScanError

    try:
        Path.cwd()
    except OSError as exc:
        detail = f"the current folder can't be accessed ({type(exc).__name__}): cd to another one"
        raise ScanError(Reason.ENVIRONMENT, detail) from exc


def _fail(manner: OutputMode, error: Exception, known: ScanError) -> NoReturn:
    """Report an error by the reason and detail of a known one, and exit."""
    if manner.debug:
        say(told_traceback(error), err=True)
    if manner.json:
        print_json({"schema": 1, "error": error_document(known.reason, known.detail)})
    else:
        message = format_error(known.reason, known.detail, known.private)
        say(f"scanloom: {message}", err=True)
    raise typer.Exit(exit_of_reason(known.reason)) from error


def _libraries_heard(manner: OutputMode) -> AbstractContextManager[None]:
    """Return the context of a command: with its log if there is one, else without any."""
    if not (manner.debug or manner.verbose or manner.log):
        return _libraries_silent()
    # `--debug` includes `--verbose`
    level = logging.DEBUG if manner.debug else logging.INFO if manner.verbose else None
    return _logged(level, manner.log)


@contextmanager
def _libraries_silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def report_new_key(key: Path | None) -> Iterator[None]:
    """Report on stderr a key that is created in the block, so that a wrong path is noticed.

    Also warn about an explicit key file that another user may read or change. The default key
    file is refused in that case, but an explicit one may be intended.
    """
    from scanloom.io.identity import default_key_file
    from scanloom.own_python import is_ours

    file = key or default_key_file()
    explicit = bool(key or os.environ.get("SCANLOOM_KEY"))
    with suppress(OSError):  # missing or unreadable: reported when it is loaded
        if explicit and not is_ours(file):
            warning = "belongs to another user or is writable by others: case ids depend on it"
            say(f"scanloom: the key in {file} {warning}.", err=True)
    existed = os.path.exists(file)  # noqa: PTH110 False where Path.exists() raises
    try:
        yield
    finally:
        if not existed and os.path.exists(file):  # noqa: PTH110  # as above
            advice = "Back it up: case ids depend on it."
            say(f"scanloom: created a new key in {file}. {advice}", err=True)


OURS = "scanloom"
WITHHELD = "(text withheld)"


def told_traceback(error: BaseException) -> str:
    """Return the traceback of an error and of its causes.

    The text of a `ScanError` and the name of a missing module are shown; otherwise only the type.
    """
    sections = [_formatted(link) for link in _chain(error)]
    return "\nwhich led to\n\n".join(reversed(sections))


class _LogFile(logging.FileHandler):
    """A log whose file is made anew once it was moved away or removed, as logrotate does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message; a file that can't be made anew stops nobody."""
        try:
            if self.stream is not None and not self._is_in_place(self.stream.fileno()):
                self.stream.close()
                self.stream = None  # opened by the next line
            super().emit(record)
        except OSError:
            self.handleError(record)

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(Path(self.baseFilename).stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False


def _log_handlers(level: int | None, file: Path | None) -> list[logging.Handler]:
    """Return the handlers of scanloom's messages; refuse a file that can't be written."""
    handlers: list[logging.Handler] = []
    if level is not None:
        handlers.append(logging.StreamHandler())
        handlers[0].setFormatter(_Formatter())
        handlers[0].setLevel(level)
    if file is not None:
        try:
            handlers.append(_LogFile(file, encoding="utf-8"))
        except OSError as exc:
            problem = f"{file} can't be written ({type(exc).__name__})"
            raise typer.BadParameter(problem, param_hint="'--log'") from exc
        handlers[-1].setLevel(min(logging.INFO, level or logging.INFO))
        handlers[-1].setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handlers


@contextmanager
def _logged(level: int | None, file: Path | None) -> Iterator[None]:
    """Log scanloom's messages, and only the location of other libraries'.

    On stderr those of `level` and above, None for none; in the file, with their time, those of INFO
    or of a lower `level`. With DEBUG, other libraries are heard. The record factory is replaced,
    since some libraries install their own handlers.
    """
    logger, handlers = logging.getLogger(OURS), _log_handlers(level, file)
    before, factory = logger.level, logging.getLogRecordFactory()
    silence = None if level == logging.DEBUG else logging.NullHandler()

    def make_record(*values: object, **keywords: object) -> logging.LogRecord:
        record: logging.LogRecord = factory(*values, **keywords)
        if record.name.partition(".")[0] != OURS:
            record.msg = f"{record.name}, {record.filename} line {record.lineno}: {WITHHELD}"
            record.args, record.exc_info = (), None
            record.exc_text = record.stack_info = None
        return record

    logging.setLogRecordFactory(make_record)
    if silence is not None:  # otherwise logging prints the warnings of other libraries
        logging.root.addHandler(silence)
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        if silence is not None:
            logging.root.removeHandler(silence)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before)
        logging.setLogRecordFactory(factory)


class _Formatter(logging.Formatter):
    """Formats tracebacks without text from other libraries."""

    def formatException(  # noqa: N802 the name is logging's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        return "" if ei[1] is None else told_traceback(ei[1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            pending.extend(link.exceptions)
        # As Python does: a cause stands for the context, and "from None" hides it
        pending.append(link.__cause__ or (None if link.__suppress_context__ else link.__context__))


def _formatted(error: BaseException) -> str:
    from scanloom.core import ScanError

    text = WITHHELD
    if isinstance(error, ScanError):
        text = str(error)
    elif isinstance(error, ImportError) and error.name:
        text = error.name  # of a module
    lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return "".join(lines) + f"{module}{kind.__qualname__}: {text}\n"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Replace `warnings.showwarning`: log location and category, not the text."""
    logging.getLogger(OURS).debug(
        "%s line %d: %s: %s", filename, lineno, category.__name__, WITHHELD
    )
