"""VISTA3D, prompted by classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monai.networks.nets import SegResNetDS2
from monai.networks.nets import vista3d as monai_vista3d
from torch.nn import functional

_LAST_SUPPORTED = 132
"""Largest number of a class that the network knows without clicks."""
_CLASSES = 512
"""Number of class embeddings."""


class Vista3d(monai_vista3d.VISTA3D):
    """MONAI's `vista3d132` with fixed class prompts.

    Parameters
    ----------
    classes : sequence of int
        Numbers of the classes; 1 to 132.
    in_channels, encoder_embed_dim : int
        As in `vista3d132`.
    """

    def __init__(
        self, classes: Sequence[int], in_channels: int = 1, encoder_embed_dim: int = 48
    ) -> None:
        width = encoder_embed_dim
        encoder = SegResNetDS2(
            in_channels=in_channels,
            blocks_down=(1, 2, 2, 4, 4),
            norm="instance",
            out_channels=width,
            init_filters=width,
            dsdepth=1,
        )
        points = monai_vista3d.PointMappingSAM(
            feature_size=width, n_classes=_CLASSES, last_supported=_LAST_SUPPORTED
        )
        prompts = monai_vista3d.ClassMappingClassify(
            n_classes=_CLASSES, feature_size=width, use_mlp=True
        )
        super().__init__(image_encoder=encoder, class_head=prompts, point_head=points)
        self._prompts = tuple(classes)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the scores (1, 1 + classes, x, y, z) of windows (1, 1, x, y, z).

        Channel 0 is the background, whose score is 0: a voxel belongs to the class of the largest
        positive score, as after VistaPostTransform.
        """
        prompts = torch.tensor(self._prompts, device=windows.device)[:, None]
        scores = [
            super(Vista3d, self).forward(window[None], class_vector=prompts, transpose=True)
            for window in windows
        ]
        return functional.pad(torch.cat(scores), (0, 0) * 3 + (1, 0))
