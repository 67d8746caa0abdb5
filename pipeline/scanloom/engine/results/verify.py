"""Check an output folder: case files against their checksums, tables against the cases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from scanloom.engine.results.verify_tables import (
    TableUnreadableError,
    altered_manifest,
    altered_measurements,
    missing_tables,
    recorded_cases,
)
from scanloom.io.output.file_names import CHECKSUMS, TIMING
from scanloom.io.output.layout import CASES, no_results, published_cases
from scanloom.io.output.private import PRIVATE
from scanloom.io.output.published import MAX_DOCUMENT_BYTES
from scanloom.io.system.regular_files import open_regular_file, read_regular_file
from scanloom.review.corrections.revisions import REVISIONS, revision_folders
from scanloom.review.verdicts.log import COMMENTS, REVIEW, VERDICTS, LineError, read_lines

DiscrepancyKind = Literal["changed", "missing", "extra", "unreadable"]


@dataclass(frozen=True)
class Discrepancy:
    """A file, or a whole case, that differs from its published state.

    Parameters
    ----------
    fault : DiscrepancyKind
        The kind of difference.
    file : str
        Path relative to the output folder.
    """

    fault: DiscrepancyKind
    file: str


def verify(out: Path) -> Iterator[Discrepancy]:
    """Compare every published case with its SHA256SUMS, and the tables with the cases.

    Yields
    ------
    Finding
        First case by case, sorted, then missing cases, then tables. `timing.json` has no checksum
        and only has to exist. Cases published after the tables were written are not a finding.

    Raises
    ------
    ScanError
        NOT_FOUND or NO_RESULTS if there are no results in `out`.
    """
    folders, expected = published_cases(out), recorded_cases(out)
    if not expected and not (out / CASES).is_dir():
        raise no_results(out)
    intact = set()
    for folder in folders:
        findings = list(_verify_case(folder, f"{CASES}/{folder.name}"))
        yield from findings
        if not findings:
            intact.add(folder.name)
    yield from _verify_review(out)
    missing = expected - {folder.name for folder in folders}
    yield from (Discrepancy("missing", f"{CASES}/{name}") for name in sorted(missing))
    yield from (Discrepancy("missing", name) for name in missing_tables(out))
    measurements = partial(altered_measurements, out, intact)
    for altered in (measurements, partial(altered_manifest, out)):
        try:
            yield from (Discrepancy("changed", name) for name in sorted(altered()))
        except TableUnreadableError as error:
            yield Discrepancy("unreadable", error.file)


def _verify_review(out: Path) -> Iterator[Discrepancy]:
    """Yield the damaged lines of verdicts, and the differences of revisions from their sums."""
    for name in (f"{REVIEW}/{VERDICTS}", f"{PRIVATE}/{COMMENTS}"):
        try:
            for _ in read_lines(out / name):
                pass
        except LineError as error:
            yield Discrepancy("changed", f"{name}, {error}")
        except OSError:
            yield Discrepancy("unreadable", name)
    folder = Path(out, *REVISIONS)
    for case in sorted(folder.iterdir()) if folder.is_dir() else ():
        for revision in revision_folders(out, case.name):
            yield from _verify_case(revision, revision.relative_to(out).as_posix())


def _verify_case(folder: Path, name: str) -> Iterator[Discrepancy]:
    """Yield the differences of a case from its checksums; `name` is its path in the output."""
    try:
        sums = _read_sums(folder / CHECKSUMS)
    except FileNotFoundError:
        yield Discrepancy("missing", f"{name}/{CHECKSUMS}")
        return
    except (OSError, ValueError):
        yield Discrepancy("unreadable", f"{name}/{CHECKSUMS}")
        return
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    expected = {*sums, CHECKSUMS, TIMING}
    yield from (Discrepancy("missing", f"{name}/{file}") for file in sorted(expected - present))
    yield from (Discrepancy("extra", f"{name}/{file}") for file in sorted(present - expected))
    for file in sorted(present & sums.keys()):
        try:
            with open_regular_file(folder / file) as stream:
                is_same = hashlib.file_digest(stream, "sha256").hexdigest() == sums[file]
        except OSError:
            yield Discrepancy("unreadable", f"{name}/{file}")
            continue
        if not is_same:
            yield Discrepancy("changed", f"{name}/{file}")


def _read_sums(path: Path) -> dict[str, str]:
    """Return the digest of each file from a file in the format of `sha256sum --check`."""
    sums = {}
    for line in read_regular_file(path, MAX_DOCUMENT_BYTES).decode().splitlines():
        digest, gap, file = line[:64], line[64:66], line[66:]
        if gap != "  " or not file:
            raise ValueError(f"a line of {path.name} is not a checksum and a file name")
        sums[file] = digest
    return sums
