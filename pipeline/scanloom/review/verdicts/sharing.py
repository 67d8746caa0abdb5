"""How the cases of an output folder are shared among reviewers: `review/readers.json`.

It is kept from the first start of a review on: who reads which case must not change half-way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scanloom.core import Reason, ScanError
from scanloom.io.output.json_file import read_json, write_json
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import output_error
from scanloom.review.verdicts.log import REVIEW
from scanloom.review.verdicts.readers import Readers

READERS = "readers.json"
SCHEMA = 1


def kept_readers(out: Path) -> Readers:
    """Return how cases are shared since the last start; no reviewer before the first.

    Raises
    ------
    ScanError
        REVIEW_DAMAGED if the file can't be read.
    """
    path = out / REVIEW / READERS
    if not path.exists():
        return Readers(())
    try:
        plain = read_json(path)
        shares = float(plain["double"]), float(plain["repeat"])
        return Readers(tuple(map(str, plain["reviewers"])), *shares)
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
    try:
        readers = Readers(
            tuple(dict.fromkeys(codes)),
            kept.double if double is None else double,
            kept.repeat if repeat is None else repeat,
        )
    except ValueError as exc:
        raise ScanError(Reason.READERS, str(exc)) from exc
    if readers != kept:
        _keep(out / REVIEW / READERS, readers)
    return readers


def _keep(path: Path, readers: Readers) -> None:
    shares = {"double": readers.double, "repeat": readers.repeat}
    plain = {"schema": SCHEMA, "reviewers": list(readers.reviewers), **shares}
    try:
        atomic_write(path, lambda draft: write_json(draft, plain))
    except OSError as exc:
        raise output_error(exc, "the readers") from exc
