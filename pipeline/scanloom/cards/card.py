"""`ModelCard`: what a trained model needs and gives, as data."""

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
    """An input channel: which modality it must have."""

    name: str
    modality: str

    def __post_init__(self) -> None:
        if self.modality not in MODALITIES:
            raise ValueError(f"modality must be one of {MODALITIES}, got {self.modality!r}")


@dataclass(frozen=True)
class NetworkSpec:
    """A network class by its name on the allow-list, and its arguments (plain data)."""

    name: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Weights:
    """Where the trained numbers are.

    Parameters
    ----------
    file : Path
        A state dict: `.pt` or `.safetensors`.
    sha256 : str
        Of the file, as it was found when the card was read (and as the card pins it, if it does).
    key : str or None
        The entry of the file that holds the state dict; None where it is the file itself. A file
        without that entry is the state dict itself, as with ignite's CheckpointLoader.
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
        Axis codes such as "RAS"; None leaves the source's axes.
    spacing : (x, y, z) or None
        mm, in the order of `orientation`; None leaves the source's spacing.
    mode : "linear" or "nearest"
        How the scan is resampled.
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

    MONAI NormalizeIntensity: `nonzero` takes and changes only voxels that are not 0; a standard
    deviation of 0 becomes 1.
    """

    subtrahend: float | None = None
    divisor: float | None = None
    nonzero: bool = False


IntensityStep = ScaleRange | ScaleMinMax | Normalize


@dataclass(frozen=True)
class Window:
    """How the network is moved over its grid (MONAI SlidingWindowInferer).

    Parameters
    ----------
    size : (x, y, z) or None
        Voxels of the network grid; None shows the network the whole grid at once.
    overlap : float
        Share of a window that the next one covers again, 0 to below 1.
    blending : "constant" or "gaussian"
        Weight of a voxel by its place in the window.
    sigma_scale : float
        Standard deviation of the gaussian, in window sizes.
    padding : "constant", "replicate" or "reflect"
        How a grid smaller than the window is enlarged.
    padding_value : float
        For "constant".
    """

    size: tuple[int, int, int] | None
    overlap: float = 0.25
    blending: Literal["constant", "gaussian"] = "constant"
    sigma_scale: float = 0.125
    padding: Literal["constant", "replicate", "reflect"] = "constant"
    padding_value: float = 0.0


@dataclass(frozen=True)
class Argmax:
    """Each voxel gets the class with the largest score; channel n is structure number n."""


@dataclass(frozen=True)
class Threshold:
    """Each channel is a structure of its own, where its score is at least `value`.

    Channel n is the structure of number n + 1; structures may overlap.
    """

    value: float = 0.5


Decision = Argmax | Threshold


@dataclass(frozen=True)
class KeepLargest:
    """Keep the largest connected part(s) of structures (MONAI KeepLargestConnectedComponent).

    Parameters
    ----------
    numbers : tuple of int
        Which structures; empty for all.
    together : bool
        Whether they are joined before parts are sought (`independent=False`).
    parts : int
        How many parts are kept.
    connectivity : 6, 18 or 26
        Neighbours that count as connected.
    when : "before" or "after"
        On the network grid before, or on the source grid after labels are brought back.
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
        """Whether `value` lies in it."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Checks:
    """What a scan must be like for the model to be meant for it; None where anything goes.

    Parameters
    ----------
    low, high : Range or None
        Where the 1st and the 99th percentile of the intensities (without padding) must lie.
    spacing : Range or None
        mm, for each axis.
    extent : Range or None
        mm, the field of view along each patient axis.
    refuse : tuple of "intensity", "spacing", "extent"
        Which of them refuse the scan (IMPLAUSIBLE) and do not only flag it.
    """

    low: Range | None = None
    high: Range | None = None
    spacing: Range | None = None
    extent: Range | None = None
    refuse: tuple[Literal["intensity", "spacing", "extent"], ...] = ()


@dataclass(frozen=True)
class ModelCard:
    """All that must be known to run a model and to name what it gives.

    `restore` says how labels come back to the source grid: "scores" are brought back linearly and
    decided there; "labels" are decided on the network grid and brought back by nearest neighbour.
    `precisions` are those that were validated: Dice of at least 0.998 a structure against float32.
    `kernel` is the kind of CT reconstruction it was made for; None where any will do.
    `air_below` is an intensity of the scan below which nothing but background can lie: windows
    that hold no voxel as high are not run; None where all are.
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
            raise ValueError("a model has at least one input channel and one structure")

    @property
    def n_outputs(self) -> int:
        """Channels that the network gives: with argmax, background is channel 0."""
        highest = max(s.number for s in self.structures)
        return highest + 1 if isinstance(self.decision, Argmax) else highest
