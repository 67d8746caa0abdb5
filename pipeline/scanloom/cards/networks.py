"""The table of network classes that a card may name; nothing else is ever imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Layout = Literal["channels_first", "channels_last"]
"""Order of the axes of an ONNX graph: channels after the batch, or at the end."""
ONNX_GRAPH: Final = "OnnxGraph"
"""Class of networks that are an ONNX graph."""


@dataclass(frozen=True)
class AllowedNetwork:
    """A class of MONAI, or of `scanloom.inference.nets`, that a card may name.

    Parameters
    ----------
    module : str
        Module of the class.
    removed : frozenset of str
        Arguments of earlier MONAI versions that did not change the network; they are dropped.
    largest : mapping of str to int
        Largest value of arguments with which memory grows as a power, independently of the weights.
    in_bundles : bool
        Whether the config of a MONAI bundle may name it.
    """

    module: str
    removed: frozenset[str] = frozenset()
    largest: Mapping[str, int] = field(default_factory=dict)
    in_bundles: bool = True


NETWORKS: Final[Mapping[str, AllowedNetwork]] = {
    "AttentionUnet": AllowedNetwork("monai.networks.nets.attentionunet"),
    "BasicUNet": AllowedNetwork("monai.networks.nets.basic_unet"),
    "DiNTS": AllowedNetwork("scanloom.inference.nets.variants"),
    "DynUNet": AllowedNetwork("monai.networks.nets.dynunet"),
    "DynUNetWithoutClicks": AllowedNetwork("scanloom.inference.nets.variants", in_bundles=False),
    "MeshNet": AllowedNetwork("scanloom.inference.nets.meshnet", in_bundles=False),
    ONNX_GRAPH: AllowedNetwork(
        "scanloom.inference.nets.onnx_graph", largest={"nbytes": 2 << 30}, in_bundles=False
    ),
    "PlainConvUNet": AllowedNetwork("scanloom.inference.nets.unet", in_bundles=False),
    "ResidualEncoderUNet": AllowedNetwork("scanloom.inference.nets.unet", in_bundles=False),
    "SegResNet": AllowedNetwork("monai.networks.nets.segresnet"),
    "SegResNetDS": AllowedNetwork("monai.networks.nets.segresnet_ds"),
    "SwinUNETR": AllowedNetwork(
        "monai.networks.nets.swin_unetr",
        removed=frozenset({"img_size"}),  # in MONAI 1.5
        largest={"window_size": 16},
    ),
    "UNesT": AllowedNetwork("scanloom.inference.nets.unest", in_bundles=False),
    "UNETR": AllowedNetwork("monai.networks.nets.unetr"),
    "UNet": AllowedNetwork("monai.networks.nets.unet"),
    "VNet": AllowedNetwork("monai.networks.nets.vnet"),
    "Vista3d": AllowedNetwork("scanloom.inference.nets.variants"),
}
"""Allowed networks by the name of their class."""
