"""Input and outcome of the steps of a case: `Series`, `Case`, `CaseRecord`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from scanloom.core.measurement import Measurement
from scanloom.core.reasons import Flag, Reason
from scanloom.core.relations import NO_RELATIONS, Relations
from scanloom.options import ComputeOptions, Outputs, ReadOptions

DICOM = "dicom"
"""`Series.kind` of a DICOM series; other kinds are formats of volume files."""


@dataclass(frozen=True)
class Series:
    """The files of one scan, with metadata of their headers.

    Parameters
    ----------
    kind : str
        Its format: a name of `scanloom.io.formats.FORMATS`.
    files : tuple of Path
        All its files, in no particular order.
    study_uid, series_uid : str
        Empty for other kinds than DICOM, and if the source lacks them.
    modality : str or None
        Modality in the header, if it is one of `MODALITIES`.
    number : int
        SeriesNumber of the header; -1 if absent.
    description : str
        Text for choosing a series. It may identify the patient: never written to results or logs.
    derived : bool
        Whether it was computed from other slices (a reformat): used only if selected by name.
    unreadable : int
        Number of unreadable files next to its own, which may be slices of it.
    damaged : int
        Number of these that can be read, but are damaged.
    beside : int
        Number of these that lie in a folder with its slices, or between such folders.
    stamp : str
        Hash over size, time of change and inode of its files when they were listed; an equal stamp
        implies equal content without reading it. Empty if unknown.
    """

    kind: str
    files: tuple[Path, ...]
    study_uid: str = ""
    series_uid: str = ""
    modality: str | None = None
    number: int = -1
    description: str = ""
    derived: bool = False
    unreadable: int = 0
    damaged: int = 0
    beside: int = 0
    stamp: str = ""


@dataclass(frozen=True)
class Case:
    """One scan to segment, with its options and outputs.

    Parameters
    ----------
    id : str
        Keyed hash, independent of path, machine and order; 26 characters of base32.
    series : Series
        The scan.
    outputs : Outputs
        Files to write.
    source_hash : str
        Keyed hash over the files' contents, by which a changed source is detected.
    stamp : str
        Keyed hash of the stamp of each series, joined by spaces; see `Series`. Empty if any is
        unknown.
    folder : str
        Name of its folder in `OUT/cases/`; empty for its id.
    recipe : str
        Hash over everything that can change the result: see `scanloom.engine.case.recipe`.
    read : ReadOptions
        Options for reading the scan.
    phase : int or None
        Index of the volume, from 0, if a file or series holds several.
    further_channels : tuple of Series
        Further input channels of models with several, in their order. Results have the grid of
        `series`.
    relations : Relations
        Relations between its models.
    compute : ComputeOptions
        Options with which its networks run.
    flags : tuple of Flag
        Caveats that are known before it is read.
    staged : str
        Name in `OUT/.work` of its result until an index confirms it; empty to publish it.
    """

    id: str
    series: Series
    outputs: Outputs
    source_hash: str
    recipe: str
    read: ReadOptions = ReadOptions()
    phase: int | None = None
    further_channels: tuple[Series, ...] = ()
    stamp: str = ""
    folder: str = ""
    relations: Relations = NO_RELATIONS
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    flags: tuple[Flag, ...] = ()
    staged: str = ""

    @property
    def folder_name(self) -> str:
        """Name of its folder in `OUT/cases/`."""
        return self.folder or self.id


@dataclass(frozen=True)
class SeriesChoice:
    """The choice of one of the series at a path, for the terminal.

    Parameters
    ----------
    number, of : int
        Its number in the list of the series at the path, from 1, and the length of that list.
    text : str
        The series as a person recognises it, in a line; it may name the patient.
    notes : tuple of str
        Other meanings of the selection that a user may have had; without text of headers.
    unused : tuple of str
        Options that the headers of the series override.
    """

    number: int
    of: int
    text: str
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        which = f" {self.number} of {self.of}" if self.of > 1 else ""
        return f"Series{which}: {self.text}"


@dataclass(frozen=True)
class CaseRecord:
    """Outcome of a case. `reason` is `None` if it was published.

    `reused` means that a current result existed and nothing was done; `updated` that the scan had
    changed since an earlier result, which this one replaced. `private` holds paths and descriptions
    that a failure is about, as in `ScanError`. `choice` is the series of the path that was taken.
    A result that is one file with a name of the user's has no `folder`, but a `file`.
    """

    id: str
    reason: Reason | None
    detail: str
    flags: tuple[Flag, ...]
    folder: Path | None
    measurements: tuple[Measurement, ...] = ()
    seconds: float = 0.0
    reused: bool = False
    updated: bool = False
    private: str = ""
    choice: SeriesChoice | None = None
    file: Path | None = None

    def __repr__(self) -> str:
        if self.reason is not None:
            return f"CaseRecord({self.id or 'no id'}, {self.reason.code}: {self.detail})"
        state = "from before" if self.reused else "published"
        n_present = sum(1 for m in self.measurements if m.voxels)
        structures = f"{n_present} of {len(self.measurements)} structures found"
        flags = [flag.code for flag in self.flags]
        result = str(self.file or self.folder)
        return f"CaseRecord({', '.join((self.id, state, structures, *flags, result))})"

    def _repr_html_(self) -> str:
        """Return the preview and the volumes for a notebook, or the reason."""
        from scanloom.interop.notebook import record_html

        return record_html(self)
