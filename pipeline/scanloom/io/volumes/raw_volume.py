"""Volume files whose voxels are an array of plain numbers, stored raw, compressed or as text.

A reader parses its header into a `RawVolume`; probing and reading it are the same for all formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scanloom.core import Flag, Grid, Nan, Reason, ScanError, Volume, counted
from scanloom.core.volume import default_unit
from scanloom.io.scan import GridOnlySource, Scan, Source
from scanloom.io.system.sandbox import start_sandbox
from scanloom.io.volumes.raw_voxels import RawLayout, read_voxels
from scanloom.io.voxel_values import replace_nan, rounding_flags

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True, eq=False)
class RawVolume:
    """One volume of a file, as the file's header describes it.

    Parameters
    ----------
    layout : RawLayout
        Position and type of the voxels, checked by `scanloom.io.volumes.raw_voxels.check_layout`.
    grid : Grid
    flags : tuple of Flag
        Findings about the header.
    source : Source
    """

    layout: RawLayout
    grid: Grid
    flags: tuple[Flag, ...] = ()
    source: Source = field(default_factory=GridOnlySource)

    @property
    def outline(self) -> tuple[Grid, np.dtype[Any]]:
        """Grid of the volume and type of its voxels after rescale."""
        return self.grid, self.layout.value_dtype


class ParseHeader(Protocol):
    """Parse the header of a volume file; nothing of the size of a volume is allocated."""

    def __call__(
        self, files: Sequence[Path], phase: int | None, orientation: str | None, limit: int
    ) -> RawVolume:
        """Return one volume as the header describes it.

        Parameters
        ----------
        files : sequence of Path
            The files of the volume, the header first.
        phase : int or None
            Index of the volume in a file that holds several, from 0.
        orientation : str or None
            Axis codes such as "RAS", used only if the header has no orientation.
        limit : int
            Largest size of the decoded voxels in bytes.

        Raises
        ------
        ScanError
            If the file cannot be read as a volume; its `code` is the reason.
        """


def select_volume(volumes: int, phase: int | None) -> int:
    """Return the index of the requested volume in a file with this number of volumes.

    Raises
    ------
    ScanError
        FOUR_D if `phase` is required and missing, or out of range.
    """
    if phase is None and volumes > 1:
        raise ScanError(Reason.FOUR_D, f"the file has {volumes} volumes, numbered from 0")
    if not 0 <= (phase or 0) < volumes:
        raise ScanError(
            Reason.FOUR_D, f"the file has {counted(volumes, 'volume')} from 0, not volume {phase}"
        )
    return phase or 0


def read_raw_volume(
    parse: ParseHeader,
    files: Sequence[Path],
    phase: int | None,
    orientation: str | None,
    modality: str | None,
    nan: Nan,
    limit: int,
) -> Scan:
    """Read one volume; parameters and errors are those of `ParseHeader` and `load_volume`."""
    if files[-1].suffix in _COMPRESSED:
        start_sandbox()  # starts the process that decompresses while the header is parsed
    raw = parse(files, phase, orientation, limit)
    layout = raw.layout
    array, flags = read_voxels(layout), raw.flags
    if array.dtype != layout.dtype.newbyteorder("="):
        flags += rounding_flags(array, layout.dtype, layout.slope, layout.intercept)
    volume = Volume(array, raw.grid, default_unit(modality), modality, flags=flags)
    return Scan(replace_nan(volume, nan), raw.source)
