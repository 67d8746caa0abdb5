"""`Volume`: one channel of a scan on its grid, as a reader returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scanloom.core.grid import Grid
from scanloom.core.reasons import Flag

if TYPE_CHECKING:
    import nibabel as nib
    import SimpleITK as sitk  # noqa: N813 - the library's own documentation imports it so
    import torch
    from monai.data import MetaTensor

Unit = Literal["HU", "a.u.", "unknown"]
MODALITIES = ("CT", "MR", "PT", "NM")
"""Supported modalities (DICOM PS3.3 C.7.3.1.1.1); any other is unknown (None)."""


def default_unit(modality: str | None) -> Unit:
    """Return the unit of values without a stated unit, from the modality that was given."""
    if modality is None:
        return "unknown"
    return "HU" if modality == "CT" else "a.u."


@dataclass(frozen=True, eq=False)
class Volume:
    """One channel of a scan.

    Parameters
    ----------
    array : (I, J, K) array
        Values after rescale, I fastest in memory (Fortran order), integer or floating.
    grid : Grid
        Shape and affine.
    unit : "HU", "a.u." or "unknown"
        HU only if the source states it.
    modality : str or None
        One of `MODALITIES`; None if the source does not state it.
    padding : float or None
        Value of voxels outside the scanner's field of view. Networks see it, statistics skip it.
    flags : tuple of Flag
        Corrections and assumptions of the reader.
    padding_limit : float or None
        The other end of the range if padding is a range of values.
    acquisition : "2D", "3D" or None
        Of a DICOM series: whether its slices were acquired together (MRAcquisitionType 3D), or one
        by one. None for volume files.
    suv_factor : float or None
        Standardised uptake value by body weight (g/ml) of a voxel with the value 1, of a PET series
        whose headers state it.
    """

    array: NDArray[np.generic]
    grid: Grid
    unit: Unit
    modality: str | None
    padding: float | None = None
    flags: tuple[Flag, ...] = ()
    padding_limit: float | None = None
    acquisition: Literal["2D", "3D"] | None = None
    suv_factor: float | None = None

    def __post_init__(self) -> None:
        if self.array.shape != self.grid.shape:
            raise ValueError(f"array {self.array.shape} does not fit grid {self.grid.shape}")
        if self.array.dtype.kind not in "iuf" or self.array.dtype.itemsize > 8:
            raise ValueError(f"array must hold numbers of at most 64 bits, got {self.array.dtype}")
        if self.modality is not None and self.modality not in MODALITIES:
            raise ValueError(f"modality must be one of {MODALITIES} or None, got {self.modality}")
        array = np.asfortranarray(self.array).view()
        array.flags.writeable = False
        object.__setattr__(self, "array", array)
        for name in ("padding", "padding_limit"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name} must be a number in the range of float64") from None
            if array.dtype.kind == "f":  # so that it equals voxels in any precision
                with np.errstate(over="ignore", under="ignore"):  # no voxel equals it
                    number = float(array.dtype.type(number))
            object.__setattr__(self, name, number)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Support pickling: arrays come back writable."""
        self.__dict__.update(state)
        self.array.flags.writeable = False

    def __repr__(self) -> str:
        sections = (self.modality or "modality unknown", self.grid.summary, str(self.array.dtype))
        flags = [flag.code for flag in self.flags]
        return f"Volume({', '.join((*sections, self.unit, *flags))})"

    def _repr_html_(self) -> str:
        """Return a picture of the middle planes for a notebook."""
        from scanloom.interop.notebook import volume_html

        return volume_html(self)

    @classmethod
    def from_array(
        cls,
        array: ArrayLike,
        affine: ArrayLike,
        *,
        modality: str | None = None,
        padding: float | None = None,
    ) -> Volume:
        """Return a volume of an array.

        Parameters
        ----------
        array : (I, J, K) array-like
            Values: in Hounsfield units if the modality is "CT".
        affine : (4, 4) array-like
            Voxel index to RAS mm.
        modality : str or None
            One of `MODALITIES`; None if it is unknown.
        padding : float or None
            Value of voxels outside the scanner's field of view.

        Raises
        ------
        ScanError
            BAD_GEOMETRY if the affine is not that of a stack of slices.
        ValueError
            If the array has not three dimensions or holds no numbers of at most 64 bits.
        TypeError
            If the array is masked: the mask would be lost.
        """
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("array is masked: give array.filled(value), and the value as padding")
        values = np.asarray(array)
        if values.ndim != 3:
            raise ValueError(f"array must be (I, J, K), got {values.shape}")
        i, j, k = values.shape
        grid = Grid((i, j, k), np.asarray(affine, np.float64))
        return cls(values, grid, default_unit(modality), modality, padding)

    @classmethod
    def from_nibabel(
        cls,
        image: nib.spatialimages.SpatialImage,
        *,
        modality: str | None = None,
        padding: float | None = None,
    ) -> Volume:
        """Return a volume of an image of nibabel; parameters and errors as in `from_array`.

        ORIENTATION_UNKNOWN if a NIfTI or Analyze image has neither sform nor qform: its affine is a
        guess of nibabel's.
        """
        from scanloom.interop.images import from_nibabel

        array, grid = from_nibabel(image)
        return cls(array, grid, default_unit(modality), modality, padding)

    @classmethod
    def from_sitk(
        cls, image: sitk.Image, *, modality: str | None = None, padding: float | None = None
    ) -> Volume:
        """Return a volume of an image of SimpleITK; parameters and errors as in `from_array`."""
        from scanloom.interop.images import from_sitk

        array, grid = from_sitk(image)
        return cls(array, grid, default_unit(modality), modality, padding)

    @classmethod
    def from_metatensor(
        cls, tensor: MetaTensor, *, modality: str | None = None, padding: float | None = None
    ) -> Volume:
        """Return a volume of a MetaTensor (1, I, J, K); parameters and errors as in `from_array`.

        Its affine leads to RAS mm, or to LPS mm if its `space` says so.
        """
        from scanloom.interop.images import from_metatensor

        array, grid = from_metatensor(tensor)
        return cls(array, grid, default_unit(modality), modality, padding)

    def to_nibabel(self) -> nib.Nifti1Image:
        """Return a copy as a NIfTI image of nibabel, in RAS mm; float16 becomes float32."""
        from scanloom.interop.images import to_nibabel

        return to_nibabel(self.array, self.grid)

    def to_sitk(self) -> sitk.Image:
        """Return a copy as an image of SimpleITK, in LPS mm; float16 becomes float32.

        Raises
        ------
        ScanError
            SHEAR_NOT_SUPPORTED if the grid is sheared: ITK's direction is a rotation.
        """
        from scanloom.interop.images import to_sitk

        return to_sitk(self.array, self.grid)

    def to_torch(self) -> torch.Tensor:
        """Return a copy (I, J, K) as a contiguous, writable tensor of the array's type."""
        from scanloom.interop.images import to_torch

        return to_torch(self.array)

    def to_metatensor(self) -> MetaTensor:
        """Return a copy (1, I, J, K) as a MetaTensor of MONAI, with the affine in RAS mm."""
        from scanloom.interop.images import to_metatensor

        return to_metatensor(self.array, self.grid)

    def is_padding(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask, of the same shape, of the values that are padding."""
        if self.padding is None:
            return np.zeros(values.shape, np.bool_)
        if self.padding_limit is None:
            return np.asarray(values == self.padding)
        low, high = sorted((self.padding, self.padding_limit))
        return np.asarray((values >= low) & (values <= high))
