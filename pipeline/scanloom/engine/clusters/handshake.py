"""Handshake with workers: whether each reads the scans, writes results and runs this version."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from scanloom.core import Reason, ScanError
from scanloom.engine.worker.case_file import CaseFile
from scanloom.io.output.work_folder import HANDSHAKE_PREFIX, make_work_folder, process_file_name
from scanloom.io.system.regular_files import open_regular_file
from scanloom.version import __version__


@dataclass(frozen=True)
class Question:
    """Question to a worker.

    Parameters
    ----------
    token : str
        Path of a file in the output folder, whose random content the worker returns.
    models : tuple of str
        Names from the store, or bundle folders.
    book : str or None
        Path of the run's `CaseFile`, of whose first case the worker reads the files.
    """

    token: str
    models: tuple[str, ...] = ()
    book: str | None = None


@dataclass(frozen=True)
class Answer:
    """Answer of a worker, of built-in types only, so that different versions can read it."""

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
"""Fields of `Answer` that must be true for a worker if they are for this process."""


class Handshake:
    """Keeps a token file in the output folder during a run, by which workers are checked.

    Parameters
    ----------
    out : Path
        The output folder.
    models : sequence of str
        Models, whose files must be the same everywhere.
    digests : sequence of str
        The `card_digest` of each when the recipe was made.
    book : Path or None
        Path of the run's `CaseFile`; workers must see and read the files of its first case.
    """

    def __init__(
        self,
        out: Path,
        models: Sequence[str] = (),
        digests: Sequence[str] = (),
        book: Path | None = None,
    ) -> None:
        token = out.absolute() / ".work" / process_file_name(HANDSHAKE_PREFIX)
        seen = str(book.absolute()) if book else None
        self._token, self._digests = token, tuple(digests)
        self.question = Question(str(token), tuple(models), seen)

    def __enter__(self) -> Self:
        make_work_folder(self._token.parent.parent)
        self._token.write_text(os.urandom(16).hex())
        self.expected = replace(answer(self.question), models=self._digests)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.unlink(missing_ok=True)

    def check(self, client: Any) -> None:
        """Check that all current workers can do the work.

        Raises
        ------
        ScanError
            CLUSTER if one cannot.
        """
        try:
            answers = client.run(answer, self.question, on_error="return")
        except (OSError, TimeoutError, AssertionError) as exc:  # the last: not serialisable
            detail = f"a worker gave no answer ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        if not answers:
            raise ScanError(Reason.CLUSTER, "the cluster has no workers")
        fault = describe_mismatch(answers, self.expected)
        if fault is not None:
            raise ScanError(Reason.CLUSTER, fault)


def answer(question: Question) -> Answer:
    """Answer a question; runs on the worker."""
    try:
        token = Path(question.token).read_text()
    except OSError:
        token = None
    files = _first_case(question.book)
    return Answer(
        token,
        __version__,
        sys.version_info[:2],
        tuple(_model_hash(name) for name in question.models),
        files is not None and all(file.exists() for file in files),
        files is not None and all(map(_can_read, files)),
        _can_write(Path(question.token).parent),
    )


def describe_mismatch(answers: Mapping[str, Any], expected: Answer) -> str | None:
    """Describe why the workers cannot do the work; None if they can.

    Parameters
    ----------
    answers : mapping
        By address: an `Answer`, or the exception raised instead.
    expected : Answer
        Answer of this process: workers are only required to match it.
    """
    count = len(answers)
    valid = [a for a in answers.values() if isinstance(a, Answer)]
    if len(valid) < count:
        return f"{count - len(valid)} of {count} workers have no scanloom {expected.version}"
    versions = sorted({a.version for a in valid} - {expected.version})
    if versions:
        return f"workers run scanloom {', '.join(versions)}, this is {expected.version}"
    pythons = sorted({a.python for a in valid} - {expected.python})
    if pythons:
        theirs = ", ".join("{}.{}".format(*p) for p in pythons)
        return f"workers run Python {theirs}, this is {'{}.{}'.format(*expected.python)}"
    blind = sum(a.word != expected.word for a in valid)
    if blind:
        return f"{blind} of {count} workers don't see the output folder"
    different = sum(a.models != expected.models for a in valid)
    if different:
        return f"{different} of {count} workers have no or different files of the models"
    for field, problem in _ABLE.items():
        lacking = sum(not getattr(a, field) for a in valid) if getattr(expected, field) else 0
        if lacking:
            return f"{lacking} of {count} workers {problem}"
    return None


def _model_hash(name: str) -> str | None:
    from scanloom.cards.store import find_model
    from scanloom.engine.case.recipe import card_digest

    try:
        return card_digest(find_model(name))
    except ScanError:
        return None


def _first_case(book: str | None) -> tuple[Path, ...] | None:
    """Return the files of the first case, of all its inputs; None if it cannot be read."""
    if book is None:
        return ()
    try:
        case = CaseFile.read(Path(book), 0)
    except (OSError, ValueError):
        return None
    return tuple(file for series in (case.series, *case.further_channels) for file in series.files)


def _can_read(file: Path) -> bool:
    """Return whether a file can be read, by reading: a server (NFS) may ignore permissions."""
    try:
        with open_regular_file(file) as opened:
            opened.read(1)
    except OSError:
        return False
    return True


def _can_write(work: Path) -> bool:
    """Return whether results can be written: create a file, move it as a result, and remove it."""
    draft, cases = work / process_file_name(HANDSHAKE_PREFIX), work.parent / "cases"
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
