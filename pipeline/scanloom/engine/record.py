"""What a case says of itself: `case.json` (the same for equal runs) and `timing.json` (not)."""

from __future__ import annotations

import resource
from dataclasses import asdict
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from scanloom.core import Flag, Grid
from scanloom.engine.estimate import Placement, estimate_case
from scanloom.engine.recipe import card_digest
from scanloom.io.published import SOURCE

if TYPE_CHECKING:
    from scanloom.engine.steps import SegmentedCase

LIBRARIES = ("scanloom", "torch", "monai", "numpy", "pydicom", "highdicom", "nibabel", "SimpleITK")
"""Whose versions can change a result."""


def case_json(segmented: SegmentedCase) -> dict[str, Any]:
    """Return what a case's result is and how it came about: no path, no identity."""
    case, volume = segmented.loaded.case, segmented.loaded.scan.volume
    return {
        "schema": 1,
        "case": case.id,
        "source": {
            "kind": case.series.kind,
            "files": len(case.series.files),
            "hash": case.source_hash,
            "modality": volume.modality,
            "unit": volume.unit,
            **({"nan_as": volume.padding} if Flag.NAN_PADDED in volume.flags else {}),
        },
        "grid": _grid(volume.grid),
        "flags": [{"code": flag.code, "text": flag.text} for flag in segmented.flags],
        "recipe": case.recipe,
        "outputs": asdict(case.outputs),
        "models": [
            {
                "name": labeller.card.name,
                "version": labeller.card.version,
                "license": labeller.card.license,
                "weights_sha256": labeller.card.weights.sha256,
                "card_sha256": card_digest(labeller.card),
                "device": made.device or labeller.device_name,
                "precision": made.precision or labeller.precision_name,
            }
            for labeller, made in zip(segmented.labellers, segmented.segmentations, strict=True)
        ],
        "versions": _versions(),
        "notice": "Research software: not a medical device, not for diagnosis or treatment.",
    }


def timing_json(segmented: SegmentedCase) -> dict[str, Any]:
    """Return what the case took: seconds by step, memory; joules where they can be measured."""
    clock = segmented.loaded.clock
    return {
        "schema": 1,
        SOURCE: segmented.loaded.case.stamp,
        "steps": {
            name: {"wall_s": round(s.wall, 4), "cpu_s": round(s.cpu, 4)}
            for name, s in clock.steps.items()
        },
        "device": [labeller.device_name for labeller in segmented.labellers],
        "precision": [labeller.precision_name for labeller in segmented.labellers],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimated_memory_bytes": _estimated(segmented),
        "window_values": _window_values(segmented),
        "ladder": clock.notes.get("ladder", []),
        "body_box": clock.notes.get("body box", []),
        "joules": segmented.loaded.meter.joules(),
    }


def _estimated(segmented: SegmentedCase) -> int:
    """Return the bytes that were to be expected from header and cards alone."""
    volume = segmented.loaded.scan.volume
    first = segmented.labellers[0]
    placement = Placement(first.device_name, first.precision_name)
    cards = [labeller.card for labeller in segmented.labellers]
    outputs = segmented.loaded.case.outputs
    return estimate_case(volume.grid, volume.array.dtype, cards, outputs, placement).peak


def _window_values(segmented: SegmentedCase) -> int:
    """Return what went through the networks, as a plan counts it."""
    from scanloom.inference.cost import window_values

    grid = segmented.loaded.scan.volume.grid
    return sum(window_values(labeller.card, grid) for labeller in segmented.labellers)


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "shape": list(grid.shape),
        "spacing_mm": [round(s, 6) for s in grid.spacing],
        "axes": grid.axis_codes,
        "sheared": grid.sheared,
        "affine_ras_mm": [[float(v) for v in row] for row in grid.affine],
    }


@cache
def _versions() -> dict[str, str]:
    """Return what is installed; looked up once, since it takes longer than a small case."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
