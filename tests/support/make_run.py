"""Runs of one workflow by formula over a drawn archive, and their tables."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

from support import engine_models as em
from support.commands import Ended, scanloom
from support.formula_run import formula_environment, start
from support.layouts import case_folders
from support.write_dicom import Words, noise, write_series

SLICES = 4
GOOD, WRONG = range(3000, 3004), em.RAISE
"""The brightest voxels of scans that can be segmented, and of one whose model fails."""
THORAX = "modality: CT, description: thorax"
"""Selects the good ones alone."""


def write_study(folder: Path, name: str, brightest: int, modality: str = "CT") -> list[Path]:
    stored = noise((12, 10, SLICES), brightest) % 900
    stored[3:6, 3:6, 1:3] = brightest + 1024
    description = {"SeriesDescription": "thorax" if brightest in GOOD else "other"}
    attributes = Words(modality=modality, name=name, study=f"study of {name}", more=description)
    return write_series(folder / name, stored, words=attributes)


class Runs:
    """Runs by formula of one workflow over one archive into one output folder."""

    def __init__(self, folder: Path, archive: Path, model: Path) -> None:
        self.folder, self.archive, self.out = folder, archive, folder / "out"
        self.notes, self.workflow = folder / "notes", folder / "workflow.yaml"
        self.environment = formula_environment(self.notes)
        self._model = model
        self.write()

    def write(self, select: str = "modality: CT", more: str = "") -> None:
        head = f"name: test\nmodels: [{self._model}]\nselect: {{{select}}}\n"
        self.workflow.write_text(head + more)

    def __call__(self, *options: str | Path) -> Ended:
        """Run in this process."""
        where = ("--out", self.out, "--cluster", "none", "--json")
        return scanloom("run", self.workflow, self.archive, *where, *options)

    def begin(self, *options: str | Path, seconds: float = 0.0) -> Any:
        """Start a run in a process of its own."""
        environment = {**self.environment, "FORMULA_SECONDS": str(seconds)}
        command = ["run", self.workflow, self.archive, "--out", self.out, *options]
        return start(command, environment, self.folder / "log")

    @property
    def started(self) -> Counter[int]:
        """The number of starts of each scan, by its brightest voxel."""
        lines = (self.notes / "starts").read_text().splitlines()
        return Counter(int(line.split()[0]) for line in lines)

    def rows(self, table: str) -> list[dict[str, str]]:
        with (self.out / f"{table}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def cases(self) -> dict[str, int]:
        """Return the published cases with the times of their last change."""
        return {p.name: p.stat().st_mtime_ns for p in case_folders(self.out)}
