"""Whether numbers are finite, in one pass and without an array of truth values."""

from __future__ import annotations

import math

import torch


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite.

    What is not finite makes the sum so. Finite values may overflow it: then the largest and the
    smallest value decide, which takes twice as long. It waits for the device once.
    """
    if math.isfinite(float(values.sum())):
        return True
    return math.isfinite(float(values.amax())) and math.isfinite(float(values.amin()))
