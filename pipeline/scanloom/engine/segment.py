"""Segment the scans at paths, or plan to, for `scanloom segment` and `scanloom.segment`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from scanloom.cards.requested import describe_changes
from scanloom.core import (
    Case,
    CaseRecord,
    Reason,
    ScanError,
    Series,
    SeriesChoice,
    StepTimer,
    blame,
)
from scanloom.core.reasons import known_flags
from scanloom.core.timing import MarkStep, WindowCount
from scanloom.engine.case.models import import_heavy
from scanloom.engine.machine.devices import check_device
from scanloom.engine.prepare import (
    OutputTarget,
    Prepared,
    Request,
    failed_record,
    model_loader,
    prepare,
)
from scanloom.engine.result_file import ResultFile
from scanloom.engine.steps import run_case
from scanloom.engine.workflow.schema import Workflow, make_workflow
from scanloom.inference.graph import Predictor
from scanloom.io.formats import is_single_volume, unused_options
from scanloom.io.identity import case_id, key_fingerprint, read_key, source_stamp
from scanloom.io.index import ranking
from scanloom.io.index.inspection import SeriesInfo, describe_as_read
from scanloom.io.index.listing import TERMINAL_COLUMNS, describe_series
from scanloom.io.index.series import find_series
from scanloom.io.output import crosswalk
from scanloom.io.output.case_folder import check_writable
from scanloom.io.output.engines import remove_unused_engines
from scanloom.io.output.failures import is_failure, remove_failure, write_failure
from scanloom.io.output.file_names import CASE
from scanloom.io.output.json_file import read_json
from scanloom.io.output.layout import case_folder, taken_names
from scanloom.io.output.measurements import read_measurements
from scanloom.io.output.private import load_key_of, private_folder, read_fingerprint
from scanloom.io.output.published import ResultState
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


def iter_segment(
    paths: Sequence[Path],
    options: SegmentOptions,
    on_step: OnStep | None = None,
    on_windows: OnWindows | None = None,
    mark: MarkStep = nullcontext,
) -> Iterator[tuple[Path, CaseRecord]]:
    """Segment the scan at each path; one that can't be used does not stop the others.

    Yields
    ------
    (Path, CaseRecord)
        In order, one a path, or one a series with `series="all"`; its `reason` says why there is
        no result.

    Raises
    ------
    ScanError
        If the models, the key or the output folder cannot be used.
    """
    file = ResultFile.of(options, paths)
    options = file.requesting(options) if file else options
    request = Request.of(segment_workflow(options))
    check_device(options.device)
    with ExitStack() as stack:
        if file is not None:
            file.check_models(request.cards, options.outputs)
            options = replace(options, out=stack.enter_context(file.output_folder()))
        key = load_key_of(options.out, options.key)
        open_output(options.out, key_fingerprint(key))
        is_new, is_unwritable = not options.out.exists(), False
        scans = _Scans(options, request, key, file.left_out if file else ())
        stack.enter_context(closing(scans.session))
        segmenter = _Segmenter(scans, len(paths), file)
        for path in paths:
            clock = StepTimer(
                partial(on_step, path) if on_step else None,
                partial(on_windows, path) if on_windows else None,
                mark,
            )
            for record in segmenter.segment(path, clock):
                done = "from before" if record.reused else f"done in {record.seconds:.1f} s"
                ending = record.reason.code if record.reason else done
                logger.info("case %s: %s", record.id or "unknown", ending)
                is_unwritable |= record.reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE)
                yield path, record
        # Of other faults, what follows takes the engines: other commands may use them just now
        if is_new and is_unwritable:
            remove_unused_engines(options.out)


@dataclass(frozen=True)
class PlannedScan:
    """A scan that would be segmented, or the reason for which it would not be.

    Parameters
    ----------
    path : Path
        As it was given.
    prepared : Prepared or None
        The case; None if no series is selected. Its id is empty if there is no key yet.
    error : ScanError or None
        Why the scan would not be segmented.
    choice : SeriesChoice or None
        Its number among the series at the path, and how a person recognises it.
    changes : str
        How the models are run otherwise than their cards say; else "".
    """

    path: Path
    prepared: Prepared | None = None
    error: ScanError | None = None
    choice: SeriesChoice | None = None
    changes: str = ""


def plan_scans(paths: Sequence[Path], options: SegmentOptions) -> Iterator[PlannedScan]:
    """Yield what `iter_segment` would do with each scan, from headers and cards alone.

    Raises
    ------
    ScanError
        If the models, the key or the device cannot be used.
    """
    check_device(options.device)
    file = ResultFile.of(options, paths)
    options = file.requesting(options) if file else options
    request = Request.of(segment_workflow(options))
    if file is not None:  # a folder that does not exist: there are no results in it
        file.check_models(request.cards, options.outputs)
        options = replace(options, out=file.path.with_name(f".{file.path.name}"))
    changes = ", ".join(filter(None, map(describe_changes, request.cards, request.requested)))
    try:
        key = read_key(options.key)
    except ScanError as error:
        if error.reason is not Reason.KEY_MISMATCH:
            raise
        key = None  # it would be created
    scans = _Scans(options, request, key)
    with closing(scans.session):
        for path in paths:
            try:
                selected = scans.select(path)
            except ScanError as error:
                yield PlannedScan(path, error=error)
                continue
            for each in selected:
                prepared = scans.prepare(each)
                if file is not None:
                    with scans.session.active():
                        prepared = file.compare(prepared)
                if prepared.state is ResultState.CURRENT:  # the grid is shown all the same
                    with scans.session.active(), suppress(ScanError):
                        outline = read_outline(each.series, options.read, phase=each.phase)
                        prepared = replace(prepared, outline=outline)
                refusal = prepared.refusal
                choice = scans.describe(each, refusal.reason if refusal else None)
                yield PlannedScan(path, prepared, refusal, choice, changes)


@dataclass(frozen=True)
class _SelectedSeries:
    """A series to segment, its volume if it has several, and its number at the path."""

    series: Series
    phase: int | None
    choice: SeriesChoice


class _Scans:
    """The scans at paths, selected and prepared one after another; without a key, they have no id.

    The output folder, which need not exist, is the `target`.
    """

    def __init__(
        self,
        options: SegmentOptions,
        request: Request,
        key: bytes | None,
        left_out: Collection[str] = (),
    ) -> None:
        self._options, self.request, self._key = options, request, key
        self._folders = dict(crosswalk.case_folders(options.out))
        self.target = OutputTarget(options.out, key or b"", options.replace, left_out)
        self.session = ReadSession()

    def select(self, path: Path) -> list[_SelectedSeries]:
        """Return the series at a path that are taken; errors as of `find_series`."""
        options, read = self._options, self._options.read
        with self.session.active():
            candidates = find_series(path, options.out, archives=options.archives)
            preference = ranking.preference_of(self.request.cards)
            selected = []
            for series in ranking.select_series(
                candidates, options.series, preference, read, options.phase
            ):
                number = next(n for n, each in enumerate(candidates, 1) if each is series)
                notes = ranking.describe_selection(candidates, options.series, series)
                phase = options.phase
                if phase == 0 and is_single_volume(series, read):
                    phase = None  # volume 0 of a single one has the case id of the scan
                    single = "`--phase 0` was not needed: the scan has a single volume"
                    notes = (*notes, single)
                unused = unused_options(series, options.phase, read)
                choice = SeriesChoice(number, len(candidates), "", tuple(notes), unused)
                selected.append(_SelectedSeries(series, phase, choice))
            return selected

    def prepare(self, selected: _SelectedSeries) -> Prepared:
        """Return the case of a series; a fault is its `refusal`."""
        series, phase = selected.series, selected.phase
        case = self.request.case("", series, phase=phase)
        with self.session.active():
            try:
                if self._key is not None:
                    number = case_id(series, self._key, phase)
                    stamp = source_stamp([series.stamp], self._key)
                    case = replace(case, id=number, stamp=stamp)
                    case = replace(case, folder=self._folder_name(case))
            except Exception as error:  # noqa: BLE001  # a fault in one scan must not stop others
                return Prepared(case, refusal=blame(error))
            return prepare(
                case,
                self.request.cards,
                None if self._key is None else self.target,
                memory_limit=self._options.memory_limit,
            )

    def _folder_name(self, case: Case) -> str:
        """Return the name of a case's folder in `OUT/cases/`; an existing folder keeps its name."""
        out = self._options.out
        if case.id not in self._folders:
            name = case.id
            if self._options.names == "source" and not case_folder(out, case.id).is_dir():
                source = crosswalk.source_from_series(case.series, case.id, case.phase)
                name = crosswalk.folder_name(source, [*taken_names(out), *self._folders.values()])
            self._folders[case.id] = name
        return self._folders[case.id]

    def describe(self, selected: _SelectedSeries, reason: Reason | None) -> SeriesChoice:
        """Return how a person recognises a series, with its modality and slices.

        If there is no result for a reason, the headers are not read again, to refuse a scan soon:
        then the slices are left out.
        """
        series, choice = selected.series, selected.choice
        info = SeriesInfo(modality=series.modality or "")
        with self.session.active():  # which knows the archives of unpacked files
            if reason is None:
                info = describe_as_read(series, self._options.phase, self._options.read)
            text = describe_series(series, info, TERMINAL_COLUMNS - len(str(choice)))
        return replace(choice, text=text)


