"""A test for NaN and infinity, in one pass and without a mask."""

from __future__ import annotations

import math

import torch


def all_finite(values: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite.

    A sum with such a value is not finite. A sum of finite values may overflow: then the maximum and
    the minimum are tested, which takes twice as long. Waits for the device.
    """
    if math.isfinite(float(values.sum())):
        return True
    return math.isfinite(float(values.amax())) and math.isfinite(float(values.amin()))
