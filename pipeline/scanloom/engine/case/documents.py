"""Documents of a case: `case.json`, equal for equal runs, and `timing.json`, which is not."""

from __future__ import annotations

import resource
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.cards.graph import known_errors, needed_parts, networks
from scanloom.core import Flag, Grid, Relations
from scanloom.core.packages import package_versions
from scanloom.engine.case.differences import options_document, outputs_document
from scanloom.engine.case.types import SegmentedCase
from scanloom.io.output.published import SOURCE_STAMP

if TYPE_CHECKING:
    from scanloom.inference.memory import CaseEstimate

VERSIONED_PACKAGES = (
    "torch",
    "monai",
    "numpy",
    "pydicom",
    "highdicom",
    "nibabel",
    "SimpleITK",
)
"""Packages whose versions can change a result, beside scanloom."""


def case_json(segmented: SegmentedCase, present: Collection[str]) -> dict[str, Any]:
    """Return the document of a result and its provenance, without paths or identity.

    `present` has the conditions of known errors that the scan meets.
    """
    case, volume = segmented.loaded.case, segmented.loaded.scan.volume
    labels = case.relations.labels_to_compute(case.outputs.structures)
    errors = known_errors([each.card for each in segmented.predictors], case.relations, present)
    return {
        "case": case.id,
        "source": {
            "kind": case.series.kind,
            "files": len(case.series.files),
            "hash": case.source_hash,
            **({} if case.phase is None else {"phase": case.phase}),
            "modality": volume.modality,
            "unit": volume.unit,
            **({"nan_as": volume.padding} if Flag.NAN_PADDED in volume.flags else {}),
        },
        "grid": _grid(volume.grid),
        "flags": [{"code": flag.code, "text": flag.text} for flag in segmented.flags],
        "recipe": case.recipe,
        "outputs": outputs_document(case.outputs),
        "options": options_document(case.read, case.compute),
        "models": [
            {
                "name": predictor.card.name,
                "version": predictor.card.version,
                "license": predictor.card.license,
                "weights_sha256": predictor.card.weights.published,
                **weights_of_networks(needed_parts(predictor.card, labels)),
                "card_sha256": card_digest(predictor.card),
                "device": device,
                "precision": precision,
                "engine": {"name": engine.name, "version": engine.version, "why": engine.why},
                **({"changes": predictor.changes} if predictor.changes else {}),
                **_judgements(predictor.card, errors[predictor.card.name]),
            }
            for predictor, (device, precision, engine) in zip(
                segmented.predictors, segmented.placements, strict=True
            )
        ],
        **_related(segmented),
        "versions": _versions(),
        "notice": "Research software: not a medical device, not for diagnosis or treatment.",
    }


def _judgements(card: ModelCard, errors: Sequence[str]) -> dict[str, Any]:
    """Return the known errors to expect and the reference ranges, if the card states any."""
    ranges = [asdict(each) for each in card.reference_ranges]
    stated = {"limitations": list(errors), "reference_ranges": ranges}
    return {name: value for name, value in stated.items() if value}


def weights_of_networks(card: ModelCard) -> dict[str, Any]:
    """Return the hashes of all weights of a model with several: folds, parts, previous stages."""
    used = [
        {
            "name": network.name,
            "weights_sha256": [each.published for each in (network.weights, *network.folds)],
        }
        for network in networks(card)
    ]
    several = len(used) > 1 or len(used[0]["weights_sha256"]) > 1
    return {"networks": used} if several else {}


def _related(segmented: SegmentedCase) -> dict[str, Any]:
    """Return the relations of a case, and the models of results that have several; if any."""
    relations = segmented.loaded.case.relations
    if not relations:
        return {}
    results = [
        {"name": result.model, "version": result.version, "models": list(result.sources)}
        for result in segmented.segmentations
        if result.sources
    ]
    return {"relations": _relations(relations), "results": results}


def _relations(relations: Relations) -> dict[str, Any]:
    return {
        "results": [{"name": name, **asdict(each)} for name, each in relations.results.items()],
        "crop_by": [
            {
                "name": name,
                "around": {"model": crop.model, "structures": crop.structures},
                "margin_mm": crop.margin_mm,
                "largest": crop.largest,
            }
            for name, crop in relations.crop_by.items()
        ],
        "restrict_to": [
            {"name": name, "inside": asdict(inside)}
            for name, inside in relations.restrict_to.items()
        ],
        "ensembles": [
            {"name": name, "models": models} for name, models in relations.ensembles.items()
        ],
        "unite": [{"name": name, **asdict(union)} for name, union in relations.unite.items()],
        "shares": [asdict(share) for share in relations.shares],
        "asymmetries": [asdict(each) for each in relations.asymmetries],
    }


def timing_json(segmented: SegmentedCase, estimate: CaseEstimate) -> dict[str, Any]:
    """Return the cost of a case: seconds by step, memory, and joules if they can be measured."""
    clock = segmented.loaded.clock
    return {
        SOURCE_STAMP: segmented.loaded.case.stamp,
        "steps": {
            name: {"wall_s": round(s.wall, 4), "cpu_s": round(s.cpu, 4)}
            for name, s in clock.steps.items()
        },
        "device": [device for device, _, _ in segmented.placements],
        "precision": [precision for _, precision, _ in segmented.placements],
        "engine": [engine.measured for _, _, engine in segmented.placements],
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimated_memory_bytes": estimate.peak,
        "window_values": estimate.values,
        "ladder": clock.notes.get("ladder", []),
        "body_box": clock.notes.get("skip air", []),
        "joules": segmented.loaded.meter.joules(),
    }


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
    """Return the installed versions; cached, since the lookup takes longer than a small case."""
    return package_versions(VERSIONED_PACKAGES)
