"""All options of a segmentation, in one table: name, type, default, help, and what it changes.

Everything else follows from the fields of these classes: the command line (`scanloom.cli.options`),
the sections of a workflow (`scanloom.engine.workflow.schema`), the signature of `scanloom.segment`
(written by docs/write_api.py), recipes, messages and completion. A new option is a field here and
the code that uses it. Its default must mean "as before": see `scanloom.engine.case.recipe`.

This module imports nothing but the standard library, so that `scanloom --help` needs no NumPy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Gaps = Literal["refuse", "interpolate"]
"""Handling of missing slices of an otherwise regular stack."""
Nan = Literal["refuse", "padding"]
"""Handling of voxels that are not numbers (NaN)."""
Modality = Literal["CT", "MR", "PT", "NM"]
Precision = Literal["auto", "float32", "half"]
DEVICES = r"auto|cpu|mps|(cuda|xpu)(:\d+)?"
"""Names of devices, as a regular expression."""
Engine = Literal[
    "auto", "torch", "openvino", "tensorrt", "onnxruntime", "fused", "cudagraphs", "compile"
]
"""Library that runs networks. "auto" measures them in this order, so that TensorRT comes before
ONNX Runtime's own kernels. Each is `ENGINE` of the module NAME_engine in `inference.engines`."""
Mirror = Literal["auto", "no"]
"""Whether networks also run on mirrored scans: as the model card says, or not."""
SegKind = Literal["binary", "labelmap"]
Dates = Literal["source", "now"]
FolderNaming = Literal["id", "source"]

MAX_OVERLAP: Final = 0.9
"""Largest overlap of windows, as a fraction of a window: each voxel is then in up to 1,000 windows.
Beyond it their number grows without bound, and a scan never ends. Models use 0.25 to 0.75."""

PANELS: Final = ("Input", "Model", "Output", "Device", "Expert", "General")
"""Panels of help, in order."""

AXIS_CODES: Final = "^([RL]([AP][SI]|[SI][AP])|[AP]([RL][SI]|[SI][RL])|[SI]([RL][AP]|[AP][RL]))$"
"""One letter for each patient axis, in any order: RAS, LPS, ..."""

EXTRAS: Final = {
    "image": "the scan, as image.nii.gz",
    "masks": "a mask for each structure",
    "uncertainty": "maps of the uncertainty of labels",
    "segnrrd": "a segmentation for 3D Slicer",
    "rtstruct": "outlines in DICOM RTSTRUCT",
    "sr": "measurements in DICOM SR",
    "radiomics": "IBSI features of the structures",
    "surface": "closed surfaces, in glTF",
}
"""Files of a case that are written only on request, by the names of their writers: see
`scanloom.engine.case.writers`."""

FeatureFamily = Literal[
    "morphology",
    "local_intensity",
    "statistics",
    "intensity_histogram",
    "intensity_volume_histogram",
    "glcm",
    "glrlm",
    "glszm",
    "gldzm",
    "ngtdm",
    "ngldm",
]
"""Families of features, in the order of the IBSI reference manual."""

DEFAULT_OUT: Final = Path("scanloom-out")
"""Output folder of every command, unless another is given."""

T = TypeVar("T")


def describe_extras() -> str:
    """Return all descriptions with their names, as a list in words."""
    *first, last = (f"{description} ({name})" for name, description in EXTRAS.items())
    return f"{', '.join(first)}, or {last}"


def option(
    default: Any,
    description: str,
    *,
    panel: str,
    help: str,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
    parser: str | None = None,
    completion: str | None = None,
    changes_result: bool = True,
    **schema: Any,
) -> Any:
    """Return a field of an options class.

    Parameters
    ----------
    default
        Its value if it is not given.
    description : str
        Sentence for the schema of workflows and the docstring of `scanloom.segment`.
    panel : str
        Panel of the command's help, of `PANELS`.
    help : str
        Line of the command's help.
    flags : tuple of str
        Its names on the command line; by default, `--` and the field's name.
    metavar, parser, completion : str or None
        How help calls its value, and the functions of `scanloom.cli.values` and `complete`
        that parse and complete it.
    changes_result : bool
        Whether it can change a result, and so is part of the recipe.
    **schema
        Keywords of pydantic's Field, such as `ge`.
    """
    command = {"panel": panel, "help": help, "flags": flags, "metavar": metavar}
    functions = {"parser": parser, "completion": completion}
    return field(
        default=default,
        metadata={
            "description": description,
            "command": {**command, **functions},
            "changes_result": changes_result,
            "schema": schema,
        },
    )


