"""Files of a run: its folder `OUT/runs/<run id>/` with workflow, versions and log, and its lock.

One run at a time works on an output folder, or on a shard of it. Its lock, `OUT/.work/run.lock`, is
one of `scanloom.io.output.folder_lock`.
"""

from __future__ import annotations

import calendar
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.core import Case, Reason, ScanError
from scanloom.core.packages import package_versions
from scanloom.core.process import lock_file
from scanloom.engine.case.documents import VERSIONED_PACKAGES
from scanloom.engine.monitor import Status, remove_progress
from scanloom.engine.workflow.schema import Workflow
from scanloom.io.output import work_folder
from scanloom.io.output.folder_lock import Holder, read_lock, release_lock, take_lock
from scanloom.io.output.json_file import read_json, write_json
from scanloom.io.output.private import PRIVATE, check_links
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.scratch_folders import DIED, FINAL_STATES

if TYPE_CHECKING:
    from scanloom.engine.worker.supervisor import CaseOutcome

RUNS = "runs"
WORKFLOW, CASES_FILE, VERSIONS = "workflow.json", "cases.jsonl", "versions.json"
_MOMENT = "%Y%m%dT%H%M%S"


def run_folders(out: Path) -> list[Path]:
    """Return the folders of all runs, the oldest first."""
    return sorted((out / RUNS).glob("*/"))


def create_run_folder(
    out: Path,
    workflow: Workflow,
    cards: Sequence[ModelCard],
    recipe: str,
    shard: tuple[int, int] | None = None,
) -> str:
    """Create the folder of a new run, or of that of a shard; return the run's id.

    An id tells the time in UTC. Runs are in the order of their ids, also those that begin within a
    second, and those that begin after the clock was set back.
    """
    now, newest = time.time(), run_folders(out)[-1:]
    name = _run_id(now)
    if newest and newest[0].name >= name:
        with suppress(ValueError):  # a folder that is no run
            second = calendar.timegm(time.strptime(newest[0].name[:15], _MOMENT)) + 1
            name = _run_id(second + now % 1)  # the fraction tells it from runs that begin with it
    folder = out / RUNS / name
    folder.mkdir(parents=True)
    versions: dict[str, Any] = {
        "python": platform.python_version(),
        **package_versions((*VERSIONED_PACKAGES, "distributed")),
        "models": {card.name: card_digest(card) for card in cards},
        "recipe": recipe,
        "shard": shard,
    }
    try:
        write_json(folder / WORKFLOW, publishable_workflow(workflow, [card.name for card in cards]))
        write_json(folder / VERSIONS, versions)
    except OSError:  # half a document, of a full disk, could not be read
        shutil.rmtree(folder)
        raise
    return name


def _run_id(moment: float) -> str:
    text = time.strftime(_MOMENT, time.gmtime(moment))
    return f"{text}-{int(moment % 1 * (1 << 20)):05x}{secrets.token_hex(1)[0]}"


class _KnownRun(NamedTuple):
    """A run of an output folder; its shard is (0, 0) if it had none."""

    name: str
    recipe: str
    shard: tuple[int, int]
    state: str


def check_other_runs(out: Path, recipe: str, shard: tuple[int, int] | None) -> None:
    """Refuse a run of another recipe than one whose work has not ended: all would become STALE.

    That is a run at work; and for a shard also the latest run of each shard of the same number,
    unless all of them have ended with its recipe.

    Raises
    ------
    ScanError
        STALE, naming the other run.
    """
    runs = [*_runs(out)]
    unfinished = [run for run in runs if run.state not in (*FINAL_STATES, DIED)]
    if shard is not None:
        _, count = shard
        shards = [run for run in runs if run.shard[1] == count]
        ended = {(run.recipe, run.shard[0]) for run in shards if run.state == "done"}
        latest = {run.shard[0]: run for run in shards}
        unfinished += [
            run
            for run in latest.values()
            if any((run.recipe, n) not in ended for n in range(1, count + 1))
        ]
    for run in unfinished:
        if run.recipe != recipe:
            which = "shard {} of {}".format(*run.shard) if run.shard[1] else "a run"
            detail = f"{which} ({run.name}, {run.state}) has another workflow, options or model"
            raise ScanError(Reason.STALE, f"{detail}; give this one the same")


def _runs(out: Path) -> Iterator[_KnownRun]:
    """Yield the runs of an output folder, the oldest first; damaged ones are passed over."""
    for folder in run_folders(out):
        with suppress(OSError, ValueError, LookupError, TypeError, ScanError):
            made_by = read_json(folder / VERSIONS)
            number, count = made_by["shard"] or (0, 0)
            state = DIED  # before it wrote its first status
            with suppress(FileNotFoundError):
                state = Status.read(folder).as_observed().state
            yield _KnownRun(folder.name, str(made_by["recipe"]), (int(number), int(count)), state)


def publishable_workflow(workflow: Workflow, models: Sequence[str]) -> dict[str, Any]:
    """Return a workflow as results may publish it: without paths and the site's cluster.

    It is plain data, again a valid workflow. It names bundles by `models` instead of their folders.
    """
    document = workflow.model_dump(mode="json", exclude={"execution": {"cluster"}})
    return {**document, "models": list(models)}


