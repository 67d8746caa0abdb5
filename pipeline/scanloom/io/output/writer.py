"""`Writer` of one kind of file of a case, and `CaseContent`, which it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.core import Case, Flag, Grid, Measurement, Outputs, Segmentation
from scanloom.io.scan import Scan

Counts = dict[tuple[str, str], int]
"""Voxels of each (model, label)."""


@dataclass(frozen=True, eq=False)
class CaseContent:
    """Content of a case folder, which writers write and read back.

    Parameters
    ----------
    case : Case
        Outputs, and the recipe that DICOM UIDs are derived from.
    scan : Scan
        Volume and source.
    segmentations : sequence of Segmentation
        One for each model, with the requested structures.
    measurements : sequence of Measurement
        Of all structures.
    flags : sequence of Flag
        Of the case.
    cards : sequence of ModelCard
        Of the models.
    counts : dict
        Voxels of each (model, label), filled in when the label maps are read back.
    """

    case: Case
    scan: Scan
    segmentations: Sequence[Segmentation]
    measurements: Sequence[Measurement] = ()
    flags: Sequence[Flag] = ()
    cards: Sequence[ModelCard] = ()
    counts: Counts = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """Names of the models, in order."""
        return [s.model for s in self.segmentations]


def _nothing(*_: object) -> None:
    """Read nothing back."""


def _no_bytes(*_: object) -> int:
    return 0


@dataclass(frozen=True)
class Writer:
    """Writer of one kind of file.

    Parameters
    ----------
    name : str
        Its key in `scanloom.options.EXTRAS` if it runs only on request.
    expected : callable
        Return the relative names of the files that it writes for a content; none if it does not
        apply.
    write : callable
        Write them into the folder. Writers run concurrently.
    read_back : callable
        Compare them with the content; raise WRITE_MISMATCH at the first difference. Runs in the
        order of `scanloom.engine.case.writers.WRITERS`.
    memory : callable
        Estimate the bytes that it holds, from the scan's grid, the models' cards and the outputs.
    """

    name: str
    expected: Callable[[CaseContent], set[str]]
    write: Callable[[Path, CaseContent], None]
    read_back: Callable[[Path, CaseContent], None] = _nothing
    memory: Callable[[Grid, Sequence[ModelCard], Outputs], int] = _no_bytes
