"""Dataset, transforms and inferer that a training bundle names and MONAI lacks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import CacheDataset
from monai.inferers import SimpleInferer
from monai.transforms import Compose, MapTransform, Randomizable
from torch.nn import functional

from scanloom.io.read import load_volume

CONTROL_POINTS: Final = 5
"""Points along each axis of a patch at which a displacement is drawn; linear in between. More of
them would tear small structures, fewer are an affine map."""


class SeededDataset(CacheDataset):  # type: ignore[misc]
    """`monai.data.CacheDataset` of an epoch's patches, drawn from seed, epoch and index only.

    A patch is the same whichever process draws it, and after a killed run as without it: neither
    order nor random state has to be in a checkpoint. The cases come in passes, each in an order of
    its own, wherever epochs end.

    Parameters
    ----------
    data : sequence of mapping
        Cases, as `monai.data.CacheDataset` takes them.
    transform : Compose
        Deterministic transforms, whose results are cached, then random ones.
    seed : int
        Seed of the run.
    patches : int
        Number of patches in an epoch, of all processes together.
    """

    def __init__(
        self, data: Sequence[Any], transform: Compose, seed: int, patches: int, **cache: Any
    ) -> None:
        self.seed, self.epoch, self.patches = seed, 1, patches
        super().__init__(data=data, transform=transform, **cache)

    def __len__(self) -> int:
        return self.patches

    def _transform(self, index: int) -> Any:
        passes, position = divmod((self.epoch - 1) * self.patches + index, len(self.data))
        order = np.random.default_rng((self.seed, passes)).permutation(len(self.data))
        state = np.random.SeedSequence((self.seed, self.epoch, index)).generate_state(1)
        self.transform.set_random_state(seed=int(state[0]))
        return super()._transform(int(order[position]))


class LoadVolumed(MapTransform):  # type: ignore[misc]
    """Read scans of any format that scanloom reads as tensors (1, i, j, k) with their affine.

    Parameters
    ----------
    keys : str or sequence of str
        Paths.
    modality : str
        Modality of files that state none.
    """

    def __init__(self, keys: KeysCollection, modality: str) -> None:
        super().__init__(keys)
        self.modality = modality

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its scans."""
        read = {key: load_volume(data[key], modality=self.modality) for key in self.keys}
        return {**data, **{key: volume.to_metatensor() for key, volume in read.items()}}


class AutocastInferer(SimpleInferer):  # type: ignore[misc]
    """`SimpleInferer` in mixed precision on any device; MONAI's engines know it on CUDA only.

    Parameters
    ----------
    precision : str
        "float32", which changes nothing, or "bfloat16".
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]

    def __call__(
        self, inputs: torch.Tensor, network: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the network's scores in float32, in which the loss is computed."""
        half = self.dtype is not torch.float32
        with torch.autocast(inputs.device.type, self.dtype, enabled=half):
            scores: torch.Tensor = super().__call__(inputs, network, *args, **kwargs)
        return scores.float()


class RandDeformedPatchd(Randomizable, MapTransform):  # type: ignore[misc]
    """Cut a patch, deformed by one random map: position, affine and smooth displacement at once.

    One interpolation instead of three, of the patch's voxels only, which costs a CPU less than a
    fifth of MONAI's RandAffined and Rand3DElasticd. Outside the scan is 0, as in the windows of
    MONAI's sliding-window inferer.

    Parameters
    ----------
    keys : str or sequence of str
        Arrays (channel, i, j, k) on one grid: image and label map.
    modes : sequence of str
        "bilinear" or "nearest" for each key.
    size : sequence of int
        Voxels of the patch along each axis.
    spacing : sequence of float
        Voxel spacing in mm, with which rotations are those of the body.
    prob : float
        Probability of a deformation; a patch without is cut where voxels lie, unless the scan is
        smaller and its parity differs.
    rotate : float
        Largest rotation about each axis, in degrees.
    scale : float
        Largest change of size along each axis, as a share.
    elastic : float
        Standard deviation of the displacement, in mm.
    centre_key : str or None
        Key of the voxels of each class (MONAI's indices of classes), of which every second patch
        contains one, the class drawn first.
    """

    def __init__(
        self,
        keys: KeysCollection,
        modes: Sequence[str],
        size: Sequence[int],
        spacing: Sequence[float],
        *,
        prob: float,
        rotate: float,
        scale: float,
        elastic: float,
        centre_key: str | None = None,
    ) -> None:
        MapTransform.__init__(self, keys)
        self.modes, self.size, self.spacing = tuple(modes), tuple(size), tuple(spacing)
        self.prob, self.rotate, self.scale, self.elastic = prob, rotate, scale, elastic
        self.centre_key = centre_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with patches of all keys."""
        result = dict(data)
        classes = () if self.centre_key is None else result.pop(self.centre_key)
        shape = result[self.keys[0]].shape[1:]
        positions = self._positions(shape, self._centre(shape, classes))
        for key, mode in zip(self.keys, self.modes, strict=True):
            result[key] = sample(torch.as_tensor(result[key]), positions, mode)
        return result

    def _centre(self, shape: Sequence[int], classes: Sequence[Any]) -> np.ndarray:
        """Return the patch's centre in voxels: anywhere, or so that a voxel of a class is in it."""
        lengths, size = np.array(shape), np.array(self.size)
        low, high = (size - 1) / 2, lengths - 1 - (size - 1) / 2
        middle = (lengths - 1) / 2
        drawn = low + self.R.uniform(size=3) * (high - low)
        filled = [voxels for voxels in classes if len(voxels)]
        if filled and self.R.uniform() < 0.5:
            voxels = filled[self.R.randint(len(filled))]
            voxel = np.array(np.unravel_index(int(voxels[self.R.randint(len(voxels))]), shape))
            drawn = voxel + self.R.uniform(-0.25, 0.25, size=3) * size
        # whole voxels, so that a patch without deformation is not blurred
        inside = np.clip(np.round(drawn - low) + low, low, np.maximum(low, high))
        return np.where(size < lengths, inside, middle)

    def _positions(self, shape: Sequence[int], centre: np.ndarray) -> torch.Tensor:
        """Return the voxel of the scan, (i, j, k), for each voxel of the patch."""
        axes = [torch.arange(n, dtype=torch.float32) - (n - 1) / 2 for n in self.size]
        offsets = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
        if self.R.uniform() < self.prob:
            spacing = np.array(self.spacing)
            matrix = _rotation(np.radians(self.R.uniform(-self.rotate, self.rotate, size=3)))
            matrix = matrix @ np.diag(1 + self.R.uniform(-self.scale, self.scale, size=3))
            voxels = matrix * spacing[None] / spacing[:, None]
            drawn = self.R.normal(scale=self.elastic, size=(3, *[CONTROL_POINTS] * 3))
            field = torch.as_tensor(drawn / spacing[:, None, None, None], dtype=torch.float32)
            field = functional.interpolate(
                field[None], self.size, mode="trilinear", align_corners=True
            )[0]
            offsets = offsets @ torch.as_tensor(voxels.T, dtype=torch.float32)
            offsets = offsets + field.movedim(0, -1)
        return offsets + torch.as_tensor(centre, dtype=torch.float32)


