"""The three steps of every case, load, segment and write, and `run_case`, which publishes it.

Plain functions: no globals, no Dask, no printing. The command line, a run over an archive, the
tests and a worker call the same ones, after `scanloom.engine.prepare`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cards.card import HEAD
from scanloom.cards.check import check_measurement, check_scan
from scanloom.cards.graph import Node, graph_of, needed_parts, networks
from scanloom.core import (
    Case,
    CaseRecord,
    Flag,
    Layer,
    Measurement,
    Outputs,
    Reason,
    ScanError,
    Segmentation,
    StepTimer,
)
from scanloom.core.engines import EngineChoice
from scanloom.engine.case.documents import case_json, timing_json
from scanloom.engine.case.types import LoadedCase, SegmentedCase
from scanloom.engine.case.writers import conditions_of, read_back, write_files, writers_of
from scanloom.engine.machine.devices import CaseEnergyMeter
from scanloom.engine.prepare import (
    OutputTarget,
    Prepared,
    estimate_case,
    failed_record,
    file_states,
    placement_of,
)
from scanloom.inference.graph import NO_ENGINE, GraphRun, Predictor, unite
from scanloom.io.extras import rtstruct, sr
from scanloom.io.identity import key_fingerprint
from scanloom.io.output import file_names
from scanloom.io.output.audit import AuditTrail
from scanloom.io.output.case_folder import CaseContent, CaseFolder, staged_folder
from scanloom.io.output.crosswalk import SourceRecord
from scanloom.io.output.json_file import write_document
from scanloom.io.output.published import ResultState
from scanloom.io.read import read_scan
from scanloom.io.scan import DicomSource
from scanloom.ops.label_maps import keep_numbers
from scanloom.ops.measure import add_ratios, measure
from scanloom.ops.uncertainty import add_uncertainty

if TYPE_CHECKING:
    from scanloom.inference.memory import CaseEstimate

logger = logging.getLogger(__name__)
"""Logs at DEBUG only: tracebacks may hold foreign text."""


def run_case(
    prepared: Prepared,
    make_predictors: Callable[[], Sequence[Predictor]],
    target: OutputTarget,
    clock: StepTimer | None = None,
    *,
    source: SourceRecord | None = None,
) -> CaseRecord:
    """Read, segment, write and publish a case that is to run; see `Prepared.ended`.

    `make_predictors` returns the models; it is called when the scan is in memory. `source` is for a
    case that the crosswalk does not have yet. No exception is raised: a failure is the `reason` of
    the record.
    """
    case, clock = prepared.case, clock or StepTimer()
    try:
        loaded = load(case, clock)
        _check_unchanged(prepared)
        clock.announce("models")
        predictors = make_predictors()
        segmented = segment(loaded, predictors)
        estimate = prepared.estimate
        if estimate is None or estimate.placement is None:
            volume, cards = loaded.scan.volume, [predictor.card for predictor in predictors]
            estimate = estimate_case(
                volume.grid,
                volume.array.dtype,
                cards,
                case.outputs,
                placement_of(predictors),
                case.relations,
            )
        name = case.folder_name
        if case.staged:  # it is recorded when it is confirmed
            folder = CaseFolder(target.out, name, target=staged_folder(target.out, case.staged))
        else:
            audit = AuditTrail(target.out, target.key)
            folder = CaseFolder(target.out, name, key_fingerprint(target.key), audit=audit)
        with folder as draft:
            record = write(segmented, draft.path, estimate, target.left_out)
            published = draft.publish(replace=target.replace, source=source)
        updated = prepared.state is ResultState.CHANGED
        return replace(record, folder=published, updated=updated)
    except Exception as error:  # a fault in one case must not stop the others
        logger.debug("case not used", exc_info=True)
        return failed_record(case.id, error)


def _check_unchanged(prepared: Prepared) -> None:
    # a file that was missing at first has not been read before it reappeared
    states = zip(file_states(prepared.case), prepared.files, strict=True)
    if any(before is not None and now != before for now, before in states):
        raise ScanError(Reason.SOURCE_CHANGED, "a file was changed while it was read")


def load(case: Case, clock: StepTimer | None = None) -> LoadedCase:
    """Read the case's scan.

    Raises
    ------
    ScanError
        If it cannot be read without doubt.
    """
    clock, meter = clock or StepTimer(), CaseEnergyMeter()
    with clock.step("load"):
        scan = read_scan(case.series, case.read, phase=case.phase)
        channel = replace(case.read, gaps="refuse", orientation=None)
        volumes = (read_scan(series, channel).volume for series in case.further_channels)
        further = tuple(volumes)
    return LoadedCase(case, scan, clock, meter, further)


def segment(loaded: LoadedCase, predictors: Sequence[Predictor]) -> SegmentedCase:
    """Label one case with every model, after the scan was checked against each card.

    Raises
    ------
    ScanError
        MODALITY, CHANNELS or IMPLAUSIBLE if the scan is not for a model; NOT_FINITE if scan or
        scores overflow; OUT_OF_MEMORY.
    """
    outputs, relations, clock = loaded.case.outputs, loaded.case.relations, loaded.clock
    nodes = graph_of([predictor.card.name for predictor in predictors], relations)
    flags = _check(loaded, predictors, nodes)
    labels = relations.labels_to_compute(outputs.structures)
    clock.networks = sum(
        len([*networks(needed_parts(predictors[n].card, labels))])
        for node in nodes
        for n in node.members
    )
    run = GraphRun(
        nodes,
        predictors,
        (loaded.scan.volume, *loaded.further_channels),
        clock,
        uncertainty="uncertainty" in outputs.also,
    )
    results = run.run()
    own = (results[node.name] for node in nodes if node.name not in relations.united)
    with clock.step("relate"):
        united = [unite(name, union, results) for name, union in relations.unite.items()]
    segmentations = tuple(keep_structures((*own, *united), outputs))
    flags += [flag for result in results.values() for flag in result.flags]
    unique = tuple(dict.fromkeys(flags))
    placements = _placements(predictors, nodes, results)
    return SegmentedCase(loaded, tuple(predictors), segmentations, unique, placements)


def _check(
    loaded: LoadedCase, predictors: Sequence[Predictor], nodes: Sequence[Node]
) -> list[Flag]:
    """Return the flags of a scan before it is labelled; refuse one that is not for a model."""
    scan, also = loaded.scan, loaded.case.outputs.also
    flags = [*loaded.case.flags, *scan.volume.flags]
    whole = {n for node in nodes if node.crop is None for n in node.members}
    for n, predictor in enumerate(predictors):
        card = predictor.card
        if n not in whole:  # its extent is for the crop, which is found later
            card = replace(card, checks=replace(card.checks, extent=None))
        flags += check_scan(scan.volume, card, loaded.further_channels)
    if isinstance(scan.source, DicomSource) and (missing := scan.source.missing_uids):
        logger.info("no DICOM SEG: the series lacks a valid %s", ", ".join(missing))
        flags.append(Flag.SEG_NOT_POSSIBLE)
    if "rtstruct" in also and not rtstruct.can_write(scan):
        flags.append(Flag.RTSTRUCT_NOT_POSSIBLE)
    if "sr" in also and not sr.can_write(scan):
        flags.append(Flag.SR_NOT_POSSIBLE)
    return flags


def _placements(
    predictors: Sequence[Predictor],
    nodes: Sequence[Node],
    results: Mapping[str, Segmentation],
) -> tuple[tuple[str, str, EngineChoice], ...]:
    """Return device, precision and engine of each model, as they were for this scan."""
    # Of a model with several results, one for which it was run
    ran_last = sorted(nodes, key=lambda node: results[node.name].engine != NO_ENGINE)
    result_of = {predictors[n]: results[node.name] for node in ran_last for n in node.members}
    return tuple(
        (
            result_of[predictor].device or predictor.device_name,
            result_of[predictor].precision or predictor.precision_name,
            result_of[predictor].engine or predictor.engine,
        )
        for predictor in predictors
    )


def write(
    segmented: SegmentedCase,
    folder: Path,
    estimate: CaseEstimate,
    left_out: Collection[str] = (),
) -> CaseRecord:
    """Write all results of a case into `folder`, then read them back and compare.

    Nothing is published here: the folder becomes a result when it is renamed into place. Its
    `timing.json` compares the estimate of memory with the peak. Writers that are `left_out` do not
    run.

    Raises
    ------
    ScanError
        WRITE_MISMATCH if the written files differ from the segmentation.
    OSError
        If the disk is full or can't be written.
    """
    loaded, flags = segmented.loaded, segmented.flags
    case, scan, clock = loaded.case, loaded.scan, loaded.clock
    cards = [predictor.card for predictor in segmented.predictors]
    with clock.step("measure"):
        present = conditions_of(scan.volume, cards)
        if HEAD in present:
            flags = (*flags, Flag.HEAD_IN_VIEW)
        measurements = add_ratios(_measure(segmented, flags), case.relations)
    if not any(measurement.voxels for measurement in measurements):
        flags = (*flags, Flag.EMPTY)
    segmented = replace(segmented, flags=flags)
    present |= {m.label for m in measurements if m.voxels}
    content = CaseContent(
        case, scan, segmented.segmentations, measurements, flags, cards, present=present
    )
    writers = writers_of(case.outputs, left_out)
    with clock.step("write"):
        write_files(folder, content, writers)
        write_document(folder / file_names.CASE, case_json(segmented, present))
    with clock.step("readback"):
        read_back(folder, content, writers)
    write_document(folder / file_names.TIMING, timing_json(segmented, estimate))
    seconds = sum(s.wall for s in clock.steps.values())
    return CaseRecord(case.id, None, "", flags, folder, measurements, seconds)


def _measure(segmented: SegmentedCase, flags: Sequence[Flag]) -> list[Measurement]:
    """Measure all structures; each has its own flags, then those of the case."""
    cards = {predictor.card.name: predictor.card for predictor in segmented.predictors}
    of_results = {flag for s in segmented.segmentations for flag in s.flags}
    measured = []
    for segmentation in segmented.segmentations:
        measurements = measure(segmentation, segmented.loaded.scan.volume)
        models = [cards[name] for name in segmentation.sources or (segmentation.model,)]
        for m in add_uncertainty(measurements, segmentation):
            unusual = dict.fromkeys(
                flag
                for card in models
                for flag in check_measurement(
                    m, card.reference_ranges, {s.label for s in card.structures}
                )
            )
            # A crop of nothing, say, is a flag of its own result, not of all in the case
            own = segmentation.flags_of(m.label)
            of_case = (f for f in flags if f in own or f not in of_results)
            measured.append(replace(m, flags=(*m.flags, *unusual, *of_case)))
    return measured


def keep_structures(
    segmentations: Sequence[Segmentation], outputs: Outputs
) -> Sequence[Segmentation]:
    """Return the segmentations with only the requested structures; numbers do not change.

    Segmentations without any are left out: other models may have needed them.
    """
    requested = set(outputs.structures)
    if not requested:
        return segmentations
    reduced = (_with_only(segmentation, requested) for segmentation in segmentations)
    kept = [segmentation for segmentation in reduced if segmentation is not None]
    if not kept:
        raise ScanError(Reason.STRUCTURE_UNKNOWN, f"no model has one of {sorted(requested)}")
    return kept


def _with_only(segmentation: Segmentation, requested: set[str]) -> Segmentation | None:
    """Return the segmentation with only some structures; None if it has none of them."""
    layers = []
    for layer in segmentation.layers:
        kept = tuple(s for s in layer.structures if s.label in requested)
        if kept:
            layers.append(Layer(keep_numbers(layer.labels, (s.number for s in kept)), kept))
    return replace(segmentation, layers=tuple(layers)) if layers else None
