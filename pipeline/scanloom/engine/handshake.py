"""The handshake: each worker reads the scans, writes results, and runs the same program."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from scanloom.core import Reason, ScanError
from scanloom.engine.book import CaseBook
from scanloom.io.regular import open_regular
from scanloom.io.work_folder import token_name


@dataclass(frozen=True)
class Question:
    """What a worker is asked.

    Parameters
    ----------
    token : str
        A file in the output folder, for the word that stands in it.
    models : tuple of str
        Names from the store, or bundle folders.
    book : str or None
        The book of the run: whether the worker sees and reads the files of its first case.
    """

    token: str
    models: tuple[str, ...] = ()
    book: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a worker says: of plain types alone, so that other versions can read it."""

    word: str | None
    version: str
    python: tuple[int, int]
    models: tuple[str | None, ...]
    sees_scans: bool
    reads_scans: bool
    writes: bool


_ABLE = {
    "sees_scans": "don't see the scans",
    "reads_scans": "can't read the scans",
    "writes": "can't write in the output folder",
}
"""What a worker must be able to do if this process is, by names of `Answer`."""


class Handshake:
    """A word in a file of the output folder, for as long as the run goes on.

    Parameters
    ----------
    out : Path
        The output folder.
    models : sequence of str
        Which must be the same files everywhere.
    digests : sequence of str
        The `card_digest` of each when the recipe was made.
    book : Path or None
        Of the run; the files of its first case must be seen and read.
    """

    def __init__(
        self,
        out: Path,
        models: Sequence[str] = (),
        digests: Sequence[str] = (),
        book: Path | None = None,
    ) -> None:
        token = out.absolute() / ".work" / token_name()
        seen = str(book.absolute()) if book else None
        self._token, self._digests = token, tuple(digests)
        self.question = Question(str(token), tuple(models), seen)

    def __enter__(self) -> Self:
        self._token.parent.mkdir(parents=True, exist_ok=True)
        self._token.write_text(os.urandom(16).hex())
        self.expected = replace(answer(self.question), models=self._digests)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.unlink(missing_ok=True)

    def check(self, client: Any) -> None:
        """Check that all workers that are there can do the work.

        Raises
        ------
        ScanError
            CLUSTER if one can't.
        """
        try:
            answers = client.run(answer, self.question, on_error="return")
        except (OSError, TimeoutError, AssertionError) as exc:  # what Dask can't carry is the last
            detail = f"a worker gives no answer ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        if not answers:
            raise ScanError(Reason.CLUSTER, "no worker is there")
        fault = find_fault(answers, self.expected)
        if fault is not None:
            raise ScanError(Reason.CLUSTER, fault)


def answer(question: Question) -> Answer:
    """Say what this process sees; on a worker."""
    try:
        word = Path(question.token).read_text()
    except OSError:
        word = None
    files = _first_case(question.book)
    return Answer(
        word,
        version("scanloom"),
        sys.version_info[:2],
        tuple(_model_hash(name) for name in question.models),
        files is not None and all(file.exists() for file in files),
        files is not None and all(map(_can_read, files)),
        _can_write(Path(question.token).parent),
    )


def find_fault(answers: Mapping[str, Any], expected: Answer) -> str | None:
    """Return what is wrong with the workers, in words of ours; None if nothing is.

    Parameters
    ----------
    answers : mapping
        By address: an `Answer`, or the exception that came instead.
    expected : Answer
        This process's own: what it can't do either is not a worker's fault.
    """
    count = len(answers)
    told = [a for a in answers.values() if isinstance(a, Answer)]
    if len(told) < count:
        return f"{count - len(told)} of {count} workers have no scanloom {expected.version}"
    versions = sorted({a.version for a in told} - {expected.version})
    if versions:
        return f"workers run scanloom {', '.join(versions)}, this is {expected.version}"
    pythons = sorted({a.python for a in told} - {expected.python})
    if pythons:
        theirs = ", ".join("{}.{}".format(*p) for p in pythons)
        return f"workers run Python {theirs}, this is {'{}.{}'.format(*expected.python)}"
    blind = sum(a.word != expected.word for a in told)
    if blind:
        return f"{blind} of {count} workers don't see the output folder"
    other = sum(a.models != expected.models for a in told)
    if other:
        return f"{other} of {count} workers have no or other files of the models"
    for able, words in _ABLE.items():
        lacking = sum(not getattr(a, able) for a in told) if getattr(expected, able) else 0
        if lacking:
            return f"{lacking} of {count} workers {words}"
    return None


def _model_hash(name: str) -> str | None:
    from scanloom.cards.store import find_model
    from scanloom.engine.recipe import card_digest

    try:
        return card_digest(find_model(name))
    except ScanError:
        return None


def _first_case(book: str | None) -> tuple[Path, ...] | None:
    """Return the files of the first case, of all its inputs; None where the book can't be read."""
    if book is None:
        return ()
    try:
        case = CaseBook.read(Path(book), 0)
    except (OSError, ValueError):
        return None
    return tuple(file for series in (case.series, *case.others) for file in series.files)


def _can_read(file: Path) -> bool:
    """Try: permissions say little where another machine decides (NFS)."""
    try:
        with open_regular(file) as opened:
            opened.read(1)
    except OSError:
        return False
    return True


def _can_write(work: Path) -> bool:
    """Make a file where results are made, move it to where they go, and remove it."""
    draft, cases = work / token_name(), work.parent / "cases"
    moved = cases / f".{draft.name}"
    try:
        draft.write_bytes(b"")
        if cases.is_dir():
            draft.rename(moved)
    except OSError:
        return False
    finally:
        for path in (draft, moved):
            with suppress(OSError):
                path.unlink()
    return True
