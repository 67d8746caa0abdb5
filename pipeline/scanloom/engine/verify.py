"""Whether an output folder still holds what was published: cases by their sums, tables by cases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from scanloom.core import Reason, ScanError
from scanloom.engine.verify_tables import (
    TableUnreadableError,
    altered_manifest,
    altered_measurements,
    known_cases,
    missing_tables,
)
from scanloom.io.names import SUMS, TIMING
from scanloom.io.outfolder import CASES, published_cases
from scanloom.io.published import MOST
from scanloom.io.regular import open_regular, read_regular

Fault = Literal["changed", "missing", "extra", "unreadable"]


@dataclass(frozen=True)
class Finding:
    """One file, or whole case, that is not as it was published; `file` is relative to OUT."""

    fault: Fault
    file: str


def verify(out: Path) -> Iterator[Finding]:
    """Compare every published case with its SHA256SUMS, and the tables with the cases.

    Yields
    ------
    Finding
        Case by case, sorted, then cases that are gone, then tables; nothing where all is well.
        `timing.json` has no sum: it must only be there. Cases that were published after the
        tables were written are no finding.

    Raises
    ------
    ScanError
        NOT_FOUND if there are no results at `out`.
    """
    folders, known = published_cases(out), known_cases(out)
    if not known and not (out / CASES).is_dir():
        raise ScanError(Reason.NOT_FOUND, "there are no results in this folder")
    sound = set()
    for folder in folders:
        found = list(_verify_case(folder, f"{CASES}/{folder.name}"))
        yield from found
        if not found:
            sound.add(folder.name)
    gone = known - {folder.name for folder in folders}
    yield from (Finding("missing", f"{CASES}/{name}") for name in sorted(gone))
    yield from (Finding("missing", name) for name in missing_tables(out))
    measurements = partial(altered_measurements, out, sound)
    for altered in (measurements, partial(altered_manifest, out)):
        try:
            yield from (Finding("changed", name) for name in sorted(altered()))
        except TableUnreadableError as error:
            yield Finding("unreadable", error.file)


def _verify_case(folder: Path, name: str) -> Iterator[Finding]:
    try:
        sums = _read_sums(folder / SUMS)
    except FileNotFoundError:
        yield Finding("missing", f"{name}/{SUMS}")
        return
    except (OSError, ValueError):
        yield Finding("unreadable", f"{name}/{SUMS}")
        return
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    expected = {*sums, SUMS, TIMING}
    yield from (Finding("missing", f"{name}/{file}") for file in sorted(expected - there))
    yield from (Finding("extra", f"{name}/{file}") for file in sorted(there - expected))
    for file in sorted(there & sums.keys()):
        try:
            with open_regular(folder / file) as stream:
                same = hashlib.file_digest(stream, "sha256").hexdigest() == sums[file]
        except OSError:
            yield Finding("unreadable", f"{name}/{file}")
            continue
        if not same:
            yield Finding("changed", f"{name}/{file}")


def _read_sums(path: Path) -> dict[str, str]:
    """Return file to digest of what `sha256sum --check` reads."""
    sums = {}
    for line in read_regular(path, MOST).decode().splitlines():
        digest, gap, file = line[:64], line[64:66], line[66:]
        if gap != "  " or not file:
            raise ValueError("no line of sums")
        sums[file] = digest
    return sums
