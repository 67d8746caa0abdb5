"""A torso made of formulas: which material lies at a point of the patient (LPS mm).

x grows to the patient's left, y to the back, z to the head; the origin lies in the middle of the
body at the height of the diaphragm. Sizes are those of a slim adult, rounded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Point = tuple[float, float, float]


class M(IntEnum):
    """What a point is made of."""

    AIR = 0
    TABLE = 1
    FOAM = 2
    SKIN = 3
    FAT = 4
    MUSCLE = 5
    LUNG = 6
    LUNG_VESSEL = 7
    GAS = 8
    HEART = 9
    BLOOD = 10
    LIVER = 11
    SPLEEN = 12
    KIDNEY = 13
    BOWEL_WALL = 14
    BOWEL_FLUID = 15
    BILE = 16
    PANCREAS = 17
    DISC = 18
    CORD = 19
    CARTILAGE = 20
    CORTICAL = 21
    CANCELLOUS = 22
    AIRWAY_WALL = 23


@dataclass(frozen=True)
class Capsule:
    """A piece of tube with round ends."""

    start: Array  # (3,) mm
    end: Array  # (3,) mm
    radius: float  # mm


@dataclass(frozen=True)
class Torso:
    """What differs from one torso to the next."""

    waves: Array  # (9, 5): wave vector (3), phase, amplitude; three for each direction
    vessels: tuple[Capsule, ...]
    bowel: tuple[Capsule, ...]
    fat: float  # thickness of subcutaneous fat, 1 for the usual


@dataclass(frozen=True)
class Slab:
    """Points of a part of the patient; `material` is painted in place."""

    x: Array
    y: Array
    z: Array
    material: NDArray[np.uint8]
    ticks: tuple[Array, Array, Array]  # the grid's own coordinates along each axis

    def near(self, low: Point, high: Point) -> Slab:
        """Return the part within a box, with room for the deformation; a view."""
        room = 8.0
        cut = tuple(
            slice(*np.searchsorted(t, (a - room, b + room)))
            for t, a, b in zip(self.ticks, low, high, strict=True)
        )
        ticks = (self.ticks[0][cut[0]], self.ticks[1][cut[1]], self.ticks[2][cut[2]])
        return Slab(self.x[cut], self.y[cut], self.z[cut], self.material[cut], ticks)

    def around(self, centre: Point, reach: float) -> Slab:
        """Return the part within `reach` mm of a point; a view."""
        low = (centre[0] - reach, centre[1] - reach, centre[2] - reach)
        return self.near(low, (centre[0] + reach, centre[1] + reach, centre[2] + reach))

    def paint(self, where: Mask, material: M) -> None:
        """Give the points of `where` a material."""
        self.material[where] = material

    def over(self, where: Mask, material: M, *under: M) -> None:
        """Give them a material only where they are made of one of `under`."""
        self.material[where & self.of(*under)] = material

    def of(self, *materials: M) -> Mask:
        """Return which points are made of one of `materials`."""
        table = np.zeros(256, bool)
        table[list(materials)] = True
        return table[self.material]

    def ball(self, centre: Point, radii: Point, turn: float = 0.0) -> Array:
        """Return the ellipsoid's own radius (1 on its surface), turned in the axial plane (rad)."""
        x, y, z = self.x - centre[0], self.y - centre[1], self.z - centre[2]
        c, s = np.cos(turn), np.sin(turn)
        u, v = (c * x + s * y) / radii[0], (c * y - s * x) / radii[1]
        return np.asarray(np.sqrt(u * u + v * v + (z / radii[2]) ** 2))

    def rod(self, centre: tuple[Array | float, Array | float], radii: tuple[float, float]) -> Array:
        """Return the radius (1 on its surface) of an upright elliptic rod."""
        return np.hypot((self.x - centre[0]) / radii[0], (self.y - centre[1]) / radii[1])

    def tube(self, capsule: Capsule) -> Array:
        """Return the distance in mm from a capsule's axis."""
        axis = capsule.end - capsule.start
        px, py, pz = self.x - capsule.start[0], self.y - capsule.start[1], self.z - capsule.start[2]
        t = (px * axis[0] + py * axis[1] + pz * axis[2]) / max(float(axis @ axis), 1e-9)
        t = np.clip(t, 0, 1)
        away = (px - t * axis[0]) ** 2 + (py - t * axis[1]) ** 2 + (pz - t * axis[2]) ** 2
        return np.asarray(np.sqrt(away))


