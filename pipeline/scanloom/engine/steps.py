"""The three doors that every case goes through: load | segment | write.

Plain functions: no globals, no Dask, no printing. The command line, a run over an archive, the
tests and a worker call the same three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from scanloom.cards.card import ModelCard
from scanloom.cards.check import check_scan
from scanloom.core import (
    Case,
    CaseRecord,
    Clock,
    Flag,
    Layer,
    Outputs,
    Reason,
    ScanError,
    Segmentation,
    Volume,
)
from scanloom.engine.energy import Meter
from scanloom.engine.record import case_json, timing_json
from scanloom.io.beside import run_beside
from scanloom.io.json_file import write_json
from scanloom.io.readback import read_back
from scanloom.io.results import write_results
from scanloom.io.scan import DicomSource, Scan
from scanloom.io.tables import write_measurements
from scanloom.ops.measure import measure
from scanloom.review.preview import draw_preview


class Labeller(Protocol):
    """Labels a volume on its own grid: a `Predictor`, or anything that can do the same."""

    @property
    def card(self) -> ModelCard:
        """What it needs and gives."""

    @property
    def device_name(self) -> str:
        """Where it runs: "cpu", "cuda:0"."""

    @property
    def precision_name(self) -> str:
        """In which numbers it computes: "float32", "float16"."""

    def predict(
        self, volume: Volume, clock: Clock | None = None, *, others: Sequence[Volume] = ()
    ) -> Segmentation:
        """Return the structures of `volume`; `others` are further input channels."""


@dataclass(frozen=True, eq=False)
class LoadedCase:
    """A case with its scan in memory, and the volumes of further input channels."""

    case: Case
    scan: Scan
    clock: Clock
    meter: Meter
    others: tuple[Volume, ...] = ()


@dataclass(frozen=True, eq=False)
class SegmentedCase:
    """A loaded case with what the models found, one segmentation a model."""

    loaded: LoadedCase
    labellers: tuple[Labeller, ...]
    segmentations: tuple[Segmentation, ...]
    flags: tuple[Flag, ...] = field(default=())


def load(case: Case, clock: Clock | None = None) -> LoadedCase:
    """Read the case's scan.

    Raises
    ------
    ScanError
        If it can't be read for sure.
    """
    from scanloom.io.read import read_scan

    clock, meter = clock or Clock(), Meter()
    with clock.step("load"):
        scan = read_scan(
            case.series,
            phase=case.phase,
            gaps=case.gaps,
            nan=case.nan,
            orientation=case.orientation,
            modality=case.modality,
            max_bytes=case.max_bytes,
        )
        others = tuple(
            read_scan(series, nan=case.nan, modality=case.modality, max_bytes=case.max_bytes).volume
            for series in case.others
        )
    return LoadedCase(case, scan, clock, meter, others)


def segment(loaded: LoadedCase, labellers: Sequence[Labeller]) -> SegmentedCase:
    """Label one case with every model, after the scan was checked against each card.

    Raises
    ------
    ScanError
        MODALITY, CHANNELS or IMPLAUSIBLE if the scan is not for a model; NOT_FINITE if scan or
        scores overflow; OUT_OF_MEMORY.
    """
    volume, others, outputs = loaded.scan.volume, loaded.others, loaded.case.outputs
    flags = list(volume.flags)
    if volume.grid.sheared:
        flags.append(Flag.SHEARED)
    for labeller in labellers:
        flags.extend(check_scan(volume, labeller.card, others))
    if isinstance(loaded.scan.source, DicomSource) and not loaded.scan.source.can_refer:
        flags.append(Flag.SEG_NOT_POSSIBLE)
    found = (labeller.predict(volume, loaded.clock, others=others) for labeller in labellers)
    segmentations = tuple(keep_structures(one, outputs) for one in found)
    flags.extend(flag for one in segmentations for flag in one.flags)
    return SegmentedCase(loaded, tuple(labellers), segmentations, tuple(dict.fromkeys(flags)))


def write(segmented: SegmentedCase, folder: Path) -> CaseRecord:
    """Write all results of a case into `folder`, then read them back and compare.

    Nothing is published here: the folder becomes a result when it is renamed into place.

    Raises
    ------
    ScanError
        WRITE_MISMATCH if what was written differs from the segmentation.
    OSError
        If the disk is full or can't be written.
    """
    loaded, flags = segmented.loaded, segmented.flags
    case, scan, clock = loaded.case, loaded.scan, loaded.clock
    with clock.step("measure"):
        measurements = tuple(
            m for s in segmented.segmentations for m in measure(s, scan.volume, flags)
        )
    segmentations = segmented.segmentations

    def picture() -> None:
        if Flag.BURNED_IN not in flags:
            path = folder / "preview.png"
            draw_preview(scan.volume, segmentations, measurements, flags, path)

    with clock.step("write"):
        run_beside(lambda: write_results(folder, segmentations, scan, case, flags), picture)
        write_measurements(folder, measurements)
        write_json(folder / "case.json", case_json(segmented))
    with clock.step("readback"):
        read_back(folder, segmented.segmentations, scan, case)
    write_json(folder / "timing.json", timing_json(segmented))
    seconds = sum(s.wall for s in clock.steps.values())
    return CaseRecord(case.id, None, "", flags, folder, measurements, seconds)


def keep_structures(segmentation: Segmentation, outputs: Outputs) -> Segmentation:
    """Return the segmentation with only the structures that were asked for; numbers stay."""
    wanted = set(outputs.structures)
    if not wanted:
        return segmentation
    layers = []
    for layer in segmentation.layers:
        kept = tuple(s for s in layer.structures if s.label in wanted)
        if kept:
            table = np.zeros(int(np.iinfo(layer.labels.dtype).max) + 1, layer.labels.dtype)
            numbers = [s.number for s in kept]
            table[numbers] = numbers
            layers.append(Layer(table[layer.labels], kept))
    if not layers:
        raise ScanError(
            Reason.STRUCTURE_UNKNOWN, f"{segmentation.model} has none of {sorted(wanted)}"
        )
    return replace(segmentation, layers=tuple(layers))
