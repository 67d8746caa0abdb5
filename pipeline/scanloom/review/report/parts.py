"""The rows of the report in parts, and the columns by which its page searches, filters and sorts.

A page of a million rows can't hold them. They stand in files beside it, in the order of review and
some hundred in each, which the page loads as scripts: a page on disk may not fetch anything else.
What a search, filter or order of all rows needs is in columns of one to four bytes a row, each in a
file of its own; the words of a search that many rows share are named once in the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scanloom.io.system.atomic_write import private_draft
from scanloom.review.scratch import Columns, Texts

ROWS = 200
"""Rows of a part: a page of the table takes 30, in another order mostly of as many parts."""
TEXTS = 100_000
"""Rows whose words are in a part: a search goes through all of them."""
WHOLE = 500
"""Most rows of a report whose parts stand in the page itself."""
CODED = ("status", "verdict", "reason", "flags", "models", "review")
"""Fields of a row of which many rows share the value."""
_NO_VALUE = -1.0
_SET, _DRAFT = re.compile(r"[0-9a-f]{16}"), re.compile(r"\.new\.[0-9a-f]{8}")
OLD_S, ABANDONED_S = 600.0, 86_400.0
"""Age from which parts are removed that are not those of the page: another process may be about to
write its page. The same of parts whose writer died."""


class RowTable:
    """The rows of a report: each as its JSON text, with its fields in columns.

    Parameters
    ----------
    structures : int
        Number of structures, whose volumes a row may have.
    folder : Path, optional
        A folder of the file system that has room for the rows; by default they are in memory.
    """

    def __init__(self, structures: int, folder: Path | None = None) -> None:
        self._rows, self._words, self._ids = Texts(folder), Texts(folder), Texts(folder)
        self._values = {name: dict[Any, int]() for name in CODED}
        self._numbers, self._structures = Columns[str](folder), range(structures)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._ids)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, as the page shows it."""
        self._rows.add(embedded(row))
        texts = (row["id"], row["detail"], *(f["text"] for f in row["findings"]))
        text = " ".join((*texts, *row.get("source", ())))
        self._words.add(text.replace("\n", " ").lower())
        self._ids.add(row["id"])
        self._numbers.add("risk", row["risk"])
        self._numbers.add("seconds", row["seconds"])
        for name in CODED:
            value = row.get(name, "")
            known = self._values[name]
            key = tuple(value) if isinstance(value, list) else value
            self._numbers.add(name, known.setdefault(key, len(known)))
        volumes = row["volumes"] or (None,) * len(self._structures)
        for n, ml in zip(self._structures, volumes, strict=True):
            self._numbers.add(f"volume-{n}", _NO_VALUE if ml is None else ml)

    def count(self, name: str) -> Counter[Any]:
        """Return the number of rows of each value of a field."""
        counts = np.bincount(self._numbers.read(name).astype(np.int64), minlength=1).tolist()
        return Counter(dict(zip(self._values[name], counts, strict=False)))

    def most_frequent(self) -> int:
        """Return the structure that most rows have a volume of; 0 without any."""
        counts = [int((self._numbers.read(f"volume-{n}") > 0).sum()) for n in self._structures]
        return counts.index(max(counts)) if counts else 0

    def values(self) -> dict[str, list[Any]]:
        """Return the values of the fields of `CODED`, in their order."""
        return {name: sorted(known) for name, known in self._values.items()}

    def parts(self) -> Iterator[tuple[str, str]]:
        """Yield name and JSON text of each part.

        Returns
        -------
        rows-0 ...
            `ROWS` rows each, in the order of review: their positions count from 0.
        words-0 ...
            The words of `TEXTS` rows, lower case, a line each.
        codes-status ...
            Indices into `values`, one to four bytes each.
        values-risk, values-seconds, values-volume-0 ...
            Numbers as float32; negative if unknown.
        has-0 ...
            A bit a row: whether the structure has a volume above 0.
        order-id, hash-id
            Positions in the order of ids, and the CRC-32 of each id.
        """
        ids = self._ids.as_bytes()
        by_id = np.argsort(ids, kind="stable")
        hashes = np.fromiter(map(crc32, ids), np.uint32, len(ids))
        del ids
        # ids break ties, so that equal results give equal pages
        ordered = by_id[np.argsort(-self._numbers.read("risk")[by_id], kind="stable")]
        for n, of_part in enumerate(_cut(ordered, ROWS)):
            yield f"rows-{n}", f"[{','.join(map(self._rows.__getitem__, of_part))}]"
        for n, of_part in enumerate(_cut(ordered, TEXTS)):
            yield f"words-{n}", embedded("\n".join(map(self._words.__getitem__, of_part)))
        for name, known in self._values.items():
            ranks = {value: rank for rank, value in enumerate(sorted(known))}
            rank_of = np.array([ranks[value] for value in known], np.uint32)
            codes = self._numbers.read(name).astype(np.int64)[ordered]
            kind = next(
                k for k in (np.uint8, np.uint16, np.uint32) if len(known) <= np.iinfo(k).max
            )
            yield f"codes-{name}", _base64(rank_of[codes].astype(kind))
        for name in ("risk", "seconds"):
            yield f"values-{name}", _base64(self._numbers.read(name).astype(np.float32)[ordered])
        for n in self._structures:
            volumes = self._numbers.read(f"volume-{n}").astype(np.float32)[ordered]
            yield f"values-volume-{n}", _base64(volumes)
            yield f"has-{n}", _base64(np.packbits(volumes > 0, bitorder="little"))
        position_of = np.empty(len(ordered), np.uint32)
        position_of[ordered] = np.arange(len(ordered), dtype=np.uint32)
        yield "order-id", _base64(position_of[by_id])
        yield "hash-id", _base64(hashes[ordered])


