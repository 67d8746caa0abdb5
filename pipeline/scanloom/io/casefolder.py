"""The output folder: a case folder that exists is whole.

A case is built in `OUT/.work/`, every file and folder is brought to the disk (fsync), and one
rename puts it at `OUT/cases/<name>/`: the case id, unless source names are wanted. Names in `.work`
say who is building, so that what a dead process left there is known and cleared away at the next
start::

    <name>.<host>.<process>.<start>.<random>.new         being built
    ... .ready                                           whole, about to replace an older result
    ... .old                                             the older result, about to be deleted

A replacement takes three renames: `.new` to `.ready`, the case to `.old`, `.ready` to the case. If
it is interrupted after the second, the next start does the third; before, it takes `.ready` away.

`SHA256SUMS` names every file but itself and `timing.json`: timing is the one file that differs
between two equal runs, and the sums must not.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from scanloom.core import Reason, ScanError
from scanloom.io.crosswalk import Source, add_sources
from scanloom.io.living import process_start, this_host
from scanloom.io.names import SUMS, TIMING
from scanloom.io.outfolder import check_unclaimed
from scanloom.io.private import PRIVATE, check_key, check_links, private_folder
from scanloom.io.published import Made, keep_file_stamps, read_made
from scanloom.io.whole import clear_drafts, sync

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a full disk and a used-up quota say."""

_NOT_OF_A_DISK = (
    ConnectionError,
    TimeoutError,
    ChildProcessError,
    ProcessLookupError,
    InterruptedError,
    BlockingIOError,
)

ELSEWHERE_DEAD_AFTER = 86_400.0
"""Seconds without a change after which a folder that another host was building is given up."""

HANDSHAKE = "handshake"
"""Of a run: the file by which workers prove that they see OUT."""

_OF_A_RUN = re.compile(
    rf"{HANDSHAKE}\..+|run(-\d+-of-\d+)?\.lock\.[0-9a-f]{{16}}(\.stale)?|\..+\.[0-9a-f]{{8}}"
)
"""Files of `.work` that a run makes, beside its lock: of workers, of locks, drafts."""
_OF_BIDS = re.compile(r"bids-[0-9a-f]{8}(-old)?")
"""Folders of `.work` in which `OUT/bids` is made anew."""

State = Literal["new", "ready", "old"]


def claim_out(out: Path, fingerprint: str) -> None:
    """Check that `out` belongs to this key, and put right what dead runs left in it.

    Nothing is made here: the key's fingerprint is laid down when the first case is published, so
    that a run without a result leaves no trace.

    Raises
    ------
    ScanError
        KEY_MISMATCH if the cases there have ids of another key; OUTPUT_UNWRITABLE if it can't be
        read, or holds somebody's own files under names that scanloom writes to.
    """
    check_key(out, fingerprint)
    check_unclaimed(out)
    try:
        _recover(out)
    except OSError as exc:
        raise output_error(exc) from exc


def check_writable(out: Path) -> None:
    """Check that a case could be built in `out`, which is left as it was.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE.
    """
    with CaseFolder(out, "check"):
        pass


def tidy(out: Path, since: float) -> None:
    """Take away what processes that died left in `out`; its published cases are not touched.

    Parameters
    ----------
    out : Path
        The output folder.
    since : float
        A moment (seconds since 1970) long enough ago that no file is still being drafted since.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if a part of it is a link.
    OSError
        If something can't be taken away.
    """
    check_links(out)
    _recover(out)
    for folder in (out, *(out / part for part in ("failed", "report", "report/thumbs", PRIVATE))):
        clear_drafts(folder, since)
    work = out / ".work"
    for path in work.iterdir() if work.is_dir() else ():
        with suppress(FileNotFoundError):  # of a run of another shard
            if _OF_BIDS.fullmatch(path.name) and path.stat().st_mtime < since:
                shutil.rmtree(path, ignore_errors=True)
            elif _OF_A_RUN.fullmatch(path.name) and path.is_file() and _is_left(path, since):
                path.unlink()


