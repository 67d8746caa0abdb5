"""Defines the network grid of a scan, and the maps between both grids.

A network grid shares the axes of its source, so the map is linear in each axis: the network index
is ``n[x] = scale[x] * s[follows[x]] + shift[x] + lean[x] * s[lead]`` for the source index ``s``.
`lean` is not 0 only in a sheared stack (gantry tilt), for the two axes other than the sheared one.

With alignment "first", shape and position of the grid are those of MONAI's Orientationd and
Spacingd, including rounding: a network that was trained with them must see the same voxels. One
exception: a sheared stack that is resampled gets the grid of its in-plane axes and their normal.
MONAI (Gram-Schmidt in the order of the axes) gives the same grid if the sheared axis comes last;
otherwise its grid is not parallel to the source's planes. Without a requested spacing the network
sees the voxels as they are stored.

With the other alignments the grid divides the source's axes anew, sheared ones too: the programs
that align in these ways (nnU-Net, TotalSegmentator) scale arrays and know no directions. Their
coordinates are computed in their order of operations, since the last bit decides which of two
neighbours is the nearest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import IntensityStep, ModelCard, NetworkGrid, Triple
from scanloom.core import Grid, Volume

_SMALLEST_WEIGHT = 1e-6
"""Smallest weight of a voxel next to a box, see `NetworkPlan.boxed`."""

Affine = NDArray[np.float64]

SAME_AFFINE = 1e-3
"""Differences of spacing (mm) and affine below it are ignored (MONAI's AFFINE_TOL)."""
_FLOAT32_LENGTH = 3e-7
"""Largest relative error of a length whose three components are float32."""
Alignment = Literal["first", "edges", "ends", "centre"]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NetworkPlan:
    """Network grid of a scan, and the maps between source and network indices.

    Parameters
    ----------
    source : Grid
        The scan's own grid.
    oriented : Grid
        The same voxels with axes flipped and permuted to the network's order.
    network : Grid
        Grid of the network's input.
    follows : (x, y, z)
        The source axis that each network axis follows.
    flipped : (x, y, z)
        Whether the network axis has the opposite direction.
    lead : int
        Source axis that is processed slice by slice: the sheared one, else the last, along which
        the slices are stored.
    scale, shift, lean : (x, y, z)
        Coefficients of the network index, see the module.
    step : (4, 4) array
        Maps an index of `network` to an index of `oriented`.
    alignment : "first", "edges", "ends" or "centre"
        Voxels that coincide, as in `NetworkGrid`. With "centre", voxels of one grid that lie
        outside the other are empty; otherwise they continue the outermost ones.
    mode : "linear", "nearest", "cubic", "area" or "trilinear"
        Interpolation of the scan, as in `NetworkGrid`.
    nearest : (int or None, int or None)
        Network axis that is resampled by nearest neighbour: from the source to the network grid,
        and back.
    boxed : bool
        Whether the network sees a box of its grid only. Scores are 0 outside, so that next to the
        box a weight of 1e-16 decides: coordinates are computed as MONAI does, and such weights are
        increased to 1e-6, which float32 does not lose.
    unturned : NetworkPlan or None
        If the scan is oriented after it is resampled: the plan without orientation.
    """

    source: Grid
    oriented: Grid
    network: Grid
    follows: tuple[int, int, int]
    flipped: tuple[bool, bool, bool]
    lead: int
    scale: Triple
    shift: Triple
    lean: Triple
    step: Affine
    alignment: Alignment = "first"
    mode: Literal["linear", "nearest", "cubic", "area", "trilinear"] = "linear"
    nearest: tuple[int | None, int | None] = (None, None)
    boxed: bool = False
    unturned: NetworkPlan | None = None

    @property
    def resampled(self) -> bool:
        """Whether voxels are resampled, not only flipped and permuted."""
        return self.network is not self.oriented

    def network_axis(self, source_axis: int) -> int:
        """Return the network axis that follows `source_axis`."""
        return self.follows.index(source_axis)

    def to_network(self, source_axis: int, slice_index: int = 0) -> NDArray[np.float64]:
        """Return the network coordinate of each source index along an axis.

        Coordinates are whole numbers along an axis that is resampled by nearest neighbour.

        Parameters
        ----------
        source_axis : int
            The source axis.
        slice_index : int
            Source index along `lead`; only used for a sheared stack.
        """
        x = self.network_axis(source_axis)
        if self.alignment in SCALED and self.resampled:
            at = SCALED[self.alignment](self.oriented.shape[x], self.network.shape[x])
            at = at[::-1] if self.flipped[x] else at
        else:
            index = np.arange(self.source.shape[source_axis], dtype=np.float64)
            at = self.scale[x] * index + (self.shift[x] + self.lean[x] * slice_index)
        if x == self.nearest[1]:
            return round_half_up(at, self.network.shape[x])
        if self.boxed and self.resampled and self.alignment == "first" and not any(self.lean):
            at = self._in_monais_order(x)
        return at

    def label_index(self, source_axis: int) -> NDArray[np.int64]:
        """Return the network index whose label each source index along an axis gets.

        For a grid that divides the scan's axes anew, or has their centre.
        """
        x = self.network_axis(source_axis)
        size = self.network.shape[x]
        if self.mode not in ("area", "trilinear"):
            return round_half_up(self.to_network(source_axis), size).astype(np.int64)
        count = self.oriented.shape[x]
        ratio = np.float32(size) / np.float32(count)  # as PyTorch: the last bit decides
        at = np.floor(np.arange(count, dtype=np.float32) * ratio).clip(max=size - 1)
        return np.asarray(at[::-1] if self.flipped[x] else at, dtype=np.int64)

    def _in_monais_order(self, x: int) -> NDArray[np.float64]:
        """Return the network coordinate of each source index along an axis, see `boxed`."""
        from scanloom.inference.resampling.sampling import sampling_coordinates

        step = np.linalg.solve(self.network.affine, self.oriented.affine)
        at = sampling_coordinates(self.network.shape, step, self.oriented.shape, x)
        whole = np.round(at)
        tiny = np.abs(at - whole) < _SMALLEST_WEIGHT
        at = np.where(tiny, whole + np.sign(at - whole) * _SMALLEST_WEIGHT, at)
        return at[::-1] if self.flipped[x] else at

    def to_source(self, source_axis: int, slice_position: float = 0.0) -> NDArray[np.float64]:
        """Return the source coordinate of each network index along an axis.

        Coordinates are whole numbers along an axis that is resampled by nearest neighbour.

        Parameters
        ----------
        source_axis : int
            The source axis that the network axis follows.
        slice_position : float
            Source coordinate along `lead`; only used for a sheared stack.
        """
        x = self.network_axis(source_axis)
        if self.alignment in SCALED and self.resampled:
            at = SCALED[self.alignment](self.network.shape[x], self.oriented.shape[x])
            if self.mode == "nearest" or x == self.nearest[0]:
                at = round_half_up(at, self.oriented.shape[x])
            return self.oriented.shape[x] - 1 - at if self.flipped[x] else at
        index = np.arange(self.network.shape[x], dtype=np.float64)
        return (index - (self.shift[x] + self.lean[x] * slice_position)) / self.scale[x]


def as_nifti(requested: NetworkGrid, volume: Volume) -> NetworkGrid:
    """Return a request that names the axes with which dcm2niix would store a DICOM series.

    dcm2niix stores rows from the bottom up, and columns and slices as they are; but slices that
    were acquired together (MRAcquisitionType 3D) from left, posterior and inferior. Volume files,
    and models that turn all scans to the same orientation, are left as they are.
    """
    if not requested.as_nifti or requested.orientation is not None or volume.acquisition is None:
        return requested
    if volume.acquisition == "3D":
        return replace(requested, orientation="RAS")
    from nibabel import orientations

    flipped = volume.grid.affine @ np.diag([1.0, -1.0, 1.0, 1.0])
    return replace(requested, orientation="".join(orientations.aff2axcodes(flipped)))


def plan_grid(source: Grid, requested: NetworkGrid) -> NetworkPlan:
    """Define the network grid of a scan.

    Parameters
    ----------
    source : Grid
        The scan's grid.
    requested : NetworkGrid
        Spacing and orientation, from the model card.

    Returns
    -------
    NetworkPlan
        The network grid, and the maps between both grids.
    """
    if requested.orient == "after" and requested.orientation is not None:
        own_axes = replace(requested, orientation=None, orient="before")
        return _turn(plan_grid(source, own_axes), requested)
    follows, flipped = _orientation(source, requested)
    oriented = _orient(source, follows, flipped)
    target = _in_network_order(requested)
    if requested.alignment != "first":
        return _plan_scaled(source, oriented, target, (follows, flipped))
    sheared = oriented.shear_axis  # in MONAI's order: of two oblique axes the later one
    network, step = first_aligned_grid(oriented, target, sheared)
    lead = 2 if sheared is None else follows[sheared]
    scale, shift, lean = _maps(oriented, network, flipped, sheared)
    return NetworkPlan(
        source=source,
        oriented=oriented,
        network=network,
        follows=follows,
        flipped=flipped,
        lead=lead,
        scale=scale,
        shift=shift,
        lean=lean,
        step=step,
        mode=requested.mode,
        boxed=requested.boxed,
    )


def _turn(plan: NetworkPlan, requested: NetworkGrid) -> NetworkPlan:
    """Return the plan whose network grid, on the source's axes in `plan`, is oriented at last."""
    source = plan.source
    follows, flipped = _orientation(source, requested)
    oriented, network = (_orient(grid, follows, flipped) for grid in (source, plan.network))
    back = np.array(flipped)
    scale, shift, lean = (
        np.array(values)[list(follows)] for values in (plan.scale, plan.shift, plan.lean)
    )
    last = np.array(network.shape) - 1.0
    return replace(
        plan,
        oriented=oriented,
        network=network,
        follows=follows,
        flipped=flipped,
        scale=_triple(np.where(back, -scale, scale)),
        shift=_triple(np.where(back, last - shift, shift)),
        lean=_triple(np.where(back, -lean, lean)),
        step=np.asarray(np.linalg.solve(oriented.affine, network.affine), dtype=np.float64),
        unturned=replace(plan, network=_orient_back(network, follows, flipped)),
    )


def _orient_back(
    grid: Grid, follows: tuple[int, int, int], flipped: tuple[bool, bool, bool]
) -> Grid:
    """Return the grid that `_orient` turned into `grid`, with the rounding of MONAI's inverse."""
    source = [follows.index(axis) for axis in range(3)]
    back = [flipped[x] for x in source]
    return _orient(grid, (source[0], source[1], source[2]), (back[0], back[1], back[2]))


def _in_network_order(requested: NetworkGrid) -> NetworkGrid:
    """Return the request with spacing and shape in the order in which the network sees the axes."""
    x, y, z = requested.order
    spacing, shape = requested.spacing, requested.shape
    return replace(
        requested,
        order=(0, 1, 2),
        spacing=spacing and (spacing[x], spacing[y], spacing[z]),
        shape=shape and (shape[x], shape[y], shape[z]),
    )


def _plan_scaled(
    source: Grid,
    oriented: Grid,
    requested: NetworkGrid,
    turned: tuple[tuple[int, int, int], tuple[bool, bool, bool]],
) -> NetworkPlan:
    """Return the plan of a grid that divides the axes of `oriented` anew: edges, ends or centre.

    `turned` are the source axes that the network axes follow, and whether they are flipped.
    """
    follows, flipped = turned
    # nnU-Net and TotalSegmentator read the spacing of NIfTI's header
    own = np.array(oriented.spacing) if requested.alignment == "centre" else nifti_spacing(oriented)
    target = target_spacing(requested, own)
    before = np.array(oriented.shape)
    ratio = own / target * before
    after = np.array(requested.shape or [max(1, round(float(n))) for n in ratio])
    # The index in the network grid is scale * index + shift, for an index in `oriented`
    if requested.alignment == "edges":
        scale = after / before
        shift = (scale - 1.0) / 2.0
    elif requested.alignment == "ends":
        both = (before > 1) & (after > 1)
        scale = np.where(both, (after - 1.0) / np.maximum(before - 1.0, 1.0), 1.0)
        shift = np.zeros(3)
    else:  # FreeSurfer's centre of an axis of n voxels is index n / 2, counted as in the scan
        scale = own / target
        centre = before / 2.0 - np.where(flipped, 1.0, 0.0)
        shift = after / 2.0 - scale * centre
    step = np.diag(np.append(1.0 / scale, 1.0))
    step[:3, 3] = -shift / scale
    if np.array_equal(before, after) and np.allclose(step, np.eye(4), atol=SAME_AFFINE):
        network, scale, shift, step = oriented, np.ones(3), np.zeros(3), np.eye(4)
    else:
        x, y, z = (int(n) for n in after)
        network = Grid((x, y, z), oriented.affine @ step)
    above = requested.separate_above
    nearest: tuple[int | None, int | None] = (None, None)
    if above is not None:
        nearest = (coarse_axis(own, target, above), coarse_axis(target, own, above))
    return NetworkPlan(
        source=source,
        oriented=oriented,
        network=network,
        follows=follows,
        flipped=flipped,
        lead=2,
        scale=_triple(np.where(flipped, -scale, scale)),
        shift=_triple(shift + np.where(flipped, scale * (before - 1.0), 0.0)),
        lean=(0.0, 0.0, 0.0),
        step=step,
        alignment=requested.alignment,
        mode=requested.mode,
        nearest=nearest,
        boxed=requested.boxed,
    )


def _orientation(
    source: Grid, requested: NetworkGrid
) -> tuple[tuple[int, int, int], tuple[bool, bool, bool]]:
    """Return the source axis that each network axis follows, and whether it is flipped."""
    axes, flipped = [0, 1, 2], [False, False, False]
    if requested.orientation is not None:
        from nibabel import orientations  # as MONAI does: both must orient a scan equally

        current = orientations.io_orientation(source.affine)
        codes = orientations.axcodes2ornt(tuple(requested.orientation))
        transform = orientations.ornt_transform(current, codes)
        axes = [int(axis) for axis in np.argsort(transform[:, 0])]
        flipped = [bool(transform[axis, 1] < 0) for axis in axes]
    x, y, z = requested.order
    return (axes[x], axes[y], axes[z]), (flipped[x], flipped[y], flipped[z])


def _orient(source: Grid, follows: tuple[int, int, int], flipped: tuple[bool, bool, bool]) -> Grid:
    """Return the grid of the same voxels with axes flipped and permuted."""
    turn = np.zeros((4, 4))  # oriented index to source index
    turn[3, 3] = 1
    for axis, (follow, back) in enumerate(zip(follows, flipped, strict=True)):
        turn[follow, axis] = -1 if back else 1
        turn[follow, 3] = source.shape[follow] - 1 if back else 0
    x, y, z = (source.shape[follow] for follow in follows)
    return Grid((x, y, z), source.affine @ turn)


def _maps(
    oriented: Grid, network: Grid, flipped: tuple[bool, bool, bool], sheared: int | None
) -> tuple[Triple, Triple, Triple]:
    """Return scale, shift and lean of each network axis; `sheared` is the sheared one, if any.

    If a file rounded its directions, these coefficients leave a residual: 0 in the middle of the
    scan, growing by less than `ORTHOGONAL` voxels per voxel of distance.
    """
    solved = np.linalg.solve(network.affine, oriented.affine)  # network from oriented index
    step = np.asarray(solved, dtype=np.float64)
    middle = (np.array(oriented.shape) - 1) / 2.0
    scale, lean = np.array(np.diag(step)[:3]), np.zeros(3)
    if sheared is not None:
        lean[:] = step[:3, sheared]
        lean[sheared] = 0.0
    at = middle[sheared or 0]
    shift = step[:3] @ np.append(middle, 1.0) - scale * middle - lean * at
    if network is oriented:
        scale, shift, lean = np.ones(3), np.zeros(3), np.zeros(3)
    signs = np.where(flipped, -1.0, 1.0)  # from oriented to source: s' = n - 1 - s
    last = np.array(oriented.shape) - 1
    shift = shift + np.where(flipped, scale * last, 0.0)
    if sheared is not None and flipped[sheared]:
        shift, lean = shift + lean * last[sheared], -lean
    return _triple(scale * signs), _triple(shift), _triple(lean)


def _triple(values: NDArray[np.float64]) -> Triple:
    """Return the three values as floats."""
    x, y, z = (float(v) for v in values)
    return x, y, z


def _by_edges(count: int, size: int) -> Float64:
    """Return where `count` voxels lie on an axis of `size` voxels with the same outer edges."""
    return np.asarray(size / count * (np.arange(count) + 0.5) - 0.5)


def _by_ends(count: int, size: int) -> Float64:
    """Return where `count` voxels lie on an axis of `size` voxels with the same outermost ones."""
    return np.asarray(np.arange(count) * ((size - 1) / (count - 1) if count > 1 else 1.0))


SCALED: dict[str, Callable[[int, int], Float64]] = {
    "edges": _by_edges,
    "ends": _by_ends,
}
"""Coordinates of one axis on another, by the alignments that depend on both lengths alone."""


def round_half_up(at: Float64, size: int) -> Float64:
    """Return the nearest voxel of an axis, the upper of two (SciPy's interpolation of order 0)."""
    return np.clip(np.floor(at + 0.5), 0.0, size - 1.0)


def nifti_spacing(grid: Grid) -> Float64:
    """Return the spacing (3,) in mm that a NIfTI header states for a grid, which is in float32.

    The length of a direction that was rounded to float32 differs in the last digit, which decides
    half a voxel: 10 slices of 3.1 mm are 15.5 slices of 2 mm. So the value is a decimal of six
    digits or a 4096th of a millimetre (matrix sizes), if such a value lies within the rounding.
    """
    return np.array([_stated(length) for length in grid.spacing])


def _stated(length: float) -> float:
    """Return the float32 value that a header states for a length, as float64."""
    for value in (float(f"{length:.6g}"), round(length * 4096.0) / 4096.0):
        if abs(value - length) <= _FLOAT32_LENGTH * length:
            return float(np.float32(value))
    return float(np.float32(length))


def target_spacing(requested: NetworkGrid, own: Float64) -> Float64:
    """Return the requested spacing; `own` is kept along axes for which none is requested."""
    target = np.array([value or 0.0 for value in requested.spacing or (None, None, None)])
    return np.where(target > 0.0, target, own)


def coarse_axis(first: Float64, second: Float64, above: float) -> int | None:
    """Return the axis of the largest spacing of an anisotropic grid (nnU-Net's separate z).

    The first of the two spacings that is anisotropic decides. None if none is, or if several axes
    share the largest spacing.
    """
    for spacing in (first, second):
        if spacing.max() / spacing.min() > above:
            coarse = np.flatnonzero(spacing.max() / spacing == 1)
            return int(coarse[0]) if len(coarse) == 1 else None
    return None


def first_aligned_grid(
    oriented: Grid, requested: NetworkGrid, sheared: int | None
) -> tuple[Grid, Affine]:
    """Return the grid of the requested spacing (MONAI Spacing, sp_resample), else `oriented`.

    Also returns the affine from an index of that grid to an index of `oriented`. Without a
    requested spacing the voxels are seen as they are stored, sheared ones too (MONAI).
    """
    if requested.spacing is None:
        return oriented, np.eye(4)
    directions = _directions(oriented, sheared)
    own = np.array(oriented.spacing)
    target = target_spacing(requested, own)
    is_same = (target - SAME_AFFINE <= own) & (own <= target + SAME_AFFINE)
    affine = np.eye(4)
    affine[:3, :3] = directions * np.where(is_same, own, target)
    ends = ((0.0, n - 1.0) for n in oriented.shape)
    corners = np.array([(*corner, 1.0) for corner in itertools.product(*ends)]).T
    corners = (np.linalg.solve(affine, oriented.affine) @ corners)[:3]
    shape = np.round(np.ptp(corners, axis=1) + 1.0)
    affine[:3, 3] = _origin(oriented, affine, shape, corners)
    if tuple(shape) == oriented.shape and _same(oriented.affine, affine):
        return oriented, np.eye(4)
    x, y, z = (int(n) for n in shape)
    # as MONAI's trace stores it, one multiplication later: nearest neighbours at exact ratios
    # are decided by the last bit
    step = np.asarray(np.linalg.solve(oriented.affine, affine), dtype=np.float64)
    return Grid((x, y, z), oriented.affine @ step), step


def _directions(oriented: Grid, sheared: int | None) -> Affine:
    """Return three orthogonal unit vectors as columns, each the nearest to its axis."""
    axes = oriented.affine[:3, :3]
    if sheared is None:
        upper = np.linalg.cholesky(axes.T @ axes).T
        return np.asarray(axes @ np.linalg.inv(upper) * np.sign(np.diag(upper)))
    a, b, c = sheared, (sheared + 1) % 3, (sheared + 2) % 3
    directions: Affine = axes / np.linalg.norm(axes, axis=0)
    normal = np.cross(directions[:, b], directions[:, c])
    normal *= np.sign(normal @ axes[:, a]) / np.linalg.norm(normal)
    directions[:, a] = normal
    directions[:, c] -= directions[:, b] * (directions[:, b] @ directions[:, c])
    directions[:, c] /= np.linalg.norm(directions[:, c])
    return np.asarray(directions)


def _origin(
    oriented: Grid, affine: Affine, shape: NDArray[np.float64], corners: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the position of voxel (0, 0, 0): the corner that is lowest along all new axes.

    If no corner is (a shear, or directions that were rounded in a file), the centres of both grids
    coincide (MONAI compute_shape_offset, with its tolerance of 1e-8 voxels).

    `corners` (3, 8) are the corners of `oriented` as indices by `affine`.
    """
    axes, offset = oriented.affine[:3, :3], oriented.affine[:3, 3]
    for n, corner in enumerate(itertools.product(*((0.0, n - 1.0) for n in oriented.shape))):
        if np.allclose(np.min(corners - corners[:, n : n + 1], axis=1), 0.0):
            return np.asarray(axes @ np.array(corner) + offset)
    middle = axes @ (np.array(oriented.shape) / 2.0) + offset
    return np.asarray(middle - affine[:3, :3] @ (shape / 2.0))


def _same(first: Affine, second: Affine) -> bool:
    """Return whether resampling between two affines of the same shape would change nothing."""
    step = np.linalg.solve(first, second)
    return np.allclose(first, second, atol=SAME_AFFINE) or np.allclose(
        step, np.eye(4), atol=SAME_AFFINE
    )


def part_grid(plan: NetworkPlan, card: ModelCard) -> Grid:
    """Return the grid of the resampled scan as a scan of its own, in the network's axes.

    TotalSegmentator hands it on as a NIfTI file: its spacing is the requested one, although the
    voxels at the ends coincide, and has the precision of the file's header.
    """
    spacing = target_spacing(card.grid, nifti_spacing(plan.oriented)).astype(np.float32)
    return Grid(plan.network.shape, np.diag([*spacing.astype(np.float64), 1.0]))


def steps_after(plan: NetworkPlan, card: ModelCard) -> tuple[IntensityStep, ...]:
    """Return the steps after resampling: none for a scan that has exactly the card's spacing."""
    own = nifti_spacing(plan.oriented)
    target = np.array(card.grid.spacing or (), dtype=np.float64)
    return () if np.array_equal(own, target) else card.after


def grid_for_parts(grid: Grid, card: ModelCard) -> Grid:
    """Return the grid on which a card's parts see a scan; that of the scan without parts."""
    return part_grid(plan_grid(grid, card.grid), card) if card.parts else grid
