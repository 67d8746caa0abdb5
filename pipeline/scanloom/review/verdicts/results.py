"""The result that a verdict is about."""

from __future__ import annotations

import re
from pathlib import Path

from scanloom.io.output.file_names import CASE, CHECKSUMS, SEGMENTS
from scanloom.io.output.json_file import read_json
from scanloom.review.verdicts.verdict import Seen

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def seen_of(result: Path) -> Seen:
    """Return recipe and hashes of the label maps in the folder of a case or revision.

    Raises
    ------
    OSError, ValueError, LookupError
        If a document is damaged.
    """
    files = {entry["file"] for entry in read_json(result / SEGMENTS)["files"]}
    sums = _SUM_LINE.findall((result / CHECKSUMS).read_text("utf-8"))
    recipe = read_json(result / CASE)["recipe"]
    return Seen(recipe, {name: value for value, name in sums if name in files})
