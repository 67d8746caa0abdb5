"""Volumes and label maps as tensors of PyTorch and MONAI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Grid

if TYPE_CHECKING:
    import torch
    from monai.data import MetaTensor

_LPS = np.diag((-1.0, -1.0, 1.0, 1.0))


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """Return an array (I, J, K) as a contiguous tensor of its own memory."""
    import torch

    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def to_metatensor(array: NDArray[Any], grid: Grid) -> MetaTensor:
    """Return an array (I, J, K) as a tensor (1, I, J, K) with the affine in RAS mm."""
    import torch
    from monai.data import MetaTensor
    from monai.utils import MetaKeys, SpaceKeys

    affine = torch.from_numpy(grid.affine.copy())
    meta = {
        MetaKeys.SPACE: SpaceKeys.RAS,
        MetaKeys.ORIGINAL_AFFINE: affine.clone(),
        MetaKeys.SPATIAL_SHAPE: np.array(grid.shape),
        MetaKeys.ORIGINAL_CHANNEL_DIM: "no_channel",
    }
    return MetaTensor(to_torch(array)[None], affine=affine, meta=meta)


def from_metatensor(tensor: MetaTensor) -> tuple[NDArray[Any], Grid]:
    """Return the values (I, J, K) of a tensor (1, I, J, K) or (I, J, K), and its grid.

    Raises
    ------
    ValueError
        If the tensor has several channels, or its space is neither RAS nor LPS.
    ScanError
        BAD_GEOMETRY if the affine is not that of a stack of slices.
    """
    from monai.utils import MetaKeys, SpaceKeys

    array = tensor.detach().cpu().as_tensor().numpy()
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3:
        raise ValueError(f"a tensor (1, I, J, K) is expected, got {tuple(tensor.shape)}")
    affine = tensor.affine.cpu().numpy().astype(np.float64)
    space = tensor.meta.get(MetaKeys.SPACE, SpaceKeys.RAS)
    if space not in (SpaceKeys.RAS, SpaceKeys.LPS):
        raise ValueError(f"the space of the affine must be RAS or LPS, got {space!r}")
    affine = _LPS @ affine if space == SpaceKeys.LPS else affine
    return np.array(array), Grid(array.shape, affine)
