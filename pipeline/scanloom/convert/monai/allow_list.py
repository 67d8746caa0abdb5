"""Allow-list of ``_target_`` names, looked up here and never imported, and known scripts."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scanloom.cards.networks import NETWORKS
from scanloom.convert.files import read_text, truncate, unsafe, unsupported
from scanloom.convert.monai.config import Kind
from scanloom.core import Reason, ScanError


@dataclass(frozen=True)
class KnownClass:
    """A class of a script whose meaning is known.

    Parameters
    ----------
    kind : Kind
        Kind of component that takes its place; "ignored" if it changes no label.
    files : mapping
        Files of the bundle that define the class, each with the SHA-256 of its known versions.
    """

    kind: Kind
    name: str
    files: Mapping[str, tuple[str, ...]]


_RENAL: Final = {
    "scripts/my_transforms.py": (
        "d780252d1a30adce08d1a94cb348c1792b4f42b12fc761f5be93b1b8278a2ead",
        "49bb365b0e317b74901c9554310d6250f37886ee4823657ea0eb8535f8609c3f",
    )
}
_DEEPEDIT: Final = {
    "scripts/transforms.py": ("e0fa2eb326596e1a96d8d68f4f672cd0709379cd6d278116e61f42e30a826e18",)
}
_VISTA_INFERER: Final = {
    "scripts/inferer.py": ("e1be1a7844623295059948c0c8a320fd0a2c60f3b1cc64f295a16488e7d1df32",)
}
_VISTA_EVALUATOR: Final = {
    "scripts/evaluator.py": (
        "2487b2ef2777ac4442f903268be10dfe83244b232edd39db45a2f870e76ce424",
        "986220cb8b56812f35571a4933197abdaf8df61c60655ecbb4a125bf3911585c",
        "e12d0e873541b4d859c98fc8dfca279b8dc3f26f2d3abed7bfcbbed5a1707dac",
    )
}
_NESTED: Final = {
    "scripts/networks/nest_transformer_3D.py": (
        "3bc882fc948301b5a57b6919088a4d8d9a11d931add1b6765435213887dbfefd",
    ),
    "scripts/networks/patchEmbed3D.py": (
        "c115045843b844119aff508498c65627b2e97e32dab1d026bc0f9c8ba00f8d42",
    ),
    "scripts/networks/unest_block.py": (
        "dec389f37991f07c0803f85e8d3041c86f597c583fb08b0aa9179fae61b7faa1",
    ),
    "scripts/networks/nest/__init__.py": (
        "d9dde32a3a5ac3578b5fa8c1fecab9b7af7311a852017bef1e3016c98e7bfe53",
    ),
    "scripts/networks/nest/utils.py": (
        "c4beaa898e7a846de407b82378f5f3f54516718147c03da021e05b278f884b9a",
    ),
}

KNOWN: Final[Mapping[str, KnownClass]] = {
    "scripts.my_transforms.ConcatImages": KnownClass("transform", "ConcatImages", _RENAL),
    "scripts.my_transforms.MergeClassesd": KnownClass("transform", "MergeClassesd", _RENAL),
    "scripts.transforms.OrientationGuidanceMultipleLabelDeepEditd": KnownClass(
        "ignored", "OrientationGuidanceMultipleLabelDeepEditd", _DEEPEDIT
    ),
    "scripts.inferer.Vista3dInferer": KnownClass("inferer", "Vista3dInferer", _VISTA_INFERER),
    "scripts.evaluator.Vista3dEvaluator": KnownClass(
        "evaluator", "Vista3dEvaluator", _VISTA_EVALUATOR
    ),
    "scripts.networks.unest.UNesT": KnownClass(
        "network",
        "UNesT",
        {
            "scripts/networks/unest.py": (
                "530e4caed71a34152263759eae5f4f1429bd3bcd167cdcb724d85f6136c5199d",
            ),
            **_NESTED,
        },
    ),
    "scripts.networks.unest_base_patch_4.UNesT": KnownClass(
        "network",
        "UNesT",
        {
            "scripts/networks/unest_base_patch_4.py": (
                "3089b06400b413b6f5bb02e2c828e9dfc961c98a96d232aa6049640dc69ff405",
            ),
            **_NESTED,
        },
    ),
}
"""Known classes by the ``_target_`` of a config."""
_PEDIATRIC: Final = {
    "scripts/__init__.py": "770393899ff8c84a2bc9cd4bca32f131c904a9cfbde36be288ba00f5cfc1fccf",
    "scripts/monai_utils.py": "5715eac0aac310a977c8eaac5bc1d05f14bcf97035338f8912ebc3813fb2aed6",
    "scripts/utils.py": "9b531e8c9fcb0cbbf19c84f1bd912340b1f2e152570373dfc5e2912da0202a9f",
}
_STOPPING: Final = "e5c77b011847941aedfc7aa5c0e07a72988ed676ffb0356e211aa61c24f9d7d3"
IMPORTS: Final[Mapping[str, tuple[Mapping[str, str], ...]]] = {
    "scripts": tuple(
        {"scripts/__init__.py": sha256, "scripts/early_stop_score_function.py": _STOPPING}
        for sha256 in (
            "8b64d77b9ce7c98bb90dfe785e90c8ef24417b8cc3598ef0ce546f640809368c",
            "e006cae22c2da539d25e4a78caa723f6432cac19aaa2e6c451cc5d83412f6b68",
        )
    ),
    "scripts.monai_utils": (_PEDIATRIC,),
}
"""Modules of bundles that change nothing when they are imported: files that are then run, with the
SHA-256 of each, in the known versions."""


def known_class(folder: Path, target: str) -> tuple[Kind, str]:
    """Return the kind and the name of the component that takes the place of a script's class.

    Raises
    ------
    ScanError
        MODEL_UNSAFE, with file and hash, if the class or the version of its file is not known;
        MODEL_DAMAGED if the file is missing.
    """
    known = KNOWN.get(target)
    if known is None:
        file = "/".join(target.split(".")[:-1]) + ".py"
        raise _unknown(target, file, _sha256(folder, file))
    for file, versions in known.files.items():
        sha256 = _sha256(folder, file)
        if sha256 not in versions:
            raise _unknown(target, file, sha256)
    return known.kind, known.name


def _sha256(folder: Path, file: str) -> str | None:
    """Return the SHA-256 (hex) of a script, None if there is no such file."""
    try:
        return hashlib.sha256(read_text(folder, file).encode()).hexdigest()
    except ScanError as exc:
        # a link out of the bundle is an error by itself
        if exc.reason is Reason.MODEL_UNSAFE:
            raise
        return None


def _unknown(target: str, file: str, sha256: str | None) -> ScanError:
    version = "which is missing" if sha256 is None else f"SHA-256 {sha256}"
    return unsafe(f"{truncate(target)} is code of the bundle ({truncate(file)}, {version})")


def check_imports(folder: Path, entries: Any) -> None:
    """Refuse imports of a bundle's own modules, which run, unless their files are known.

    MONAI runs the imports that stand anywhere in a config.

    Raises
    ------
    ScanError
        MODEL_UNSAFE, with the hash of the module's file.
    """
    waiting, known = [entries], set()
    while waiting:
        entry = waiting.pop()
        if id(entry) in known:  # YAML can share an entry many times
            continue
        known.add(id(entry))
        if isinstance(entry, Mapping):
            waiting += entry.values()
        elif isinstance(entry, list):
            waiting += entry
        elif isinstance(entry, str):
            for module in _imported(entry):
                _check_module(folder, module)


def _imported(text: str) -> list[str]:
    """Return the modules that a text of a config imports."""
    if not re.match(r"\$\s*(import|from)\b", text):
        return []
    try:
        statement = ast.parse(text[1:].strip()).body[0]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []  # MONAI can't read it either
    match statement:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=str() as module):
            return [module]
    return []


def _check_module(folder: Path, module: str) -> None:
    root = module.partition(".")[0]
    if not (folder / root).is_dir() and not (folder / f"{root}.py").is_file():
        return  # a library
    for files in IMPORTS.get(module, ()):
        if all(_sha256(folder, file) == sha256 for file, sha256 in files.items()):
            return
    path = module.replace(".", "/")
    file = f"{path}/__init__.py" if (folder / path).is_dir() else f"{path}.py"
    raise _unknown(module, file, _sha256(folder, file))


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
        "DivisiblePadd",
        "EnsureChannelFirstd",
        "EnsureTyped",
        "FillHolesd",
        "Invertd",
        "KeepLargestConnectedComponentd",
        "Lambdad",
        "LoadImaged",
        "NormalizeIntensityd",
        "Orientationd",
        "RemoveSmallObjectsd",
        "ResizeWithPadOrCropd",
        "Resized",
        "ScaleIntensityd",
        "ScaleIntensityRangePercentilesd",
        "ScaleIntensityRanged",
        "Spacingd",
        "SpatialPadd",
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
        raise unsafe(f"{truncate(target)} is code outside MONAI")
    module_kind = _MODULES.get(package[1]) if len(package) > 1 else None
    if package and module_kind is None:
        raise unsupported(f"{truncate(target)} is not on the list")
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
    is_script = target.startswith("scripts.")
    return known_class(folder, target) if is_script else canonical_target(target)


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
    # a transform in the place of a network is on the list, but is none
    if kind not in ("network", "part"):
        raise ScanError(Reason.MODEL_NETWORK, f"{truncate(target)} is not a network")
    return kind, name
