"""Networks of interactive models, run without clicks."""

from __future__ import annotations

from typing import Any

import torch
from monai.networks import nets
from torch.nn import functional


class DynUNetWithoutClicks(nets.DynUNet):
    """DynUNet that takes the scan's channels and sets those of clicks to 0 (MONAI DeepEdit).

    Parameters
    ----------
    in_channels : int
        Number of channels, with those of clicks.
    args
        Further arguments of MONAI's DynUNet.
    """

    def __init__(self, in_channels: int, **args: Any) -> None:
        super().__init__(in_channels=in_channels, **args)
        self._channels = in_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of scans (N, channels, x, y, z) without channels of clicks."""
        clicks = self._channels - x.shape[1]
        scores: torch.Tensor = super().forward(functional.pad(x, (0, 0) * 3 + (0, clicks)))
        return scores
