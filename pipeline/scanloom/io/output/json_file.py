"""JSON documents that scanloom publishes: written in one form, read by the fields that are known.

A document names the version of its form in `schema`. Fields that this version does not know are
ignored. A document of another schema is refused by name: it is not damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.io.system.regular_files import read_regular_file

SCHEMA = 2
"""Schema of the documents that this version reads and writes; 1 was that of 0.1.0."""
MAX_DOCUMENT_BYTES = 1 << 26
"""Size limit of a published document: scanloom writes none as large."""


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data as JSON: UTF-8, keys in the order given, a newline at the end.

    Bytes of a path that are not UTF-8 are written as escapes.

    Raises
    ------
    ValueError
        If a number is not finite: JSON cannot express it.
    """
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_bytes(f"{text}\n".encode("utf-8", "backslashreplace"))


def write_document(path: Path, data: Mapping[str, Any]) -> None:
    """Write a document of ours as `write_json`, with its `schema` first."""
    write_json(path, {"schema": SCHEMA, **data})


def read_json(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """Read a published document; one of more than `max_bytes` is cut, and so no valid JSON.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or is not a JSON object.
    ScanError
        OLDER_VERSION or NEWER_VERSION if its schema is not `SCHEMA`.
    """
    document = json.loads(read_regular_file(path, max_bytes))
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is not a JSON object")  # noqa: TRY004  # a damaged file
    check_schema(document, path.name)
    return document


def check_schema(document: Mapping[str, Any], name: str) -> None:
    """Refuse a document that another version of scanloom wrote in another form.

    Raises
    ------
    ScanError
        OLDER_VERSION or NEWER_VERSION if its schema is not `SCHEMA`.
    """
    schema = document.get("schema", SCHEMA)
    if isinstance(schema, int) and schema != SCHEMA:
        is_newer = schema > SCHEMA
        writer = "a newer scanloom" if is_newer else "an older scanloom"
        detail = f"{name} was written by {writer} (schema {schema}, known: {SCHEMA})"
        raise ScanError(Reason.NEWER_VERSION if is_newer else Reason.OLDER_VERSION, detail)
