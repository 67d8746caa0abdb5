"""Settings that share the cases of an output folder among reviewers: `review/readers.json`.

It is kept from the first start of a review on: who reads which case must not change half-way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.output.json_file import read_json, write_json
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import output_error
from scanloom.review.verdicts.log import REVIEW, VerdictLog, reviewer_names
from scanloom.review.verdicts.readers import Readers

READERS = "readers.json"


def kept_readers(out: Path) -> Readers:
    """Return how cases are shared since the last start; no reviewer before the first.

    Raises
    ------
    ScanError
        REVIEW_DAMAGED if the file can't be read.
    """
    path = out / REVIEW / READERS
    if not os.path.lexists(path):
        return Readers(())
    if path.is_symlink():
        raise ScanError(Reason.REVIEW_DAMAGED, f"{REVIEW}/{READERS} is a link")
    try:
        plain = read_json(path)
        shares = float(plain["double"]), float(plain["repeat"])
        former = tuple(map(str, plain.get("former", ())))
        return Readers(tuple(map(str, plain["reviewers"])), *shares, former)
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise ScanError(Reason.REVIEW_DAMAGED, f"{REVIEW}/{READERS} can't be read") from exc


def share_cases(
    out: Path,
    reviewers: Sequence[str],
    double: float | None = None,
    repeat: float | None = None,
    *,
    begun: bool = True,
) -> Readers:
    """Share the cases as since the first verdict, and keep how.

    Earlier reviewers keep their cases, also if they are not named; further ones take part.

    Parameters
    ----------
    out : Path
        The output folder, whose log of verdicts is held.
    reviewers : sequence of str
        Codes of the reviewers.
    double, repeat : float or None
        Shares as of `Readers`; None for the kept ones, or 0.
    begun : bool
        Whether there are verdicts: without them, nothing needs to stay.

    Raises
    ------
    ScanError
        READERS if a share differs from the kept one, or cases are to be read twice and there is one
        reviewer; REVIEW_DAMAGED; OUTPUT_UNWRITABLE or DISK_FULL.
    """
    kept = kept_readers(out)
    for name, requested, before in (
        ("double", double, kept.double),
        ("repeat", repeat, kept.repeat),
    ):
        if begun and kept.reviewers and requested is not None and requested != before:
            detail = f"the review began with --{name} {before:.4g}, not {requested:.4g}"
            raise ScanError(Reason.READERS, detail)
    codes = (*kept.reviewers, *reviewers) if begun else reviewers
    former = tuple(code for code in kept.former if code not in codes)
    try:
        readers = Readers(
            tuple(dict.fromkeys(codes)),
            kept.double if double is None else double,
            kept.repeat if repeat is None else repeat,
            former,
        )
    except ValueError as exc:
        raise ScanError(Reason.READERS, str(exc)) from exc
    if readers != kept:
        _keep(out / REVIEW / READERS, readers)
    return readers


def remove_reviewer(out: Path, reviewer: str) -> str:
    """Take a reviewer off the list: the verdicts stay, and others read the cases that are open.

    Parameters
    ----------
    out : Path
        The output folder.
    reviewer : str
        Code or name.

    Returns
    -------
    str
        The reviewer's code.

    Raises
    ------
    ScanError
        ID_UNKNOWN if the list has no such reviewer; READERS if cases are read twice and one
        reviewer would be left; REVIEW_OPEN while a server is open; as of `VerdictLog`.
    """
    with closing(VerdictLog(out)):
        kept, names = kept_readers(out), reviewer_names(out)
        codes = [c for c in kept.reviewers if reviewer in (c, names.get(c))]
        if not codes:
            listed = ", ".join(kept.reviewers) or "nobody"
            raise ScanError(Reason.ID_UNKNOWN, f"there is no such reviewer: the list has {listed}")
        remaining = tuple(code for code in kept.reviewers if code != codes[0])
        try:
            readers = replace(kept, reviewers=remaining, former=(*kept.former, codes[0]))
        except ValueError as exc:
            raise ScanError(Reason.READERS, str(exc)) from exc
        _keep(out / REVIEW / READERS, readers)
    return codes[0]


def _keep(path: Path, readers: Readers) -> None:
    shares = {"double": readers.double, "repeat": readers.repeat}
    former = {"former": list(readers.former)} if readers.former else {}
    plain = {"reviewers": list(readers.reviewers), **shares, **former}
    try:
        atomic_write(path, lambda draft: write_json(draft, plain))
    except OSError as exc:
        raise output_error(exc, "the readers") from exc
