"""The scan of a published case, found again through the crosswalk and the key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from scanloom.core import ReadOptions, Reason, ScanError, Series, read_error
from scanloom.io.formats import count_volumes
from scanloom.io.identity import case_id, join_channel_hashes, source_hash, source_stamp
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import find_sources, latest_by_id, sources_of_study
from scanloom.io.output.file_names import CASE, TIMING
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder
from scanloom.io.output.private import read_key_of
from scanloom.io.output.published import SOURCE_STAMP
from scanloom.io.read import read_scan
from scanloom.io.scan import Scan

MAX_PHASES = 1000


FindSeries = Callable[[Path], Sequence[Series]]


def read_source(
    out: Path, name: str, key: Path | None = None, find: FindSeries = find_series
) -> Scan:
    """Read the scan of a case as it was read for its result, of which its files must be unchanged.

    Their content is compared if their sizes, times or places are not those of the run.

    The content of a result of several input channels is not compared: the crosswalk has the first
    channel only.

    Parameters
    ----------
    key : Path or None
        File with the key of the case ids; None for SCANLOOM_KEY or the user's own key.
    find : callable
        Lists the scans at a path: one that keeps its answers spares the next case of a large folder
        the listing.

    Raises
    ------
    ScanError
        KEY_MISMATCH, or what `read_key` raises, without the key; ID_UNKNOWN or NOT_FOUND if the
        scan is not where it was; SERIES_DIFFERS if it is not the one that was segmented;
        RESULT_DAMAGED if `case.json` can't be read; else why the scan can't be read.
    """
    folder = case_folder(out, name)
    try:
        document = read_json(folder / CASE)
        stamp = str(read_json(folder / TIMING).get(SOURCE_STAMP, ""))
    except (OSError, ValueError, LookupError) as exc:
        raise read_error(exc, "the result", Reason.RESULT_DAMAGED) from exc
    secret = read_key_of(out, key)
    series, phase, _ = _find(out, document, secret, find)
    # a hash of all files takes long: only where their stamp is another
    is_alone = len(stamp.split()) < 2  # a stamp for each channel
    if is_alone and source_stamp([series.stamp], secret) != stamp:
        check_content(series, document, secret)
    return read_scan(series, _read_options(document), phase=phase)


def read_channels(
    out: Path, name: str, channels: int, key: Path | None = None, find: FindSeries = find_series
) -> list[Scan]:
    """Read the scans of all input channels of a case, in the order of its model.

    The crosswalk has the first channel only: the others are the series of its study whose content
    is that of the result, so that all files of the study are read.

    Parameters
    ----------
    channels : int
        Their number.
    key, find
        As in `read_source`.

    Raises
    ------
    ScanError
        As `read_source`; SERIES_DIFFERS if the series are not those that were segmented.
    """
    if channels == 1:
        return [read_source(out, name, key, find)]
    document = read_json(case_folder(out, name) / CASE)
    secret = read_key_of(out, key)
    first, phase, study = _find(out, document, secret, find)
    paths = dict.fromkeys(record.path for record in sources_of_study(out, study))
    candidates = {
        series.series_uid: series
        for path in paths
        if Path(path).exists()
        for series in find(Path(path))
        if series.study_uid == study and series.series_uid != first.series_uid
    }
    hashes = {uid: source_hash(series, secret) for uid, series in candidates.items()}
    own = source_hash(first, secret)
    for order in permutations(candidates, channels - 1):
        content = join_channel_hashes([own, *(hashes[uid] for uid in order)], secret)
        if content == document["source"]["hash"]:
            read = _read_options(document)
            further = replace(read, gaps="refuse", orientation=None)
            scans = (read_scan(candidates[uid], further) for uid in order)
            return [read_scan(first, read, phase=phase), *scans]
    detail = "series of the study are missing, or have other content than when it was segmented"
    raise ScanError(Reason.SERIES_DIFFERS, detail)


def _read_options(document: Mapping[str, Any]) -> ReadOptions:
    """Return the options with which a case was read, from `case.json`.

    Their limit of a scan's size is not known, but the scan was within it.
    """
    options = document["options"]
    known = {name: options[name] for name in ("gaps", "nan", "orientation", "modality")}
    return ReadOptions(**known, max_size=sys.maxsize)


def check_content(series: Series, document: Mapping[str, Any], key: bytes) -> None:
    """Refuse a series whose files have other content than those that were segmented.

    Parameters
    ----------
    document : mapping
        `case.json`.

    Raises
    ------
    ScanError
        SERIES_DIFFERS, with the difference; UNREADABLE.
    """
    if source_hash(series, key) == document["source"]["hash"]:
        return
    now, then = len(series.files), document["source"]["files"]
    detail = f"the scan has {now} files, {then} when it was segmented"
    if now == then:
        detail = "files of the scan have other content than when it was segmented"
    raise ScanError(Reason.SERIES_DIFFERS, detail)


def _find(
    out: Path, document: Mapping[str, Any], secret: bytes, find: FindSeries
) -> tuple[Series, int | None, str]:
    """Return the series of a case, its volume if it has several, and the UID of its study."""
    number = document["case"]
    record = latest_by_id(find_sources(out, [number])).get(number)
    if record is None:
        raise ScanError(Reason.ID_UNKNOWN, "the crosswalk lacks the case")
    for series, phase in _candidates(find(Path(record.path)), _read_options(document)):
        if case_id(series, secret, phase) == number:
            return series, phase, record.study_uid
    raise ScanError(Reason.SERIES_DIFFERS, "another series is where that of the case was")


def _candidates(
    listed: Sequence[Series], options: ReadOptions
) -> Iterator[tuple[Series, int | None]]:
    """Yield each series, then each volume of those with several."""
    # the volumes of a series are counted only if no whole series is that of the case: it takes time
    for series in listed:
        yield series, None
    for series in listed:
        try:
            count = count_volumes(series, options)
        except ScanError:
            continue
        for phase in range(min(count, MAX_PHASES)):
            yield series, phase
