"""Tables and report of an output folder that `listen` fills: over all that the spool holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scanloom.core import ScanError
from scanloom.engine import run_files
from scanloom.engine.listen.site import Site
from scanloom.engine.listen.spool import STUDIES
from scanloom.engine.listen.studies import Queue
from scanloom.engine.listen.work import read_requests
from scanloom.engine.monitor import Status
from scanloom.engine.outcomes import Outcomes
from scanloom.engine.results.run_cases import RunCases
from scanloom.engine.results.tables import write_tables
from scanloom.engine.results.totals import write_totals
from scanloom.engine.workflow.selection import Scope
from scanloom.io.index.build import build_index
from scanloom.io.output.ledger import Ledger
from scanloom.io.output.private import load_key_of
from scanloom.io.session import read_session
from scanloom.review.report.page import write_report


@read_session()
def write_all_tables(
    site: Site, spool: Path, out: Path, key_file: Path | None, runs: Sequence[str]
) -> None:
    """Write manifest, tables, totals of runs and the report, as the end of a run does.

    The manifest has every file of the spool: those of studies that no workflow has had are open.

    Raises
    ------
    ScanError, OSError
        As at the end of a run.
    """
    key = load_key_of(out, key_file)
    index = build_index([spool / STUDIES], key, out)
    workflow_of = {
        study: state.workflow for study, state in Queue(spool).states().items() if state.workflow
    }
    endings, left_out, ledger = Outcomes(), Outcomes(), Ledger(out)
    for path, request in read_requests(site).items():
        series = [each for each in index.series if workflow_of.get(each.study_uid) == path]
        cases = RunCases(index, request, key, out, Scope(), series, ledger=ledger)
        cases.compare()
        for outcomes, of_request in ((endings, cases.endings), (left_out, cases.left_out)):
            for outcome in of_request:
                outcomes.append(outcome)
    damaged: set[str] = set()
    write_tables(out, index, left_out, endings, key, None, damaged)
    for name in runs:
        with suppress(ScanError, ValueError):  # it has not written a status yet
            write_totals(out, Status.read(out / run_files.RUNS / name))
    write_report(out, damaged)
