"""What an output folder says, apart from times, and what no run needs: to compare two of them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from scanloom.io.identity import key_fingerprint
from scanloom.io.index.build import stored_index
from scanloom.io.output.audit import read_trail
from support.index_rows import index_rows
from support.layouts import case_folders

TABLES = ("manifest", "measurements")


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def output_state(out: Path, key: bytes) -> dict[str, Any]:
    """Return all that an output folder says, by subject."""
    from pyarrow import parquet

    private = out / "private"
    index = stored_index(out, key_fingerprint(key))
    assert index is not None
    files = [path for name in ("cases", "failed") for path in (out / name).rglob("*")]
    files += [out / f"{table}.csv" for table in TABLES]
    return {
        "files": {
            path.relative_to(out).as_posix(): digest(path)
            for path in files
            if path.is_file() and path.name != "timing.json"
        },
        "tables": [parquet.read_table(out / f"{table}.parquet").to_pylist() for table in TABLES],
        "counts": index.counts(),
        "index": index_rows(index),
        "crosswalk": sorted(
            str(row) for row in parquet.read_table(private / "crosswalk.parquet").to_pylist()
        ),
        "ledger": rows_of_folders(out, "ledger"),
        "tabled": rows_of_folders(out, "tabled"),
        "trail": told_results(out, key),
        "report": shown_rows(out),
    }


def rows_of_folders(out: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table; in place of inode and time, whether they are the folder's."""
    from pyarrow import parquet

    states = {folder.name: folder.stat() for folder in case_folders(out)}
    expected = {
        name: {"inode": state.st_ino, "time": state.st_mtime_ns} for name, state in states.items()
    }
    rows: list[dict[str, Any]] = parquet.read_table(out / "private" / f"{name}.parquet").to_pylist()
    for row in rows:
        of_folder = expected.get(row["name"], {})
        for column in {"inode", "time"}.intersection(row):
            row[column] = row[column] == of_folder.get(column)
    return rows


def told_results(out: Path, key: bytes) -> dict[str, str]:
    """Return the sums of the results that the audit trail tells, which checks each of its lines."""
    lines = read_trail(out, key)
    return {line["case"]: line["sums"] for line in lines if line["event"] == "segmented"}


def shown_rows(out: Path) -> dict[str, Any]:
    """Return the rows of the report's page, and how they are sorted and searched, without times."""
    page = (out / "report" / "index.html").read_text()
    [text] = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    data = json.loads(text)
    parts = {name: part for name, part in data.pop("parts").items() if "seconds" not in name}
    for name, rows in parts.items():
        if name.startswith("rows-"):
            parts[name] = [{**row, "seconds": None} for row in rows]
    return data | parts


def left_over(out: Path, temporary: Path) -> list[str]:
    """Return what no run needs: claims, locks, drafts, lists, lines that are not in their table."""
    known = {".work", ".lock"}
    names = ["*.claim", "*.lock", "*.jsonl", "progress", "sorted.*", "clock.*", ".*"]
    found = {path for name in names for path in out.rglob(name) if path.name not in known}
    found -= {out / "private" / "audit.jsonl", *out.glob("runs/*/log.jsonl")}
    found -= set(out.glob("private/runs/*/cases.jsonl"))  # of a killed run: removed a day later
    found |= set((out / ".work").glob("*")) | set(temporary.glob("*"))
    return sorted(map(str, found))
