"""Allow-list of ``_target_`` names, which are looked up here and never imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from scanloom.cards.monai.config import truncate
from scanloom.cards.networks import NETWORKS
from scanloom.core import Reason, ScanError

Kind = Literal["network", "transform", "inferer", "ignored"]

_ALIASES: Final[Mapping[str, str]] = {
    "BasicUnet": "BasicUNet",
    "Basicunet": "BasicUNet",
    "basicunet": "BasicUNet",
    "DynUnet": "DynUNet",
    "Dynunet": "DynUNet",
    "Unet": "UNet",
}
_TRANSFORMS: Final = frozenset(
    {
        "Activationsd",
        "AsDiscreted",
        "CastToTyped",
        "Compose",
        "EnsureChannelFirstd",
        "EnsureTyped",
        "Invertd",
        "KeepLargestConnectedComponentd",
        "LoadImaged",
        "NormalizeIntensityd",
        "Orientationd",
        "ScaleIntensityd",
        "ScaleIntensityRanged",
        "Spacingd",
    }
)
_INFERERS: Final = frozenset({"SimpleInferer", "SlidingWindowInferer", "SlidingWindowInfererAdapt"})
_IGNORED: Final = frozenset({"Identityd", "SaveImaged", "ToDeviced", "ToTensord"})
"""Transforms that change no label; their arguments are not read."""

_MODULES: Final[Mapping[str, str]] = {
    "networks": "network",
    "transforms": "transform",
    "inferers": "inferer",
}


def canonical_target(target: str) -> tuple[Kind, str]:
    """Return the kind of a ``_target_`` and its class name.

    Parameters
    ----------
    target : str
        Class name ("UNet") or full name ("monai.networks.nets.UNet").

    Raises
    ------
    ScanError
        MODEL_UNSAFE for code outside MONAI; MODEL_NETWORK for a network that is not on the list;
        MODEL_UNSUPPORTED for any other target that is not on the list.
    """
    *package, name = target.split(".")
    if package and package[0] != "monai":
        raise ScanError(Reason.MODEL_UNSAFE, f"{truncate(target)} is code outside MONAI")
    module_kind = _MODULES.get(package[1]) if len(package) > 1 else None
    if package and module_kind is None:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{truncate(target)} is not on the list")
    plain = _ALIASES.get(name, name)
    allowed = NETWORKS.get(plain)
    if allowed and allowed.module.startswith("monai.") and module_kind in (None, "network"):
        return "network", plain
    if plain in _INFERERS and module_kind in (None, "inferer"):
        return "inferer", plain
    plain = re.sub(r"(?<=[a-z])(D|Dict)$", "d", name)  # MONAI's aliases: X, Xd, XD, XDict
    if plain in _TRANSFORMS and module_kind in (None, "transform"):
        return "transform", plain
    if plain in _IGNORED and module_kind in (None, "transform"):
        return "ignored", plain
    reason = Reason.MODEL_NETWORK if module_kind == "network" else Reason.MODEL_UNSUPPORTED
    raise ScanError(reason, f"{truncate(target)} is not on the list")


def check_target(target: str) -> bool:
    """Return whether the arguments of a ``_target_`` matter; errors as `canonical_target`."""
    return canonical_target(target)[0] != "ignored"


def judge_network(target: str) -> bool:
    """Accept a network's ``_target_``.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for code outside MONAI; MODEL_NETWORK for any target not on the list.
    """
    try:
        kind, _ = canonical_target(target)
    except ScanError as exc:
        if exc.reason is Reason.MODEL_UNSAFE:
            raise
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(target)} is not on the list") from exc
    if kind != "network":
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(target)} is not a network")
    return True
