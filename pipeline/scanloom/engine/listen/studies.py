"""Studies of a spool: what of them are images, what became of them, and which of them are waiting.

    SPOOL/queue/<study>.json      what became of the images that a study had

A file of the queue that is lost costs time only: by the run's own rules, the study's results are
then found to be current. Everything here names patients, as the spool does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scanloom.core import ScanError
from scanloom.engine.listen.documents import Documents, stamped_files
from scanloom.engine.listen.spool import (
    STUDIES,
    SUFFIX,
    JournalFollower,
    last_arrival,
    received_studies,
)
from scanloom.io.dicom.header.header import pydicom_muted
from scanloom.io.dicom.sop_classes import is_image_class
from scanloom.io.dicom.uids import is_uid
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.private import write_private
from scanloom.own_python import make_private_folder

if TYPE_CHECKING:
    from scanloom.io.network.source import SeriesFound

QUEUE = "queue"
RESCAN_S = 3600.0
"""Between two looks at all folders, which find what the journal may lack."""

NO_IMAGES = frozenset(
    (
        *("SEG", "SR", "PR", "KO", "RTSTRUCT", "RTPLAN", "RTDOSE", "RTRECORD", "REG", "FID"),
        *("DOC", "RWV", "AU", "ECG", "HD", "EPS", "EEG", "EMG", "EOG", "RESP", "SMR", "PLAN"),
        *("TEXTUREMAP", "M3D", "OPTSTL", "ANN", "ASMT", "STAIN"),
    )
)
"""Modalities of series without images (PS3.3 C.7.3.1.1.1): what we sent ourselves is among them."""

Outcome = Literal["begun", "done", "failed", "cleared", "no image", "no rule"]


@dataclass(frozen=True)
class Images:
    """The images that a study has on the disk.

    Parameters
    ----------
    digest : str
        Hash over their names, sizes and times; "" if there are none.
    counts : mapping
        Their number by SeriesInstanceUID.
    senders : tuple of str
        Calling titles of those who sent them.
    """

    digest: str
    counts: Mapping[str, int]
    senders: tuple[str, ...]

    def short_of(
        self, sent: Iterable[SeriesFound], *, received_only: bool
    ) -> frozenset[str] | None:
        """Return the series of which the sender has more images than there are here.

        None if it does not say: it does not know the study, or gives no numbers.
        """
        short, has_counts = set(), False
        for series in sent:
            if series.modality in NO_IMAGES:
                continue
            here = self.counts.get(series.series, 0)
            if received_only and not here:
                continue
            if series.instances is None:
                return None
            has_counts = True
            if series.instances > here:
                short.add(series.series)
        return frozenset(short) if has_counts else None


def survey(study: Path) -> Images:
    """Return the images in the folder of a study: what is of another class is passed over.

    A file that can't be read counts as an image, so that the run says why there is no result.
    """
    from pydicom.filereader import read_file_meta_info

    digest, counts, senders = hashlib.sha256(), dict[str, int](), set[str]()
    with pydicom_muted():
        for path in sorted(study.glob(f"*/*{SUFFIX}")):
            sop_class = sender = ""
            try:
                state = path.stat()
                meta = read_file_meta_info(path)
                sop_class = str(meta.get("MediaStorageSOPClassUID", ""))
                sender = str(meta.get("SendingApplicationEntityTitle", ""))
            except FileNotFoundError:
                continue
            except Exception:  # noqa: BLE001, S110  # foreign data, foreign code
                pass
            if not is_image_class(sop_class):
                continue
            name = f"{path.parent.name}/{path.name} {state.st_size} {state.st_mtime_ns}\n"
            digest.update(name.encode())
            counts[path.parent.name] = counts.get(path.parent.name, 0) + 1
            if sender:
                senders.add(sender)
    return Images(digest.hexdigest() if counts else "", counts, tuple(sorted(senders)))


@dataclass(frozen=True)
class StudyState:
    """The outcome of the images that a study had.

    Parameters
    ----------
    images : str
        `Images.digest`.
    seen : float
        `last_arrival` of the study before they were looked at.
    outcome : str
        "begun" if a process works on them, or has died of it; "cleared" if they were removed from
        the spool.
    reason : str
        Code of the reason of "failed".
    workflow : str
        File of the workflow that the study's rule names.
    attempts : int
        How often work on these images began.
    rules : str
        Digest of the site's rules, for "no rule".
    cleared : bool
        Whether a part of the study was ever removed from the spool.
    """

    images: str
    seen: float
    outcome: Outcome
    reason: str = ""
    workflow: str = ""
    attempts: int = 1
    rules: str = ""
    cleared: bool = False

    def is_over(self, rules: str) -> bool:
        """Return whether these images need no work, with the rules of a digest."""
        return self.outcome != "begun" and (self.outcome != "no rule" or self.rules == rules)


class Queue:
    """The states of studies, in a folder of the spool."""

    def __init__(self, spool: Path) -> None:
        self._folder = spool / QUEUE
        self._documents = Documents(self._folder, _read_state)

    def read(self, study: str) -> StudyState | None:
        """Return the state of a study; None if it was never worked on, or the file is damaged."""
        return _read_state(self._folder / f"{study}.json")

    def write(self, study: str, state: StudyState) -> None:
        """Keep the state of a study.

        Raises
        ------
        OSError
            If it can't be written.
        """
        make_private_folder(self._folder)
        path = self._folder / f"{study}.json"
        write_private(path, lambda draft: write_document(draft, asdict(state)))

    def forget(self, since: float, studies: Container[str]) -> None:
        """Remove the states that were written before a time, but not those of some studies."""
        for path, (written, _) in stamped_files(self._folder) if self._folder.is_dir() else ():
            if written < since * 1e9 and path.stem not in studies:
                path.unlink(missing_ok=True)

    def states(self) -> dict[str, StudyState]:
        """Return the state of each study; what has not changed is not read again."""
        return self._documents.values() if self._folder.is_dir() else {}


def _read_state(path: Path) -> StudyState | None:
    try:
        document = read_json(path)
        del document["schema"]
        state = StudyState(**document)
    except (OSError, ValueError, TypeError, KeyError, ScanError):
        return None
    is_valid = isinstance(state.attempts, int) and isinstance(state.seen, float)
    return state if is_valid and is_uid(path.stem) else None


@dataclass
class Waiting:
    """A study of which something came that was not worked on; moments of CLOCK_MONOTONIC.

    Parameters
    ----------
    first, last : float
        When something came first, and last.
    not_before : float
        When it is looked at again, such as after a failure.
    images : Images or None
        Its images, if they were looked at since `last`.
    seen : float
        `last_arrival` of the study before that, seconds since 1970.
    """

    first: float
    last: float
    not_before: float = 0.0
    images: Images | None = None
    seen: float = 0.0


@dataclass
class WaitingStudies:
    """The studies that wait, from the folders at first, then from the journal.

    Parameters
    ----------
    rules : str
        Digest of the rules: studies that others left out are looked at again.
    """

    spool: Path
    queue: Queue
    rules: str
    by_study: dict[str, Waiting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._looked = time.monotonic()
        self._journal = JournalFollower(self.spool)  # first: what comes meanwhile has its line
        self._scan()

    def look(self) -> None:
        """Take note of what came since the last look."""
        now, clock = time.monotonic(), time.time()
        before_it, self._looked = self._looked, now
        for arrival in self._journal.new():
            if arrival.outcome == "ignored":
                continue
            # Not before the last look: a clock may have been put forward
            moment = max(before_it, now - max(0.0, clock - arrival.time))
            before = self.by_study.get(arrival.study)
            first = moment if before is None else min(before.first, moment)
            self.by_study[arrival.study] = Waiting(first, moment)
        if now - self._scanned > RESCAN_S:
            self._scan()

    def folder(self, study: str) -> Path:
        """Return the folder of a study."""
        return self.spool / STUDIES / study

    def again(self, study: str, pause: float) -> None:
        """Let a study wait for another attempt, unless something of it came meanwhile."""
        now = time.monotonic()
        self.by_study.setdefault(study, Waiting(now, now, now + pause))

    def in_order(self) -> list[tuple[str, Waiting]]:
        """Return the waiting studies that may be looked at, by their last arrival."""
        now = time.monotonic()
        ready = [item for item in self.by_study.items() if item[1].not_before <= now]
        return sorted(ready, key=lambda item: item[1].last)

    def _scan(self) -> None:
        """Find studies in the folders that are newer than their state in the queue."""
        now, clock = time.monotonic(), time.time()
        self._scanned = now
        if not (self.spool / STUDIES).is_dir():
            return  # the receiver makes it; what comes then has its line
        for folder in received_studies(self.spool):
            if folder.name in self.by_study:
                continue
            with suppress(OSError):  # cleared just now
                came = last_arrival(folder)
                if self._is_done(folder.name, came):
                    continue
                age = max(0.0, clock - came)
                self.by_study[folder.name] = Waiting(now - age, now - age)

    def _is_done(self, study: str, came: float) -> bool:
        state = self.queue.read(study)
        # Not earlier: a clock may have been put back
        return state is not None and came == state.seen and state.is_over(self.rules)
