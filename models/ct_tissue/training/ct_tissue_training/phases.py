"""Phases of the training of `ct_tissue`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Phase:
    """One phase of the training: one cycle of the learning rate.

    Parameters
    ----------
    seed : int
        Seed of all random numbers.
    steps, patch : int
        Number of steps; edge length of a patch in voxels.
    rate : float
        Highest learning rate.
    dice : float
        Weight of the Dice loss relative to cross entropy; a small one keeps volumes right.
    batch, threads : int
        Patches per step; CPU threads.
    noise : float
        Relative noise on the output of each layer: per voxel, plus a third of it per channel, as
        all voxels of uniform air are rounded alike. It makes decisions robust to rounding.
    cut, contrast, organs, marrow : float
        Share of the patches from scans that are cut to few slices or a smaller field of view;
        share to which contrast agent is added; share into which organs are drawn; share whose
        marrow is made darker or brighter.
    """

    seed: int
    steps: int
    patch: int
    rate: float
    dice: float
    batch: int = 2
    threads: int = 2
    noise: float = 0.0
    cut: float = 0.0
    contrast: float = 0.0
    organs: float = 0.0
    marrow: float = 0.0


PHASES = (
    Phase(seed=1, steps=900, patch=56, rate=4e-3, dice=0.5),
    Phase(seed=2, steps=400, patch=64, rate=7e-4, dice=0.1),
)
NOISE_PHASES = (
    Phase(seed=3, steps=800, patch=64, rate=1e-3, dice=0.1, noise=0.03),
    Phase(seed=4, steps=800, patch=64, rate=7e-4, dice=0.1, noise=0.06),
    Phase(seed=5, steps=450, patch=64, rate=5e-4, dice=0.1, noise=0.04),
    Phase(seed=6, steps=350, patch=64, rate=4e-4, dice=0.1, noise=0.04),
)
"""Phases with noise of at least 3 %; rounding to bfloat16 changes a value by at most 0.4 %."""
_CUT = Phase(
    seed=7, steps=600, patch=48, rate=2e-3, dice=0.1, threads=1, noise=0.03, cut=0.5, contrast=0.35
)
CUT_PHASES = (
    _CUT,
    replace(_CUT, seed=8, steps=350, patch=64, rate=1e-3, noise=0.05),
    replace(_CUT, seed=9, steps=300, patch=64, rate=5e-4, noise=0.04),
    replace(_CUT, seed=10, steps=250, patch=48, rate=1e-3, noise=0.04, contrast=0.7),
)
"""Phases with scans that are cut, and with contrast agent."""
_ORGANS = replace(_CUT, seed=11, steps=600, patch=56, rate=1.5e-3, cut=0.6, organs=0.5)
ORGAN_PHASES = (
    _ORGANS,
    replace(_ORGANS, seed=12, steps=350, patch=64, rate=1e-3, noise=0.05),
    replace(_ORGANS, seed=13, steps=300, patch=64, rate=7e-4, noise=0.04),
    replace(_ORGANS, seed=14, steps=600, patch=64, rate=1e-3, noise=0.04),
    replace(_ORGANS, seed=15, steps=500, patch=64, rate=6e-4, noise=0.04),
    replace(_ORGANS, seed=16, steps=400, patch=64, rate=4e-4, noise=0.04),
)
"""Phases into which kidneys with contrast agent are drawn, and bowel and stomachs with gas."""
_MARROW = replace(_ORGANS, patch=64, rate=1e-3, noise=0.04, contrast=0.3, organs=0.3, marrow=0.6)
MARROW_PHASES = (
    replace(_MARROW, seed=17, steps=500),
    replace(_MARROW, seed=18, steps=350, rate=5e-4),
)
"""Phases with marrow of varied brightness, and fewer drawn organs: else bright marrow is none."""
