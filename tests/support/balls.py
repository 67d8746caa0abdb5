"""A ball of known place, size and values: drawn as a scanner would see it, and found again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Volume
from support.write_dicom import Geometry, plane

SHAPE = (40, 36, 20)
SPACING = (1.6, 1.5)
STEP = 2.5
FIELD = np.array((8.0, -24.0, 27.0))
"""Centre of what is drawn, LPS mm: no symmetry with the origin or the ball."""
FINE = 5
"""Samples of a voxel along each axis."""
TO_RAS = np.array((-1.0, -1.0, 1.0))


@dataclass(frozen=True)
class Ball:
    """A ball in a background, each of one value (HU)."""

    centre: tuple[float, float, float] = (11.0, -27.0, 29.0)  # LPS mm
    radius: float = 13.0  # mm
    inside: float = 170.0
    outside: float = -80.0

    @property
    def volume(self) -> float:
        """Volume in mm^3."""
        return 4 / 3 * np.pi * self.radius**3


BALL = Ball()
LATE, LATER = replace(BALL, inside=90.0), replace(BALL, inside=250.0)


def around(name: str = "axial", shape: tuple[int, int, int] = SHAPE, **changes: float) -> Geometry:
    """Return slices of a plane of `PLANES` whose middle is that of the field."""
    flat = plane(name, spacing=SPACING, step=changes.pop("step", STEP), **changes)
    geometry = replace(flat, origin=(0.0, 0.0, 0.0))
    half = (np.array(shape) - 1) / 2
    corner = np.array(geometry.across) * half[0] * SPACING[1]
    corner = corner + np.array(geometry.down) * half[1] * SPACING[0]
    corner = corner + geometry.position(half[2])
    return replace(geometry, origin=tuple(FIELD - corner))


def drawn(
    geometry: Geometry, shape: tuple[int, int, int] = SHAPE, ball: Ball = BALL
) -> NDArray[np.float64]:
    """Return values (I, J, K): each voxel the mean over its own box."""
    sub = (np.arange(FINE) + 0.5) / FINE - 0.5
    image = np.empty(shape)
    for k in range(shape[2]):
        origin = geometry.position(k) - np.array(ball.centre)
        x, y = (
            origin @ np.asarray(way) + np.add.outer(np.arange(n), sub).ravel() * size
            for way, n, size in (
                (geometry.across, shape[0], geometry.spacing[1]),
                (geometry.down, shape[1], geometry.spacing[0]),
            )
        )
        share = np.zeros(shape[:2])
        for z in origin @ geometry.normal + sub * geometry.step:
            inside = np.add.outer(x**2, y**2) < ball.radius**2 - z**2
            share += inside.reshape(shape[0], FINE, shape[1], FINE).mean((1, 3)) / FINE
        image[:, :, k] = ball.outside + (ball.inside - ball.outside) * share
    return image


def wrong(volume: Volume, ball: Ball = BALL, noise: float = 0.1) -> dict[str, float]:
    """Return by how much a volume is not that ball: empty where it is right.

    Right: centre within 0.5 mm, volume within 2 %, values inside and outside within 1 HU.
    """
    share = (np.asarray(volume.array, float) - ball.outside) / (ball.inside - ball.outside)
    share[share < noise] = 0  # rounding; the edge that is lost counts little
    index = np.argwhere(share > 0)
    weight = share[tuple(index.T)]
    if not len(index):
        return {"no ball": 1.0}
    world = volume.grid.world(index)
    centre = (world * weight[:, None]).sum(axis=0) / weight.sum()
    away = np.linalg.norm(
        volume.grid.world(np.indices(share.shape).reshape(3, -1).T)
        - np.array(ball.centre) * TO_RAS,
        axis=1,
    ).reshape(share.shape)
    array = np.asarray(volume.array, float)
    off = {
        "centre, mm": float(np.linalg.norm(centre - np.array(ball.centre) * TO_RAS)) / 0.5,
        "volume, share": abs(weight.sum() * volume.grid.voxel_volume / ball.volume - 1) / 0.02,
        "inside, HU": abs(float(np.median(array[away < 0.6 * ball.radius])) - ball.inside),
        "outside, HU": abs(float(np.median(array[away > 1.5 * ball.radius])) - ball.outside),
    }
    return {quantity: amount for quantity, amount in off.items() if not amount < 1}
