"""`OUT/listen/index.html`: what came, waits, was segmented and went back, while `listen` runs.

The page names no patient: a study is called by a hash of its UID, as in the log. It is written
anew all the time, and the browser loads it again. Metrics for Prometheus have the same numbers.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from scanloom.core import Reason, counted, printable
from scanloom.engine.listen.outbox import Line, Outbox, OutboxState, case_name, open_outbox
from scanloom.engine.listen.own_status import write_own_status
from scanloom.engine.listen.site import Site
from scanloom.engine.listen.spool import STUDIES, JournalFollower, received_studies
from scanloom.engine.listen.studies import Queue, StudyState
from scanloom.engine.monitor import format_samples, labels_of
from scanloom.io.identity import study_id
from scanloom.io.output.layout import LISTEN
from scanloom.io.output.private import check_links
from scanloom.io.system.atomic_write import atomic_write
from scanloom.review.report.page import content_policy, page_style, page_template

MOST_STUDIES, MOST_LINES = 100, 50
"""Rows of a table: the newest."""
DAY_S = 24 * 3600.0
RELOAD_S = 15
RESTS = 20
"""So many times as long as a writing of the page took, there is none."""
_OUTCOMES = {"begun": "in work", "": "waits"}
_PROOFS = ("committed", "found", "acknowledged")
_OPEN = ("waiting", "sent", "asked")


@dataclass
class Arrivals:
    """Objects of a study that came, by the journal.

    Parameters
    ----------
    last : float
        Seconds since 1970.
    objects : int
        Number, those that replaced others included.
    senders : set of str
        Calling titles.
    """

    last: float = 0.0
    objects: int = 0
    senders: set[str] = field(default_factory=set)


class ListenPage:
    """The page of a `listen`, which follows the journal from its making on; used by one thread.

    Parameters
    ----------
    key : bytes
        Of the ids.
    """

    def __init__(self, site: Site, spool: Path, out: Path, key: bytes) -> None:
        self._site, self._spool, self._out, self._key = site, spool, out, key
        self._journal, self._queue = JournalFollower(spool), Queue(spool)
        self._outbox: Outbox | None = None
        self._arrivals: dict[str, Arrivals] = {}
        self._began, self._objects = time.time(), 0

    def write(
        self, parts: Mapping[str, str] = MappingProxyType({}), *, has_ended: bool = False
    ) -> None:
        """Write page and metrics as things stand; `has_ended` for the last time.

        Parameters
        ----------
        parts : mapping
            Why each other process does nothing, by its role; "" for one that runs.

        Raises
        ------
        ScanError
            OUTPUT_UNWRITABLE if a folder of the output is a link.
        OSError
            If they can't be written.
        """
        check_links(self._out)
        now = time.time()
        for arrival in self._journal.new():
            self._objects += 1
            study = self._arrivals.setdefault(arrival.study, Arrivals())
            study.last, study.objects = arrival.time, study.objects + 1
            study.senders.add(arrival.sender)
        states = self._queue.states()
        self._outbox = self._outbox or open_outbox(self._out)
        sent = self._outbox.state() if self._outbox else OutboxState({}, [], [], {})
        recent = {uid: came for uid, came in self._arrivals.items() if now - came.last < DAY_S}
        self._arrivals = recent
        kept = set()
        if (self._spool / STUDIES).is_dir():  # the receiver makes it
            kept = {folder.name for folder in received_studies(self._spool)}
        counts = Counter(_outcome(states.get(study)) for study in kept | states.keys())
        page = self._out / LISTEN / "index.html"
        page.parent.mkdir(exist_ok=True)
        html = self._html(states, counts, sent, parts, now, has_ended)
        atomic_write(page, lambda draft: draft.write_text(html, encoding="utf-8"))
        due = now + (1 + RESTS) * (time.time() - now)
        write_own_status(self._out, now, due, parts, has_ended=has_ended)
        if self._site.metrics is not None:
            text = self._metrics(counts, sent, parts, now)
            atomic_write(Path(self._site.metrics), lambda draft: draft.write_text(text))

    @property
    def _free(self) -> int:
        return shutil.disk_usage(self._spool if self._spool.is_dir() else self._out).free

    def _html(
        self,
        states: Mapping[str, StudyState],
        counts: Mapping[str, int],
        sent: OutboxState,
        parts: Mapping[str, str],
        now: float,
        has_ended: bool,
    ) -> str:
        style = page_style()
        return page_template(Path(__file__).parent).render(
            style=style,
            policy=content_policy("", style),
            reload=RELOAD_S,
            has_ended=has_ended,
            parts={role: state for role, state in parts.items() if state},
            site=self._site,
            began=_clock(self._began),
            now=_clock(now),
            figures={
                "objects received": self._objects,
                "studies in 24 h": len(self._arrivals),
                **{name: counts.get(name, 0) for name in ("waits", "in work", "done", "failed")},
                **{name: counts.get(name, 0) for name in ("no rule", "cleared")},
            },
            free=_gib(self._free),
            reserve=_gib(self._site.reserve),
            low=self._free < 2 * self._site.reserve,
            studies=self._rows(states),
            most=MOST_STUDIES,
            sent=_sent_rows(sent),
            waiting=[_line_row(line) for line in sent.open[:MOST_LINES]],
            failed=[_line_row(line) for line in sent.failed[-MOST_LINES:]],
            troubles={
                name: (printable(t.reason), counted(t.tries, "time"), _clock(t.due))
                for name, t in sent.troubles.items()
            },
        )

    def _rows(self, states: Mapping[str, StudyState]) -> list[dict[str, object]]:
        """Return the newest studies, by the last arrival of each; their names are hashes."""
        last = {study: state.seen for study, state in states.items()}
        last |= {study: each.last for study, each in self._arrivals.items()}
        rows = []
        for study in sorted(last, key=lambda study: -last[study])[:MOST_STUDIES]:
            state, came = states.get(study), self._arrivals.get(study)
            code = "" if state is None else state.reason
            rows.append(
                {
                    "label": study_id(study, self._key)[:8],
                    "last": _clock(last[study]),
                    "objects": came.objects if came else 0,
                    "senders": ", ".join(map(printable, sorted(came.senders))) if came else "",
                    "outcome": _outcome(state),
                    "reason": code,
                    "advice": Reason[code].advice if code in Reason.__members__ else "",
                }
            )
        return rows

    def _metrics(
        self,
        counts: Mapping[str, int],
        sent: OutboxState,
        parts: Mapping[str, str],
        now: float,
    ) -> str:
        by_target = {
            labels_of(target=target, state=state): number
            for target, states in sent.counts.items()
            for state, number in states.items()
        }
        troubles = {"": len(sent.troubles)}
        up = {labels_of(part=role): int(not state) for role, state in parts.items()}
        return format_samples(
            [
                ("listen_objects_total", "Objects since the start.", {"": self._objects}),
                (
                    "listen_studies",
                    "Studies by outcome.",
                    {labels_of(outcome=name): number for name, number in counts.items()},
                ),
                ("listen_results", "Objects of the outbox.", by_target),
                ("listen_targets_in_trouble", "Targets that take nothing.", troubles),
                ("listen_part_up", "1 if a process does its work.", up),
                ("listen_free_bytes", "Free space at the spool.", {"": self._free}),
                ("listen_reserve_bytes", "Space that is kept free.", {"": self._site.reserve}),
                ("listen_written_timestamp_seconds", "When this was written.", {"": now}),
            ]
        )


def _outcome(state: StudyState | None) -> str:
    """Return what became of a study, in words; a study without a state waits."""
    outcome = "" if state is None else state.outcome
    return _OUTCOMES.get(outcome, outcome)


def _sent_rows(sent: OutboxState) -> list[tuple[str, int, int, int]]:
    """Return for each target the numbers of objects that are there, wait, and were given up."""
    rows = []
    for target, states in sent.counts.items():
        delivered = sum(states.get(proof, 0) for proof in _PROOFS)
        waits = sum(number for state, number in states.items() if state in _OPEN)
        rows.append((target, delivered, waits, states.get("failed", 0)))
    return rows


def _line_row(line: Line) -> dict[str, str]:
    return {
        "case": case_name(line),
        "file": line.file,
        "target": line.target,
        "since": _clock(line.added),
        "reason": printable(line.reason),
    }


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
