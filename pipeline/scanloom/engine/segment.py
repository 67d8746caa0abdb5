"""Segment one path after another: what the command line and `scanloom.segment` do."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scanloom.cards.store import find_model
from scanloom.core import (
    Case,
    CaseRecord,
    Clock,
    Flag,
    Gaps,
    Nan,
    Outputs,
    Reason,
    ScanError,
    Series,
    blame,
)
from scanloom.engine.books import Books, Names
from scanloom.engine.cases import make_case, with_source_hash, workflow_recipe
from scanloom.engine.estimate import check_memory, estimate_case
from scanloom.engine.gpus import check_device
from scanloom.engine.models import check_structures, import_heavy, load_predictors, unique_cards
from scanloom.engine.record import card_digest
from scanloom.engine.steps import Labeller
from scanloom.engine.work import Place, failed_record, work_on
from scanloom.engine.workflow import Workflow, make_workflow
from scanloom.io.casefolder import check_writable, claim_out
from scanloom.io.crosswalk import source_of
from scanloom.io.find import find_series
from scanloom.io.identity import case_id, key_fingerprint, load_key, source_stamp
from scanloom.io.names import CASE
from scanloom.io.outline import read_outline
from scanloom.io.published import Standing, keep_source_stamp, standing_of
from scanloom.io.ranking import Reading, preference_of, select_series
from scanloom.io.session import ReadSession
from scanloom.io.tables import read_measurements

logger = logging.getLogger(__name__)
"""Says nothing above DEBUG: tracebacks may hold foreign text."""

OnStep = Callable[[Path, str], None]


@dataclass(frozen=True)
class SegmentOptions:
    """All that can be asked of a segmentation.

    Parameters
    ----------
    models : tuple of str
        Names from the store, or bundle folders.
    out : Path
        The output folder.
    archives : bool
        Whether archives in a folder are looked into.
    series, phase, gaps, nan, orientation, modality
        Which scan, and what its file does not say: as in `scanloom.load_volume`. "all" takes each
        series of a path.
    device : str
        "auto", "cpu", "cuda" or "cuda:N".
    precision : str
        "auto", "float32" or "half".
    key : Path or None
        The file with the key of the ids; None for SCANLOOM_KEY or the user's own.
    names : "id" or "source"
        What case folders are called; "source" puts words of headers and paths into their names.
    replace : bool
        Whether a result of another recipe is replaced.
    memory_limit : int or None
        Bytes that the whole process may take; None for what the machine has.
    max_size : int or None
        Bytes that the voxels of a scan may take; None for 4 GiB.
    body_box : bool
        Whether windows of air are passed over, for models that say what air is.
    fused_restore : bool
        Whether compiled kernels bring labels back, or plain torch.
    """

    models: tuple[str, ...]
    out: Path
    archives: bool = False
    series: str | None = None
    phase: int | None = None
    gaps: Gaps = "refuse"
    nan: Nan = "refuse"
    orientation: str | None = None
    modality: str | None = None
    device: str = "auto"
    precision: str = "auto"
    outputs: Outputs = field(default_factory=Outputs)
    key: Path | None = None
    names: Names = "id"
    replace: bool = False
    memory_limit: int | None = None
    max_size: int | None = None
    body_box: bool = True
    fused_restore: bool = True

    def workflow(self) -> Workflow:
        """Return the workflow that a run over an archive would need for the same results.

        Raises
        ------
        ScanError
            WORKFLOW if an option has a value that it can't have.
        """
        return make_workflow(
            name="segment",
            models=self.models,
            policy={
                "gaps": self.gaps,
                "nan": self.nan,
                "orientation": self.orientation,
                "modality": self.modality,
                "max_size": self.max_size,
            },
            outputs=asdict(self.outputs),
            execution={
                "device": self.device,
                "precision": self.precision,
                "body_box": self.body_box,
                "fused_restore": self.fused_restore,
                "memory_limit": self.memory_limit,
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
        For what concerns all: the models, the key, the output folder.
    """
    return tuple(record for _, record in segment_each(paths, options, on_step))


def segment_each(
    paths: Sequence[Path], options: SegmentOptions, on_step: OnStep | None = None
) -> Iterator[tuple[Path, CaseRecord]]:
    """Give each path with what became of a scan there: see `segment_paths`."""
    session = _Session(options)
    with closing(session.read_session):
        for path in paths:
            for record in session.run(path, on_step):
                yield path, record


