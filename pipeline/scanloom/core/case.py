"""What goes through the three doors: `Series`, `Case`, `CaseRecord`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scanloom.core.measurement import Measurement
from scanloom.core.reasons import Flag, Reason

DICOM = "dicom"
"""`Series.kind` of a DICOM series; other kinds are formats of volume files."""

SegKind = Literal["binary", "labelmap"]
Dates = Literal["source", "now"]
Gaps = Literal["refuse", "interpolate"]
Nan = Literal["refuse", "padding"]
"""What is done about missing slices of an otherwise regular stack."""


@dataclass(frozen=True)
class Series:
    """The files of one scan and what their headers say, as the index knows it.

    Parameters
    ----------
    kind : str
        Its format: a name of `scanloom.io.formats.FORMATS`.
    files : tuple of Path
        All its files, in no particular order.
    study_uid, series_uid : str
        Empty for other kinds than DICOM, and where the source lacks them.
    modality : str or None
        What the header says, of the closed list.
    description : str
        For the person who has to choose. It may hold identity: never written to results or logs.
    derived : bool
        Whether it was computed from other slices (a reformat): taken only if it is named.
    lost : int
        Files beside its own that can't be read, of which nobody knows whether they are slices.
    stamp : str
        Hash over size, time of change and inode of its files when they were listed; the same stamp
        means the same content without a look at it. Empty where it is not known.
    """

    kind: str
    files: tuple[Path, ...]
    study_uid: str = ""
    series_uid: str = ""
    modality: str | None = None
    description: str = ""
    derived: bool = False
    lost: int = 0
    stamp: str = ""


@dataclass(frozen=True)
class Outputs:
    """What a case writes.

    Parameters
    ----------
    seg : "binary" or "labelmap"
        SegmentationType of the DICOM SEG.
    dates : "source" or "now"
        Content dates of the DICOM SEG; "source" makes equal runs equal.
    image : bool
        Also `image.nii.gz`, the scan as it was read.
    split : bool
        Also one mask a structure in `split/`.
    structures : tuple of str
        Labels to keep; empty for all.
    """

    seg: SegKind = "binary"
    dates: Dates = "source"
    image: bool = False
    split: bool = False
    structures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One scan to be segmented, and what is wanted of it.

    Parameters
    ----------
    id : str
        Keyed hash, independent of path, machine and order; 26 characters of base32.
    series : Series
        The scan.
    outputs : Outputs
        What to write.
    source_hash : str
        Keyed hash over the files' contents, to tell whether a source changed.
    stamp : str
        Keyed hash of the stamp of each series, joined by spaces; see `Series`. Empty where one is
        not known.
    folder : str
        What its folder in `OUT/cases/` is called, if not by its id.
    recipe : str
        Hash over everything that can change the result (models and options).
    orientation : str or None
        Axis codes, for a file that does not say; only then used.
    modality : str or None
        For a file that does not say.
    phase : int or None
        Which volume of a file or series that holds several, from 0.
    gaps : "refuse" or "interpolate"
        What to do about missing slices.
    nan : "refuse" or "padding"
        What to do about voxels that are no numbers.
    max_bytes : int or None
        Largest size of the scan's voxels; None for what readers take by themselves, 4 GiB.
    others : tuple of Series
        The further input channels of models that take several, in their order. Results lie on
        `series`.
    """

    id: str
    series: Series
    outputs: Outputs
    source_hash: str
    recipe: str
    orientation: str | None = None
    modality: str | None = None
    phase: int | None = None
    gaps: Gaps = "refuse"
    nan: Nan = "refuse"
    max_bytes: int | None = None
    others: tuple[Series, ...] = ()
    stamp: str = ""
    folder: str = ""

    @property
    def folder_name(self) -> str:
        """What its folder in `OUT/cases/` is called."""
        return self.folder or self.id


@dataclass(frozen=True)
class CaseRecord:
    """What became of a case. `reason` is None where it was published whole.

    `recalled` says that its result was there already, and that nothing was done; `remade` that its
    scan had changed since an earlier result, which this one replaced.
    """

    id: str
    reason: Reason | None
    detail: str
    flags: tuple[Flag, ...]
    folder: Path | None
    measurements: tuple[Measurement, ...] = ()
    seconds: float = 0.0
    recalled: bool = False
    remade: bool = False
