"""The way into a network's grid and out again, as numbers.

A network's grid shares the axes of its source, so both ways are one linear map an axis: network
index ``n[x] = scale[x] * s[follows[x]] + shift[x] + lean[x] * s[lead]`` of the source index ``s``.
Only the two axes beside the one that leans (gantry tilt) have a `lean` other than 0.

Shape and place of the grid are those of MONAI's Orientationd and Spacingd, rounding included:
a network that was trained there must see the same voxels here. One departure: a sheared stack
always gets the grid of its in-plane axes and their normal. MONAI (Gram-Schmidt in the order of the
axes) gives the same one where the leaning axis comes last, and where it does not, one that lies in
none of the source's planes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import NetworkGrid
from scanloom.core import Grid

SAME = 1e-3
"""Differences of spacing (mm) and affine below it count as none (MONAI's AFFINE_TOL)."""

Shape = tuple[int, int, int]
Triple = tuple[float, float, float]
Affine = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NetworkPlan:
    """Where the network's voxels lie in those of the source.

    Parameters
    ----------
    source : Grid
        The scan's own grid.
    oriented : Grid
        The same voxels with axes flipped and permuted to the network's order.
    network : Grid
        What the network sees.
    follows : (x, y, z)
        The source axis that each network axis follows.
    flipped : (x, y, z)
        Whether it follows it backwards.
    lead : int
        The source axis along which the work goes slice by slice: the leaning one, else the last,
        along which the source is stored slice after slice.
    scale, shift, lean : (x, y, z)
        Network index from source index, see the module.
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

    @property
    def resampled(self) -> bool:
        """Whether voxels are more than flipped and permuted."""
        return self.network is not self.oriented

    def network_axis(self, source_axis: int) -> int:
        """Return the network axis that follows `source_axis`."""
        return self.follows.index(source_axis)

    def to_network(self, source_axis: int, slice_index: int = 0) -> NDArray[np.float64]:
        """Return the network coordinate of each source index along an axis.

        Parameters
        ----------
        source_axis : int
            Along which.
        slice_index : int
            Source index along `lead`; matters only where the stack leans.
        """
        x = self.network_axis(source_axis)
        index = np.arange(self.source.shape[source_axis], dtype=np.float64)
        return self.scale[x] * index + (self.shift[x] + self.lean[x] * slice_index)

    def to_source(self, source_axis: int, slice_position: float = 0.0) -> NDArray[np.float64]:
        """Return the source coordinate of each network index along the axis that follows one.

        Parameters
        ----------
        source_axis : int
            Along which.
        slice_position : float
            Source coordinate along `lead`; matters only where the stack leans.
        """
        x = self.network_axis(source_axis)
        index = np.arange(self.network.shape[x], dtype=np.float64)
        return (index - (self.shift[x] + self.lean[x] * slice_position)) / self.scale[x]


def plan_grid(source: Grid, wanted: NetworkGrid) -> NetworkPlan:
    """Lay the network's grid over a scan.

    Parameters
    ----------
    source : Grid
        The scan's grid.
    wanted : NetworkGrid
        What the card asks for.

    Returns
    -------
    NetworkPlan
        The grid, and the maps between the two.
    """
    follows, flipped = _orientation(source, wanted.orientation)
    oriented = _orient(source, follows, flipped)
    # asked of the source: of two axes that lean on one another, the later one there leans
    leaning = None if source.shear_axis is None else follows.index(source.shear_axis)
    network = _network_grid(oriented, wanted, leaning)
    lead = 2 if source.shear_axis is None else source.shear_axis
    scale, shift, lean = _maps(oriented, network, flipped, leaning)
    return NetworkPlan(source, oriented, network, follows, flipped, lead, scale, shift, lean)


def _orientation(
    source: Grid, codes: str | None
) -> tuple[tuple[int, int, int], tuple[bool, bool, bool]]:
    """Return the source axis that each wanted axis follows, and whether backwards."""
    if codes is None:
        return (0, 1, 2), (False, False, False)
    from nibabel import orientations  # MONAI asks it too: the same scan must turn the same way

    here = orientations.io_orientation(source.affine)
    turn = orientations.ornt_transform(here, orientations.axcodes2ornt(tuple(codes)))
    order = np.argsort(turn[:, 0])
    i, j, k = (int(axis) for axis in order)
    x, y, z = (bool(turn[axis, 1] < 0) for axis in order)
    return (i, j, k), (x, y, z)


def _orient(source: Grid, follows: tuple[int, int, int], flipped: tuple[bool, bool, bool]) -> Grid:
    """Return the grid of the same voxels with axes flipped and permuted."""
    turn = np.zeros((4, 4))  # oriented index to source index
    turn[3, 3] = 1
    for axis, (follow, back) in enumerate(zip(follows, flipped, strict=True)):
        turn[follow, axis] = -1 if back else 1
        turn[follow, 3] = source.shape[follow] - 1 if back else 0
    x, y, z = (source.shape[follow] for follow in follows)
    return Grid((x, y, z), source.affine @ turn)


def _network_grid(oriented: Grid, wanted: NetworkGrid, leaning: int | None) -> Grid:
    """Return the grid of the wanted spacing (MONAI Spacing, sp_resample), else `oriented`."""
    if wanted.spacing is None and leaning is None:
        return oriented
    directions = _directions(oriented, leaning)
    affine = np.eye(4)
    affine[:3, :3] = directions * _spacing(oriented, wanted, directions)
    ends = ((0.0, n - 1.0) for n in oriented.shape)
    corners = np.array([(*corner, 1.0) for corner in itertools.product(*ends)]).T
    seen = (np.linalg.solve(affine, oriented.affine) @ corners)[:3]
    shape = np.round(np.ptp(seen, axis=1) + 1.0)
    affine[:3, 3] = _origin(oriented, affine, shape, seen)
    if tuple(shape) == oriented.shape and _same(oriented.affine, affine):
        return oriented
    x, y, z = (int(n) for n in shape)
    # as MONAI's trace stores it, one multiplication later: nearest neighbours at exact ratios
    # are decided by the last bit
    return Grid((x, y, z), oriented.affine @ np.linalg.solve(oriented.affine, affine))


def _directions(oriented: Grid, leaning: int | None) -> Affine:
    """Return three unit vectors at right angles, columns, each the nearest to its axis."""
    axes = oriented.affine[:3, :3]
    if leaning is None:
        upper = np.linalg.cholesky(axes.T @ axes).T
        return np.asarray(axes @ np.linalg.inv(upper) * np.sign(np.diag(upper)))
    a, b, c = leaning, (leaning + 1) % 3, (leaning + 2) % 3
    directions: Affine = axes / np.linalg.norm(axes, axis=0)
    normal = np.cross(directions[:, b], directions[:, c])
    normal *= np.sign(normal @ axes[:, a]) / np.linalg.norm(normal)
    directions[:, a] = normal
    directions[:, c] -= directions[:, b] * (directions[:, b] @ directions[:, c])
    directions[:, c] /= np.linalg.norm(directions[:, c])
    return np.asarray(directions)


def _spacing(oriented: Grid, wanted: NetworkGrid, directions: Affine) -> NDArray[np.float64]:
    """Return the network's spacing: the wanted one, or the scan's own where that is as good."""
    own = np.array(oriented.spacing)
    if wanted.spacing is None:
        return np.asarray(np.abs(np.sum(directions * oriented.affine[:3, :3], axis=0)))
    target = np.array(wanted.spacing)
    return np.where((target - SAME <= own) & (own <= target + SAME), own, target)


def _origin(
    oriented: Grid, affine: Affine, shape: NDArray[np.float64], seen: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return where voxel (0, 0, 0) lies: on the corner that is lowest along all new axes.

    Where there is none (a shear, or directions that were rounded in a file), the centres lie on
    one another (MONAI compute_shape_offset, with its tolerance of 1e-8 voxels).
    """
    axes, place = oriented.affine[:3, :3], oriented.affine[:3, 3]
    for n, corner in enumerate(itertools.product(*((0.0, n - 1.0) for n in oriented.shape))):
        if np.allclose(np.min(seen - seen[:, n : n + 1], axis=1), 0.0):
            return np.asarray(axes @ np.array(corner) + place)
    middle = axes @ (np.array(oriented.shape) / 2.0) + place
    return np.asarray(middle - affine[:3, :3] @ (shape / 2.0))


def _same(one: Affine, other: Affine) -> bool:
    """Whether resampling from one affine to the other of the same shape would change nothing."""
    step = np.linalg.solve(one, other)
    return np.allclose(one, other, atol=SAME) or np.allclose(step, np.eye(4), atol=SAME)


def _maps(
    oriented: Grid, network: Grid, flipped: tuple[bool, bool, bool], leaning: int | None
) -> tuple[Triple, Triple, Triple]:
    """Return scale, shift and lean of each network axis, of which one may lean.

    Directions that a file rounded leave a rest beside these three: it is 0 in the middle of the
    scan and below `ORTHOGONAL` voxels a voxel away from it.
    """
    solved = np.linalg.solve(network.affine, oriented.affine)  # network from oriented index
    step = np.asarray(solved, dtype=np.float64)
    middle = (np.array(oriented.shape) - 1) / 2.0
    scale, lean = np.array(np.diag(step)[:3]), np.zeros(3)
    if leaning is not None:
        lean[:] = step[:3, leaning]
        lean[leaning] = 0.0
    at = middle[leaning or 0]
    shift = step[:3] @ np.append(middle, 1.0) - scale * middle - lean * at
    if network is oriented:
        scale, shift, lean = np.ones(3), np.zeros(3), np.zeros(3)
    signs = np.where(flipped, -1.0, 1.0)  # from oriented to source: s' = n - 1 - s
    last = np.array(oriented.shape) - 1
    shift = shift + np.where(flipped, scale * last, 0.0)
    if leaning is not None and flipped[leaning]:
        shift, lean = shift + lean * last[leaning], -lean
    return _triple(scale * signs), _triple(shift), _triple(lean)


def _triple(values: NDArray[np.float64]) -> Triple:
    """Return three plain numbers."""
    x, y, z = (float(v) for v in values)
    return x, y, z