class _Session:
    """Models, key and output folder, held over several scans; networks are loaded once."""

    def __init__(self, options: SegmentOptions) -> None:
        self.options, self.workflow = options, options.workflow()
        self.read_session = ReadSession()  # not active while `run` is suspended at a yield
        self.cards = unique_cards([find_model(name) for name in options.models])
        check_structures(self.cards, options.outputs)
        check_device(options.device)
        self.key = load_key(options.key)
        fingerprint = key_fingerprint(self.key)
        claim_out(options.out, fingerprint)
        self.books = Books(options.out, fingerprint, options.names)
        self.place = Place(options.out, fingerprint, options.replace, self.key)
        self.recipe = workflow_recipe(self.workflow, self.cards)
        self._labellers: Sequence[Labeller] | None = None
        self._fault: ScanError | None = None

    def run(self, path: Path, on_step: OnStep | None) -> Iterator[CaseRecord]:
        clock = Clock((lambda step: on_step(path, step)) if on_step else None)
        try:
            with clock.step("find"), self.read_session.active():
                meant = self._meant(path)
        except Exception as error:  # a fault in one scan must not stop the others
            logger.debug("no scan found", exc_info=True)
            yield failed_record("", error)
            return
        for series in meant:
            with self.read_session.active():
                record = self._run(series, clock)
            yield record
            clock = Clock(clock.on_step)

    def _meant(self, path: Path) -> tuple[Series, ...]:
        options = self.options
        reading = Reading(options.phase, options.gaps, options.orientation)
        found = find_series(path, options.out, archives=options.archives)
        return select_series(found, options.series, preference_of(self.cards), reading)

    def _run(self, series: Series, clock: Clock) -> CaseRecord:
        case: Case | None = None
        try:
            with clock.step("find"):
                phase = self.options.phase
                number = case_id(series, self.key, phase)
                case = make_case(number, series, self.workflow, self.recipe, phase=phase)
                case = replace(case, stamp=source_stamp([series.stamp], self.key))
                case = with_source_hash(case, self.key)
            record = self._segment(case, clock)
        except Exception as error:  # a fault in one case must not stop the others
            logger.debug("case not used", exc_info=True)
            record = failed_record(case.id if case else "", error)
        if self._fault is not None:
            raise self._fault  # of the models: no scan is to blame
        if case is not None:
            self.books.note(case, record)
        return record

    def _segment(self, case: Case, clock: Clock) -> CaseRecord:
        out, folder = self.options.out, self.books.folder_name(case)
        if standing_of(out, folder, case, replace=self.options.replace) is Standing.CURRENT:
            keep_source_stamp(out / "cases" / folder, case.stamp)
            return _recall(case, out / "cases" / folder)
        check_writable(out)
        self._check_fits(case)
        source = source_of(case.series, case.id)
        with self._networks() as labellers:
            return work_on(case, labellers, self.place, clock, folder=folder, source=source)

    def _check_fits(self, case: Case) -> None:
        """Refuse a scan that can't fit, before a voxel is read."""
        if self.options.memory_limit is None:
            return
        outline = read_outline(case.series, case.phase, case.orientation, case.gaps)
        need = estimate_case(*outline, self.cards, self.options.outputs)
        check_memory(need, self.options.memory_limit)

    @contextmanager
    def _networks(self) -> Iterator[Callable[[], Sequence[Labeller]]]:
        """Give what gives the networks; for the first scan they load while it is read."""
        if self._labellers is not None:
            known = self._labellers
            yield lambda: known
            return
        # Reading and importing both change the process's warning filters for a while: what
        # held before is put back when both have ended
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self._load_networks)
            pool.submit(import_heavy)  # while the network runs
            yield coming.result

    def _load_networks(self) -> Sequence[Labeller]:
        execution = self.workflow.execution
        digests = [card_digest(card) for card in self.cards]
        try:
            self._labellers = load_predictors(self.workflow.models, digests, execution)
        except Exception as error:
            self._fault = blame(error)
            raise self._fault from error
        return self._labellers


def _recall(case: Case, folder: Path) -> CaseRecord:
    """Return the record of a case that was published before."""
    try:
        told = json.loads((folder / CASE).read_text(encoding="utf-8"))
        flags = tuple(Flag[flag["code"]] for flag in told["flags"])
        rows = read_measurements(folder)
        return CaseRecord(case.id, None, "", flags, folder, rows, recalled=True)
    except (OSError, ValueError, KeyError) as exc:
        detail = f"the result of case {case.id} can't be read"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
