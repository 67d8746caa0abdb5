"""The verdicts of an output folder: `review/verdicts.jsonl`.

A verdict is a line of its own, and stays: another verdict or an undo is a further line. Comments
are free text, which may name people: they lie in `private/review.jsonl`, by the number of their
verdict, and the names of reviewers in `private/reviewers.json`. Verdicts have codes such as "r1".

A line is synced to the disk before `append` returns. A process that dies while it writes leaves at
most half a line at the end, which the next one cuts off.

Each line has its number and its SHA-256, which find damage: a bit that flipped, a line that an
editor changed, lost or moved. They have no key, and nothing says how many lines there were:
somebody who can write the file can change any line and its sum, and can cut lines off at the end,
without being noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError, read_error
from scanloom.core.process import lock_file
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.json_file import read_json, write_json
from scanloom.io.output.private import PRIVATE, check_links, locked_folder, write_private
from scanloom.io.system.atomic_write import append_synced, fsync_path
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.regular_files import open_link_free
from scanloom.review.verdicts.verdict import Verdict, plain_verdict, verdict_from_plain

_SUM = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SUM_BYTES = len(',"sha256":""}') + 64


class LineError(ValueError):
    """A line is damaged, missing, doubled or moved; the text says which."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each whole line.

    Half a line at the end is left out. There are no lines without the file.

    Raises
    ------
    LineError
        If a line was changed, or is not in its place.
    OSError
        If the file can't be read, or is a link.
    """
    try:
        with os.fdopen(open_link_free(path, os.O_RDONLY), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return
    *lines, last = content.split(b"\n")
    number = 0
    for number, line in enumerate(lines, 1):
        yield _read_line(line, number)
    if not _is_half(last, number + 1):
        yield _read_line(last, number + 1)


class JsonLines:
    """A file to which one process appends lines.

    Parameters
    ----------
    path : Path
        The file; it is created with the first line.
    mode : int
        Mode of a new file.

    Raises
    ------
    LineError, OSError
        As of `read_lines`.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path, self.mode = path, mode
        self.lines = list(read_lines(path))
        self._size = _end_with_a_line(path, len(self.lines)) if os.path.lexists(path) else 0

    def append(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line, and return its JSON object once it is on the disk.

        Parameters
        ----------
        content : mapping
            A JSON object; "number" and "sha256" are added.

        Raises
        ------
        OSError
            If it can't be written: then the file is as before.
        LineError
            If another program changed the file since.
        """
        plain: dict[str, Any] = {"number": len(self.lines) + 1, **content}
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        body = text.encode("utf-8", "replace")
        plain["sha256"] = hashlib.sha256(body).hexdigest()
        line = body[:-1] + f',"sha256":"{plain["sha256"]}"}}\n'.encode()
        descriptor = open_link_free(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.mode)
        with os.fdopen(descriptor, "ab"):
            if os.fstat(descriptor).st_size != self._size:
                raise LineError("another program changed the file")
            append_synced(descriptor, line, self._size)
        # the name of a new file is on the disk once its folder is
        if not self._size:
            fsync_path(self.path.parent)
        self._size += len(line)
        self.lines.append(plain)
        return plain


def _is_half(rest: bytes, number: int) -> bool:
    """Return whether what follows the last line feed is half of the line with a number.

    That it begins as this line does matters: it is cut off, and a file that is not a log must not
    be emptied. NULs are what some file systems leave of a write when the power failed. A whole
    line whose line feed is missing is no half: an editor saved it so.
    """
    begin = f'{{"number":{number},'.encode()
    is_begun = begin.startswith(rest) or rest.startswith(begin)
    return not rest.strip(b"\0") or (is_begun and _SUM.fullmatch(rest[-_SUM_BYTES:]) is None)


def _end_with_a_line(path: Path, count: int) -> int:
    """Cut off half a line at the end, or add a missing line feed; return the size of the file."""
    descriptor = open_link_free(path, os.O_RDWR | os.O_APPEND)
    with os.fdopen(descriptor, "r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole == len(content):
            return whole
        if content.count(b"\n") < count:
            file.write(b"\n")
            whole = len(content) + 1
        else:
            file.truncate(whole)
        file.flush()
        os.fsync(descriptor)
    return whole


def _read_line(line: bytes, number: int) -> dict[str, Any]:
    """Return the JSON object of a line, at its place in the file; LineError if it is another."""
    checksum = _SUM.fullmatch(line[-_SUM_BYTES:])
    # the sum is that of the line without the sum
    body = line[:-_SUM_BYTES] + b"}"
    if checksum is None or checksum[1].decode() != hashlib.sha256(body).hexdigest():
        raise LineError(f"line {number} was changed")
    try:
        plain = dict(json.loads(line))
        own = plain["number"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise LineError(f"line {number} is damaged") from exc
    if own != number:
        raise LineError(f"line {number} is missing: line {own} is in its place")
    return plain


REVIEW = "review"
VERDICTS = "verdicts.jsonl"
COMMENTS = "review.jsonl"
REVIEWERS = "reviewers.json"
LOCK = ".lock"
_CODE = re.compile(r"r[1-9][0-9]{0,5}")
_ADDRESS = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+")


class VerdictStack:
    """Verdicts in the order of the log, undone ones left out; it is not changed once it is made."""

    def __init__(self, verdicts: Iterable[Verdict]) -> None:
        self._kept: dict[str, dict[str, list[Verdict]]] = {}
        self._lines: dict[str, list[Verdict]] = {}
        self.count = 0
        """Number of lines that it is made of."""
        for verdict in verdicts:
            self._add(verdict)

    def after(self, verdict: Verdict) -> VerdictStack:
        """Return the stack with a further line, without going through the others again."""
        stack = VerdictStack(())
        of_case = {reviewer: [*kept] for reviewer, kept in self._kept.get(verdict.case, {}).items()}
        stack._kept = {**self._kept, verdict.case: of_case}
        lines = [*self._lines.get(verdict.case, ())]
        stack._lines, stack.count = {**self._lines, verdict.case: lines}, self.count
        stack._add(verdict)
        return stack

    def _add(self, verdict: Verdict) -> None:
        self._lines.setdefault(verdict.case, []).append(verdict)
        kept = self._kept.setdefault(verdict.case, {}).setdefault(verdict.reviewer, [])
        if verdict.undoes is None:
            kept.append(verdict)
        else:
            kept[:] = [each for each in kept if each.number != verdict.undoes]
        self.count += 1

    def of_case(self, case: str) -> dict[str, Verdict]:
        """Return the verdicts about a case that count, by reviewer."""
        return {reviewer: kept[-1] for reviewer, kept in self._kept.get(case, {}).items() if kept}

    def lines_of_case(self, case: str) -> Sequence[Verdict]:
        """Return all lines about a case in their order, undone and undoing ones too."""
        return self._lines.get(case, ())

    def history(self) -> dict[tuple[str, str], tuple[Verdict, ...]]:
        """Return the verdicts that were not undone, by case and reviewer."""
        return {
            (case, reviewer): tuple(kept)
            for case, by_reviewer in self._kept.items()
            for reviewer, kept in by_reviewer.items()
        }

    def current(self) -> dict[str, dict[str, Verdict]]:
        """Return the verdicts that count, by case and reviewer."""
        by_case = {case: self.of_case(case) for case in self._kept}
        return {case: verdicts for case, verdicts in by_case.items() if verdicts}


def read_verdicts(out: Path) -> list[Verdict]:
    """Return all lines of an output folder's log, undone ones and undoing ones included.

    Raises
    ------
    ScanError
        REVIEW_DAMAGED, with the line.
    """
    path = out / REVIEW / VERDICTS
    try:
        return [_parsed(plain) for plain in read_lines(path)]
    except LineError as exc:
        raise _damaged(f"{REVIEW}/{VERDICTS}", exc) from exc
    except OSError as exc:
        raise output_error(exc, f"{REVIEW}/{VERDICTS}") from exc


class VerdictLog:
    """The log of an output folder, held by one process, which appends to it.

    Parameters
    ----------
    out : Path
        The output folder.
    audit : AuditTrail or None
        Receives a line before each verdict.

    Raises
    ------
    ScanError
        REVIEW_OPEN if another process holds it, with its address; REVIEW_DAMAGED if a line is
        damaged; OUTPUT_UNWRITABLE.
    """

    def __init__(self, out: Path, audit: AuditTrail | None = None) -> None:
        check_links(out)
        self.out, self._audit, self._guard = out, audit, threading.Lock()
        self._viewed: set[tuple[str, str]] = set()
        try:
            (out / REVIEW).mkdir(exist_ok=True)
            self._lock = open_link_free(out / REVIEW / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise output_error(exc, "verdicts") from exc
        try:
            self._hold()
            self.announce("")
            self._lines = _open_lines(out, f"{REVIEW}/{VERDICTS}", 0o666)
            (out / PRIVATE).mkdir(mode=0o700, exist_ok=True)
            self._comments = _open_lines(out, f"{PRIVATE}/{COMMENTS}", 0o600)
            self._verdicts = [_parsed(plain) for plain in self._lines.lines]
            self.stack = VerdictStack(self._verdicts)
            """The verdicts that were not undone; another stack after each line."""
        except BaseException as exc:
            os.close(self._lock)
            if isinstance(exc, OSError):
                raise output_error(exc, "verdicts") from exc
            raise

    def _hold(self) -> None:
        if not lock_file(self._lock, timeout_s=0):
            holder = os.pread(self._lock, 300, 0).decode(errors="replace")
            where = f" at {holder}" if _ADDRESS.fullmatch(holder) else ""
            detail = f"a review of this output folder is open{where}"
            raise ScanError(Reason.REVIEW_OPEN, detail, str(self.out))

    def announce(self, address: str) -> None:
        """Note the address of the server that holds the log, for others who want to hold it."""
        with suppress(OSError):  # it is a help only
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, address.encode(), 0)

    def close(self) -> None:
        """Release the output folder."""
        self.announce("")
        os.close(self._lock)

    @property
    def count(self) -> int:
        """Number of lines."""
        return len(self._lines.lines)

    def cases_of(self, first: int, end: int) -> set[str]:
        """Return the cases of some lines, from 0 and before the end."""
        return {verdict.case for verdict in self._verdicts[first:end]}

    def append(self, verdict: Verdict, comment: str = "") -> Verdict:
        """Keep a verdict; return it with its number and moment, once it is on the disk.

        Parameters
        ----------
        comment : str
            Free text; it is kept in the private folder.

        Raises
        ------
        ScanError
            DISK_FULL or OUTPUT_UNWRITABLE: then the log is as before. REVIEW_DAMAGED if another
            program changed it.
        """
        with self._guard:
            return self._append(verdict, comment)

    def undo(self, reviewer: str, case: str) -> Verdict | None:
        """Undo a reviewer's last verdict about a case, by a further line; None without one.

        Raises
        ------
        ScanError
            As for `append`.
        """
        with self._guard:
            last = self.stack.of_case(case).get(reviewer)
            if last is None:
                return None
            return self._append(Verdict(case, reviewer, last.seen, undoes=last.number), "")

    def note_view(self, case: str, reviewer: str) -> None:
        """Note in the audit trail that a reviewer opened a case, once for this process.

        Raises
        ------
        ScanError
            DISK_FULL or OUTPUT_UNWRITABLE.
        """
        with self._guard:
            if self._audit is None or (case, reviewer) in self._viewed:
                return
            try:
                self._audit.append("viewed", {"case": case, "reviewer": reviewer})
            except OSError as exc:
                raise output_error(exc, "the audit trail") from exc
            self._viewed.add((case, reviewer))

    def comment_of(self, verdict: Verdict) -> str:
        """Return the comment of a verdict; empty without one."""
        if not verdict.comment:
            return ""
        with self._guard:
            lines = reversed(self._comments.lines)
            return next((str(c["text"]) for c in lines if c.get("verdict") == verdict.number), "")

    def _append(self, verdict: Verdict, comment: str) -> Verdict:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        kept = replace(verdict, number=self.count + 1, at=moment, comment=bool(comment))
        try:
            if comment:
                # A comment whose verdict is never written has the number of the next verdict: the
                # last comment of a number counts.
                plain = {"verdict": kept.number, "case": kept.case, "text": comment}
                self._comments.append(plain)
            plain = plain_verdict(kept)
            if self._audit is not None:
                names = ("case", "reviewer", "decision", "undoes")
                self._audit.append("judged", {n: plain[n] for n in names if plain.get(n)})
            self._lines.append(plain)
        except OSError as exc:
            raise output_error(exc, "the verdict") from exc
        except LineError as exc:
            raise _damaged(f"{REVIEW}/", exc) from exc
        self._verdicts.append(kept)
        self.stack = self.stack.after(kept)
        return kept


def reviewer_codes(out: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the code of each reviewer; new names get the next code, which is kept.

    Names that differ only in case are those of one reviewer, and the first spelling stays. Codes
    of verdicts whose reviewer's name was lost are not given again.

    Parameters
    ----------
    names : sequence of str
        Names as the reviewers are called by.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE or DISK_FULL; REVIEW_DAMAGED if the kept codes can't be read.
    """
    check_links(out)
    try:
        with locked_folder(out / PRIVATE):
            known = reviewer_names(out)
            # a code whose name was lost still stands in verdicts
            taken = {*known, *(verdict.reviewer for verdict in read_verdicts(out))}
            numbers = [int(code[1:]) for code in taken if _CODE.fullmatch(code)]
            by_name = {folded(name): code for code, name in known.items()}
            added = dict[str, str]()
            for name in names:
                if folded(name) not in by_name:
                    numbers.append(max(numbers, default=0) + 1)
                    by_name[folded(name)] = code = f"r{numbers[-1]}"
                    added[code] = name
            known |= added
            if added:
                write_private(out / PRIVATE / REVIEWERS, lambda path: write_json(path, known))
    except OSError as exc:
        raise output_error(exc, "reviewers") from exc
    codes = dict.fromkeys(by_name[folded(name)] for name in names)
    return {known[code]: code for code in codes}


def reviewer_names(out: Path) -> dict[str, str]:
    """Return the name of each reviewer, by code; REVIEW_DAMAGED if the kept codes can't be read."""
    file = out / PRIVATE / REVIEWERS
    try:
        plain = read_json(file) if file.exists() else {}
    except (OSError, ValueError) as exc:
        raise read_error(exc, f"{PRIVATE}/{REVIEWERS}", Reason.REVIEW_DAMAGED) from exc
    if not all(_CODE.fullmatch(code) and isinstance(plain[code], str) for code in plain):
        raise ScanError(Reason.REVIEW_DAMAGED, f"{PRIVATE}/{REVIEWERS} is damaged")
    return plain


def folded(name: str) -> str:
    """Return a name without case, in composed characters."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _open_lines(out: Path, name: str, mode: int) -> JsonLines:
    try:
        return JsonLines(out / name, mode)
    except LineError as exc:
        raise _damaged(name, exc) from exc


def _parsed(plain: Mapping[str, Any]) -> Verdict:
    try:
        return verdict_from_plain(plain)
    except (ValueError, LookupError, TypeError) as exc:
        problem = LineError(f"line {plain['number']} is not a verdict of this version")
        raise _damaged(f"{REVIEW}/{VERDICTS}", problem) from exc


def _damaged(name: str, problem: LineError) -> ScanError:
    return ScanError(Reason.REVIEW_DAMAGED, f"{name}: {problem}")
