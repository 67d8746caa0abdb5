"""The tables of a run that did not come to write them, from what it left: without its sources."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from scanloom.cards.store import find_model
from scanloom.core import Reason, Series
from scanloom.engine.cases import workflow_recipe
from scanloom.engine.collect import Ending, collect, collect_measurements
from scanloom.engine.models import unique_cards
from scanloom.engine.select import Inputs, select
from scanloom.engine.workflow import MOST_BYTES, parse_stored_workflow
from scanloom.io.crosswalk import case_folders
from scanloom.io.failures import failed_before
from scanloom.io.identity import case_id, key_fingerprint, source_stamp
from scanloom.io.index import stored_index
from scanloom.io.outfolder import CASES
from scanloom.io.private import PRIVATE
from scanloom.io.published import read_made
from scanloom.io.regular import read_regular

RUNS, TOTALS = "runs", "totals.json"


def is_behind(out: Path) -> bool:
    """Whether the newest run has not written its tables: totals are written after them."""
    runs = sorted(path for path in (out / RUNS).glob("*/") if path.is_dir())
    return bool(runs) and not (runs[-1] / TOTALS).is_file()


def recollect(out: Path, key: bytes | None, damaged: set[str]) -> bool:
    """Write `measurements`, and `manifest` if the key is there; return whether it was.

    Parameters
    ----------
    out : Path
        The output folder, with the index and the workflow of its newest run.
    key : bytes or None
        Of its ids.
    damaged : set of str
        As in `scanloom.engine.collect.collect`.

    Raises
    ------
    ScanError, OSError
        If what is needed of a workflow or its models is not there; if tables can't be written.
    """
    index = None if key is None else stored_index(out, key_fingerprint(key))
    if key is None or index is None:
        collect_measurements(out, damaged)
        return False
    run = sorted(path for path in (out / RUNS).glob("*/") if path.is_dir())[-1]
    whole = out / PRIVATE / RUNS / run.name / "workflow.json"  # with the folders of its models
    workflow = parse_stored_workflow(read_regular(whole, MOST_BYTES))
    cards = unique_cards([find_model(name) for name in workflow.models])
    recipe = workflow_recipe(workflow, cards)
    chosen, left = select(index.series, workflow, cards)
    endings: dict[str, list[Ending]] = {}
    folders = case_folders(out)
    for inputs in chosen:
        stamp = source_stamp([index.stamp(one) for one in inputs], key)
        for number in _case_ids(out, inputs, key):
            name = folders.get(number, number)
            if (end := _ending(out, (number, name), recipe, stamp)) is not None:
                for one in inputs:
                    endings.setdefault(one.id, []).append(end)
    collect(out, index, left, endings, key, None, damaged)
    return True


def _case_ids(out: Path, inputs: Inputs, key: bytes) -> Iterator[str]:
    """Give the ids of the cases of a series: of several volumes, those that left anything."""
    one = inputs[0]
    if one.reason not in (Reason.PHASES, Reason.FOUR_D):
        yield one.id
        return
    if not one.series_uid:
        return  # its files would have to be read: whether they were used stays open
    series = Series(one.kind, (), one.study_uid, one.series_uid)
    for phase in itertools.count():
        number = case_id(series, key, phase)
        left = (out / CASES / number, out / "failed" / f"{number}.json")
        if not any(path.exists() for path in left):
            return
        yield number


def _ending(out: Path, case: tuple[str, str], recipe: str, stamp: str) -> Ending | None:
    """Return how a case, by id and folder, ended; None where nothing says it of these files."""
    number, name = case
    old = failed_before(out, number, recipe, stamp)
    if old is not None:
        return Ending(old.reason.code, old.detail, 0.0)
    try:
        made = read_made(out / CASES / name)
    except (OSError, ValueError):
        return None
    if made.recipe != recipe:
        return Ending(Reason.STALE.code, "its result was made by another recipe", 0.0)
    return Ending("", "", 0.0) if made.stamp == stamp else None