def token_name() -> str:
    """Return a name for a file in `.work` that stays while this process lives, and no longer."""
    owner = _Owner.here(HANDSHAKE)
    return f"{HANDSHAKE}.{owner.host}.{owner.process}.{owner.start}.{owner.random}"


def _is_left(path: Path, since: float) -> bool:
    """Whether nobody needs a file of `.work`: whose owner is known goes with that one."""
    owner = _Owner.parse(f"{path.name}.new")
    return owner.given_up(path) if owner else path.stat().st_mtime < since


class CaseFolder:
    """A case folder in the making; leaving the block without `publish` takes it away again.

    Parameters
    ----------
    out : Path
        The output folder; made if it is not there, and removed again if it stays empty.
    name : str
        Of the folder to be: the case id, or another name without dots.
    fingerprint : str or None
        Of the key of the ids, for `OUT/private/`; None leaves the folder unclaimed.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE, for every OSError between entering and leaving the block.
    """

    def __init__(self, out: Path, name: str, fingerprint: str | None = None) -> None:
        self.out, self.name, self.fingerprint = out, name, fingerprint
        self.path = out / ".work" / str(_Owner.here(name))

    def __enter__(self) -> Self:
        self._made = _missing(self.path.parent)
        try:
            self.path.mkdir(parents=True)
        except OSError as exc:
            self._undo()
            raise output_error(exc) from exc
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()
        if isinstance(error, OSError):
            raise output_error(error) from error

    def publish(self, *, replace: bool = False, source: Source | None = None) -> Path:
        """Bring everything to the disk and rename it into place.

        Parameters
        ----------
        replace : bool
            Whether a folder that is there already is replaced; one of the same recipe always is
            if its source had other content.
        source : Source or None
            For the crosswalk: where the case comes from.

        Returns
        -------
        Path
            `OUT/cases/<name>`.

        Raises
        ------
        ScanError
            STALE if a result of another recipe is there and is not to be replaced; KEY_MISMATCH if
            OUT was meanwhile claimed for another key.
        OSError
            Which leaving the block maps.
        """
        target = self.out / "cases" / self.name
        if target.exists() and not replace:
            there, mine = _made(target), _made(self.path)
            if there is None or mine is None or there.recipe != mine.recipe:
                raise ScanError(Reason.STALE, "its folder is there already")
            if there.source == mine.source:
                return target  # another process was given the same case, and was first
        _write_sums(self.path)
        if (self.path / TIMING).exists():
            keep_file_stamps(self.path)
        _sync_tree(self.path)
        self._made += _missing(target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._claimed(source):  # the crosswalk knows a case before it is seen
            if target.exists():
                self._replace(target)
            else:
                self.path.rename(target)
        sync(target.parent)
        sync(self.path.parent)
        self._made = []
        return target

    def _replace(self, target: Path) -> None:
        ready, old = self.path.with_suffix(".ready"), self.path.with_suffix(".old")
        self.path.rename(ready)
        sync(ready.parent)
        target.rename(old)
        try:
            ready.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)  # what is left of it goes at the next start

    @contextmanager
    def _claimed(self, source: Source | None) -> Iterator[None]:
        if self.fingerprint is None:
            yield
            return
        with private_folder(self.out, self.fingerprint) as private:
            if source is not None:
                add_sources(private, [dataclasses.replace(source, folder=self.name)])
            yield

    def _undo(self) -> None:
        for state in (".new", ".ready"):
            shutil.rmtree(self.path.with_suffix(state), ignore_errors=True)
        for folder in reversed(self._made):
            with suppress(OSError):  # not empty: another process uses it
                folder.rmdir()


