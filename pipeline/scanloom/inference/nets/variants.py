"""MONAI's networks in other forms: built from plain numbers, or prompted without clicks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.networks import nets
from monai.networks.nets import SegResNetDS2
from monai.networks.nets import vista3d as monai_vista3d
from torch.nn import functional

_LAST_SUPPORTED = 132
"""Largest number of a class that the network knows without clicks."""
_CLASSES = 512
"""Number of class embeddings."""


class Vista3d(monai_vista3d.VISTA3D):  # type: ignore[misc] # MONAI is untyped
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


class DiNTS(nets.DiNTS):  # type: ignore[misc] # MONAI is untyped
    """DiNTS of a searched architecture.

    Parameters
    ----------
    dints_space : mapping
        Arguments of MONAI's TopologyInstance; `arch_code` as nested lists: which paths are used,
        and the operation of each.
    node_a : nested list
        Which nodes are used.
    args
        Further arguments of MONAI's DiNTS.
    """

    def __init__(self, dints_space: Mapping[str, Any], node_a: Any, **args: Any) -> None:
        paths, operations = (np.asarray(code) for code in dints_space["arch_code"])
        arguments = {key: value for key, value in dints_space.items() if key != "arch_code"}
        with contextlib.redirect_stdout(io.StringIO()):  # MONAI prints a recommendation
            space = nets.TopologyInstance(arch_code=[paths, operations], device="cpu", **arguments)
        # MONAI compares entries one by one: on the CPU, whatever the default device is
        super().__init__(space, node_a=torch.from_numpy(np.asarray(node_a)), **args)


class DynUNetWithoutClicks(nets.DynUNet):  # type: ignore[misc] # MONAI is untyped
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
