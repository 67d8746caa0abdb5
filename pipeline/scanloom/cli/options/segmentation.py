"""Options of `segment`, by panel. Fields have the names of `scanloom.core.options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import typer

from scanloom.cli.options import complete, values
from scanloom.cli.options.general import DEFAULT_OUT, KeyOption
from scanloom.cli.options.scans import (
    ArchiveOptions,
    OutOption,
    ReplaceOption,
)
from scanloom.extras import EXTRAS


@dataclass(frozen=True)
class ScanOptions(ArchiveOptions):
    """Choice of the scan, and of the way in which it is read."""

    series: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="Of several: best, all, its # or name, UID.",
        ),
    ] = None
    phase: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Of several volumes: its number, from 0.")
    ] = None
    modality: Annotated[
        Literal["CT", "MR", "PT", "NM"] | None,
        typer.Option(case_sensitive=False, help="Modality of a file that does not state it."),
    ] = None
    orientation: Annotated[
        str | None,
        typer.Option(
            parser=values.axis_codes,
            metavar="CODES",
            help="Axes of a file that does not state them: RAS, LPS.",
        ),
    ] = None
    gaps: Annotated[
        Literal["refuse", "interpolate"], typer.Option(help="Handling of missing slices.")
    ] = "refuse"
    nan: Annotated[
        Literal["refuse", "padding"], typer.Option(help="Handling of voxels that are NaN.")
    ] = "refuse"
    max_size: Annotated[
        int | None,
        typer.Option(
            parser=values.byte_count,
            metavar="SIZE",
            help="Largest size of a scan's voxels; default 4GiB.",
        ),
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """Choice of models and of their structures."""

    panel: ClassVar[str] = "Model"

    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="NAME",
            autocompletion=complete.models,
            help="Name or folder, repeatable; default: the one that fits.",
        ),
    ] = None
    structures: Annotated[
        str | None,
        typer.Option(
            parser=values.names,
            metavar="A,B",
            autocompletion=complete.structures,
            help="Structures to keep; default all.",
        ),
    ] = None
    remove_small: Annotated[
        float,
        typer.Option(min=0.0, metavar="MM3", help="Remove components up to this volume."),
    ] = 0.0


@dataclass(frozen=True)
class OutputOptions:
    """Results and their folder."""

    panel: ClassVar[str] = "Output"

    out: OutOption = DEFAULT_OUT
    also: Annotated[
        list[str] | None,
        typer.Option(
            parser=values.extra_name,
            metavar="|".join(EXTRAS),
            autocompletion=complete.extras,
            help="Also write the scan, or a mask for each structure.",
        ),
    ] = None
    seg: Annotated[Literal["binary", "labelmap"], typer.Option(help="Kind of DICOM SEG.")] = (
        "binary"
    )
    dates: Annotated[
        Literal["source", "now"], typer.Option(help="Dates in DICOM SEG; now for PACS.")
    ] = "source"
    names: Annotated[
        Literal["id", "source"],
        typer.Option(help="Folder names; source names patients."),
    ] = "id"
    replace: ReplaceOption = False
    key: KeyOption = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would be done; write nothing.")
    ] = False


@dataclass(frozen=True)
class DeviceOptions:
    """On which device networks run, and with how much memory."""

    panel: ClassVar[str] = "Device"

    device: Annotated[
        str,
        typer.Option(
            parser=values.device_name,
            metavar="NAME",
            autocompletion=complete.devices,
            help="auto, cpu, cuda, cuda:0 ...",
        ),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "float32", "half"], typer.Option(help="Numeric precision of the network.")
    ] = "auto"
    fast: Annotated[bool, typer.Option("--fast", help="One fold, no mirroring, less overlap.")] = (
        False
    )
    engine: Annotated[
        Literal["auto", "torch", "openvino", "onnxruntime", "tensorrt", "compile", "cudagraphs"],
        typer.Option(metavar="NAME", help="torch, openvino, onnxruntime ..."),
    ] = "auto"
    memory_limit: Annotated[
        int | None,
        typer.Option(
            parser=values.byte_count, metavar="SIZE", help="Most memory to use: 8GB, 7.5GiB."
        ),
    ] = None


@dataclass(frozen=True)
class ExpertOptions:
    """Options for running networks that are rarely needed."""

    panel: ClassVar[str] = "Expert"

    skip_air: Annotated[bool, typer.Option(help="Skip windows of air.")] = True
    compiled_restore: Annotated[bool, typer.Option(help="Restore labels by compiled kernels.")] = (
        True
    )
    mirror: Annotated[Literal["auto", "no"], typer.Option(help="Mirrored scans too.")] = "auto"
    overlap: Annotated[
        float | None,
        typer.Option(
            parser=values.window_overlap,
            metavar="SHARE",
            help="Overlap of windows (the model's)",
        ),
    ] = None
