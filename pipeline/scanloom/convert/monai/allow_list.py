"""Allow-list of ``_target_`` names, which are looked up here and never imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from scanloom.cards.networks import NETWORKS
from scanloom.convert.monai.config.values import Kind, truncate
from scanloom.convert.monai.known_scripts import is_script, known_class
from scanloom.core import Reason, ScanError

_ALIASES: Final[Mapping[str, str]] = {
    "BasicUnet": "BasicUNet",
    "Basicunet": "BasicUNet",
    "basicunet": "BasicUNet",
    "DynUnet": "DynUNet",
    "Dynunet": "DynUNet",
    "Unet": "UNet",
    "vista3d132": "Vista3d",
}
_NETWORK_ARGUMENTS: Final = frozenset({"TopologyInstance"})
_TRANSFORMS: Final = frozenset(
    {
        "Activationsd",
        "AddGuidanceSignalDeepEditd",
        "AsDiscreted",
        "CastToTyped",
        "Compose",
        "CropForegroundd",
        "EnsureChannelFirstd",
        "EnsureTyped",
        "Invertd",
        "KeepLargestConnectedComponentd",
        "Lambdad",
        "LoadImaged",
        "NormalizeIntensityd",
        "Orientationd",
        "Resized",
        "ScaleIntensityd",
        "ScaleIntensityRanged",
        "Spacingd",
        "ToTensord",
        "VistaPostTransformd",
    }
)
_INFERERS: Final = frozenset(
    {"SimpleInferer", "SliceInferer", "SlidingWindowInferer", "SlidingWindowInfererAdapt"}
)
_IGNORED: Final = frozenset(
    {
        "AddGuidanceFromPointsDeepEditd",
        "Identityd",
        "ResizeGuidanceMultipleLabelDeepEditd",
        "ToDeviced",
        "VistaPreTransformd",
    }
)
"""Transforms that change no label without clicks; their arguments are not read."""
_APPS: Final = ("monai.apps.deepedit.transforms", "monai.apps.vista3d.transforms")
"""Modules of transforms outside `monai.transforms`."""
_WORKFLOW: Final[Mapping[str, tuple[str, Kind]]] = {
    "SupervisedEvaluator": ("engines", "evaluator"),
    "DataLoader": ("data", "loader"),
    "ThreadDataLoader": ("data", "loader"),
    "CacheDataset": ("data", "dataset"),
    "Dataset": ("data", "dataset"),
    "CheckpointLoader": ("handlers", "checkpoint"),
    "PostProcessing": ("handlers", "postprocessing"),
    # These only watch: they print, log or measure what the evaluator did.
    **dict.fromkeys(
        (
            "ConfusionMatrix",
            "GarbageCollector",
            "HausdorffDistance",
            "LogfileHandler",
            "MLFlowHandler",
            "MeanDice",
            "MeanIoUHandler",
            "MetricLogger",
            "MetricsSaver",
            "StatsHandler",
            "SurfaceDistance",
            "TensorBoardImageHandler",
            "TensorBoardStatsHandler",
        ),
        ("handlers", "ignored"),
    ),
}
"""Parts of MONAI's runner: the package of each, and its kind."""

_MODULES: Final[Mapping[str, str]] = {
    "networks": "network",
    "transforms": "transform",
    "inferers": "inferer",
    "engines": "engines",
    "data": "data",
    "handlers": "handlers",
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
    module, _, name = target.rpartition(".")
    package = ["monai", "transforms"] if module in _APPS else module.split(".") if module else []
    if package and package[0] != "monai":
        raise ScanError(Reason.MODEL_UNSAFE, f"{truncate(target)} is code outside MONAI")
    module_kind = _MODULES.get(package[1]) if len(package) > 1 else None
    if package and module_kind is None:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{truncate(target)} is not on the list")
    plain = _ALIASES.get(name, name)
    if plain in NETWORKS and NETWORKS[plain].in_bundles and module_kind in (None, "network"):
        return "network", plain
    if name in _NETWORK_ARGUMENTS and module_kind in (None, "network"):
        return "part", name
    if plain in _INFERERS and module_kind in (None, "inferer"):
        return "inferer", plain
    plain = re.sub(r"(?<=[a-z])(D|Dict)$", "d", name)  # MONAI's aliases: X, Xd, XD, XDict
    if plain in _TRANSFORMS and module_kind in (None, "transform"):
        return "transform", plain
    if plain in _IGNORED and module_kind in (None, "transform"):
        return "ignored", plain
    if plain == "SaveImaged" and module_kind in (None, "transform"):
        return "saver", plain
    package_name, kind = _WORKFLOW.get(name, ("", "ignored"))
    if package_name and module_kind in (None, package_name):
        return kind, name
    reason = Reason.MODEL_NETWORK if module_kind == "network" else Reason.MODEL_UNSUPPORTED
    raise ScanError(reason, f"{truncate(target)} is not on the list")


def judge_target(folder: Path, target: str) -> tuple[Kind, str]:
    """Return the kind and the name of a ``_target_`` in the config of a bundle.

    Raises
    ------
    ScanError
        As `canonical_target`; MODEL_UNSAFE, with its hash, for a script of the bundle that is not
        known.
    """
    return known_class(folder, target) if is_script(target) else canonical_target(target)


def judge_network(folder: Path, target: str) -> tuple[Kind, str]:
    """Accept the ``_target_`` of a network or of an argument of a network.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for code outside MONAI; MODEL_NETWORK for any target not on the list.
    """
    try:
        kind, name = judge_target(folder, target)
    except ScanError as exc:
        if exc.reason is Reason.MODEL_UNSAFE:
            raise
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(target)} is not on the list") from exc
    if kind not in ("network", "part"):
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(target)} is not a network")
    return kind, name
