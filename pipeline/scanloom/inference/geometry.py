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

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import NetworkGrid
from scanloom.core import Grid, Volume
from scanloom.inference.resampling.alignment import (
    SCALED,
    Alignment,
    round_half_up,
    scale_axes,
)
from scanloom.inference.resampling.first_aligned import first_aligned_grid

_SMALLEST_WEIGHT = 1e-6
"""Smallest weight of a voxel next to a box, see `NetworkPlan.boxed`."""

Shape = tuple[int, int, int]
Triple = tuple[float, float, float]
Affine = NDArray[np.float64]


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
    mode : "linear", "nearest", "cubic" or "area"
        Interpolation of the scan.
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
    mode: Literal["linear", "nearest", "cubic", "area"] = "linear"
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

    def _in_monais_order(self, x: int) -> NDArray[np.float64]:
        """Return the network coordinate of each source index along an axis, see `boxed`."""
        from scanloom.inference.resampling.sampling_grid import sampling_coordinates

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
        *(source, oriented, network, follows, flipped, lead, scale, shift, lean, step),
        mode=requested.mode,
        boxed=_is_boxed(requested),
    )


def _is_boxed(requested: NetworkGrid) -> bool:
    """Return whether the network sees a box of the network grid only."""
    return requested.crop is not None and requested.crop.grid == "network"


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
    """Return the grid that `_orient` turned into `grid`, with MONAI's rounding of the way back."""
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
    """Return the plan of a grid that divides the axes of `oriented` anew.

    `turned` are the source axes that the network axes follow, and whether they are flipped.
    """
    follows, flipped = turned
    scaled = scale_axes(oriented, requested, flipped)
    last = np.array(oriented.shape) - 1.0
    return NetworkPlan(
        *(source, oriented, scaled.network, follows, flipped, 2),
        scale=_triple(np.where(flipped, -scaled.scale, scaled.scale)),
        shift=_triple(scaled.shift + np.where(flipped, scaled.scale * last, 0.0)),
        lean=(0.0, 0.0, 0.0),
        step=scaled.step,
        alignment=requested.alignment,
        mode=requested.mode,
        nearest=scaled.nearest,
        boxed=_is_boxed(requested),
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
