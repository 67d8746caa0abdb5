"""`scanloom index`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from scanloom.cli.console import (
    Exit,
    console,
    error_boundary,
    exit_of_nothing,
    print_result,
    report_new_key,
    unexamined,
)
from scanloom.cli.options import (
    ArchiveOptions,
    KeyOption,
    Reporting,
    StrictOption,
    folder_option,
    takes_panels,
)

if TYPE_CHECKING:
    from scanloom.io.index.build import Index
    from scanloom.io.index.listing import SeriesLine
    from scanloom.io.index.storage import IndexedSeries


MAX_FILES = 10
"""Failed files of no series that are listed for each reason."""


@dataclass(frozen=True)
class IndexOptions:
    """Place of the index, and its table."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path | None,
        folder_option("Keep the index in DIR/private; by default, in the user's cache folder."),
    ] = None
    key: KeyOption = None
    ids: Annotated[bool, typer.Option("--ids", help="Show the case ids too.")] = False
    strict: StrictOption = False


@takes_panels
def index(scans: ArchiveOptions, output: IndexOptions, general: Reporting) -> None:
    """List the studies and series of an archive, and account for every file.

    Only headers are read, and files that look like label maps of a scan beside them. Files that
    have not changed since the last time are not indexed again.

    Example: scanloom index archive/ -o results
    """
    with error_boundary(general.mode):
        from scanloom.io.identity import key_fingerprint, load_key
        from scanloom.io.index.build import build_index, record_series
        from scanloom.io.output.private import load_key_of
        from scanloom.io.session import read_session
        from scanloom.io.system.disk_errors import disk_errors_as_scan_errors

        paths = [str(path) for path in scans.all_paths]
        out = output.out
        with report_new_key(output.key), read_session():
            key = load_key(output.key) if out is None else load_key_of(out, output.key)
            listed = build_index(paths, key, out, archives=scans.archives)
            if out is not None:  # so that `scanloom where` answers for the ids
                with disk_errors_as_scan_errors():
                    record_series(out, key_fingerprint(key), listed)
        print_result(general.mode, lambda: document(listed), lambda: show(listed, ids=output.ids))
        raise typer.Exit(exit_of(listed, strict=output.strict))


def document(listed: Index) -> dict[str, Any]:
    """Return the document for `--json`: only ids, codes from closed lists and numbers."""
    return {
        "schema": 1,
        "series": [_series(number, series) for number, series in enumerate(listed.series, 1)],
        "files": listed.counts(),
        "reasons": dict(sorted((code, n) for code, n in listed.reasons.items() if code)),
        "opened": listed.opened,
    }


def _series(number: int, series: IndexedSeries) -> dict[str, Any]:
    info = series.info
    return {
        "number": number if series.slices else None,
        "id": series.id or None,
        "study": series.study or None,
        "kind": series.kind,
        "modality": info.modality or None,
        "body_part": info.body_part or None,
        "plane": info.plane or None,
        "shape": list(info.shape) or None,
        "spacing": list(info.spacing) or None,
        "n_files": series.n_files,
        "status": series.status,
        "reason": info.reason or None,
        "detail": info.detail or None,
    }


def show(listed: Index, *, ids: bool = False) -> None:
    """Print a table of the series and the counts of files."""
    from scanloom.core import OUTCOMES, Reason, counted, printable
    from scanloom.io.index.listing import format_series

    screen = console()
    for line in format_series(_Lines(listed, ids), screen.width):
        screen.print(line)
    counts = listed.counts()
    by_outcome = ", ".join(f"{counts[name]} {name}" for name in ("used", *OUTCOMES))
    # numbers in place of the texts: a million studies may be there
    studies = len({hash(series.study) for series in listed.series if series.study})
    lengths = [
        counted(studies, "study", "studies"),
        counted(len(listed.series), "series", "series"),
    ]
    screen.print(f"{', '.join(lengths)}. {counted(counts['found'], 'file')}: {by_outcome}.")
    reasons = Counter({code: number for code, number in listed.reasons.items() if code})
    for code, count in reasons.most_common():
        screen.print(f"{count:7} {code}: {Reason[code].advice}.")
        files = _failed_files(listed, code)
        for path in islice(files, MAX_FILES):
            screen.print(f"        {printable(path)}")
        if more := sum(1 for _ in files):
            screen.print(f"        and {more} more")


class _Lines:
    """The lines of the series of an index, which are read as they are used."""

    def __init__(self, listed: Index, ids: bool) -> None:
        from scanloom.core import DICOM
        from scanloom.io.index.label_maps import find_label_maps

        self._listed, self._ids = listed, ids
        self._labels = frozenset[int]()
        # files of volumes alone may be label maps: an archive of DICOM is not held for them
        if any(series.kind != DICOM for series in listed.series):
            sizes = [(series.kind, series.path, series.info) for series in listed.series]
            self._labels = find_label_maps(sizes, lambda n: listed.as_series(listed.series[n]))

    def __iter__(self) -> Iterator[SeriesLine]:
        from scanloom.core import DICOM
        from scanloom.io.index.listing import SeriesLine
        from scanloom.io.system.archives import MEMBER_SEPARATOR

        for n, series in enumerate(self._listed.series):
            member = series.first.replace(MEMBER_SEPARATOR, "/")
            yield SeriesLine(
                n + 1 if series.slices else None,
                series.kind,
                series.path if series.kind == DICOM else member,
                series.n_files,
                series.info,
                series.id if self._ids else "",
                n in self._labels,
            )


def _failed_files(listed: Index, code: str) -> Iterator[str]:
    """Yield the paths of the files of no series that failed for a reason."""
    from scanloom.core import Reason

    if Reason[code].outcome == "failed":
        for file in listed.files():
            if file.reason == code and file.series is None:
                yield file.entry.path


def exit_of(listed: Index, *, strict: bool = False) -> Exit:
    """Return the exit code of an index.

    65 (or 74) if no file can be used or chosen; 1 if files could not be looked at, or if `strict`
    and a series has no volume.
    """
    counts = listed.counts()
    # An archive without any scan comes first: files that could not be looked at explain it
    if not counts["used"] and not counts["ambiguous"]:
        return exit_of_nothing(listed.reasons)
    if unexamined(listed.reasons):
        return Exit.SOME_FAILED
    incomplete = counts["failed"] or any(series.info.reason for series in listed.series)
    return Exit.SOME_FAILED if strict and incomplete else Exit.OK
