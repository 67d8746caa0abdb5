"""Output folders as a run leaves them, without a run: for the report's tests and its benchmark."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scanloom.core import CaseRecord, Flag, Measurement, Reason
from scanloom.io.output.failures import write_failure
from scanloom.io.output.json_file import write_document
from scanloom.io.output.layout import case_folder
from scanloom.io.output.measurements import write_measurements

BOX = ((2, 2, 2), (9, 9, 9))
REASONS = (Reason.SLICE_GAP, Reason.DAMAGED, Reason.CASE_TIMEOUT, Reason.CRASHED)
STRUCTURES = ("liver", "spleen", "kidney_left", "kidney_right", "lung")


def id_of(number: int) -> str:
    """Return an id as cases have them."""
    digest = hashlib.blake2b(str(number).encode(), digest_size=16).digest()
    return base64.b32encode(digest).decode().rstrip("=").lower()


def measured(model: str, label: str, ml: float, **changes: Any) -> Measurement:
    fields = {
        "model": model,
        "label": label,
        "number": 1,
        "voxels": int(ml * 100),
        "volume_ml": ml,
        "unit": "HU",
        "mean": 50.0 if ml else None,
        "sd": 9.0 if ml else None,
        **dict.fromkeys(("p05", "p25", "median", "p75", "p95"), 50.0 if ml else None),
        "box": BOX if ml else None,
        "components": 1 if ml else 0,
    }
    return Measurement(**{**fields, **changes})


def usual(rng: np.random.Generator, structures: Sequence[str] = STRUCTURES) -> list[Measurement]:
    """Return the usual measurements of a case."""
    return [
        measured("organs", label, 150.0 * float(np.exp(rng.normal(0, 0.1)))) for label in structures
    ]


def add_case(
    out: Path,
    case: str,
    measurements: Sequence[Measurement],
    *,
    flags: Sequence[Flag] = (),
    preview: Path | None = None,
    references: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write the files of a published case that the report reads."""
    folder = case_folder(out, case)
    folder.mkdir(parents=True)
    models = sorted({m.model for m in measurements})
    document = {
        "case": case,
        "source": {"kind": "dicom", "files": 60, "hash": "h", "modality": "CT", "unit": "HU"},
        "grid": {"axes": "LPS", "shape": [60, 50, 40]},
        "flags": [{"code": flag.code, "text": flag.text} for flag in flags],
        "recipe": "r",
        "models": [
            {
                "name": name,
                "version": "1.0",
                "license": "MIT",
                "weights_sha256": "5" * 64,
                "card_sha256": name,
                "device": "cpu",
                "precision": "float32",
                "reference_ranges": list(references),
            }
            for name in models
        ],
        "versions": {"scanloom": "0.1.0", "torch": "2.13.0"},
    }
    write_document(folder / "case.json", document)
    steps = {"load": 0.5, "network": 3.0, "restore": 0.25, "write": 1.0}
    timing = {name: {"wall_s": s, "cpu_s": s} for name, s in steps.items()}
    write_document(folder / "timing.json", {"steps": timing})
    write_measurements(folder, measurements)
    if preview is not None:
        (folder / "preview.png").hardlink_to(preview)
    return folder


def add_failure(out: Path, case: str, reason: Reason, detail: str = "3 missing slices") -> None:
    write_failure(out, CaseRecord(case, reason, detail, (), None), "r")


def write_manifest(out: Path, rows: Sequence[tuple[str, ...]]) -> None:
    """Write a manifest of (case, outcome, reason) and, if there is one, detail; a row a file."""
    with (out / "manifest.csv").open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("file", "case", "outcome", "reason", "detail"))
        lines.writerows((id_of(-n - 1), *row, *[""] * (4 - len(row))) for n, row in enumerate(rows))


def draw_noise(path: Path, seed: int = 0, size: tuple[int, int] = (1600, 1052)) -> Path:
    """Draw a page with more detail in it than any preview has."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (size[1] // 10, size[0] // 10, 3), np.uint8))
    coarse.resize(size, Image.Resampling.BILINEAR).save(path, compress_level=1)
    return path


def make_out(
    out: Path,
    count: int,
    structures: Sequence[str] = STRUCTURES,
    size: tuple[int, int] = (400, 263),
) -> Path:
    """Write an output folder of `count` cases: one in 25 failed, one in 100 stands out."""
    rng = np.random.default_rng(1)
    out.mkdir(parents=True)
    pages = [draw_noise(out / f"page{n}.png", n, size) for n in range(4)]
    rows: list[tuple[str, str, str]] = []
    for n in range(count):
        case, failed = id_of(n), n % 25 == 24
        reason = REASONS[n % len(REASONS)]
        if failed:
            add_failure(out, case, reason)
        else:
            measurements = usual(rng, structures)
            if n % 100 == 3:
                measurements[0] = measured("organs", structures[0], 2000.0, components=30)
            flags = (Flag.SHEARED,) if n % 10 == 0 else ()
            add_case(out, case, measurements, flags=flags, preview=pages[n % len(pages)])
        rows += [(case, reason.outcome if failed else "used", reason.code if failed else "")] * 4
        rows.append(("", "skipped", "NOT_AN_IMAGE"))
    write_manifest(out, rows)
    return out
