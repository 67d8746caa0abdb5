"""Dataset, transforms and inferer that a training bundle names and MONAI lacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from monai.config import KeysCollection
from monai.data import CacheDataset
from monai.inferers import SimpleInferer
from monai.transforms import Compose, MapTransform, Randomizable
from torch.nn import functional

from scanloom.inference.device import bfloat16_units, cudnn_version, wrong_cudnn
from scanloom.interop.images import to_metatensor
from scanloom.io.read import load_volume
from scanloom.training.cases import on_axes_of

CONTROL_POINTS: Final = 5
"""Points along each axis of a patch at which a displacement is drawn; linear in between. More of
them would tear small structures, fewer are an affine map."""


class SeededDataset(CacheDataset):  # type: ignore[misc]  # MONAI's are untyped
    """`monai.data.CacheDataset` of an epoch's patches, drawn from seed, epoch and index only.

    A patch is the same whichever process draws it, and after a killed run as without it: neither
    order nor random state has to be in a checkpoint. The cases come in passes, each in an order of
    its own, wherever epochs end.

    Parameters
    ----------
    transform : Compose
        Deterministic transforms, whose results are cached, then random ones.
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


class LoadVolumed(MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Read scans of any format that scanloom reads as tensors (1, i, j, k) with an affine.

    Parameters
    ----------
    keys : str or sequence of str
        Paths of scans on one grid; axes may be in another order or direction.
    modality : str
        Modality of files that state none.
    """

    def __init__(self, keys: KeysCollection, modality: str) -> None:
        super().__init__(keys)
        self.modality = modality

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its scans, all on the grid of the first one."""
        read = {key: load_volume(data[key], modality=self.modality) for key in self.keys}
        # a header rounded by another program would give a resampled label map another shape
        grid = read[self.keys[0]].grid
        tensors = {
            key: to_metatensor(on_axes_of(grid, volume).array, grid) for key, volume in read.items()
        }
        return {**data, **tensors}


@functools.cache
def network_type(precision: str, device: str) -> torch.dtype:
    """Return the type in which a network is trained on a type of device.

    "auto" is bfloat16 where the device has units for it: emulated, it takes several times as long
    as float32. What is asked for is not taken either from a cuDNN that computes it wrong.
    """
    if precision == "float32":
        return torch.float32
    if device == "cuda":
        wrong = not torch.version.hip and wrong_cudnn(cudnn_version())
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        wrong, has_units = "", device == "cpu" and bfloat16_units() is not None
    is_taken = not wrong and (has_units or precision == "bfloat16")
    return torch.bfloat16 if is_taken else torch.float32


class AutocastInferer(SimpleInferer):  # type: ignore[misc]  # MONAI's are untyped
    """`SimpleInferer` in mixed precision on any device; MONAI's engines know it on CUDA only.

    Its `precision` is that of the recipe: see `network_type`.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def __call__(
        self, inputs: torch.Tensor, network: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return the network's scores in float32, in which the loss is computed."""
        dtype = network_type(self.precision, inputs.device.type)
        with torch.autocast(inputs.device.type, dtype, enabled=dtype is not torch.float32):
            scores: torch.Tensor = super().__call__(inputs, network, *args, **kwargs)
        return scores.float()


class RandDeformedPatchd(Randomizable, MapTransform):  # type: ignore[misc]  # MONAI's are untyped
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
        Key of the voxels of each class (MONAI's indices of classes), the class drawn first, that
        some patches contain.
    centred : float
        Their share.
    scan_spacing : sequence of float or None
        Voxel spacing of the arrays in mm, if it is not that of the patch.
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
        centred: float = 0.5,
        scan_spacing: Sequence[float] | None = None,
    ) -> None:
        MapTransform.__init__(self, keys)
        self.modes, self.size, self.spacing = tuple(modes), tuple(size), tuple(spacing)
        self.prob, self.rotate, self.scale, self.elastic = prob, rotate, scale, elastic
        self.centre_key, self.centred = centre_key, centred
        self.scan_spacing = self.spacing if scan_spacing is None else tuple(scan_spacing)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with patches of all keys."""
        result = dict(data)
        grid, box = self._patch(result)
        for key, mode in zip(self.keys, self.modes, strict=True):
            result[key] = sample(torch.as_tensor(result[key])[(slice(None), *box)], grid, mode)
        return result

    def _patch(self, case: dict[Hashable, Any]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Return the points of a patch in a box of a case, and the box; takes out the centres."""
        classes = () if self.centre_key is None else case.pop(self.centre_key)
        array = torch.as_tensor(case[self.keys[0]])
        shape = array.shape[1:]
        positions, box = self._positions(self._centre(shape, classes), shape, array.device)
        return box_grid(positions, box), box

    def _centre(self, shape: Sequence[int], classes: Sequence[Any]) -> np.ndarray:
        """Return the patch's centre in voxels: anywhere, or so that a voxel of a class is in it."""
        ratio = np.array(self.spacing) / np.array(self.scan_spacing)
        lengths, size = np.array(shape), np.array(self.size) * ratio
        low, high = (size - 1) / 2, lengths - 1 - (size - 1) / 2
        middle = (lengths - 1) / 2
        drawn = low + self.R.uniform(size=3) * (high - low)
        filled = [voxels for voxels in classes if len(voxels)]
        if filled and self.R.uniform() < self.centred:
            voxels = filled[self.R.randint(len(filled))]
            voxel = np.array(np.unravel_index(int(voxels[self.R.randint(len(voxels))]), shape))
            drawn = voxel + self.R.uniform(-0.25, 0.25, size=3) * size
        # whole voxels, so that a patch without deformation is not blurred
        inside = np.clip(np.round(drawn - low) + low, low, np.maximum(low, high))
        return np.where(size < lengths, inside, middle)

    def _positions(
        self, centre: np.ndarray, shape: Sequence[int], device: torch.device
    ) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Return the voxel of a scan for each voxel of the patch, and the box that holds them all.

        The box is found on the host, which need not wait for a device. It can be larger than the
        voxels reach: it adds the extremes of the affine map to those of the displacement.
        """
        ratio = np.array(self.spacing) / np.array(self.scan_spacing)
        linear, field = np.diag(ratio), None
        low = high = np.zeros(3)
        if self.R.uniform() < self.prob:
            spacing = np.array(self.spacing)
            matrix = _rotation(np.radians(self.R.uniform(-self.rotate, self.rotate, size=3)))
            matrix = matrix @ np.diag(1 + self.R.uniform(-self.scale, self.scale, size=3))
            linear = ratio[:, None] * matrix * spacing[None] / spacing[:, None]
            drawn = self.R.normal(scale=self.elastic, size=(3, *[CONTROL_POINTS] * 3))
            drawn *= (ratio / spacing)[:, None, None, None]
            low, high = drawn.min((1, 2, 3)), drawn.max((1, 2, 3))
            field = functional.interpolate(
                to_device(drawn, device)[None], self.size, mode="trilinear", align_corners=True
            )[0].movedim(0, -1)
        reach = np.abs(linear) @ ((np.array(self.size) - 1) / 2)
        box = covering_box(centre + low - reach, centre + high + reach, shape)
        # a row for each axis of the patch, and the centre; not a product of matrices, which a
        # device may round to ten bits
        *rows, positions = to_device(np.vstack([linear.T, centre]), device)
        for axis, (row, length) in enumerate(zip(rows, self.size, strict=True)):
            offsets = torch.arange(length, device=device) - (length - 1) / 2
            sides = [1, 1, 1]
            sides[axis] = length
            positions = positions + offsets.reshape(*sides, 1) * row
        return positions if field is None else positions + field, box


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a small array in float32 on a device, for which the host does not wait."""
    tensor = torch.as_tensor(values, dtype=torch.float32)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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


def sample(image: torch.Tensor, grid: torch.Tensor, mode: str) -> torch.Tensor:
    """Return an image at points of a grid, 0 outside.

    Parameters
    ----------
    image : Tensor
        Array (channel, i, j, k) of any type; float32 is returned for "bilinear", else its type.
        Only the box that the grid reaches should be given, since all of it is converted.
    grid : Tensor
        Points of `box_grid`.
    mode : str
        "bilinear" or "nearest".
    """
    values = functional.grid_sample(
        image[None].float(), grid[None], mode=mode, padding_mode="zeros", align_corners=False
    )[0]
    return values if mode == "bilinear" else values.round().to(image.dtype)


def box_grid(positions: torch.Tensor, box: Sequence[slice]) -> torch.Tensor:
    """Return voxel positions (..., 3) of an array as points in a box of it, as torch has them.

    The last axis comes first; -1 and 1 are the outer faces of the first and last voxels.
    """
    start, stop = (np.array([getattr(each, end) for each in box]) for end in ("start", "stop"))
    scale = 2 / (stop - start)
    rows = np.stack([scale, scale * (0.5 - start) - 1])[:, ::-1]
    factor, shift = to_device(rows.copy(), positions.device)
    return torch.addcmul(shift, positions.flip(-1), factor)


def covering_box(low: np.ndarray, high: np.ndarray, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the box of an array, of a voxel at least, for positions between two corners (3,)."""
    rounding = 1e-3  # of positions in float32, voxels
    box = []
    for start, stop, length in zip(low - rounding, high + rounding, shape, strict=True):
        first = min(max(0, math.floor(start)), length - 1)
        box.append(slice(first, max(min(math.floor(stop) + 2, length), first + 1)))
    return tuple(box)


class RandDrawnPatchd(RandDeformedPatchd):
    """Draw the image of a label map in a deformed patch: a Gaussian mixture by look-up tables.

    The method of SynthSeg (Billot et al. 2023, doi 10.1016/j.media.2023.102789), in an order that
    a CPU can pay: the means are looked up on the map's grid and interpolated with the deformation,
    which mixes them at borders as the voxels of a scanner do; the deviations are added on the
    patch's grid. The rest is done by `RandBiasd` and `RandAcquisitiond`.

    Parameters
    ----------
    keys : str
        Label map (1, i, j, k), whose numbers index the next two; becomes the structures' patch.
        "image" becomes the image that is drawn: float32 from 0 to about 1.
    structures : sequence of int
        For each number of the map the structure that the network learns, 0 for none.
    classes : sequence of int
        For each number its class, from 0: one mean and deviation, as of left and right. Class 0 is
        the air around the head.
    tissues : sequence of int
        For each class the group whose means are alike in half of the images, as those of gray
        matter in real ones; -1 for none.
    strip : float
        Probability that what is no structure is drawn as air, as after skull stripping.
    **geometry
        Of `RandDeformedPatchd`.
    """

    def __init__(
        self,
        keys: KeysCollection,
        structures: Sequence[int],
        classes: Sequence[int],
        tissues: Sequence[int],
        strip: float,
        **geometry: Any,
    ) -> None:
        super().__init__(keys, ["nearest"], **geometry)
        (self.label_key,) = self.keys
        self.strip = strip
        self.structures, self.classes = np.array(structures), np.array(classes)
        self.tissues = np.array(tissues)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with image and structures (1, i, j, k) of a patch."""
        result = dict(data)
        grid, box = self._patch(result)
        cut = torch.as_tensor(result[self.label_key])[(slice(None), *box)]
        device = cut.device
        means, deviations = self._statistics()
        # the air's mean is taken off, so that outside the map, where 0 is sampled, is air
        air = float(means[0])
        tables = np.stack([means - means[0], deviations, self.structures])
        means_of, deviations_of, structures_of = to_device(tables, device)
        patch = sample(cut, grid, "nearest")
        image = sample(look_up(means_of, cut), grid, "bilinear") + air
        noise = standard_normal(image.shape, self.R, device)
        result["image"] = (image + look_up(deviations_of, patch) * noise).clamp_(min=0)
        result[self.label_key] = look_up(structures_of.byte(), patch)
        return result

    def _statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Return means and deviations of the map's numbers, in float32; white is about 1."""
        count = len(self.tissues)
        means = self.R.uniform(0.1, 0.9, size=count)
        deviations = self.R.uniform(0.01, 0.08, size=count)
        if self.R.uniform() < 0.5:
            groups = self.R.uniform(0.1, 0.9, size=self.tissues.max(initial=0) + 1)
            near = groups[self.tissues] + self.R.normal(scale=0.06, size=count)
            means = np.where(self.tissues >= 0, np.clip(near, 0.02, 1.0), means)
        if self.R.uniform() < 0.9:
            means[0], deviations[0] = self.R.uniform(0, 0.06), self.R.uniform(0, 0.03)
        chosen = self.classes
        if self.R.uniform() < self.strip:
            chosen = np.where(self.structures > 0, chosen, 0)
        return means[chosen].astype(np.float32), deviations[chosen].astype(np.float32)


def look_up(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table (n,) at numbers of any shape and integer type."""
    return table.index_select(0, numbers.flatten().int()).reshape(numbers.shape)


def standard_normal(
    shape: Sequence[int], state: np.random.RandomState, device: torch.device
) -> torch.Tensor:
    """Return normal values, drawn on a device from the seed that a random state draws."""
    generator = torch.Generator(device).manual_seed(int(state.randint(2**31 - 1)))
    return torch.randn(tuple(shape), generator=generator, device=device)


class RandBiasd(Randomizable, MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Multiply images by a smooth field: exp of normal values at four points along each axis.

    Parameters
    ----------
    keys : str or sequence of str
        Images (1, i, j, k).
    largest : float
        Largest standard deviation of the field's logarithm; that of an image is uniform up to it.
    """

    def __init__(self, keys: KeysCollection, largest: float) -> None:
        MapTransform.__init__(self, keys)
        self.largest = largest

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its images under a field of their own."""
        result = dict(data)
        for key in self.keys:
            image = torch.as_tensor(result[key])
            drawn = self.R.normal(scale=self.R.uniform(0, self.largest), size=(1, 1, 4, 4, 4))
            points = to_device(drawn, image.device)
            field = functional.interpolate(
                points, image.shape[1:], mode="trilinear", align_corners=True
            )
            result[key] = image * field[0].exp()
        return result


class RandAcquisitiond(Randomizable, MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Blur images to a random resolution, add noise there, and interpolate them back.

    A third of the images have larger voxels, a third thick slices along a random axis, a third
    neither. The blur's width at half height is 0.5 to 1 of the spacing: slices with gaps, or none.

    Parameters
    ----------
    keys : str or sequence of str
        Images (1, i, j, k) from 0 to about 1.
    spacing : sequence of float
        Their voxel spacing in mm.
    largest_voxel, largest_slice : float
        Largest spacing of voxels, and of thick slices, in mm.
    noise : float
        Largest standard deviation of the noise; that of an image is uniform up to it.
    """

    def __init__(
        self,
        keys: KeysCollection,
        spacing: Sequence[float],
        largest_voxel: float,
        largest_slice: float,
        noise: float,
    ) -> None:
        MapTransform.__init__(self, keys)
        self.spacing, self.noise = np.array(spacing), noise
        self.largest_voxel, self.largest_slice = largest_voxel, largest_slice

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its images as scanners of random resolution have them."""
        result = dict(data)
        for key in self.keys:
            image = torch.as_tensor(result[key])
            size = image.shape[1:]
            spacing, thickness = self._resolution()
            blurred = blur(image, thickness * FWHM / self.spacing)
            lengths = np.maximum(2, np.round(size * self.spacing / spacing)).astype(int)
            coarse = functional.interpolate(
                blurred[None], [int(n) for n in lengths], mode="trilinear", align_corners=False
            )[0]
            deviation = self.R.uniform(0, self.noise)
            coarse = coarse + deviation * standard_normal(coarse.shape, self.R, image.device)
            result[key] = functional.interpolate(
                coarse[None], size, mode="trilinear", align_corners=False
            )[0]
        return result

    def _resolution(self) -> tuple[np.ndarray, np.ndarray]:
        """Return spacing and thickness of the acquisition along each axis, mm."""
        spacing = self.spacing.copy()
        kind, drawn = self.R.randint(3), self.R.uniform()
        axis, share = self.R.randint(3), self.R.uniform(0.5, 1.0)
        if kind == 0:
            finest = spacing.min()
            both = finest + drawn * max(0.0, self.largest_voxel - finest)
            spacing = np.maximum(spacing, both)
        elif kind == 1:
            finest = spacing[axis]
            spacing[axis] += drawn * max(0.0, self.largest_slice - finest)
        # voxels as fine as the patch's are not blurred: the map's are finer still
        return spacing, np.where(spacing > self.spacing, share * spacing, 0.0)


FWHM: Final = 1 / 2.3548
"""Standard deviation of a Gaussian of width 1 at half its height."""


def blur(image: torch.Tensor, sigmas: Sequence[float]) -> torch.Tensor:
    """Return an image (1, i, j, k) blurred by Gaussians, sigma in voxels for each axis.

    Outside the image are its border's values. A sigma below 0.1 changes nothing.
    """
    for axis, sigma in enumerate(sigmas):
        if sigma < 0.1:
            continue
        radius = max(1, round(3 * float(sigma)))
        weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
        kernel = to_device(weights / weights.sum(), image.device)
        shape, padding = [1] * 5, [0] * 6
        shape[axis + 2] = len(weights)
        padding[4 - 2 * axis] = padding[5 - 2 * axis] = radius
        padded = functional.pad(image[None], padding, mode="replicate")
        image = functional.conv3d(padded, kernel.reshape(shape))[0]
    return image


class RandGammad(Randomizable, MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Raise images to a random power on their own range: MONAI's RandAdjustContrastd without waits.

    It draws the same numbers, for all images of a case alike.

    Parameters
    ----------
    prob : float
        Probability of a change.
    gamma : sequence of float
        Smallest and largest power.
    """

    def __init__(self, keys: KeysCollection, prob: float, gamma: Sequence[float]) -> None:
        MapTransform.__init__(self, keys)
        self.prob, self.gamma = prob, tuple(gamma)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its images changed or not."""
        result = dict(data)
        if self.R.uniform() >= self.prob:
            return result
        gamma = self.R.uniform(*self.gamma)
        for key in self.keys:
            low, high = torch.aminmax(torch.as_tensor(result[key]))
            share = (result[key] - low) / (high - low + 1e-7)
            result[key] = share**gamma * (high - low) + low
        return result


class ZScored(MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Subtract images' mean and divide by their deviation: NormalizeIntensityd without waits."""

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its images of mean 0 and deviation 1, a constant one 0."""
        result = dict(data)
        for key in self.keys:
            image = torch.as_tensor(result[key]).float()
            deviation, mean = torch.std_mean(image, correction=0)
            result[key] = (image - mean) / (deviation + (deviation == 0))
        return result


class RandFieldOfViewd(Randomizable, MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Set what is outside a random box to 0, as a window's part outside the scan is.

    Parameters
    ----------
    keys : str or sequence of str
        Arrays (channel, i, j, k): normalised image, and structures.
    prob : float
        Probability of a box smaller than the patch.
    smallest : float
        Smallest length of the box along each axis, as a share of the patch's.
    """

    def __init__(self, keys: KeysCollection, prob: float, smallest: float) -> None:
        MapTransform.__init__(self, keys)
        self.prob, self.smallest = prob, smallest

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case with its arrays cut alike."""
        result = dict(data)
        if self.R.uniform() >= self.prob:
            return result
        lengths = np.array(result[self.keys[0]].shape[1:])
        sizes = np.round(self.R.uniform(self.smallest, 1.0, size=3) * lengths).astype(int)
        starts = [int(self.R.randint(n + 1)) for n in lengths - sizes]
        box = tuple(slice(a, a + int(n)) for a, n in zip(starts, sizes, strict=True))
        for key in self.keys:
            whole = torch.as_tensor(result[key])
            result[key] = torch.zeros_like(whole)
            result[key][(slice(None), *box)] = whole[(slice(None), *box)]
        return result


class RandMirrord(Randomizable, MapTransform):  # type: ignore[misc]  # MONAI's are untyped
    """Mirror a case along axes, each with probability one half; sides change with left and right.

    Parameters
    ----------
    keys : str or sequence of str
        Arrays (channel, i, j, k), the first axis from left to right; "label" is of type uint8.
    axes : sequence of int
        Axes that are mirrored.
    pairs : sequence of (int, int)
        Numbers of structures of the left and the right side that change places.
    """

    def __init__(
        self,
        keys: KeysCollection,
        axes: Sequence[int],
        pairs: Sequence[Sequence[int]] = (),
    ) -> None:
        MapTransform.__init__(self, keys)
        self.axes = tuple(axes)
        changed = np.arange(256)
        for left, right in pairs:
            changed[left], changed[right] = right, left
        self.changed = changed

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the case, mirrored or not."""
        result = dict(data)
        drawn = [axis for axis in self.axes if self.R.uniform() < 0.5]
        if not drawn:
            return result
        for key in self.keys:
            result[key] = torch.flip(torch.as_tensor(result[key]), [axis + 1 for axis in drawn])
        if 0 in drawn:
            label = result["label"]
            result["label"] = look_up(to_device(self.changed, label.device).byte(), label)
        return result
