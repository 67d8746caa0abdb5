"""`Segmentation`: label maps of named structures on the scan's grid, as a predictor returns it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core.engines import EngineChoice
from scanloom.core.grid import Grid
from scanloom.core.paths import given_path
from scanloom.core.reasons import Flag
from scanloom.core.text import did_you_mean

if TYPE_CHECKING:
    import nibabel as nib
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so
    import torch

    from scanloom.core.measurement import Measurement, ReferenceRange
    from scanloom.core.volume import Volume

UNCERTAINTY_STEPS = 255
"""Stored value of 1: maps are stored as integers from 0."""


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Uncertainty of each voxel's label, in steps of 1 / `UNCERTAINTY_STEPS`.

    Parameters
    ----------
    entropy : (I, J, K) uint8 array
        Entropy of the class probabilities, from 0 (certain) to 1 (all classes equally probable);
        I fastest in memory.
    disagreement : (I, J, K) uint8 array or None
        Share of the model's networks whose own label differs from the result (variation ratio);
        None for a single network.
    """

    entropy: NDArray[np.uint8]
    disagreement: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        for name, values in self.maps():
            if values.ndim != 3 or values.dtype != np.uint8:
                shape = f"{values.shape} {values.dtype}"
                raise ValueError(f"{name} must be (I, J, K) of uint8, got {shape}")

    def maps(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield name and array of each map that there is."""
        yield "entropy", self.entropy
        if self.disagreement is not None:
            yield "disagreement", self.disagreement


_SLUG = re.compile(r"[a-z0-9]+(?:[_-][a-z0-9]+)*")
Color = tuple[int, int, int]
MAX_SCHEME = 16
"""Characters of a coding scheme's designator (DICOM SH)."""
LISTED = 6
"""Number of structures that `repr` names."""


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

    def __post_init__(self) -> None:
        for text in (self.value, self.scheme, self.meaning):
            # DICOM separates values with a backslash, and pads them with spaces
            if not text or text != text.strip() or "\\" in text:
                raise ValueError(f"a code has no text that DICOM alters, got {text!r}")
        if len(self.scheme) > MAX_SCHEME:
            raise ValueError(f"a scheme has at most {MAX_SCHEME} characters, got {self.scheme!r}")


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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support pickling: arrays come back writable."""
        self.__dict__.update(state)
        self.labels.flags.writeable = False

    def __repr__(self) -> str:
        shape = " x ".join(str(n) for n in self.labels.shape)
        return f"Layer({shape} {self.labels.dtype}: {_listed(self.structures)})"


def _listed(structures: tuple[Structure, ...]) -> str:
    """Return the number of structures and the labels of the first ones."""
    labels = [structure.label for structure in structures[:LISTED]]
    more = [f"and {len(structures) - LISTED} more"] if len(structures) > LISTED else []
    noun = "structure" if len(structures) == 1 else "structures"
    return f"{len(structures)} {noun}: {', '.join(labels + more)}"


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
    engine : EngineChoice or None
        Library that ran the network; None if unknown.
    changes : str
        How the network was run otherwise than its model says, such as "not mirrored"; else "".
    flags : tuple of Flag
        Caveats of the prediction.
    sources : tuple of str
        Models whose structures were united, or whose scores were averaged; empty for one model.
    uncertainty : Uncertainty or None
        Uncertainty of the labels on `grid`, if it was requested.
    corrected : bool
        Whether a person corrected the labels.
    flags_by_label : mapping of str to tuple of Flag, or None
        Flags of single structures, if results with flags of their own were united.
    reference_ranges : tuple of ReferenceRange
        Usual values of its structures, with which `measure` compares.
    """

    model: str
    layers: tuple[Layer, ...]
    grid: Grid
    version: str = ""
    device: str = ""
    precision: str = ""
    engine: EngineChoice | None = None
    changes: str = ""
    flags: tuple[Flag, ...] = ()
    sources: tuple[str, ...] = ()
    uncertainty: Uncertainty | None = None
    corrected: bool = False
    flags_by_label: Mapping[str, tuple[Flag, ...]] | None = None
    reference_ranges: tuple[ReferenceRange, ...] = ()

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

    def flags_of(self, label: str) -> tuple[Flag, ...]:
        """Return the flags that concern a structure."""
        return self.flags if self.flags_by_label is None else self.flags_by_label[label]

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all structures, layer by layer."""
        return tuple(s.label for s in self.structures)

    def __repr__(self) -> str:
        model = " ".join(text for text in (self.title, self.version) if text)
        flags = [flag.code for flag in self.flags]
        sections = (model, _listed(self.structures), self.grid.summary, *flags)
        return f"Segmentation({'; '.join(sections)})"

    def _repr_html_(self) -> str:
        """Return a picture of the structures, and their volumes, for a notebook."""
        from scanloom.interop.notebook import segmentation_html

        return segmentation_html(self)

    def __contains__(self, label: object) -> bool:
        return label in self.labels

    def __iter__(self) -> Iterator[str]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.structures)

    def __getitem__(self, label: str) -> NDArray[np.bool_]:
        """Return the mask (I, J, K) of a structure on the scan's grid.

        Raises
        ------
        KeyError
            If the segmentation has no such structure; the message suggests a label.
        """
        structure = self.structure(label)
        return np.asarray(self.layer_of(label).labels == structure.number)

    def structure(self, label: str) -> Structure:
        """Return the structure with a label; `KeyError` as for a mask."""
        for structure in self.structures:
            if structure.label == label:
                return structure
        raise KeyError(f"no structure {label!r}: {did_you_mean(str(label), self.labels)}")

    def layer_of(self, label: str) -> Layer:
        """Return the layer that holds a structure; `KeyError` as for a mask."""
        structure = self.structure(label)
        return next(layer for layer in self.layers if structure in layer.structures)

    def single_layer(self) -> Layer:
        """Return the only layer.

        Raises
        ------
        ValueError
            If structures overlap: no single label map holds them.
        """
        if len(self.layers) > 1:
            raise ValueError(
                f"structures overlap in {len(self.layers)} layers, which no single label map "
                "holds: give the label of a structure"
            )
        return self.layers[0]

    def _voxels(self, label: str | None) -> NDArray[Any]:
        """Return the mask of a structure as uint8, or the label map."""
        return self.single_layer().labels if label is None else self[label].view(np.uint8)

    def to_nibabel(self, label: str | None = None) -> nib.Nifti1Image:
        """Return the label map, or the mask of a structure, as an image of nibabel.

        Raises
        ------
        ValueError
            If structures overlap and no label is given.
        """
        from scanloom.interop.images import to_nibabel

        image = to_nibabel(self._voxels(label), self.grid)
        image.header.set_intent("label")
        return image

    def to_sitk(self, label: str | None = None) -> sitk.Image:
        """Return the label map, or the mask of a structure, as an image of SimpleITK.

        Raises
        ------
        ScanError
            SHEAR_NOT_SUPPORTED if the grid is sheared: ITK's direction is a rotation.
        ValueError
            If structures overlap and no label is given.
        """
        from scanloom.interop.images import to_sitk

        return to_sitk(self._voxels(label), self.grid)

    def to_torch(self, label: str | None = None) -> torch.Tensor:
        """Return the label map, or the mask of a structure, as a writable tensor (I, J, K).

        Raises
        ------
        ValueError
            If structures overlap and no label is given.
        """
        from scanloom.interop.images import to_torch

        return to_torch(self._voxels(label))

    def save(self, path: str | Path, label: str | None = None) -> None:
        """Write the label map, or the mask of a structure, as NIfTI (.nii.gz).

        Raises
        ------
        ValueError
            If the name does not end in .nii.gz, or structures overlap and no label is given.
        OSError
            If the file can't be written.
        """
        from scanloom.interop.results import save

        save(self, given_path(path, "path"), label)

    def measure(self, volume: Volume) -> tuple[Measurement, ...]:
        """Return sizes and intensities of all structures in the scan that was segmented.

        Each has the flags of the volume and of the segmentation, and OUT_OF_RANGE, as in the
        measurements of `segment`.

        Raises
        ------
        ValueError
            If the grids differ.
        """
        from scanloom.interop.results import measure

        return measure(self, volume)

    def preview(self, volume: Volume, path: str | Path) -> None:
        """Draw the scan with its structures to a PNG file, as in a case folder.

        Raises
        ------
        ValueError
            If the name does not end in .png, the grids differ, or the scan is marked as having
            identifying text burned in.
        OSError
            If the file can't be written.
        """
        from scanloom.interop.results import preview

        preview(self, volume, given_path(path, "path"))
