"""Lists of series, and lines about a series, in which a person recognises it on the terminal.

They show descriptions, file names and folders, which may name a patient: they are never written to
an output folder.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from scanloom.core import DICOM, Series, counted, printable
from scanloom.io.index.inspection import SeriesInfo, describe_as_read
from scanloom.io.index.label_maps import find_label_maps
from scanloom.io.output.crosswalk import source_path
from scanloom.io.session import current_session
from scanloom.io.system.archives import is_archive
from scanloom.io.system.unpacking import UnpackedFiles

TERMINAL_COLUMNS = 80
WIDE_COLUMNS = 100
"""Width from which shape and spacing of all axes and the number of files are shown."""
MAX_LISTED = 20
"""Series that a message lists; `scanloom index` lists all."""

_GAP = " "
_SHARES = {"name": 3, "folder": 2}
"""Columns that are shortened, and how they share the width that is left."""
_LEAST = 12
"""Characters that a column of texts keeps when it is shortened."""
_NUMERIC = frozenset(("#", "DICOM #", "files"))
LABELS = "labels?"
"""Stands in place of the modality of a file that looks like a label map."""
LABELS_NOTE = (
    f"{LABELS}: it looks like a label map of a scan beside it; chosen, it would be read as a scan"
)
_KEY = "# is the number in this list, DICOM # the SeriesNumber of the headers"
"""The last line of a list in which a series may be chosen by a number."""


@dataclass(frozen=True)
class SeriesLine:
    """A series as a person recognises it.

    Parameters
    ----------
    number : int or None
        Its number in the list, by which it is selected; None if it can't be selected.
    kind : str
        Name of its format in `scanloom.io.formats.FORMATS`.
    path : str
        The only file, a volume's header (of an archive: below its path), or the innermost folder
        of all files.
    files : int
        Number of its files.
    info : SeriesInfo
    id : str
        Its case ID, if known.
    labels : bool
        Whether it looks like a label map; see `find_label_maps`.
    """

    number: int | None
    kind: str
    path: str
    files: int
    info: SeriesInfo
    id: str = ""
    labels: bool = False

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return os.path.dirname(self.path) if self._is_file else self.path

    @property
    def name(self) -> str:
        """SeriesDescription, or else the name of its only file or its header."""
        description = " ".join(self.info.description.split())
        if self.kind == DICOM and description:
            return description
        return os.path.basename(self.path) if self._is_file else ""

    @property
    def extent(self) -> str:
        """Number and spacing of its slices, or the number of its files if it gives no volume."""
        if not self.info.shape:
            return counted(self.files, "file")
        return f"{self.info.shape[2]} slices of {self.info.spacing[2]:.3g} mm"

    @property
    def _is_file(self) -> bool:
        return self.files == 1 or self.kind != DICOM

    @property
    def modality(self) -> str:
        """Modality of its header, or `LABELS`; empty for other files whose format has none."""
        return self.info.modality or (LABELS if self.labels else "")


def list_candidates(candidates: Sequence[Series], only: Sequence[Series] | None = None) -> str:
    """Return the list of the series at a path, or of some, of which one has to be chosen."""
    numbers = {id(series): number for number, series in enumerate(candidates, 1)}
    shown = candidates if only is None else only
    lines = [
        _line_of(numbers[id(series)], series, describe_as_read(series))
        for series in shown[:MAX_LISTED]
    ]
    sizes = [(line.kind, line.path, line.info) for line in lines]
    labels = find_label_maps(sizes, lambda n: shown[n])
    lines = [replace(line, labels=n in labels) for n, line in enumerate(lines)]
    rows = list(format_series(lines, TERMINAL_COLUMNS - 2))  # messages indent them
    if more := len(shown) - len(lines):
        rows.append(f"... and {more} more: `scanloom index` lists all")
    return "\n".join(rows)


def displayed_name(series: Series) -> str:
    """Return the name of a series in the list."""
    return _line_of(None, series, SeriesInfo()).name


def describe_series(series: Series, info: SeriesInfo, width: int) -> str:
    """Return a line about a series: its name, modality, slices and folder, in `width` columns.

    Name and folder are shortened as in `format_series`.
    """
    from rich.cells import cell_len

    line = _line_of(None, series, info)
    facts = ", ".join(filter(None, (line.modality, line.extent)))
    texts = {"name": printable(line.name), "folder": printable(line.folder)}
    fixed = len(f'"", , folder {facts}') if line.name else len(f", folder {facts}")
    widths = _narrowed({name: cell_len(text) for name, text in texts.items()}, width - fixed)
    name, folder = (_fitted(name, text, widths[name]) for name, text in texts.items())
    return ", ".join(filter(None, (f'"{name}"' if name else "", facts, f"folder {folder}")))


def _line_of(number: int | None, series: Series, info: SeriesInfo) -> SeriesLine:
    path = source_path(series)
    if series.kind != DICOM and is_archive(path):  # others in it have names of their own
        path = current_session().cache(UnpackedFiles).member_path(series.files[0])
    return SeriesLine(
        number,
        series.kind,
        path,
        len(series.files),
        info._replace(description=series.description),
    )


def format_series(lines: Iterable[SeriesLine], width: int) -> Iterator[str]:
    """Yield a table of series, headings first, in lines of at most `width` columns.

    No column is left out: texts are shortened, folders at their beginning and file names in their
    middle. Folders are relative to the innermost folder of all series, which the last line names.

    Parameters
    ----------
    lines : iterable of SeriesLine
        They are gone through three times, so that a million series need not be in memory.
    """
    from rich.cells import cell_len

    first, last, has_ids, has_numbers, has_labels = "", "", False, False, False
    count = 0
    for count, line in enumerate(lines, 1):
        first = line.folder if count == 1 else min(first, line.folder)
        last = max(last, line.folder)
        has_ids |= bool(line.id)
        has_numbers |= line.number is not None and line.info.number >= 0
        has_labels |= line.labels
    if not count:
        return
    root = os.path.commonpath([first, last]) if first else ""
    root = "" if root == os.sep else root  # empty if there is none but the file system's

    def rows() -> Iterator[dict[str, str]]:
        for line in lines:
            cells = _cells(line, root, wide=width >= WIDE_COLUMNS)
            yield {**cells, "case id": line.id} if has_ids else cells

    longest: dict[str, int] = {}
    for cells in rows():
        for name, text in cells.items():
            longest[name] = max(longest.get(name, cell_len(name)), cell_len(text))
    widths = _narrowed(longest, width - len(_GAP) * (len(longest) - 1))
    for cells in itertools.chain([{name: name for name in longest}], rows()):
        yield _GAP.join(_cell(name, text, widths[name]) for name, text in cells.items()).rstrip()
    if root:
        yield f"folders in {printable(root)}"
    if has_numbers:
        yield _KEY
    if has_labels:
        yield LABELS_NOTE


def _cells(line: SeriesLine, root: str, *, wide: bool) -> dict[str, str]:
    """Return the cells of a line by the headings of their columns."""
    info = line.info
    cells = {
        "#": "" if line.number is None else str(line.number),
        "name": printable(line.name),
        "DICOM #": str(info.number) if info.number >= 0 else "",
        "modality": line.modality,
    }
    if wide:
        cells |= {
            "files": str(line.files),
            "shape": "x".join(map(str, info.shape)),
            "spacing mm": "x".join(f"{mm:.3g}" for mm in info.spacing),
            "status": info.reason or "used",
        }
    else:
        slices = f"{info.shape[2]} x {info.spacing[2]:.3g} mm" if info.shape else ""
        cells["slices"] = info.reason or slices
    return {**cells, "folder": printable(os.path.relpath(line.folder, root or os.sep))}


def _narrowed(widths: dict[str, int], total: int) -> dict[str, int]:
    """Return widths of which those of long texts are reduced until all fit into a total."""
    widths = dict(widths)
    excess = sum(widths.values()) - total
    while excess > 0:  # a column a step, so that all shrink to their shares
        longest = max(_SHARES, key=lambda name: widths[name] / _SHARES[name])
        if widths[longest] <= _LEAST:
            break
        widths[longest] -= 1
        excess -= 1
    return widths


def _cell(name: str, text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size

    text = _fitted(name, text, width)
    if name in _NUMERIC:
        return " " * (width - cell_len(text)) + text
    return set_cell_size(text, width)


def _fitted(name: str, text: str, width: int) -> str:
    from rich.cells import cell_len

    return text if cell_len(text) <= width else _shortened(text, width, at_start=name == "folder")


def _shortened(text: str, width: int, *, at_start: bool) -> str:
    """Return a text with an ellipsis at its start, or in its middle: the end tells files apart."""
    from rich.cells import cell_len, set_cell_size

    head = "" if at_start else set_cell_size(text, (width - 1) // 2)
    tail = text
    while cell_len(head) + 1 + cell_len(tail) > width:
        tail = tail[1:]
    return f"{head}…{tail}"
