"""Output folders with drawn cases, as far as the list of a review needs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scanloom.core import Flag, Measurement
from scanloom.io.output.case_folder import CaseFolder
from scanloom.io.output.measurements import write_measurements
from scanloom.review.revisions import REVISIONS
from support.make_report import measured

KEY = "abc"
_FLAGS = (Flag.TOUCHES_BORDER, Flag.HU_IMPLAUSIBLE, Flag.SHEARED, Flag.FOV_IMPLAUSIBLE)
_MODELS = {"organs": ("liver", "kidney_left", "kidney_right"), "a model": ("bone", "=1+1")}


def draw_measurements(rng: np.random.Generator, models: Sequence[str]) -> list[Measurement]:
    """Draw measurements: some structures are missing, large, small, cut off or of other units."""
    drawn = []
    for model in models:
        for n, label in enumerate(_MODELS[model]):
            kind = rng.random()
            ml = 0.0 if kind < 0.05 else 150.0 * float(np.exp(rng.normal(0, 0.1 + (kind > 0.9))))
            flags = tuple(f for f in _FLAGS if rng.random() < 0.1)
            box = ((n, 1, 2), (9, int(rng.integers(2, 50)), 9)) if ml else None
            parts = int(rng.integers(1, 3)) * (20 if kind > 0.97 else 1)
            unit = "a.u." if rng.random() < 0.1 else "HU"
            values = {"mean": float(rng.normal(50, 10)) if ml else None, "unit": unit, "box": box}
            values |= {"share": float(rng.random()), "share_of": "a/b"} if kind > 0.8 else {}
            components = parts if ml else 0
            drawn.append(
                measured(model, label, ml, flags=flags, components=components, number=n, **values)
            )
    return drawn


def publish_drawn(out: Path, name: str, seed: int) -> Path:
    """Publish a case that is drawn by its seed, without label maps; replace an earlier one."""
    rng = np.random.default_rng(seed)
    models = [model for model in _MODELS if rng.random() < 0.7]
    ranges = [
        {
            "structure": "bone",
            "quantity": "volume_ml",
            "range": {"low": 100.0, "high": float(seed % 3 + 200)},
            "source": "a book",
        }
    ]
    document = {
        "case": name,
        "recipe": f"r{seed}",
        "source": {"hash": f"{seed}", "modality": [None, "CT", "MR"][seed % 3]},
        "grid": {"axes": "LPS", "shape": [5, 6, seed % 50], "spacing_mm": [1.0, 1.0, 2.5]},
        "models": [{"name": each, "reference_ranges": ranges} for each in models],
    }
    with CaseFolder(out, name, KEY) as folder:
        _write(folder.path, document, draw_measurements(rng, models))
        return folder.publish(replace=True)


def add_revision(out: Path, case: Path, seed: int) -> Path:
    """Add a corrected result with other measurements to a case."""
    rng = np.random.default_rng(seed)
    document = json.loads((case / "case.json").read_text())
    models = [each["name"] for each in document["models"]]
    document["revision"] = {"of_recipe": document["recipe"]}
    folder = Path(out, *REVISIONS, case.name, "1")
    folder.mkdir(parents=True)
    _write(folder, document, draw_measurements(rng, models))
    (folder / "SHA256SUMS").write_text(f"{seed:064}  segmentation.nii.gz\n")
    return folder


def _write(folder: Path, document: object, measurements: Sequence[Measurement]) -> None:
    (folder / "case.json").write_text(json.dumps(document))
    (folder / "timing.json").write_text('{"source_stamp": "s"}')
    (folder / "segments.json").write_text('{"files": [{"file": "segmentation.nii.gz"}]}')
    (folder / "segmentation.nii.gz").write_text(json.dumps(document))
    write_measurements(folder, measurements)