def output_error(exc: OSError, what: str = "the results") -> ScanError:
    """Return the error of the closed list for one of the system, without its text."""
    if exc.errno in FULL:
        return ScanError(Reason.DISK_FULL, f"no space left for {what}")
    name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
    return ScanError(Reason.OUTPUT_UNWRITABLE, f"{what} can't be written ({name})")


def disk_error(error: Exception) -> ScanError | None:
    """Return the error of the closed list for what a disk said of a file of ours, else None.

    What it says of a scan is UNREADABLE, by who reads it: it does not get here.
    """
    if not isinstance(error, OSError) or error.errno is None or isinstance(error, _NOT_OF_A_DISK):
        return None
    known = output_error(error, "a file of ours")
    name = errno.errorcode.get(error.errno, "an unknown error")
    full = known.reason is Reason.DISK_FULL
    detail = known.detail if full else f"a file of ours can't be read or written ({name})"
    return ScanError(known.reason, detail)


@contextmanager
def output_border() -> Iterator[None]:
    """Turn what a disk says of files of ours in the block into an error of the closed list.

    Raises
    ------
    ScanError
        DISK_FULL or OUTPUT_UNWRITABLE.
    """
    try:
        yield
    except OSError as exc:
        known = disk_error(exc)
        if known is None:
            raise
        raise known from exc


@dataclass(frozen=True)
class _Owner:
    """Who builds a folder of `.work`, as its name says."""

    name: str
    host: str
    process: int
    start: str
    random: str
    state: State

    @classmethod
    def here(cls, name: str) -> Self:
        process = os.getpid()
        return cls(name, this_host(), process, process_start(process), secrets.token_hex(4), "new")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        parts = text.split(".")
        if len(parts) != 6 or not parts[2].isdigit():
            return None
        name, host, process, start, random, state = parts
        if state not in ("new", "ready", "old"):
            return None
        return cls(name, host, int(process), start, random, state)  # type: ignore[arg-type]

    @property
    def dead(self) -> bool:
        """Whether it surely runs no more: of another host, that can't be known from here."""
        return self.host == this_host() and process_start(self.process) != self.start

    def given_up(self, path: Path) -> bool:
        """Whether it is dead, or of another host and not heard of for a day."""
        if self.host == this_host():
            return self.dead
        with suppress(FileNotFoundError):  # somebody took it away
            return time.time() - path.stat().st_mtime > ELSEWHERE_DEAD_AFTER
        return False

    def __str__(self) -> str:
        return f"{self.name}.{self.host}.{self.process}.{self.start}.{self.random}.{self.state}"


def _recover(out: Path) -> None:
    """Finish or take back what dead processes left in `.work`."""
    work = out / ".work"
    if not work.is_dir():
        return
    left = {p: owner for p in sorted(work.iterdir()) if (owner := _Owner.parse(p.name))}
    dead = {path: owner for path, owner in left.items() if owner.given_up(path)}
    for path, owner in dead.items():
        if owner.state == "old":
            target, ready = out / "cases" / owner.name, path.with_suffix(".ready")
            if not target.exists():
                (ready if ready.is_dir() else path).rename(target)
                sync(target.parent)
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)


def _made(folder: Path) -> Made | None:
    """Return how a case was made, None where it is damaged."""
    try:
        return read_made(folder)
    except (OSError, ValueError):
        return None


def _write_sums(folder: Path) -> None:
    """Write SHA256SUMS in the form that `sha256sum --check` reads."""
    lines = []
    for path in _files(folder):
        name = path.relative_to(folder).as_posix()
        if name not in (SUMS, TIMING):
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _sync_tree(folder: Path) -> None:
    """Bring all files, then all folders from the innermost out, to the disk."""
    for path in _files(folder):
        sync(path)
    inner = sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True)
    for path in (*inner, folder):
        sync(path)


def _missing(folder: Path) -> list[Path]:
    """Return the folders of a path that are not there yet, the outermost first."""
    return [p for p in (*reversed(folder.parents), folder) if not p.exists()]
