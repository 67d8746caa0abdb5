"""The scan of a published case, found again through the crosswalk and the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scanloom.core import ReadOptions, Reason, ScanError, Series
from scanloom.io.identity import case_id, key_fingerprint, read_key
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import find_sources, latest_by_id
from scanloom.io.output.private import check_key
from scanloom.io.probe import count_volumes
from scanloom.io.read import read_scan
from scanloom.io.scan import Scan

MAX_PHASES = 1000


def read_source(out: Path, document: Mapping[str, Any], key: Path | None = None) -> Scan:
    """Read the scan of a case, as it was read for its result.

    Parameters
    ----------
    out : Path
        The output folder.
    document : mapping
        `case.json`.
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.

    Raises
    ------
    ScanError
        KEY_MISMATCH, or what `read_key` raises, without the key; ID_UNKNOWN or NOT_FOUND if the
        scan is not where it was; SOURCE_CHANGED if another scan is there; else why it can't be
        read.
    """
    secret = read_key(key)
    check_key(out, key_fingerprint(secret))
    number = document["case"]
    record = latest_by_id(find_sources(out, [number])).get(number)
    if record is None:
        raise ScanError(Reason.ID_UNKNOWN, "the crosswalk lacks the case")
    listed = find_series(Path(record.path))
    options = document["options"]
    read = ReadOptions(*(options[name] for name in ("gaps", "nan", "orientation", "modality")))
    for series, phase in _candidates(listed):
        if case_id(series, secret, phase) == number:
            return read_scan(series, read, phase=phase)
    raise ScanError(Reason.SOURCE_CHANGED, "another scan is where that of the case was")


def _candidates(listed: Sequence[Series]) -> Iterator[tuple[Series, int | None]]:
    """Yield each series, then each volume of those with several."""
    for series in listed:
        yield series, None
    for series in listed:
        try:
            count = count_volumes(series)
        except ScanError:
            continue
        for phase in range(min(count, MAX_PHASES)):
            yield series, phase