def smooth(t: Array) -> Array:
    """Go from 0 to 1 without a corner while t does."""
    t = np.clip(t, 0, 1)
    return t * t * (3 - 2 * t)


def torso(seed: int) -> Torso:
    """Draw what differs from one torso to the next.

    `RandomState` and not a Generator: its stream is frozen, so that the data are the same with
    every NumPy.
    """
    rng = RandomState(seed)
    waves = np.zeros((9, 5))
    waves[:, :3] = rng.normal(size=(9, 3))
    waves[:, :3] *= (2 * np.pi / rng.uniform(70, 150, size=9) / norm(waves[:, :3]))[:, None]
    waves[:, 3] = rng.uniform(0, 2 * np.pi, size=9)
    waves[:, 4] = 1.6
    return Torso(waves, tuple(_lung_tree(rng)), tuple(_small_bowel(rng)), rng.uniform(0.9, 1.1))


def norm(vectors: Array) -> Array:
    """Return the length of each row."""
    return np.asarray(np.sqrt((vectors**2).sum(axis=1)))


def _lung_tree(rng: RandomState) -> list[Capsule]:
    """Grow vessels from both hila; what leaves the lung is not painted."""
    twigs = []
    for side in (-1, 1):
        root = np.array([side * 30.0, 2.0, 68.0])
        for aim in _directions(40, rng):
            if aim[0] < -0.45:  # none into the mediastinum
                continue
            twigs.append((root, aim * (side, 1, 1), 3.8, 27.0))
    tree = []
    while twigs:
        start, aim, radius, length = twigs.pop()
        end = start + aim * length
        tree.append(Capsule(start, end, radius))
        if radius < 1.15:
            continue
        for share in rng.uniform(0.66, 0.86, size=2):
            turned = aim + rng.normal(scale=0.38, size=3)
            turned /= np.sqrt(turned @ turned)
            twigs.append((end, turned, radius * share, max(length * 0.84, 9.0)))
    return tree


def _directions(n: int, rng: RandomState) -> Array:
    """Return n unit vectors spread evenly over the sphere, a little shaken."""
    k = np.arange(n) + 0.5
    angle, up = np.pi * (1 + 5**0.5) * k, 1 - 2 * k / n
    flat = np.sqrt(1 - up * up)
    aims = np.stack([flat * np.cos(angle), flat * np.sin(angle), up], 1)
    aims += rng.normal(scale=0.12, size=aims.shape)
    return np.asarray(aims / norm(aims)[:, None])


def _small_bowel(rng: RandomState) -> list[Capsule]:
    """Let a tube wander through the lower belly, kept from itself and from the edge."""
    loops = []
    for row, z in enumerate((-104.0, -126.0, -148.0, -170.0)):
        for col, y in enumerate((-60.0, -38.0, -16.0, 6.0)):
            xs = np.arange(-72, 84, 12.0) * (1 - 0.10 * abs(col - 1.6))
            shake = rng.normal(scale=3.2, size=(xs.size, 3))
            bend = 7 * np.sin(xs / 17 + rng.uniform(0, 6.3))
            path = np.stack([xs, y + bend, z + 5 * np.sin(xs / 21 + row)], 1) + shake
            radius = rng.uniform(9.5, 12)
            loops += [Capsule(a, b, radius) for a, b in itertools.pairwise(path)]
    return loops
