"""`Segmentation`: label maps of named structures on the scan's grid, as a predictor returns it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core.grid import Grid
from scanloom.core.reasons import Flag
from scanloom.core.uncertainty import Uncertainty

_SLUG = re.compile(r"[a-z0-9]+(?:[_-][a-z0-9]+)*")
Color = tuple[int, int, int]


def is_slug(text: str) -> bool:
    """Return whether `text` is a valid label or model name: a-z, 0-9, with _ or - between."""
    return len(text) <= 64 and _SLUG.fullmatch(text) is not None


def slug(text: str) -> str:
    """Return `text` as a model name; empty if it has neither a letter nor a digit."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:64].strip("_")


@dataclass(frozen=True)
class Code:
    """A coded concept (DICOM PS3.3 8): value and meaning in a scheme such as SCT."""

    value: str
    scheme: str
    meaning: str


@dataclass(frozen=True)
class Structure:
    """An anatomical structure, or finding, that a model segments.

    Parameters
    ----------
    label : str
        Slug, unique in a segmentation: "kidney_left".
    number : int
        Value in the label maps and DICOM segment number, at least 1, unique in a segmentation and
        independent of the selected structures.
    name : str
        Display name: "Left kidney".
    category, type : Code
        SegmentedPropertyCategory and SegmentedPropertyType (DICOM PS3.16 CID 7150, 7151).
    laterality : Code or None
        SegmentedPropertyTypeModifier (CID 244).
    color : (R, G, B)
        0 to 255.
    experimental : bool
        Whether its authors warn against relying on it.
    """

    label: str
    number: int
    name: str
    category: Code
    type: Code
    color: Color
    laterality: Code | None = None
    experimental: bool = False

    def __post_init__(self) -> None:
        if not is_slug(self.label):
            raise ValueError(f"a label is made of a-z, 0-9, _ and -, got {self.label!r}")
        if not 1 <= self.number <= 65535:
            raise ValueError(f"number must be 1 to 65535, got {self.number}")
        if len(self.color) != 3 or not all(0 <= c <= 255 for c in self.color):
            raise ValueError(f"color must be three numbers of 0 to 255, got {self.color}")


@dataclass(frozen=True, eq=False)
class Layer:
    """A label map of structures that exclude one another.

    Parameters
    ----------
    labels : (I, J, K) uint8 or uint16 array
        0, or the number of a structure; I fastest in memory.
    structures : tuple of Structure
        The structures that the layer may contain, present or not.
    """

    labels: NDArray[Any]
    structures: tuple[Structure, ...]

    def __post_init__(self) -> None:
        if self.labels.ndim != 3 or self.labels.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"labels must be (I, J, K) of uint8 or uint16, got {self.labels.shape} "
                f"{self.labels.dtype}"
            )
        numbers = [s.number for s in self.structures]
        if not numbers or max(numbers) > np.iinfo(self.labels.dtype).max:
            raise ValueError(f"the structures {numbers} do not fit {self.labels.dtype}")
        labels = np.asfortranarray(self.labels).view()
        labels.flags.writeable = False
        object.__setattr__(self, "labels", labels)


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Label maps of one model for one scan, on the scan's own grid.

    Structures that overlap are in different layers.

    Parameters
    ----------
    model : str
        Name of the model.
    layers : tuple of Layer
        At least one, all on `grid`.
    grid : Grid
        The scan's grid.
    version : str
        Version of the model; may be empty.
    device, precision : str
        Device and numeric precision of the network; empty if unknown.
    flags : tuple of Flag
        Caveats of the prediction.
    sources : tuple of str
        Models whose structures were united, or whose scores were averaged; empty for one model.
    uncertainty : Uncertainty or None
        Uncertainty of the labels on `grid`, if it was requested.
    """

    model: str
    layers: tuple[Layer, ...]
    grid: Grid
    version: str = ""
    device: str = ""
    precision: str = ""
    flags: tuple[Flag, ...] = ()
    sources: tuple[str, ...] = ()
    uncertainty: Uncertainty | None = None

    def __post_init__(self) -> None:
        if not is_slug(self.model):
            raise ValueError(f"a model's name is made of a-z, 0-9, _ and -, got {self.model!r}")
        if not self.layers:
            raise ValueError("a segmentation has at least one layer")
        for layer in self.layers:
            if layer.labels.shape != self.grid.shape:
                raise ValueError(f"layer {layer.labels.shape} does not fit grid {self.grid.shape}")
        if self.uncertainty and self.uncertainty.entropy.shape != self.grid.shape:
            shape = self.uncertainty.entropy.shape
            raise ValueError(f"uncertainty {shape} does not fit grid {self.grid.shape}")
        for field in ("label", "number"):
            values = [getattr(s, field) for s in self.structures]
            if len(set(values)) != len(values):
                raise ValueError(f"the {field} of each structure must be unique, got {values}")

    @property
    def title(self) -> str:
        """The model's name; of several models, their names too."""
        return f"{self.model} ({' + '.join(self.sources)})" if self.sources else self.model

    @property
    def structures(self) -> tuple[Structure, ...]:
        """All structures, layer by layer."""
        return tuple(s for layer in self.layers for s in layer.structures)
