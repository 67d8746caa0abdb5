"""Segment one path after another: what the command line and `scanloom.segment` do."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.cards.store import find_model
from scanloom.core import Case, CaseRecord, Clock, Flag, Gaps, Outputs, Reason, ScanError, Series
from scanloom.engine import steps
from scanloom.engine.books import Books, Names
from scanloom.engine.estimate import check_memory, estimate_case
from scanloom.engine.record import recipe_hash
from scanloom.io.casefolder import CaseFolder, claim_out, is_done
from scanloom.io.crosswalk import source_of
from scanloom.io.find import choose_series, find_series
from scanloom.io.identity import case_id, key_fingerprint, load_key, source_hash
from scanloom.io.names import CASE
from scanloom.io.outline import read_outline
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
    series, phase, gaps, orientation, modality
        Which scan, and what its file does not say: as in `scanloom.load_volume`.
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
    series: str | None = None
    phase: int | None = None
    gaps: Gaps = "refuse"
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


def segment_paths(
    paths: Sequence[Path], options: SegmentOptions, on_step: OnStep | None = None
) -> tuple[CaseRecord, ...]:
    """Segment the scan at each path; one that can't be used does not stop the others.

    Returns
    -------
    tuple of CaseRecord
        One a path, in order; its `reason` says why there is no result.

    Raises
    ------
    ScanError
        For what concerns all: the models, the key, the output folder.
    """
    session = _Session(options)
    return tuple(session.run(path, on_step) for path in paths)


class _Session:
    """Models, key and output folder, held over several scans; networks are loaded once."""

    def __init__(self, options: SegmentOptions) -> None:
        self.options = options
        self.cards = tuple(find_model(name) for name in options.models)
        if len({card.name for card in self.cards}) != len(self.cards):
            raise ScanError(Reason.MODEL_UNKNOWN, "two of the models have the same name")
        _check_structures(self.cards, options.outputs)
        self.key = load_key(options.key)
        claim_out(options.out, key_fingerprint(self.key))
        self.books = Books(options.out, key_fingerprint(self.key), options.names)
        self.recipe = recipe_hash(
            self.cards,
            {
                "phase": options.phase,
                "gaps": options.gaps,
                "orientation": options.orientation,
                "modality": options.modality,
                "precision": options.precision,
                "body_box": options.body_box,
                **({} if options.fused_restore else {"fused_restore": False}),
            },
            options.outputs,
        )
        self._labellers: tuple[steps.Labeller, ...] | None = None

    @property
    def labellers(self) -> tuple[steps.Labeller, ...]:
        """The networks, loaded when the first scan needs them."""
        if self._labellers is None:
            from scanloom.inference.predictor import Predictor  # torch comes in here

            self._labellers = tuple(
                Predictor(
                    card,
                    device=self.options.device,
                    precision=self.options.precision,
                    memory_limit=self.options.memory_limit,
                    body_box=self.options.body_box,
                    fused_restore=self.options.fused_restore,
                )
                for card in self.cards
            )
        return self._labellers

    def run(self, path: Path, on_step: OnStep | None) -> CaseRecord:
        clock = Clock((lambda step: on_step(path, step)) if on_step else None)
        case: Case | None = None
        try:
            with clock.step("find"):
                series = choose_series(find_series(path), self.options.series)
                case = self._case(series)
            record = self._segment(case, clock)
        except Exception as error:  # a fault in one case must not stop the others
            logger.debug("case not used", exc_info=True)
            record = CaseRecord(case.id if case else "", *_why(error), (), None)
        if case is not None:
            self.books.note(case, record)
        return record

    def _case(self, series: Series) -> Case:
        options = self.options
        return Case(
            id=case_id(series, self.key),
            series=series,
            outputs=options.outputs,
            source_hash=source_hash(series, self.key),
            recipe=self.recipe,
            orientation=options.orientation,
            modality=options.modality,
            phase=options.phase,
            gaps=options.gaps,
            max_bytes=options.max_size,
        )

    def _check_fits(self, case: Case) -> None:
        """Refuse a scan that can't fit, before a voxel is read."""
        if self.options.memory_limit is None:
            return
        outline = read_outline(case.series, case.phase, case.orientation, case.gaps)
        if outline is not None:
            need = estimate_case(*outline, self.cards, self.options.outputs)
            check_memory(need, self.options.memory_limit)

    def _segment(self, case: Case, clock: Clock) -> CaseRecord:
        out, name = self.options.out, self.books.folder_name(case)
        if is_done(out, name, case.recipe, replace=self.options.replace):
            return _recall(case, out / "cases" / name)
        segmented = steps.segment(self._load(case, clock), self.labellers)
        with CaseFolder(out, name, key_fingerprint(self.key)) as folder:
            record = steps.write(segmented, folder.path)
            source = source_of(case.series, case.id)
            published = folder.publish(replace=self.options.replace, source=source)
        return replace(record, folder=published)

    def _load(self, case: Case, clock: Clock) -> steps.LoadedCase:
        """Read the scan; before the first one the networks are loaded meanwhile, in a thread."""
        if self._labellers is not None:
            return steps.load(case, clock)
        # Reading and importing both change the process's warning filters for a while: what
        # held before is put back when both have ended
        with warnings.catch_warnings(), ThreadPoolExecutor(1) as pool:
            coming = pool.submit(lambda: self.labellers)
            loaded = steps.load(case, clock)
            coming.result()
        return loaded


def _why(error: Exception) -> tuple[Reason, str]:
    """Return the reason that an error is, and what may be said of it."""
    if isinstance(error, ScanError):
        return error.reason, error.detail
    if isinstance(error, MemoryError):
        return Reason.OUT_OF_MEMORY, "the scan and its result do not fit into memory"
    return Reason.INTERNAL, type(error).__name__


def _recall(case: Case, folder: Path) -> CaseRecord:
    """Return the record of a case that was published before."""
    try:
        told = json.loads((folder / CASE).read_text(encoding="utf-8"))
        flags = tuple(Flag[flag["code"]] for flag in told["flags"])
        return CaseRecord(case.id, None, "", flags, folder, read_measurements(folder))
    except (OSError, ValueError, KeyError) as exc:
        detail = f"the result of case {case.id} can't be read"
        raise ScanError(Reason.OUTPUT, detail) from exc


def _check_structures(cards: Sequence[ModelCard], outputs: Outputs) -> None:
    """Refuse a label that no model has, and a model of which nothing is wanted."""
    if not outputs.structures:
        return
    wanted = set(outputs.structures)
    for card in cards:
        if not wanted & {s.label for s in card.structures}:
            raise ScanError(Reason.STRUCTURE_UNKNOWN, f"{card.name} has none of {sorted(wanted)}")
    unknown = wanted - {s.label for card in cards for s in card.structures}
    if unknown:
        raise ScanError(Reason.STRUCTURE_UNKNOWN, f"no model has {', '.join(sorted(unknown))}")
