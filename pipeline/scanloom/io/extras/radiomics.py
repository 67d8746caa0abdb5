"""Features of structures on request: `radiomics.csv`, and `radiomics.json` with their settings.

Features of one settings hash can be compared with each other: it covers everything that decides
them, and the version of mirp, which computes them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from scanloom.cards.card import ModelCard
from scanloom.core import Grid, Outputs
from scanloom.io.output.case_folder import CaseContent, Writer
from scanloom.io.output.file_names import RADIOMICS_CSV, RADIOMICS_JSON
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.measurements import rounded
from scanloom.io.readback.mismatch import decoding, mismatch_error
from scanloom.io.system.regular_files import open_regular_file
from scanloom.ops.radiomics import (
    MIRP_MODULES,
    Features,
    compute_features,
    effective_settings,
    estimate_features,
    settings_hash,
)

COLUMNS = ("model", "label", "number", "voxels", "flags", "settings", "reason")
"""Columns before the features."""
_INTEGERS = ("number", "voxels")


def _expected(_: CaseContent) -> set[str]:
    return {RADIOMICS_CSV, RADIOMICS_JSON}


def _write(folder: Path, content: CaseContent) -> None:
    volume, requested = content.scan.volume, content.case.outputs.radiomics
    settings = effective_settings(requested, volume)
    content.features[:] = compute_features(content.segmentations, volume, requested)
    digest = settings_hash(settings)
    write_document(folder / RADIOMICS_JSON, {"settings": settings, "sha256": digest})
    flags = {(m.model, m.label): " ".join(f.code for f in m.flags) for m in content.measurements}
    names = dict.fromkeys(name for each in content.features for name in each.values)
    with (folder / RADIOMICS_CSV).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, (*COLUMNS, *names), lineterminator="\n")
        table.writeheader()
        for each in content.features:
            common = {
                "model": each.model,
                "label": each.label,
                "number": each.number,
                "voxels": each.voxels,
                "flags": flags.get((each.model, each.label), ""),
                "settings": digest,
                "reason": each.reason,
            }
            table.writerow({**common, **_numbers(each)})


def _numbers(features: Features) -> dict[str, float | None]:
    """Return the features as the table has them: with seven significant digits."""
    return {name: None if v is None else rounded(v) for name, v in features.values.items()}


def read_features(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a case's table, with None for empty cells; none if it has no table.

    Raises
    ------
    OSError, ValueError
        If the table is malformed.
    """
    try:
        file = _open(folder)
    except FileNotFoundError:
        return []
    with file:
        try:
            return [
                {name: _cell(name, text) for name, text in row.items()}
                for row in csv.DictReader(file, strict=True)
            ]
        except (csv.Error, TypeError) as exc:
            raise ValueError(f"{RADIOMICS_CSV} is malformed") from exc


def feature_columns(folder: Path) -> list[str]:
    """Return the columns of a case's table; none if it has no table.

    Raises
    ------
    OSError, ValueError
        If the table is malformed.
    """
    try:
        with _open(folder) as file:
            return next(csv.reader(file, strict=True), [])
    except FileNotFoundError:
        return []
    except csv.Error as exc:
        raise ValueError(f"{RADIOMICS_CSV} is malformed") from exc


def _open(folder: Path) -> TextIOWrapper:
    return TextIOWrapper(open_regular_file(folder / RADIOMICS_CSV), "utf-8", newline="")


def _cell(name: str, text: str) -> Any:
    if name in _INTEGERS:
        return int(text)
    if name in COLUMNS:
        return text
    return float(text) if text else None


def _read_back(folder: Path, content: CaseContent) -> None:
    """Compare a table with the values, with its settings, and with the label maps as decoded."""
    with decoding(RADIOMICS_CSV):
        rows, document = read_features(folder), read_json(folder / RADIOMICS_JSON)
    digest = settings_hash(document["settings"])
    if document["sha256"] != digest or {row["settings"] for row in rows} != {digest}:
        raise mismatch_error(f"{RADIOMICS_CSV} has other settings")
    if len(rows) != len(content.features):
        raise mismatch_error(f"{RADIOMICS_CSV} has other rows")
    for row, features in zip(rows, content.features, strict=True):
        name = (row["model"], row["label"])
        if name != (features.model, features.label) or row["number"] != features.number:
            raise mismatch_error(f"{RADIOMICS_CSV} has other structures")
        if row["voxels"] != content.counts[name]:
            raise mismatch_error(f"the voxels of {name[1]} are not those of the label map")
        written = {key: value for key, value in row.items() if key not in COLUMNS}
        expected = dict.fromkeys(written) | _numbers(features)
        if written != expected or row["reason"] != features.reason:
            raise mismatch_error(f"{RADIOMICS_CSV} has other features of {name[1]}")


def _memory(grid: Grid, cards: Sequence[ModelCard], outputs: Outputs) -> int:
    hounsfield = all(channel.modality == "CT" for card in cards for channel in card.channels[:1])
    return estimate_features(grid, outputs.radiomics, hounsfield=hounsfield)


RADIOMICS = Writer("radiomics", _expected, _write, _read_back, _memory, modules=MIRP_MODULES)