def setting(default: Any, description: str, **schema: Any) -> Any:
    """Return a field that stands in workflows only; parameters as of `option`."""
    return field(
        default=default,
        metadata={"description": description, "changes_result": True, "schema": schema},
    )


def is_setting(each: Field[Any]) -> bool:
    """Return whether a field stands in workflows only."""
    return "description" in each.metadata and "command" not in each.metadata


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a scan."""

    gaps: Gaps = option(
        "refuse",
        "Missing slices: refuse the series, or interpolate them and set a flag",
        panel="Input",
        help="Handling of missing slices.",
    )
    nan: Nan = option(
        "refuse",
        "Voxels that are not numbers (NaN): refuse the scan, or replace them by its padding value "
        "(air in a CT, else its smallest value) and set a flag",
        panel="Input",
        help="Handling of voxels that are NaN.",
    )
    orientation: str | None = option(
        None,
        "Axis codes for files that do not state theirs",
        panel="Input",
        help="Axes of a file that does not state them: RAS, LPS.",
        metavar="CODES",
        parser="axis_codes",
        pattern=AXIS_CODES,
        examples=["RAS"],
    )
    modality: Modality | None = option(
        None,
        "Modality for files that do not state theirs (NIfTI)",
        panel="Input",
        help="Modality of a file that does not state it.",
    )
    max_size: int | None = option(
        None,
        "Largest size of a scan's voxels: 8 GiB; 4 GiB if not given",
        panel="Input",
        help="Largest size of a scan's voxels; default 4GiB.",
        metavar="SIZE",
        parser="byte_count",
        changes_result=False,  # a scan that is refused has no result
    )


@dataclass(frozen=True)
class ComputeOptions:
    """Options for running networks."""

    precision: Precision = option(
        "auto",
        "Numeric precision of the networks",
        panel="Device",
        help="Numeric precision of the network.",
    )
    skip_air: bool = option(
        True, "Whether windows of air are skipped", panel="Expert", help="Skip windows of air."
    )
    compiled_restore: bool = option(
        True,
        "Whether compiled kernels map labels back to the scan's grid, or plain PyTorch",
        panel="Expert",
        help="Restore labels by compiled kernels.",
    )
    mirror: Mirror = option(
        "auto",
        "Whether networks also run on mirrored scans: as the model says, or not",
        panel="Expert",
        help="Mirrored scans too.",
    )
    remove_small: float = option(
        0.0,
        "Connected components of a structure up to this volume, in mm3, are removed",
        panel="Model",
        help="Remove components up to this volume.",
        metavar="MM3",
        parser="volume",
        ge=0.0,
        allow_inf_nan=False,
        examples=[200.0],
    )
    overlap: float | None = option(
        None,
        "Fraction of a window that the next window overlaps, instead of the model's: fewer windows "
        "are faster, labels differ slightly",
        panel="Expert",
        help="Overlap of windows (the model's)",
        metavar="SHARE",
        parser="window_overlap",
        ge=0.0,
        le=MAX_OVERLAP,
        examples=[0.25],
    )
    fast: bool = option(
        False,
        "Whether less is computed than the model says: by the model's own preset, else the first "
        "of several folds, no mirrored scans, and windows that overlap by a quarter at most; "
        "labels differ",
        panel="Device",
        help="One fold, no mirroring, less overlap.",
        flags=("--fast",),
    )
    engine: Engine = option(
        "auto",
        "Library that runs the networks: the fastest with the labels of torch, as measured on this "
        "machine, or a named one",
        panel="Device",
        help="torch, openvino, onnxruntime ...",
        metavar="NAME",
    )


@dataclass(frozen=True)
class Radiomics:
    """Settings of the features that `also: radiomics` writes; lengths in mm."""

    families: tuple[FeatureFamily, ...] = setting(
        (
            *("morphology", "statistics", "intensity_histogram"),
            *("glcm", "glrlm", "glszm", "ngtdm"),
        ),
        "Families of features, one or several",
    )
    spacing: float | None = setting(
        2.0,
        "Edge of the cubic voxels to which scan and structure are resampled, mm; null: as scanned",
        ge=0.1,
        le=20.0,
    )
    bin_width: float = setting(
        25.0, "Width of the bins of texture in a CT, HU, from -1000 HU", ge=0.1, le=1000.0
    )
    bins: int = setting(
        32, "Number of bins of texture in other scans, over a structure's range", ge=2, le=1000
    )
    normalise: bool = setting(
        True,
        "Whether other scans than CT are scaled to a mean of 0 and a standard deviation of 1, over "
        "voxels above 2 % of the scan's range",
    )
    min_voxels: int = setting(
        64, "Fewest voxels of a structure, on the grid that it is resampled to", ge=8
    )
    max_voxels: int = setting(
        16_000_000,
        "Most voxels of the box around a structure, on that grid: time and memory grow with it",
        ge=1000,
    )
    experimental: bool = setting(
        False, "Whether structures that their model calls experimental have features too"
    )

    def __post_init__(self) -> None:
        known: tuple[str, ...] = get_args(FeatureFamily)
        if unknown := [name for name in self.families if name not in known]:
            raise ValueError(f"families must be of {known}, got {unknown[0]!r}")
        if not self.families:
            raise ValueError("families must have at least one")
        ordered = tuple(name for name in known if name in self.families)
        object.__setattr__(self, "families", ordered)
        for name in ("spacing", "bin_width"):  # 2 and 2.0 have the same recipe
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))


@dataclass(frozen=True)
class Outputs:
    """Files that are written for a case; `also` names keys of `EXTRAS`."""

    seg: SegKind = option("binary", "Kind of DICOM SEG", panel="Output", help="Kind of DICOM SEG.")
    dates: Dates = option(
        "source",
        "Content dates of DICOM SEG",
        panel="Output",
        help="Dates in DICOM SEG; now for PACS.",
    )
    also: tuple[str, ...] = option(
        (),
        f"Also {describe_extras()}",
        panel="Output",
        help=f"Extra files: {', '.join(EXTRAS)}.",
        metavar="A,B",
        parser="extra_names",
        completion="complete_extras",
    )
    structures: tuple[str, ...] = option(
        (),
        "Labels to keep; by default, all but those that their model has on request only",
        panel="Model",
        help="Structures to keep; default the model's usual ones.",
        metavar="A,B",
        parser="names",
        completion="complete_structures",
    )
    radiomics: Radiomics = setting(Radiomics(), "Settings of the features of `radiomics`")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.also if name not in EXTRAS]:
            raise ValueError(f"also must be of {tuple(EXTRAS)}, got {unknown[0]!r}")
        # In one order, whatever order was given: recipes and results are the same
        object.__setattr__(self, "also", tuple(name for name in EXTRAS if name in self.also))
        object.__setattr__(self, "structures", tuple(sorted(set(self.structures))))
        if "radiomics" not in self.also:  # settings of a file that is not written change nothing
            object.__setattr__(self, "radiomics", Radiomics())


@dataclass(frozen=True)
class SegmentOptions:
    """Everything that can be requested of a segmentation.

    `read`, `outputs` and `compute` are what cases carry; the other fields are of the call.
    """

    models: tuple[str, ...] = option(
        (),
        "Names or folders of models; by default, the only model of the store that fits the scans",
        panel="Model",
        help="Name or folder, repeatable; default: the one that fits.",
        flags=("--model", "-m"),
        metavar="NAME",
        completion="complete_models",
    )
    out: Path = option(
        DEFAULT_OUT,
        "The output folder; or one file for one scan: labels.nii.gz, labels.seg.nrrd or labels.dcm",
        panel="Output",
        help="Output folder, or a file.",
        flags=("--out", "-o"),
        metavar="PATH",
    )
    archives: bool = option(
        False,
        "Whether archives in a folder are looked into",
        panel="Input",
        help="Also read zip and tar archives inside folders.",
        flags=("--archives",),
    )
    series: str | None = option(
        None,
        'Which series, as in `load_volume`; "all" for each series of a path',
        panel="Input",
        help="Of several: best, all, its # or name, UID.",
        metavar="WHICH",
    )
    phase: int | None = option(
        None,
        "Index of the volume, from 0, if a scan has several",
        panel="Input",
        help="Of several volumes: its number, from 0.",
        metavar="N",
        ge=0,
    )
    read: ReadOptions = ReadOptions()
    outputs: Outputs = Outputs()
    device: str = option(
        "auto",
        '"auto", "cpu", "cuda", "cuda:N", "mps", "xpu" or "xpu:N"',
        panel="Device",
        help="auto, cpu, cuda, cuda:0 ..., mps, xpu.",
        metavar="NAME",
        parser="device_name",
        completion="complete_devices",
        pattern=f"^({DEVICES})$",
        examples=["cuda:0"],
    )
    compute: ComputeOptions = ComputeOptions()
    memory_limit: int | None = option(
        None,
        "Memory that the process may use; by default, that of the machine",
        panel="Device",
        help="Most memory to use: 8GB, 7.5GiB.",
        metavar="SIZE",
        parser="byte_count",
    )
    names: FolderNaming = option(
        "id",
        'How case folders are named; "source" uses words of headers and paths',
        panel="Output",
        help="Folder names; source names patients.",
    )
    replace: bool = option(
        False,
        "Whether results made with other models or options are replaced",
        panel="Output",
        help="Replace results of other models or options.",
        flags=("--replace",),
    )
    key: Path | None = option(
        None,
        "File with the key of the case ids; by default, SCANLOOM_KEY or the user's own key",
        panel="Output",
        help="File with the key of the case ids.",
        metavar="FILE",
    )


SUBJECTS: Final[Mapping[str, type]] = {
    "read": ReadOptions,
    "outputs": Outputs,
    "compute": ComputeOptions,
}
"""Classes of the options objects in `SegmentOptions`, by field."""


def walk_options(kind: type = SegmentOptions) -> Iterator[tuple[type, Field[Any], Any]]:
    """Yield the class, field and type of each option, with those of objects inside, in order.

    Fields that stand in workflows only are left out.
    """
    hints = get_type_hints(kind)
    for each in fields(kind):
        if is_setting(each):
            continue
        if is_dataclass(hints[each.name]):
            yield from walk_options(hints[each.name])
        else:
            yield kind, each, hints[each.name]


def segment_options(**values: Any) -> SegmentOptions:
    """Return options from flat values: fields of `SegmentOptions` and of the objects in it.

    Raises
    ------
    TypeError
        If there is no such option.
    """
    subjects: dict[str, Any] = {
        subject: take(kind, values)
        for subject, kind in SUBJECTS.items()
        if subject not in values and values.keys() & set(names_of(kind))
    }
    inner = {name for subject in subjects for name in names_of(SUBJECTS[subject])}
    own = {name: value for name, value in values.items() if name not in inner}
    return SegmentOptions(**own, **subjects)


def names_of(kind: type) -> tuple[str, ...]:
    """Return the names of the options of a class, in order."""
    return tuple(f.name for f in fields(kind))


def take(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the options of a class from values by name; other values are ignored."""
    return kind(**{name: values[name] for name in names_of(kind) if name in values})


