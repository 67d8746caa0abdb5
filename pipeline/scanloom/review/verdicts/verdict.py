"""Decisions of reviewers about a result."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from scanloom.io.output.file_names import CASE, CHECKSUMS
from scanloom.io.output.json_file import MAX_DOCUMENT_BYTES, read_json
from scanloom.io.output.layout import is_case_name, listed_label_maps
from scanloom.io.system.regular_files import read_regular_file
from scanloom.review.revisions import latest_result, replaced_correction

Decision = Literal["accept", "edit", "reject"]
"""The result can be used; it can be used once it is corrected; it can't be used."""
DECISIONS: tuple[Decision, ...] = get_args(Decision)

TAGS: Mapping[str, str] = {
    "leak": "leak",
    "missing-part": "missing part",
    "wrong-label": "wrong label",
    "sides-swapped": "sides swapped",
    "cut-off": "cut off",
    "artefact": "artefact",
    "wrong-body-part": "wrong body part",
}
"""Display name of each tag."""

SCHEMA = 1
MAX_SECONDS = 24 * 3600.0
"""Longest time that a verdict states: a page may be left open."""


@dataclass(frozen=True)
class Seen:
    """The result that a reviewer saw.

    Parameters
    ----------
    recipe : str
        Hash of the recipe.
    labels : mapping
        SHA-256 of each label map, by the name of its file.
    """

    recipe: str
    labels: Mapping[str, str]

    @property
    def version(self) -> str:
        """A text that no other result of the case has."""
        plain = json.dumps([self.recipe, dict(self.labels)], sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Verdict:
    """A reviewer's decision about a case, as a line of the log.

    Parameters
    ----------
    reviewer : str
        Code of the reviewer, such as "r1".
    decision : "accept", "edit", "reject" or None
        About the case; None if the line undoes another.
    structures : mapping
        Decisions about single structures, by "<model>/<label>".
    tags : tuple of str
        Keys of `TAGS`.
    seconds : float
        Time for which the case was looked at.
    comment : bool
        Whether there is a comment, in the private folder.
    undoes : int or None
        Number of the line that is undone.
    reading : int
        2 if the case had come back to the reviewer, else 1.
    independent : bool
        Whether it was given without seeing another reviewer's verdict about the result.
    number : int
        Number of the line in the log, from 1; 0 before it is kept.
    at : str
        Moment in UTC, ISO 8601.
    """

    case: str
    reviewer: str
    seen: Seen
    decision: Decision | None = None
    structures: Mapping[str, Decision] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    seconds: float = 0.0
    comment: bool = False
    undoes: int | None = None
    reading: int = 1
    independent: bool = True
    number: int = 0
    at: str = ""


def about(seen: Seen, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return the verdicts about a result, without those about a result that it replaced."""
    return {reviewer: verdict for reviewer, verdict in verdicts.items() if verdict.seen == seen}


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a JSON object."""
    return {
        "schema": SCHEMA,
        "case": verdict.case,
        "reviewer": verdict.reviewer,
        "at": verdict.at,
        "seconds": round(verdict.seconds, 1),
        "recipe": verdict.seen.recipe,
        "labels": dict(verdict.seen.labels),
        "decision": verdict.decision,
        "structures": dict(verdict.structures),
        "tags": list(verdict.tags),
        "comment": verdict.comment,
        "undoes": verdict.undoes,
        "reading": verdict.reading,
        "independent": verdict.independent,
    }


def verdict_from_plain(plain: Mapping[str, Any]) -> Verdict:
    """Return the verdict in a JSON object of the log.

    Raises
    ------
    ValueError, LookupError, TypeError
        If it was not written by scanloom.
    """
    decision, undoes, tags = plain["decision"], plain["undoes"], tuple(plain["tags"])
    allowed = DECISIONS if undoes is None else (None,)
    if decision not in allowed or not set(tags) <= TAGS.keys():
        raise ValueError("an unknown decision or tag")
    structures = dict(plain["structures"])
    if not set(structures.values()) <= set(DECISIONS):
        raise ValueError("an unknown decision")
    return Verdict(
        case=str(plain["case"]),
        reviewer=str(plain["reviewer"]),
        seen=Seen(str(plain["recipe"]), dict(plain["labels"])),
        decision=decision,
        structures=structures,
        tags=tags,
        seconds=float(plain["seconds"]),
        comment=bool(plain["comment"]),
        undoes=None if undoes is None else int(undoes),
        reading=int(plain["reading"]),
        independent=bool(plain["independent"]),
        number=int(plain["number"]),
        at=str(plain["at"]),
    )


STATES: Mapping[str, str] = {
    "accept": "accepted",
    "edit": "needs edit",
    "reject": "rejected",
    "disagreed": "disagreed",
    "stale": "replaced since its review",
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
    files = {entry["file"] for entry in listed_label_maps(result)}
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


def reference_result(out: Path, name: str, verdicts: Mapping[str, Verdict]) -> Path:
    """Return the folder of the result of a case, or of the revision, whose labels are people's.

    It is the latest one. If a run replaced what a person had corrected, it is that correction,
    until somebody judges the new result.

    Raises
    ------
    OSError
        If a file can't be read for the moment.
    """
    latest = latest_result(out, name)
    before = replaced_correction(out, name)
    if before is None:
        return latest
    with suppress(OSError, ValueError, LookupError, TypeError):  # damaged: told when it is read
        if about(seen_of(latest), verdicts):
            return latest
    return before


def differ(verdicts: Mapping[str, Verdict]) -> bool:
    """Return whether reviewers of a case differ, and no majority decided between them."""
    decided = [each.decision for each in verdicts.values() if each.decision]
    if len(set(decided)) < 2:
        return False
    return max(decided.count(each) for each in decided) * 2 <= len(decided)


def state_of(seen: Seen, verdicts: Mapping[str, Verdict]) -> str:
    """Return the decisions about a result.

    Parameters
    ----------
    verdicts : mapping
        Verdicts about its case, by reviewer.

    Returns
    -------
    str
        A decision (that of the majority), "disagreed", "stale" if all are about another result, or
        "open" without any.
    """
    current = about(seen, verdicts)
    if not current:
        return "stale" if verdicts else "open"
    if differ(current):
        return "disagreed"
    # the last verdict first: of decisions that are equally frequent it counts
    decided = [v.decision for v in sorted(current.values(), key=lambda v: -v.number) if v.decision]
    return max(decided, key=decided.count)