def _cut(rows: NDArray[np.int64], size: int) -> Iterator[list[int]]:
    """Yield rows, some at a time."""
    for first in range(0, len(rows), size):
        yield rows[first : first + size].tolist()


def embedded(data: Any) -> str:
    """Return data as JSON that can't close the HTML element around it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _base64(values: ArrayLike) -> str:
    """Return numbers, the lowest byte of each first, as a JSON text."""
    array_ = np.asarray(values)
    plain = np.ascontiguousarray(array_, array_.dtype.newbyteorder("<"))
    return f'"{base64.b64encode(plain.tobytes()).decode()}"'


def write_parts(folder: Path, parts: Iterator[tuple[str, str]], mode: int) -> str:
    """Write parts into a new folder, which is named after their content; return its name.

    The folders before it stay until `remove_others`, for pages that were written before.

    Parameters
    ----------
    folder : Path
        The folder of such folders; created if it is missing.
    mode : int
        Mode of the files, before the umask; 0o600 is that of private ones.

    Raises
    ------
    OSError
        If a file can't be written.
    """
    folder_mode = mode | (mode & 0o444) >> 2  # who can read can enter
    folder.mkdir(mode=folder_mode, exist_ok=True)
    digest = hashlib.sha256()
    with private_draft(folder / "new") as draft:
        draft.mkdir(folder_mode)
        for name, text in parts:
            content = f"reportPart({json.dumps(name)},{text})\n".encode()
            digest.update(content)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(draft / f"{name}.js", flags, mode), "wb") as file:
                file.write(content)
        name = digest.hexdigest()[:16]
        with suppress(OSError):  # there already: the same content
            draft.rename(folder / name)
    return name


def remove_others(folder: Path, name: str) -> None:
    """Remove older folders of parts than that with a name, if there are any."""
    now = time.time()
    for entry in folder.iterdir() if folder.is_dir() else ():
        for form, age in ((_SET, OLD_S), (_DRAFT, ABANDONED_S)):
            with suppress(FileNotFoundError):  # removed by another process
                is_old = entry.lstat().st_mtime < now - age
                if form.fullmatch(entry.name) and entry.name != name and is_old:
                    shutil.rmtree(entry, ignore_errors=True)  # a link is left as it is