def _rotation(angles: np.ndarray) -> np.ndarray:
    """Return the rotation about three axes, angles in radians, one after the other."""
    matrix = np.eye(3)
    for axis, angle in enumerate(angles):
        i, j = [k for k in range(3) if k != axis]
        turn = np.eye(3)
        turn[i, i] = turn[j, j] = np.cos(angle)
        turn[i, j], turn[j, i] = -np.sin(angle), np.sin(angle)
        matrix = matrix @ turn
    return matrix


def sample(image: torch.Tensor, positions: torch.Tensor, mode: str) -> torch.Tensor:
    """Return an image at positions of its voxels, 0 outside.

    Parameters
    ----------
    image : Tensor
        Array (channel, i, j, k) of any type; float32 is returned for "bilinear", else its type.
    positions : Tensor
        Voxel coordinates (..., 3) with three axes before the last.
    mode : str
        "bilinear" or "nearest".
    """
    low = [max(0, int(n)) for n in positions.amin((0, 1, 2)).floor()]
    high = [int(n) + 2 for n in positions.amax((0, 1, 2)).floor()]
    # only this box is converted, not the whole scan
    box = tuple(
        slice(min(a, n - 1), max(min(b, n), min(a, n - 1) + 1))
        for a, b, n in zip(low, high, image.shape[1:], strict=True)
    )
    cut = image[(slice(None), *box)]
    lengths = torch.tensor(cut.shape[1:], dtype=torch.float32)
    start = torch.tensor([each.start for each in box], dtype=torch.float32)
    grid = ((positions - start) * 2 + 1) / lengths - 1
    values = functional.grid_sample(
        cut[None].float(), grid.flip(-1)[None], mode=mode, padding_mode="zeros", align_corners=False
    )[0]
    return values if mode == "bilinear" else values.round().to(image.dtype)


class RandMirrord(Randomizable, MapTransform):  # type: ignore[misc]
    """Mirror a case along axes, each with probability one half; sides change with left and right.

    Parameters
    ----------
    keys : str or sequence of str
        Arrays (channel, i, j, k) in one orientation.
    axes : sequence of int
        Axes that are mirrored.
    label_key : str
        Key of the label map.
    sided_axis : int
        Axis from left to right.
    pairs : sequence of (int, int)
        Numbers of structures of the left and the right side that change places.
    """

    def __init__(
        self,
        keys: KeysCollection,
        axes: Sequence[int],
        label_key: str = "label",
        sided_axis: int = 0,
        pairs: Sequence[Sequence[int]] = (),
    ) -> None:
        MapTransform.__init__(self, keys)
        self.axes, self.label_key, self.sided_axis = tuple(axes), label_key, sided_axis
        self.pairs = [(int(left), int(right)) for left, right in pairs]

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case, mirrored or not."""
        result = dict(data)
        drawn = [axis for axis in self.axes if self.R.uniform() < 0.5]
        if not drawn:
            return result
        for key in self.keys:
            result[key] = torch.flip(torch.as_tensor(result[key]), [axis + 1 for axis in drawn])
        if self.sided_axis in drawn:
            label = result[self.label_key]
            changed = label.clone()
            for left, right in self.pairs:
                changed[label == left], changed[label == right] = right, left
            result[self.label_key] = changed
        return result
