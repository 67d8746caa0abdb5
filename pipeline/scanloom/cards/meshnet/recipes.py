"""Steps of brainchop for each of its networks, which its files of weights do not contain.

From brainchop-parameters.js of github.com/neuroneural/brainchop at commit 4c87885 (MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from scanloom.cards.card import ANY_MODALITY, Crop, NetworkGrid
from scanloom.cards.intensity import (
    IntensityStep,
    Round,
    ScaleHistogram,
    ScaleMinMax,
    ScaleQuantiles,
)

BEFORE: Final = (ScaleHistogram(),)
"""Intensity steps before a scan is resampled."""


@dataclass(frozen=True)
class Recipe:
    """Steps before and after a network.

    Parameters
    ----------
    title : str
        Title of the model.
    normalize : IntensityStep
        Last intensity step on the network grid.
    above : float or None
        Fraction of the largest intensity that the crop exceeds; None for no crop.
    margin : int
        Voxels around the crop.
    modality : str
        Modality of the scans.
    classifier_bias : bool
        Whether the bias of the last convolution is applied.
    """

    title: str
    normalize: IntensityStep = field(default_factory=ScaleMinMax)
    above: float | None = 0.0
    margin: int = 0
    modality: str = "MR"
    classifier_bias: bool = True

    @property
    def after(self) -> tuple[IntensityStep, ...]:
        """Intensity steps on the network grid."""
        return (Round(), self.normalize)

    @property
    def grid(self) -> NetworkGrid:
        """The grid: that of FreeSurfer's conform."""
        crop = None
        if self.above is not None:
            crop = Crop("positive", "network", margin=self.margin, above=self.above)
        return NetworkGrid(
            "LIA",
            (1.0, 1.0, 1.0),
            alignment="centre",
            shape=(256, 256, 256),
            crop=crop,
        )


DEFAULT: Final = Recipe("MeshNet")
"""The application's defaults, for networks that it does not have."""
QUANTILES: Final = ScaleQuantiles(0.05, 0.95)
MINDGRAB_QUANTILES: Final = ScaleQuantiles(0.02, 0.98, added=1e-3, clip=True, interpolated=True)

RECIPES: Final[Mapping[str, Recipe]] = {
    "mindgrab": Recipe(
        "MindGrab: brain in images of any modality",
        MINDGRAB_QUANTILES,
        above=None,
        modality=ANY_MODALITY,
        classifier_bias=False,
    ),
    "model18cls": Recipe("18 classes of brain tissue, small", above=0.2),
    "model20chan3cls": Recipe("White and grey matter", QUANTILES, above=0.2),
    "model21_104class": Recipe("104 classes of the brain, left and right"),
    "model30chan18cls": Recipe("18 classes of brain tissue", above=0.2),
    "model30chan50cls": Recipe("50 classes of the brain", QUANTILES),
    "model5_gw_ae": Recipe("White and grey matter, small", margin=18),
}
"""By the names of brainchop's folders."""

_WEIGHTS: Final[Mapping[str, tuple[str, str]]] = {
    "mindgrab": (
        "c9a01490fe2d13acc1515fd019b69db176ebe6f40c9b84aeb77f25acbc2ee0f3",
        "9ead2564b7731b585267d11e0df968c9e5a2bd198cbc0c01c8da58319ec0f0cf",
    ),
    "model18cls": (
        "725096439f64ece1ca45ec3c5115c9fa6004f6538cac3032b85966d3772b605e",
        "b872accef8237d2e449b2f0fcc12f05a5b6c5f8adee0636f1a37db229ddc7043",
    ),
    "model20chan3cls": (
        "aecc03e3db596bfffab0ea1143f0848dbf4da4e317e04ef202986c6888cd467f",
        "c60e73aae96e83f3866607c0c222540033769c037078f3b39d5d70e75c1b2d0a",
    ),
    "model21_104class": (
        "8a0aa1e2d94e5edc94c54aed900da978d2a1388bee4621cee05e473db64b84af",
        "a981d13d6baa0256387f14838c0997265a646616957c7e2bf742340a28a826df",
    ),
    "model30chan18cls": (
        "7039651d91c4cee0b7b1ddfe93fe2f5cb9b71d99f5a126fdef407e2a36bb52d4",
        "58441bcc4533346c2dffd4702ba8435a930bdb2e726f0b48f45d544124f75e48",
    ),
    "model30chan50cls": (
        "a7e597568dc7750c64cce8c64c4ca3ec7215716949efd741f19904da1baffa81",
        "d217ed8f675208004081516bac6ca926c61670c8fb5ca44412f8c879ff624d1c",
    ),
    "model5_gw_ae": (
        "ca0d1b8ff72f8719d9525acaf9a1f1cb66dbb173b4ee1d7540f99e022cf4bfd8",
        "262df624dcb0466bd58620d7862d9c3585ad9a4df5499243967435ce5bd0d98f",
    ),
}
"""SHA-256 of the published weights, as a layer model and as safetensors."""


def name_of_weights(sha256: str) -> str | None:
    """Return the name of brainchop's network with these weights, None if it is another network."""
    return next((name for name, known in _WEIGHTS.items() if sha256 in known), None)