LOG = "log.jsonl"
_TIME = "%Y-%m-%dT%H:%M:%S%z"


def append_to_log(folder: Path, case: Case, outcome: CaseOutcome) -> None:
    """Append a line to a run's log: the outcome of a case, its attempts, its time on the device."""
    record = outcome.record
    entry = {
        "at": time.strftime(_TIME),
        "case": case.id,
        "reason": record.reason.code if record and record.reason else None,
        "recalled": bool(record and record.reused),
        "remade": bool(record and record.updated),
        "tries": [{**asdict(each), "seconds": round(each.seconds, 3)} for each in outcome.tries],
        "device": [[round(t, 4) for t in span] for span in outcome.device],
        "engine": outcome.supervisor,
    }
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


_WORK = ".work"
_WAIT_S = 10.0
"""How long to wait for another process that is inspecting a lock."""
_LONG_DEAD_S = 24 * 3600.0
_MAX_ATTEMPTS = 100
"""How often a lock may disappear and reappear before the attempt to acquire it fails."""


@contextmanager
def hold_run_lock(
    out: Path, *, shard: str = "", take_over: bool = False
) -> Iterator[Callable[[], None]]:
    """Hold an output folder for one run; at its end, remove temporary files of dead processes.

    Yields a function that releases the lock, for a process that ends at once.

    Parameters
    ----------
    out : Path
        Created if it is missing.
    shard : str
        The shard that the run works on, which then has a lock of its own.
    take_over : bool
        Whether the lock of a run on another host, or in another container, is replaced: whether
        that run is alive can't be known from here. The lock of a dead process on this host is
        always replaced.

    Raises
    ------
    ScanError
        LOCKED, naming host, process and start time; DISK_FULL or OUTPUT_UNWRITABLE.
    """
    check_links(out)
    path = out / _WORK / (f"run-{shard}.lock" if shard else "run.lock")
    content = str(Holder.of_this_process())
    try:
        work_folder.make_work_folder(out)
        with exclusively(out):
            _acquire(path, content, take_over=take_over)
        began, begin_s = _file_time(out), time.monotonic()
    except OSError as exc:
        raise output_error(exc) from exc

    def release() -> None:
        with suppress(OSError):  # the next run removes the lock of a process that is gone
            release_lock(path, content)

    try:
        yield release
    finally:
        if read_lock(path) == content:
            with suppress(OSError, ScanError):  # as well as other leftovers
                # Two ways, since the clock may have been set meanwhile: the earlier moment is safe
                began = min(began, _file_time(out) - (time.monotonic() - begin_s))
                work_folder.clean_up(out, began)
                remove_progress(out / RUNS)
                _remove_case_files(out)
            release()


def _remove_case_files(out: Path) -> None:
    """Remove the lists of cases of runs that ended: they have the path of each file, gigabytes.

    A run that looks dead from another host may be alive, and its workers read its list: that waits.
    """
    for file in (out / PRIVATE / RUNS).glob(f"*/{CASES_FILE}"):
        with suppress(OSError, ValueError, ScanError):
            status = Status.read(out / RUNS / file.parent.name).as_observed()
            is_long_dead = time.time() - status.moment > _LONG_DEAD_S
            if status.state in FINAL_STATES or (status.state == DIED and is_long_dead):
                file.unlink()


def _file_time(out: Path) -> float:
    """Return the time that the file system gives to its files now: other hosts' clocks differ."""
    os.utime(out / _WORK)
    return (out / _WORK).stat().st_mtime


@contextmanager
def exclusively(folder: Path, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Let one process at a time into the block, if the file system supports flock(2).

    Of an output folder, to inspect locks and runs; of its `runs`, to merge tables. After `wait_s`
    seconds, it is entered all the same.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # without flock, atomic renames remain
            lock_file(descriptor, timeout_s=wait_s)
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, content: str, *, take_over: bool) -> None:
    """Take the lock, of several processes exactly one; raise LOCKED if its run may be alive."""
    # Each removal of a stale lock may be followed by the lock of another run
    for _ in range(_MAX_ATTEMPTS):
        if take_lock(path, content):
            return
        _refuse_or_remove(path, take_over=take_over)
    raise ScanError(Reason.LOCKED, "other processes keep replacing the lock")


def _refuse_or_remove(path: Path, *, take_over: bool) -> None:
    """Remove the lock of a dead or replaced run; raise LOCKED if its run may be alive."""
    text = read_lock(path)
    if text is None:
        return  # just released
    holder = Holder.parse(text)
    is_here = holder is not None and holder.is_here
    if (holder and holder.is_dead) or (take_over and not is_here):
        release_lock(path, text)
        return
    if holder is None:
        name = f"{_WORK}/{path.name}"
        detail = f"{name} does not name its run: use --take-over if no run is alive"
        raise ScanError(Reason.LOCKED, detail)
    host = f"host {holder.host}"
    remote = f"another container of {host}" if holder.has_our_host else host
    where = "this host" if is_here else f"{remote}: use --take-over if that run is surely dead"
    raise ScanError(Reason.LOCKED, f"process {holder.process} since {holder.since} on {where}")
