"""`ModelCard`: inputs, processing and outputs of a trained model, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scanloom.core import MODALITIES, Structure, is_slug

Precision = Literal["float32", "float16", "bfloat16"]
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Channel:
    """An input channel and its required modality."""

    name: str
    modality: str

    def __post_init__(self) -> None:
        if self.modality not in MODALITIES:
            raise ValueError(f"modality must be one of {MODALITIES}, got {self.modality!r}")


@dataclass(frozen=True)
class NetworkSpec:
    """A network class, named as on the allow-list, with its arguments (plain data)."""

    name: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Weights:
    """The file with the trained weights.

    Parameters
    ----------
    file : Path
        A state dict: `.pt` or `.safetensors`.
    sha256 : str
        SHA-256 of the file when the card was read; checked against the card's own, if given.
    key : str or None
        Entry of the file that holds the state dict; None if the file is the state dict. A file
        without that entry is taken as the state dict, as in ignite's CheckpointLoader.
    """

    file: Path
    sha256: str
    key: str | None = None


@dataclass(frozen=True)
class NetworkGrid:
    """The grid on which the network sees the scan.

    Parameters
    ----------
    orientation : str or None
        Axis codes such as "RAS"; None keeps the source's axes.
    spacing : (x, y, z) or None
        In mm, in the order of `orientation`; None keeps the source's spacing.
    mode : "linear" or "nearest"
        Interpolation of the scan.
    """

    orientation: str | None = None
    spacing: Triple | None = None
    mode: Literal["linear", "nearest"] = "linear"


@dataclass(frozen=True)
class ScaleRange:
    """Map [a_min, a_max] linearly to [b_min, b_max] (MONAI ScaleIntensityRange)."""

    a_min: float
    a_max: float
    b_min: float | None
    b_max: float | None
    clip: bool = False


@dataclass(frozen=True)
class ScaleMinMax:
    """Map the scan's own minimum and maximum to [minv, maxv] (MONAI ScaleIntensity)."""

    minv: float = 0.0
    maxv: float = 1.0


@dataclass(frozen=True)
class Normalize:
    """Subtract and divide, by default the scan's own mean and population standard deviation.

    MONAI NormalizeIntensity: with `nonzero`, only voxels that are not 0 are measured and changed;
    a standard deviation of 0 is replaced by 1.
    """

    subtrahend: float | None = None
    divisor: float | None = None
    nonzero: bool = False


IntensityStep = ScaleRange | ScaleMinMax | Normalize


@dataclass(frozen=True)
class Window:
    """Sliding window over the network grid (MONAI SlidingWindowInferer).

    Parameters
    ----------
    size : (x, y, z) or None
        Voxels of the network grid; None passes the whole grid at once.
    overlap : float
        Fraction of a window that the next window overlaps, 0 to below 1.
    blending : "constant" or "gaussian"
        Weight of a voxel by its position in the window.
    sigma_scale : float
        Standard deviation of the gaussian, in window sizes.
    padding : "constant", "replicate" or "reflect"
        Padding of a grid that is smaller than the window.
    padding_value : float
        Value for "constant" padding.
    """

    size: tuple[int, int, int] | None
    overlap: float = 0.25
    blending: Literal["constant", "gaussian"] = "constant"
    sigma_scale: float = 0.125
    padding: Literal["constant", "replicate", "reflect"] = "constant"
    padding_value: float = 0.0


@dataclass(frozen=True)
class Argmax:
    """Assign each voxel the class with the largest score; channel n is structure number n."""


@dataclass(frozen=True)
class Threshold:
    """Segment each channel separately: voxels with a score of at least `value`.

    Channel n is structure number n + 1; structures may overlap.
    """

    value: float = 0.5


Decision = Argmax | Threshold


def label_bytes(decision: Decision, classes: int) -> int:
    """Return the bytes per voxel of the label maps of `classes` channels: 1 or 2.

    The largest label is `classes` - 1 with argmax, else `classes`.
    """
    largest = classes - 1 if isinstance(decision, Argmax) else classes
    return 1 if largest <= 255 else 2


@dataclass(frozen=True)
class KeepLargest:
    """Keep the largest connected components (MONAI KeepLargestConnectedComponent).

    Parameters
    ----------
    numbers : tuple of int
        Numbers of the structures; empty for all.
    together : bool
        Whether the structures are merged before components are found (`independent=False`).
    parts : int
        Number of components to keep.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.
    when : "before" or "after"
        Before labels are mapped to the source grid (on the network grid), or after.
    """

    numbers: tuple[int, ...] = ()
    together: bool = False
    parts: int = 1
    connectivity: Literal[6, 18, 26] = 26
    when: Literal["before", "after"] = "after"


@dataclass(frozen=True)
class Range:
    """From low to high, both included."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Checks:
    """Plausible ranges of scans for a model; None for no limit.

    Parameters
    ----------
    low, high : Range or None
        Range of the 1st and of the 99th percentile of the intensities, without padding.
    spacing : Range or None
        Range of the spacing along each axis, mm.
    extent : Range or None
        Range of the field of view along each patient axis, mm.
    refuse : tuple of "intensity", "spacing", "extent"
        Checks that refuse a scan (IMPLAUSIBLE) instead of flagging it.
    """

    low: Range | None = None
    high: Range | None = None
    spacing: Range | None = None
    extent: Range | None = None
    refuse: tuple[Literal["intensity", "spacing", "extent"], ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """A complete description of a model: inputs, network, processing, structures.

    `restore` selects how labels reach the source grid: "scores" are interpolated linearly and
    decided there; "labels" are decided on the network grid and mapped by nearest neighbour.
    `precisions` lists validated precisions: Dice of at least 0.998 a structure against float32.
    `kernel` is the kind of CT reconstruction that the model was trained on; None for any.
    `air_below` is an intensity below which voxels are always background: windows without a voxel
    at or above it are skipped; None skips none.
    """

    name: str
    version: str
    title: str
    description: str
    intended_use: str
    license: str
    attribution: str
    channels: tuple[Channel, ...]
    network: NetworkSpec
    weights: Weights
    grid: NetworkGrid
    window: Window
    structures: tuple[Structure, ...]
    before: tuple[IntensityStep, ...] = ()
    after: tuple[IntensityStep, ...] = ()
    activation: Literal["softmax", "sigmoid"] | None = None
    decision: Decision = field(default_factory=Argmax)
    restore: Literal["scores", "labels"] = "scores"
    cleaning: tuple[KeepLargest, ...] = ()
    checks: Checks = field(default_factory=Checks)
    precisions: tuple[Precision, ...] = ("float32",)
    air_below: float | None = None
    kernel: Literal["soft", "sharp"] | None = None

    def __post_init__(self) -> None:
        if not is_slug(self.name):
            raise ValueError(f"a model's name is made of a-z, 0-9, _ and -, got {self.name!r}")
        if not self.channels or not self.structures:
            raise ValueError("a model must have at least one input channel and one structure")

    @property
    def n_outputs(self) -> int:
        """Number of output channels of the network; with argmax, channel 0 is background."""
        highest = max(s.number for s in self.structures)
        return highest + 1 if isinstance(self.decision, Argmax) else highest

    @property
    def n_maps(self) -> int:
        """Number of label maps: one with argmax, else one per output channel."""
        return 1 if isinstance(self.decision, Argmax) else self.n_outputs

    @property
    def label_bytes(self) -> int:
        """Bytes per voxel of a label map: 1, or 2 if its labels exceed 255."""
        return label_bytes(self.decision, self.n_outputs)
