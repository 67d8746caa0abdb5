"""Results that verdicts are about, and the decisions on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from scanloom.io.output.file_names import CASE, CHECKSUMS, SEGMENTS
from scanloom.io.output.json_file import MAX_DOCUMENT_BYTES, read_json
from scanloom.io.output.layout import is_case_name
from scanloom.io.system.regular_files import read_regular_file
from scanloom.review.corrections.revisions import latest_result
from scanloom.review.verdicts.verdict import Seen, Verdict, about

STATES: Mapping[str, str] = {
    "accept": "accepted",
    "edit": "needs edit",
    "reject": "rejected",
    "disagreed": "disagreed",
    "stale": "replaced since its review",
    "open": "only structures judged",
}
"""Words for the state of a case with verdicts."""

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def seen_of(result: Path) -> Seen:
    """Return recipe and hashes of the label maps in the folder of a case or revision.

    Raises
    ------
    OSError, ValueError, LookupError
        If a document is damaged.
    """
    files = {entry["file"] for entry in read_json(result / SEGMENTS)["files"]}
    lines = read_regular_file(result / CHECKSUMS, MAX_DOCUMENT_BYTES).decode("utf-8")
    sums = _SUM_LINE.findall(lines)
    recipe = read_json(result / CASE)["recipe"]
    return Seen(recipe, {name: value for value, name in sums if name in files})


def current_results(out: Path, names: Iterable[str]) -> dict[str, Seen]:
    """Return the latest result of each of some cases; damaged and missing ones are left out."""
    results = dict[str, Seen]()
    for name in names:
        with suppress(OSError, ValueError, LookupError, TypeError):
            if is_case_name(name):
                results[name] = seen_of(latest_result(out, name))
    return results


def differ(verdicts: Mapping[str, Verdict]) -> bool:
    """Return whether reviewers of a case differ, and no majority decided between them."""
    decided = [each.decision for each in verdicts.values() if each.decision]
    if len(set(decided)) < 2:
        return False
    return max(decided.count(each) for each in decided) * 2 <= len(decided)


def state_of(seen: Seen, verdicts: Mapping[str, Verdict], *, disagreed: bool | None = None) -> str:
    """Return the decisions about a result.

    Parameters
    ----------
    seen : Seen
        The result that there is now.
    verdicts : mapping
        Verdicts about its case, by reviewer.
    disagreed : bool or None
        Whether the reviewers differ; None to find out.

    Returns
    -------
    str
        A decision (that of the majority), "disagreed", "stale" if all are about another result, or
        "open".
    """
    current = about(seen, verdicts)
    if not current:
        return "stale" if verdicts else "open"
    if differ(current) if disagreed is None else disagreed:
        return "disagreed"
    decided = [v.decision or "open" for v in sorted(current.values(), key=lambda v: -v.number)]
    return max(decided, key=decided.count)