class _Segmenter:
    """Segments prepared scans with networks that are loaded once.

    The models are those of the request, as of the moment when the command began.
    """

    def __init__(self, scans: _Scans, planned_cases: int, file: ResultFile | None = None) -> None:
        self._scans, self._planned_cases, self._file = scans, planned_cases, file
        self._hashes: dict[str, str] = {}  # of the sources of this command's results, by case id
        self._predictors: Sequence[Predictor] | None = None
        self._fault: ScanError | None = None  # of the models or OUT: no scan is to blame
        self._writable = False
        self._unwritten: list[tuple[Case, CaseRecord]] = []  # failed cases

    def segment(self, path: Path, clock: StepTimer) -> Iterator[CaseRecord]:
        """Yield the record of each series at a path that is taken."""
        try:
            with clock.step("find"):
                selected = self._scans.select(path)
        except Exception as error:  # a fault in one scan must not stop the others
            logger.debug("no scan found", exc_info=True)
            yield failed_record("", error)
            return
        for each in selected:
            with clock.step("find"):
                prepared = self._scans.prepare(each)
            with self._scans.session.active():  # not while this is suspended at the yield
                record = self._segment(prepared, clock)
                if self._fault is not None:
                    raise self._fault
                if record.reason is None:
                    self._hashes[record.id] = prepared.case.source_hash
                if record.id:
                    self._note(prepared.case, record)
            yield replace(record, choice=self._scans.describe(each, record.reason))
            clock = StepTimer(clock.on_step, clock.on_windows, clock.mark)

    def _note(self, case: Case, record: CaseRecord) -> None:
        """Record the outcome of a case; failures are written once OUT has any result.

        If no case succeeds, nothing is written. Failure to write a record is not fatal: the caller
        has already received it.
        """
        out, fingerprint = self._scans.target.out, key_fingerprint(self._scans.target.key)
        if record.reason is not None:
            self._unwritten.append((case, record))
        try:
            if record.reason is None:
                remove_failure(out, case.id)
            if self._unwritten and read_fingerprint(out) == fingerprint:
                sources = [
                    crosswalk.source_from_series(case.series, case.id, case.phase)
                    for case, _ in self._unwritten
                ]
                with private_folder(out, fingerprint) as private:
                    crosswalk.add_sources(private, sources)
                for case, failed in self._unwritten:
                    if is_failure(failed):
                        write_failure(out, failed, case.recipe, case.stamp)
                self._unwritten.clear()
        except (OSError, ScanError):
            logger.debug("a failure can't be written", exc_info=True)

    def _segment(self, prepared: Prepared, clock: StepTimer) -> CaseRecord:
        """Return the record of a case; that of a failure has the path of the scan."""
        case = prepared.case
        try:
            record = self._result(prepared, clock)
        except Exception as error:  # a fault in one case must not stop the others
            logger.debug("case not used", exc_info=True)
            record = failed_record(case.id, error)
        if record.reason is None or record.reason is Reason.INTERNAL:
            return record  # a bug's message is for a report: no path
        return replace(record, private=record.private or crosswalk.source_path(case.series))

    def _result(self, prepared: Prepared, clock: StepTimer) -> CaseRecord:
        """Return the record of a case: refused, from before, or segmented now."""
        case = prepared.case
        if (ended := prepared.ended()) is not None:
            return _with_content(ended) if ended.reason is None else ended
        if self._file and (same := self._file.earlier(case)) is not None:
            return same
        if self._hashes.get(case.id, case.source_hash) != case.source_hash:
            detail = "another path of this command has the same UIDs, but other content"
            raise ScanError(Reason.ID_TAKEN, f"{detail}; its result is kept")
        self._check_writable()
        source = crosswalk.source_from_series(case.series, case.id, case.phase)
        with self._networks() as predictors:
            record = run_case(prepared, predictors, self._scans.target, clock, source=source)
        if self._file and record.reason is None:
            return self._file.publish(record, case)
        return record

    def _check_writable(self) -> None:
        """Refuse an output folder that can't be written: no scan is to blame."""
        if self._writable:
            return
        out = self._scans.target.out
        try:
            check_writable(out)
        except ScanError as error:
            detail = error.detail.replace("the results", "the output folder")
            self._fault = ScanError(error.reason, detail, str(out))
            raise self._fault from error
        self._writable = True

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
        scans = self._scans
        try:
            load = model_loader(scans.request, self._planned_cases, scans.target.out)
            self._predictors = load()
        except Exception as error:
            self._fault = blame(error)
            raise self._fault from error
        return self._predictors


def _with_content(record: CaseRecord) -> CaseRecord:
    """Return the record of a case that was published before with its flags and measurements."""
    folder = record.folder or Path()
    try:
        document = read_json(folder / CASE)
        flags = known_flags(flag["code"] for flag in document["flags"])
        return replace(record, flags=flags, measurements=read_measurements(folder))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        detail = f"the result of case {record.id} can't be read"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail) from exc