def check_values(options: Any) -> None:
    """Refuse a value of another type than its option's, or outside its words or bounds.

    Options objects inside are checked too.

    Raises
    ------
    ValueError
        Naming the option and what it takes.
    """
    hints = get_type_hints(type(options))
    for each in fields(options):
        name, hint, value = each.name, hints[each.name], getattr(options, each.name)
        if is_dataclass(hint):
            check_values(value)
            continue
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        literals = [kind for kind in kinds if get_origin(kind) is Literal]
        choices = tuple(choice for kind in literals for choice in get_args(kind))
        if choices and value not in choices and (value is not None or NoneType not in kinds):
            raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        if not choices and not any(_is_of(value, kind) for kind in kinds):
            expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        schema = each.metadata.get("schema", {})
        pattern = schema.get("pattern")
        if value is not None and pattern and not re.fullmatch(pattern, str(value)):
            described = each.metadata["description"]
            expected = f"{described[:1].lower()}{described[1:]}, such as {schema['examples'][0]}"
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        low, high = schema.get("ge"), schema.get("le", math.inf)
        if None not in (value, low) and not low <= value <= high:
            most = "" if high == math.inf else f" and at most {high}"
            raise ValueError(f"{name} must be at least {low}{most}, got {value!r}")


def _is_of(value: object, kind: Any) -> bool:
    """Return whether a value is of a type; True is not a number, and an integer is one."""
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
