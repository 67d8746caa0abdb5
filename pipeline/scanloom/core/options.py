"""Options that change results, one frozen object for each subject.

Each option is defined here once: name, type, default, and a description with other keywords of
pydantic's Field. `scanloom.engine.workflow.schema` and
`scanloom.engine.segment` embed these objects, cases and recipes carry them. A new option must keep
results as they are by its default: see `scanloom.engine.case.recipe`. Its command line parameter
has the same name and is defined in `scanloom.cli.options.segmentation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from scanloom.extras import EXTRAS, describe_extras

Gaps = Literal["refuse", "interpolate"]
"""Handling of missing slices of an otherwise regular stack."""
Nan = Literal["refuse", "padding"]
"""Handling of voxels that are not numbers (NaN)."""
Modality = Literal["CT", "MR", "PT", "NM"]
Precision = Literal["auto", "float32", "half"]
Engine = Literal["auto", "torch", "openvino", "onnxruntime", "tensorrt", "compile", "cudagraphs"]
"""Library that runs networks."""
Mirror = Literal["auto", "no"]
"""Whether networks also run on mirrored scans: as the model card says, or not."""
SegKind = Literal["binary", "labelmap"]
Dates = Literal["source", "now"]

MAX_OVERLAP = 0.9
"""Largest overlap of windows, as a fraction of a window: each voxel is then in up to 1,000 windows.
Beyond it their number grows without bound, and a scan never ends. Models use 0.25 to 0.75."""

T = TypeVar("T")


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a scan. Only `max_size` cannot change a result."""

    gaps: Gaps = field(
        default="refuse",
        metadata={
            "description": "Missing slices: refuse the series, or interpolate them and set a flag"
        },
    )
    nan: Nan = field(
        default="refuse",
        metadata={
            "description": "Voxels that are not numbers (NaN): refuse the scan, or replace them "
            "by its padding value (air in a CT, else its smallest value) and set a flag"
        },
    )
    orientation: str | None = field(
        default=None,
        metadata={
            "description": "Axis codes for files that do not state theirs",
            "pattern": "^[RLAPSI]{3}$",
            "examples": ["RAS"],
        },
    )
    modality: Modality | None = field(
        default=None,
        metadata={"description": "Modality for files that do not state theirs (NIfTI)"},
    )
    max_size: int | None = field(
        default=None,
        metadata={"description": "Largest size of a scan's voxels: 8 GiB; 4 GiB if not given"},
    )


@dataclass(frozen=True)
class ComputeOptions:
    """Options for running networks."""

    precision: Precision = field(
        default="auto", metadata={"description": "Numeric precision of the networks"}
    )
    skip_air: bool = field(
        default=True, metadata={"description": "Whether windows of air are skipped"}
    )
    compiled_restore: bool = field(
        default=True,
        metadata={
            "description": "Whether compiled kernels map labels back to the scan's grid, or plain "
            "PyTorch"
        },
    )
    mirror: Mirror = field(
        default="auto",
        metadata={
            "description": "Whether networks also run on mirrored scans: as the model says, or not"
        },
    )
    remove_small: float = field(
        default=0.0,
        metadata={
            "description": "Connected components of a structure up to this volume, in mm3, are "
            "removed",
            "ge": 0.0,
            "examples": [200.0],
        },
    )
    overlap: float | None = field(
        default=None,
        metadata={
            "description": "Fraction of a window that the next window overlaps, instead of the "
            "model's: fewer windows are faster, labels differ slightly",
            "ge": 0.0,
            "le": MAX_OVERLAP,
            "examples": [0.25],
        },
    )
    fast: bool = field(
        default=False,
        metadata={
            "description": "Whether less is computed than the model says: by the model's own "
            "preset, else the first of several folds, no mirrored scans, and windows that overlap "
            "by a quarter at most; labels differ"
        },
    )
    engine: Engine = field(
        default="auto",
        metadata={
            "description": "Library that runs the networks: the fastest with the labels of torch, "
            "as measured on this machine, or a named one"
        },
    )


@dataclass(frozen=True)
class Outputs:
    """Files that are written for a case; `also` names keys of `scanloom.extras.EXTRAS`."""

    seg: SegKind = field(default="binary", metadata={"description": "Kind of DICOM SEG"})
    dates: Dates = field(default="source", metadata={"description": "Content dates of DICOM SEG"})
    also: tuple[str, ...] = field(default=(), metadata={"description": f"Also {describe_extras()}"})
    structures: tuple[str, ...] = field(
        default=(), metadata={"description": "Labels to keep; by default, all"}
    )

    def __post_init__(self) -> None:
        if unknown := [name for name in self.also if name not in EXTRAS]:
            raise ValueError(f"also must be of {tuple(EXTRAS)}, got {unknown[0]!r}")


def names_of(kind: type) -> tuple[str, ...]:
    """Return the names of the options of a class, in order."""
    return tuple(f.name for f in fields(kind))


def take(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the options of a class from values by name; other values are ignored."""
    return kind(**{name: values[name] for name in names_of(kind) if name in values})


def check_choices(options: Any) -> None:
    """Refuse a value that is not one of the words of its option.

    Raises
    ------
    ValueError
        Naming the option and its words.
    """
    for name, choices in _choices(type(options)).items():
        value = getattr(options, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the words of each option that is one of a closed list, or None."""
    closed = {}
    for name, hint in get_type_hints(kind).items():
        arguments = get_args(hint) if get_origin(hint) is not Literal else (hint,)
        literals = [argument for argument in arguments if get_origin(argument) is Literal]
        if literals and get_origin(hint) is not tuple:
            choices = tuple(choice for argument in literals for choice in get_args(argument))
            closed[name] = (*choices, None) if type(None) in arguments else choices
    return closed
