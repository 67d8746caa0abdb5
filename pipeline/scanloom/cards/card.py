"""`ModelCard`: inputs, processing and outputs of a trained model, as data."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from scanloom.core import MODALITIES, Flag, Structure, is_slug
from scanloom.core.measurement import Range, ReferenceRange
from scanloom.options import AXIS_CODES, MAX_OVERLAP

CT = "CT"
Precision = Literal["float32", "float16", "bfloat16"]
ANY_MODALITY = "any"
"""Modality of a channel whose model states none, or takes all; the scan's is not checked."""
Triple = tuple[float, float, float]


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

    Parameters
    ----------
    subtrahend, divisor : float or None
        None measures the scan.
    nonzero : bool
        Whether only voxels that are not 0 are measured and changed.
    filled : bool
        Whether only the foreground of `NetworkGrid.crop`, with its holes filled, is measured and
        changed (nnU-Net's `use_mask_for_norm`).
    smallest_divisor : float or None
        A smaller divisor is replaced by this one (nnU-Net: 1e-8); None replaces 0 by 1 (MONAI).
    """

    subtrahend: float | None = None
    divisor: float | None = None
    nonzero: bool = False
    filled: bool = False
    smallest_divisor: float | None = None


@dataclass(frozen=True)
class Clip:
    """Limit intensities to [low, high]."""

    low: float
    high: float


@dataclass(frozen=True)
class Truncate:
    """Drop the fraction of intensities, towards zero (conversion to int32)."""


@dataclass(frozen=True)
class ScaleHistogram:
    """Map intensities from the scan's minimum to the end of its histogram to 0 to 255, and clip.

    The end leaves out the brightest part of the voxels that are not 0, in a histogram of 1000 bins.
    A negative minimum counts as 0 if less than 2 % of the voxels are negative (niimath, after
    FreeSurfer's mri_convert --conform).

    Parameters
    ----------
    brightest : float
        Fraction of the voxels that are not 0.
    """

    brightest: float = 0.02


@dataclass(frozen=True)
class Round:
    """Round to whole numbers, the even one of two, and limit them to 0 to 255 (uint8)."""


@dataclass(frozen=True)
class ScaleQuantiles:
    """Map two quantiles of a scan of whole numbers from 0 to 255 to 0 and 1.

    Parameters
    ----------
    low, high : float
        Quantiles as fractions.
    added : float
        Number that is added to the difference of the quantiles before the division.
    clip : bool
        Whether the result is limited to 0 to 1.
    interpolated : bool
        Whether a quantile between two voxels is interpolated. Otherwise the lower one is rounded
        up, and the upper one down, to the value of a voxel (brainchop).
    """

    low: float
    high: float
    added: float = 0.0
    clip: bool = False
    interpolated: bool = False


@dataclass(frozen=True)
class ScalePercentiles:
    """Map two percentiles of a scan to [b_min, b_max] (MONAI ScaleIntensityRangePercentilesd).

    Parameters
    ----------
    lower, upper : float
        Percentiles, 0 to 100; a value between two voxels is interpolated.
    b_min, b_max : float or None
        As in `ScaleRange`.
    clip : bool
        Whether the result is limited to them.
    """

    lower: float
    upper: float
    b_min: float | None
    b_max: float | None
    clip: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.lower <= 100 and 0 <= self.upper <= 100):  # also nan
            raise ValueError(f"percentiles are from 0 to 100, got {self.lower} and {self.upper}")


IntensityStep = (
    ScaleRange
    | ScaleMinMax
    | Normalize
    | Clip
    | Truncate
    | ScaleHistogram
    | Round
    | ScaleQuantiles
    | ScalePercentiles
)


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
    ties : "last" or "all"
        Components kept of those as large as the smallest that is kept: as many as `parts` allows,
        the last ones (MONAI), or all (nnU-Net).
    """

    numbers: tuple[int, ...] = ()
    together: bool = False
    parts: int = 1
    connectivity: Literal[6, 18, 26] = 26
    when: Literal["before", "after"] = "after"
    ties: Literal["last", "all"] = "last"


@dataclass(frozen=True)
class RemoveSmall:
    """Remove connected components of at most a volume, of each structure by itself.

    Parameters
    ----------
    volume : float
        Largest volume that is removed, mm^3.
    numbers, connectivity, when
        As of `KeepLargest`.
    """

    numbers: tuple[int, ...] = ()
    volume: float = 200.0
    connectivity: Literal[6, 18, 26] = 6
    when: Literal["before", "after"] = "before"


@dataclass(frozen=True)
class RemoveSmallObjects:
    """Remove objects that are smaller than a size (MONAI RemoveSmallObjects).

    If 1 is the largest number in a label map, its connected components are the objects. Otherwise
    each structure is one object, however many components it has.

    Parameters
    ----------
    size : float
        Smallest size that is kept: voxels, or mm^3, rounded up to whole voxels.
    unit : "voxels" or "mm3"
        Unit of `size`.
    together : bool
        Whether the structures are merged, and the components of all are the objects
        (`independent_channels=False`).
    connectivity, when
        As of `KeepLargest`.
    """

    size: float = 64.0
    unit: Literal["voxels", "mm3"] = "voxels"
    together: bool = False
    connectivity: Literal[6, 18, 26] = 6
    when: Literal["before", "after"] = "after"


@dataclass(frozen=True)
class FillHoles:
    """Give a structure all voxels that it encloses, also those of others (MONAI FillHoles).

    Parameters
    ----------
    numbers : tuple of int
        Numbers of the structures; empty for all. Smaller numbers are filled first.
    connectivity : 6, 18 or 26
        Neighbours through which voxels outside a structure are connected to the border of the scan.
    when : "before" or "after"
        Before labels are mapped to the source grid (on the network grid), or after.
    """

    numbers: tuple[int, ...] = ()
    connectivity: Literal[6, 18, 26] = 26
    when: Literal["before", "after"] = "after"


Cleaning = KeepLargest | RemoveSmall | RemoveSmallObjects | FillHoles


def with_small_removed(
    rules: tuple[Cleaning, ...], volume: float, when: Literal["before", "after"]
) -> tuple[Cleaning, ...]:
    """Return rules of cleaning and then, on request, the removal of components up to a volume."""
    return (*rules, RemoveSmall((), volume, when=when)) if volume > 0 else rules


HEAD: Final = "head"
UNCROPPED: Final = "uncropped"
CONTRAST: Final = "contrast"


@dataclass(frozen=True)
class Limitation:
    """A known error of a model.

    Parameters
    ----------
    text : str
        The error, as a sentence.
    where : str
        The scans in which it is to be expected: `HEAD` (CT with a head in view), `CONTRAST` (CT
        with a contrast agent), `UNCROPPED` (all that the model sees whole, not a crop around
        structures of another one), or the label of a structure that is found; empty for any scan.
    """

    text: str
    where: str = ""


@dataclass(frozen=True)
class ReferenceDirection:
    """Usual direction from some structures to others, in a body that lies as the header says.

    Parameters
    ----------
    start, end : tuple of str
        Labels of the structures; the direction is that from the centroid of the first ones together
        to that of the others.
    direction : (x, y, z)
        To the right, front and head (RAS), of any length but 0.
    within : float
        Largest usual angle to `direction`, degrees.
    source : str
        Where it comes from, as a sentence.
    """

    start: tuple[str, ...]
    end: tuple[str, ...]
    direction: Triple
    within: float
    source: str

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise ValueError("a reference direction must have structures at both ends")
        if not (0 < math.hypot(*self.direction) < math.inf and 0 < self.within < 180):  # also nan
            raise ValueError(
                "a reference direction must not be 0, and its angle be from 0 to 180 degrees, "
                f"got {self.direction} and {self.within}"
            )


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
    tilt : float or None
        Largest angle between the scan's axes and those of the body, degrees.
    refuse : tuple of "intensity", "spacing", "extent", "tilt"
        Checks that refuse a scan (IMPLAUSIBLE) instead of flagging it.
    hounsfield : bool or None
        Whether intensities that no CT in Hounsfield units has refuse a scan (IMPLAUSIBLE): see
        `scanloom.cards.check`. None if the input is CT.
    """

    low: Range | None = None
    high: Range | None = None
    spacing: Range | None = None
    extent: Range | None = None
    tilt: float | None = None
    refuse: tuple[Literal["intensity", "spacing", "extent", "tilt"], ...] = ()
    hounsfield: bool | None = None

    def needs_hounsfield(self, modality: str) -> bool:
        """Return whether an input of a modality must be in Hounsfield units."""
        return modality == CT if self.hounsfield is None else self.hounsfield


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
        A state dict: safetensors.
    sha256 : str
        SHA-256 of the file, which is compared when the weights are loaded.
    published : str
        SHA-256 of the file as its authors published it, if the weights were converted.
    """

    file: Path
    sha256: str
    published: str = ""

    def __post_init__(self) -> None:
        if not self.published:
            object.__setattr__(self, "published", self.sha256)


@dataclass(frozen=True)
class Crop:
    """Smallest box around the foreground.

    Parameters
    ----------
    foreground : "nonzero" or "positive"
        Voxels that are not 0 in any channel (nnU-Net), or greater than 0 (MONAI CropForeground).
    grid : "source" or "network"
        Whether the box is found on the scan's grid, before resampling and intensity steps
        (nnU-Net), or on the network grid, after them (MONAI).
    margin : int
        Voxels around the box, as far as the grid extends.
    steps : int or None
        With grid "network": number of steps of `ModelCard.after` before the box is found; later
        steps measure the box only. None for all steps.
    above : float
        With "positive": fraction of the largest intensity that voxels must exceed (brainchop).
    beyond : bool
        With grid "network": whether the margin extends beyond the grid, where voxels are 0.
    multiple : (x, y, z)
        With grid "network": the box grows to a multiple of these lengths, also beyond the grid.
    threshold : float
        With grid "network" and "positive": intensity that voxels must exceed instead of 0.
    """

    foreground: Literal["nonzero", "positive"]
    grid: Literal["source", "network"] = "source"
    margin: int = 0
    steps: int | None = None
    above: float = 0.0
    beyond: bool = False
    multiple: tuple[int, int, int] = (1, 1, 1)
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if min(self.multiple) < 1:
            raise ValueError(f"lengths must be at least 1, got {self.multiple}")

    @property
    def padded(self) -> bool:
        """Whether the box can extend beyond the grid."""
        return (self.beyond and self.margin > 0) or max(self.multiple) > 1


@dataclass(frozen=True)
class Fit:
    """Change of the lengths of the image that a network sees, around its middle.

    MONAI SpatialPadd, DivisiblePadd and ResizeWithPadOrCropd. What is cropped is background; scores
    of what is added are dropped.

    Parameters
    ----------
    size : (x, y, z)
        New lengths in voxels; None keeps one.
    multiple : (x, y, z)
        Each length grows to a multiple of its number.
    crops : bool
        Whether lengths above `size` are cropped; otherwise they stay.
    at_end : bool
        Whether voxels are added at the end of an axis only. Otherwise on both sides, an odd one at
        the end.
    padding : "constant", "replicate" or "reflect"
        Values of the voxels that are added.
    padding_value : float
        Value for "constant" padding.
    steps : int or None
        Number of steps of `ModelCard.after` that come first; None for all.
    """

    size: tuple[int | None, int | None, int | None] = (None, None, None)
    multiple: tuple[int, int, int] = (1, 1, 1)
    crops: bool = False
    at_end: bool = False
    padding: Literal["constant", "replicate", "reflect"] = "constant"
    padding_value: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        if min(*self.multiple, *(n for n in self.size if n is not None)) < 1:
            raise ValueError(f"lengths must be at least 1, got {self.size}, {self.multiple}")

    def bounds(self, axis: int, length: int) -> tuple[int, int]:
        """Return where an axis of `length` voxels starts and stops afterwards, in its indices."""
        size = self.size[axis]
        if size is not None and self.crops and size < length:
            start = length // 2 - size // 2
            return start, start + size
        padded = max(length, size or 0)
        padded = -(-padded // self.multiple[axis]) * self.multiple[axis]
        below = 0 if self.at_end else (padded - length) // 2
        return -below, padded - below


@dataclass(frozen=True)
class NetworkGrid:
    """The grid on which the network sees the scan.

    Parameters
    ----------
    orientation : str or None
        Axis codes such as "RAS"; None keeps the source's axes.
    spacing : (x, y, z) or None
        In mm, in the order of `orientation`; None keeps the source's spacing, of all axes or of one
        (nnU-Net's two-dimensional configurations).
    mode : "linear", "nearest", "cubic", "area" or "trilinear"
        Interpolation of the scan. "cubic" is a cubic spline that is clipped to the scan's range
        (scikit-image's resize of order 3). "area" is the mean of the voxels that a voxel overlaps,
        whole ones (PyTorch's adaptive average pooling), for scores too; it needs `shape` and
        alignment "edges". "trilinear" is linear as of PyTorch's interpolate, which rounds
        coordinates to float32; it needs `shape` and alignment "edges" or "ends". With both, labels
        are mapped back by PyTorch's "nearest", which takes the voxel below.
    order : (x, y, z)
        The axes of `orientation`, in the order in which the network sees them (nnU-Net's
        `transpose_forward`, applied to arrays with the last axis first).
    alignment : "first", "edges", "ends" or "centre"
        Voxels that coincide in both grids: the first one (MONAI); none, but the outer edges of the
        grids (nnU-Net); the first and the last one (TotalSegmentator); the centres of the grids,
        for a grid of a given `shape` (FreeSurfer's conform).
    shape : (x, y, z) or None
        Shape of the grid, in the order of `orientation`; None follows from the scan's extent.
    separate_above : float or None
        Anisotropy (largest spacing / smallest, of the scan, else of the network) above which the
        axis of the largest spacing is resampled by nearest neighbour, and the slices one by one
        (nnU-Net); None for never.
    crop : Crop or None
        Box that the network sees; voxels outside are background.
    fits : tuple of Fit
        Changes of the lengths of that box, or of the whole grid, one after another.
    as_nifti : bool
        If `orientation` is None: whether the axes of a DICOM scan are those with which dcm2niix
        stores it, for models that read voxels in the order of a NIfTI file.
    orient : "before" or "after"
        Whether the scan is oriented before it is resampled, or after: then the first voxel of the
        scan, not of the oriented axes, lies in both grids.
    """

    orientation: str | None = None
    spacing: tuple[float | None, float | None, float | None] | None = None
    mode: Literal["linear", "nearest", "cubic", "area", "trilinear"] = "linear"
    order: tuple[int, int, int] = (0, 1, 2)
    alignment: Literal["first", "edges", "ends", "centre"] = "first"
    shape: tuple[int, int, int] | None = None
    separate_above: float | None = None
    crop: Crop | None = None
    as_nifti: bool = False
    orient: Literal["before", "after"] = "before"
    fits: tuple[Fit, ...] = ()

    @property
    def boxed(self) -> bool:
        """Whether the network sees a part of its grid only."""
        cropped = self.crop is not None and self.crop.grid == "network"
        return cropped or any(fit.crops for fit in self.fits)

    @property
    def padded(self) -> bool:
        """Whether the network can see voxels that were added to the scan."""
        return bool(self.fits) or (self.crop is not None and self.crop.padded)

    def __post_init__(self) -> None:
        sizes = (*(self.spacing or ()), *(self.shape or ()))
        if not all(size is None or 0 < size < math.inf for size in sizes):
            raise ValueError(f"spacing and shape must be positive, got {sizes}")
        if self.orientation is not None and not re.match(AXIS_CODES, self.orientation):
            raise ValueError(f"orientation must be axis codes, got {self.orientation!r}")
        if sorted(self.order) != [0, 1, 2]:
            raise ValueError(f"order must have each axis once, got {self.order}")
        allowed = {"area": ("edges",), "trilinear": ("edges", "ends")}.get(self.mode)
        if allowed and (self.shape is None or self.alignment not in allowed):
            raise ValueError(f"mode {self.mode!r} needs a shape and alignment {allowed}")
        if self.orient == "after" and self.spacing and len(set(self.spacing)) > 1:
            raise ValueError("a grid oriented after resampling has one spacing for all axes")


@dataclass(frozen=True)
class Channel:
    """An input channel.

    Parameters
    ----------
    name : str
        Display name.
    modality : str
        Required modality, as in DICOM, or `ANY_MODALITY`.
    steps : tuple of IntensityStep
        Steps of this channel alone, on the scan's voxels, before the card's own steps.
    """

    name: str
    modality: str
    steps: tuple[IntensityStep, ...] = ()

    def __post_init__(self) -> None:
        known = (*MODALITIES, ANY_MODALITY)
        if self.modality not in known:
            raise ValueError(f"modality must be one of {known}, got {self.modality!r}")


@dataclass(frozen=True)
class Window:
    """Sliding window over the network grid (MONAI SlidingWindowInferer).

    Parameters
    ----------
    size : (x, y, z) or None
        Voxels of the network grid; None passes the whole grid at once.
    overlap : float
        Fraction of a window that the next window overlaps, 0 to `MAX_OVERLAP`.
    blending : "constant", "gaussian" or "gaussian_filter"
        Weight of a voxel by its position in the window. "gaussian_filter" is nnU-Net's: SciPy's
        filter of a point, scaled to a maximum of 10, as float16.
    sigma_scale : float
        Standard deviation of the gaussian, in window sizes.
    padding : "constant", "replicate" or "reflect"
        Padding of a grid that is smaller than the window.
    padding_value : float
        Value for "constant" padding.
    starts : "fixed" or "even"
        Steps between windows: as `overlap` says, the last one shorter (MONAI); or equal and at most
        as long, rounded (nnU-Net).
    sums : "float32" or "float16"
        Type in which weighted scores are summed, and scores are restored to the source grid before
        they are compared (nnU-Net: float16).
    mirror : tuple of int
        Axes of the network grid; scores are the mean over all combinations of flips.
    mirrored_channels : tuple of int
        Order in which a mirrored scan's scores enter the mean, where left and right structures
        change places; with one mirrored axis. Empty if channels stay in place.
    plane : 0, 1, 2 or None
        Axis across the planes that a two-dimensional network sees one by one; `size` is 1 along it.
    """

    size: tuple[int, int, int] | None
    overlap: float = 0.25
    blending: Literal["constant", "gaussian", "gaussian_filter"] = "constant"
    sigma_scale: float = 0.125
    padding: Literal["constant", "replicate", "reflect"] = "constant"
    padding_value: float = 0.0
    starts: Literal["fixed", "even"] = "fixed"
    sums: Literal["float32", "float16"] = "float32"
    mirror: tuple[int, ...] = ()
    mirrored_channels: tuple[int, ...] = ()
    plane: Literal[0, 1, 2] | None = None

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"a window must have voxels along each axis, got {self.size}")
        if not 0 <= self.overlap <= MAX_OVERLAP:  # also nan
            raise ValueError(f"overlap must be from 0 to {MAX_OVERLAP}, got {self.overlap}")
        if self.plane is not None and (self.size is None or self.size[self.plane] != 1):
            raise ValueError(f"a window must be 1 voxel along axis {self.plane}, got {self.size}")
        if len(set(self.mirror)) < len(self.mirror) or not {0, 1, 2}.issuperset(self.mirror):
            raise ValueError(f"mirrored axes must be different ones of 0, 1, 2, got {self.mirror}")
        if sorted(self.mirrored_channels) != [*range(len(self.mirrored_channels))]:
            raise ValueError("mirrored channels must have each channel once")
        if self.mirrored_channels and len(self.mirror) > 1:
            raise ValueError("channels change places along one mirrored axis only")

    @property
    def sums_features(self) -> bool:
        """Whether features may be summed before the final layer, if that is linear: they are fewer.

        Not where nnU-Net's rounding is that of scores, nor where channels change places.
        """
        return self.sums == "float32" and not (self.mirror and self.mirrored_channels)


@dataclass(frozen=True)
class Argmax:
    """Assign each voxel the class with the largest score; channel n is structure number n."""


SIGMOID_ABOVE_HALF: Final = 2.0**-23
"""Largest score whose sigmoid, in float32, is not above 0.5: nnU-Net's regions are decided so."""


@dataclass(frozen=True)
class Threshold:
    """Segment each channel separately: voxels with a score of at least `value`.

    Channel n is structure number n + 1; structures may overlap.
    """

    value: float = 0.5


@dataclass(frozen=True)
class Paint:
    """Paint regions into one label map, each over the ones before it.

    Parameters
    ----------
    regions : tuple of (channel, number)
        Channels in the order in which they are painted, each with the number of its structure.
    value : float
        Score from which on a voxel belongs to a region.
    inclusive : bool
        Whether a score of `value` itself belongs to it (MONAI), or not (nnU-Net).
    """

    regions: tuple[tuple[int, int], ...]
    value: float = 0.5
    inclusive: bool = True

    def __post_init__(self) -> None:
        if not self.regions or min(channel for channel, _ in self.regions) < 0:
            raise ValueError(f"regions must be of channels from 0, got {self.regions}")


Decision = Argmax | Threshold | Paint


def label_bytes(decision: Decision, classes: int) -> int:
    """Return the bytes per voxel of the label maps of `classes` channels: 1 or 2.

    The largest label is `classes` - 1 with argmax, `classes` with a threshold, and the largest
    number of a region if regions are painted.
    """
    match decision:
        case Argmax():
            largest = classes - 1
        case Threshold():
            largest = classes
        case Paint():
            largest = max(number for _, number in decision.regions)
    return 1 if largest <= 255 else 2


@dataclass(frozen=True)
class Stage:
    """A model that runs before another one, on the same scan.

    Parameters
    ----------
    card : ModelCard
        The model that runs first.
    use : "channels" or "crop"
        Its structures become further input channels, 0 and 1, in the order of their numbers
        (nnU-Net's cascade); or the scan is cropped to the box around them (TotalSegmentator).
    labels : tuple of str
        Structures that are used; empty for all.
    margin : float
        Distance around the box, mm.
    steps : tuple of IntensityStep
        Steps that a cropped scan takes before those of the card that sees it.
    """

    card: ModelCard
    use: Literal["channels", "crop"]
    labels: tuple[str, ...] = ()
    margin: float = 0.0
    steps: tuple[IntensityStep, ...] = ()


@dataclass(frozen=True)
class FastPreset:
    """Settings of a model if less work is requested (`fast`); None: as the card says.

    Parameters
    ----------
    overlap : float or None
        Largest overlap of windows.
    mirror : tuple of int or None
        Axes that are still mirrored.
    folds : int or None
        Number of networks, of those with different weights.
    spacing : (x, y, z) or None
        Spacing of the network grid, mm.
    precisions : tuple of str
        Precisions that are allowed beside the card's.
    card : ModelCard or None
        A coarser model with the same structures, which runs instead.
    """

    overlap: float | None = None
    mirror: tuple[int, ...] | None = None
    folds: int | None = None
    spacing: Triple | None = None
    precisions: tuple[Precision, ...] = ()
    card: ModelCard | None = None


GENERAL_PRESET = FastPreset(overlap=0.25, mirror=(), folds=1)
"""Preset of models whose card has none."""


@dataclass(frozen=True)
class ModelCard:
    """A complete description of a model: inputs, network, processing, structures.

    `restore` selects how labels reach the source grid: "scores" are interpolated linearly and
    decided there; "labels" are decided on the network grid and mapped by nearest neighbour.
    `precisions` lists validated precisions: Dice of at least 0.998 a structure against float32.
    `kernel` is the kind of CT reconstruction that the model was trained on; None for any.
    `air_below` is an intensity below which voxels are always background: windows without a voxel
    at or above it are skipped; None skips none.
    `folds` are further weights of the same network: the scores of all are averaged. `stage` is a
    model that runs first. A card with `parts` has no network of its own (`network`, `weights` and
    `window` are those of the first part): the scan is resampled to its grid and its steps are
    applied, unless it has exactly that spacing; its parts see the result as a scan. Their
    structures are united by label, later parts over earlier ones, and mapped back by nearest
    neighbour.
    `flags` are caveats of every result of the model; `limitations` are sentences on its known
    errors, `reference_ranges` usual measurements of its structures, `reference_directions` how they
    usually lie to one another. `on_request` has the labels that results have only if they are asked
    for. `subset` is the card for requested structures only. `fast` is the card's own preset for
    less work.
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
    cleaning: tuple[Cleaning, ...] = ()
    checks: Checks = field(default_factory=Checks)
    precisions: tuple[Precision, ...] = ("float32",)
    air_below: float | None = None
    kernel: Literal["soft", "sharp"] | None = None
    folds: tuple[Weights, ...] = ()
    stage: Stage | None = None
    parts: tuple[ModelCard, ...] = ()
    flags: tuple[Flag, ...] = ()
    limitations: tuple[Limitation, ...] = ()
    reference_ranges: tuple[ReferenceRange, ...] = ()
    reference_directions: tuple[ReferenceDirection, ...] = ()
    on_request: tuple[str, ...] = ()
    subset: Stage | None = None
    fast: FastPreset | None = None

    def __post_init__(self) -> None:
        if not is_slug(self.name):
            raise ValueError(f"a model's name is made of a-z, 0-9, _ and -, got {self.name!r}")
        if not self.channels or not self.structures:
            raise ValueError("a model must have at least one input channel and one structure")
        for each in ({s.label for s in self.structures}, {s.number for s in self.structures}):
            if len(each) < len(self.structures):
                raise ValueError("two structures have the same label or number")
        if not set(self.on_request) < {s.label for s in self.structures}:
            raise ValueError("structures on request must be some of the model's, not all")
        named = {each.structure for each in self.reference_ranges}
        named |= {label for each in self.reference_directions for label in each.start + each.end}
        named |= {each.where for each in self.limitations} - {"", HEAD, CONTRAST, UNCROPPED}
        if unknown := named.difference(s.label for s in self.structures):
            detail = f"a limitation or usual value is of {min(unknown)!r}"
            raise ValueError(f"{detail}, which is no structure of the model")
        painted = {n for _, n in self.decision.regions} if isinstance(self.decision, Paint) else ()
        if not {s.number for s in self.structures}.issuperset(painted):
            raise ValueError("a region is painted with the number of no structure")
        if not self.parts and 0 < len(self.window.mirrored_channels) < self.n_outputs:
            raise ValueError("mirrored channels must be all of the network's")
        if any(part.parts or part.stage for part in self.parts):
            raise ValueError("parts must be single networks")
        if self.parts and self.stage is not None and self.stage.use == "channels":
            raise ValueError("only a single network has structures as further input channels")
        coarser = self.fast.card if self.fast else None
        if coarser and {s.label for s in coarser.structures} != {s.label for s in self.structures}:
            raise ValueError("a coarser model must have the same structures")

    def limitations_in(self, present: Collection[str]) -> tuple[str, ...]:
        """Return the known errors to expect where `present` is, those of few scans first."""
        special = [each.text for each in self.limitations if each.where and each.where in present]
        return (*special, *(each.text for each in self.limitations if not each.where))

    @property
    def n_inputs(self) -> int:
        """Number of input channels of the network: the scan's, and those of a previous stage."""
        stage, count = self.stage, len(self.channels)
        if stage is not None and stage.use == "channels":
            count += len(stage.labels or stage.card.structures)
        return count

    @property
    def n_outputs(self) -> int:
        """Number of output channels of the network; with argmax, channel 0 is background."""
        if isinstance(self.decision, Paint):
            return max(channel for channel, _ in self.decision.regions) + 1
        highest = max(s.number for s in self.structures)
        return highest + 1 if isinstance(self.decision, Argmax) else highest

    @property
    def n_maps(self) -> int:
        """Number of label maps: with a threshold one per output channel, else one."""
        return self.n_outputs if isinstance(self.decision, Threshold) else 1

    @property
    def label_bytes(self) -> int:
        """Bytes per voxel of a label map: 1, or 2 if its labels exceed 255."""
        return label_bytes(self.decision, self.n_outputs)


def shared_modality(cards: Iterable[ModelCard]) -> str | None:
    """Return the only modality that the first inputs of some models require; None for several."""
    modalities = {card.channels[0].modality for card in cards} - {ANY_MODALITY}
    return modalities.pop() if len(modalities) == 1 else None
