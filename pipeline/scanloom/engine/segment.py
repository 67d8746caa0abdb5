"""Segment one path after another, for the command line and `scanloom.segment`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from scanloom.cards.card_file import card_digest
from scanloom.cards.check import check_assumed_modality, check_modalities
from scanloom.cards.requested import requested_card
from scanloom.convert.store import find_model
from scanloom.core import (
    Case,
    CaseRecord,
    Reason,
    ScanError,
    StepTimer,
    blame,
)
from scanloom.core.reasons import known_flags
from scanloom.core.timing import MarkStep, WindowCount
from scanloom.engine.case.build import make_case, with_source_hash, workflow_recipe
from scanloom.engine.case.differences import explained_result_state
from scanloom.engine.case.memory_estimate import check_memory, estimate_case
from scanloom.engine.case.models import check_structures, import_heavy, load_models, unique_cards
from scanloom.engine.case.run_case import OutputTarget, failed_record, run_case
from scanloom.engine.case.types import Predictor
from scanloom.engine.machine.devices import check_device
from scanloom.engine.results.case_registry import CaseRegistry
from scanloom.engine.selected_series import SelectedSeries, choice_of, select_at
from scanloom.engine.workflow.schema import Workflow, make_workflow
from scanloom.io.identity import case_id, key_fingerprint, source_stamp
from scanloom.io.output.case_folder import check_writable
from scanloom.io.output.crosswalk import common_parent, source_from_series
from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.private import load_key_of
from scanloom.io.output.published import ResultState, store_source_stamp
from scanloom.io.output.work_folder import open_output
from scanloom.io.read import read_outline
from scanloom.io.session import ReadSession
from scanloom.options import SegmentOptions

logger = logging.getLogger(__name__)
"""Tracebacks are logged at DEBUG only: they may hold foreign text."""

OnStep = Callable[[Path, str], None]
OnWindows = Callable[[Path, WindowCount], None]


def segment_workflow(options: SegmentOptions) -> Workflow:
    """Return the workflow that a run over an archive would need for the same results.

    Raises
    ------
    ScanError
        WORKFLOW if an option has a value that is not allowed.
    """
    return make_workflow(
        name="segment",
        models=options.models,
        policy=asdict(options.read),
        outputs=asdict(options.outputs),
        execution={
            **asdict(options.compute),
            "device": options.device,
            "memory_limit": options.memory_limit,
        },
    )


def segment_paths(
    paths: Sequence[Path], options: SegmentOptions, on_step: OnStep | None = None
) -> tuple[CaseRecord, ...]:
    """Segment the scan at each path; one that can't be used does not stop the others.

    Returns
    -------
    tuple of CaseRecord
        In order, one a path, or one a series with `series="all"`; its `reason` says why there is
        no result.

    Raises
    ------
    ScanError
        If the models, the key or the output folder cannot be used.
    """
    return tuple(record for _, record in iter_segment(paths, options, on_step))


def iter_segment(
    paths: Sequence[Path],
    options: SegmentOptions,
    on_step: OnStep | None = None,
    on_windows: OnWindows | None = None,
    mark: MarkStep = nullcontext,
) -> Iterator[tuple[Path, CaseRecord]]:
    """Yield each path with the record of its scan: see `segment_paths`."""
    session = _Session(options, len(paths) if isinstance(paths, Sequence) else 1)
    with closing(session.read_session):
        for path in paths:
            clock = StepTimer(
                partial(on_step, path) if on_step else None,
                partial(on_windows, path) if on_windows else None,
                mark,
            )
            for record in session.run(path, clock):
                _log(record)
                yield path, record


def _log(record: CaseRecord) -> None:
    """Log the outcome of a case, without its path."""
    if record.reason is not None:
        logger.info("case %s: %s", record.id or "unknown", record.reason.code)
    elif record.reused:
        logger.info("case %s: from before", record.id)
    else:
        logger.info("case %s: done in %.1f s", record.id, record.seconds)


class _Session:
    """Models, key and output folder, held over several scans; networks are loaded once."""

    def __init__(self, options: SegmentOptions, paths: int) -> None:
        self.options, self.workflow, self._paths = options, segment_workflow(options), paths
        self.read_session = ReadSession()  # not active while `run` is suspended at a yield
        self.cards = unique_cards([find_model(name) for name in options.models])
        check_structures(self.cards, options.outputs)
        check_device(options.device)
        self.key = load_key_of(options.out, options.key)
        fingerprint = key_fingerprint(self.key)
        open_output(options.out, fingerprint)
        self.books = CaseRegistry(options.out, fingerprint, options.names)
        self.target = OutputTarget(options.out, fingerprint, options.replace, self.key)
        self.recipe = workflow_recipe(self.workflow, self.cards)
        self._hashes: dict[str, str] = {}  # of the sources of this command's results, by case id
        self._predictors: Sequence[Predictor] | None = None
        self._fault: ScanError | None = None
        self._writable = False

    def run(self, path: Path, clock: StepTimer) -> Iterator[CaseRecord]:
        try:
            with clock.step("find"), self.read_session.active():
                selected = select_at(path, self.options, self.cards)
        except Exception as error:  # a fault in one scan must not stop the others
            logger.debug("no scan found", exc_info=True)
            yield failed_record("", error)
            return
        for chosen in selected:
            with self.read_session.active():
                record = self._run(chosen, clock)
                choice = choice_of(chosen, self.options, record.reason)
            yield replace(record, choice=choice)
            clock = StepTimer(clock.on_step, clock.on_windows, clock.mark)

    def _run(self, chosen: SelectedSeries, clock: StepTimer) -> CaseRecord:
        case: Case | None = None
        series, phase = chosen.series, chosen.phase
        try:
            with clock.step("find"):
                number = case_id(series, self.key, phase)
                case = make_case(number, series, self.workflow, self.recipe, phase=phase)
                case = replace(case, stamp=source_stamp([series.stamp], self.key))
                case = with_source_hash(case, self.key)
                self._check_unique(case)
            record = self._segment(case, clock)
            if record.reason is None:
                self._hashes[case.id] = case.source_hash
        except Exception as error:  # a fault in one case must not stop the others
            logger.debug("case not used", exc_info=True)
            record = failed_record(case.id if case else "", error)
            record = replace(record, private=record.private or common_parent(series.files))
        if self._fault is not None:
            raise self._fault  # of the models or OUT: no scan is to blame
        if case is not None:
            self.books.note(case, record)
        return record

    def _check_unique(self, case: Case) -> None:
        """Refuse a case that would replace another result of this command.

        Raises
        ------
        ScanError
            ID_TAKEN if another path has the same UIDs but other content.
        """
        if self._hashes.get(case.id, case.source_hash) != case.source_hash:
            detail = "another path of this command has the same UIDs, but other content"
            raise ScanError(Reason.ID_TAKEN, f"{detail}; its result is kept")

    def _segment(self, case: Case, clock: StepTimer) -> CaseRecord:
        out, folder = self.options.out, self.books.folder_name(case)
        state = explained_result_state(
            *(out, folder, case),
            replace=self.options.replace,
            workflow=self.workflow,
            cards=self.cards,
        )
        if state is ResultState.CURRENT:
            store_source_stamp(out / "cases" / folder, case.stamp)
            return _recall(case, out / "cases" / folder)
        self._check_output()
        self._check_headers(case)
        source = source_from_series(case.series, case.id)
        with self._networks() as predictors:
            return run_case(case, predictors, self.target, clock, folder=folder, source=source)

    def _check_output(self) -> None:
        """Refuse an output folder that can't be written: no scan is to blame."""
        if self._writable:
            return
        try:
            check_writable(self.options.out)
        except ScanError as error:
            detail = error.detail.replace("the results", "the output folder")
            self._fault = ScanError(error.reason, detail, str(self.options.out))
            raise self._fault from error
        self._writable = True

    def _check_headers(self, case: Case) -> None:
        """Refuse a scan by its headers, before torch is imported and voxels are read."""
        modality = case.series.modality or case.read.modality
        check_assumed_modality(modality, self.cards)
        for card in self.cards:
            check_modalities([modality], card)
        outline = read_outline(case.series, case.read, phase=case.phase)
        if self.options.memory_limit is not None:
            cards = [requested_card(card, self.options.compute) for card in self.cards]
            need = estimate_case(*outline, cards, self.options.outputs)
            check_memory(need, self.options.memory_limit)

    @contextmanager
    def _networks(self) -> Iterator[Callable[[], Sequence[Predictor]]]:
        """Yield a callable that returns the networks; at first they load while the scan is read."""
        if self._predictors is not None:
            known = self._predictors
            yield lambda: known
            return
        # Reading and importing both change the process's warning filters for a while: what
        # held before is put back when both have ended
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self._load_networks)
            pool.submit(import_heavy)  # while the network runs
            yield coming.result

    def _load_networks(self) -> Sequence[Predictor]:
        execution = self.workflow.execution
        digests = [card_digest(card) for card in self.cards]
        try:
            self._predictors = load_models(
                *(self.workflow.models, digests, execution, self.workflow.computed_labels),
                planned_cases=self._paths,
                out=self.options.out,
            )
        except Exception as error:
            self._fault = blame(error)
            raise self._fault from error
        return self._predictors


def _recall(case: Case, folder: Path) -> CaseRecord:
    """Return the record of a case that was published before."""
    try:
        document = read_json(folder / CASE)
        flags = known_flags(flag["code"] for flag in document["flags"])
        rows = read_measurements(folder)
        return CaseRecord(case.id, None, "", flags, folder, rows, reused=True)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        detail = f"the result of case {case.id} can't be read"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
