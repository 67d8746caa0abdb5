"""Classes in the scripts of MONAI's Model Zoo that have a counterpart here.

A script of a bundle is never run. If its file has a known hash, its class is known too, and a
module of this package takes its place. Hashes are those of versions in the history of
github.com/Project-MONAI/model-zoo whose meaning is the same.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scanloom.convert.files import read_text
from scanloom.convert.monai.config.values import Kind, truncate
from scanloom.core import Reason, ScanError


@dataclass(frozen=True)
class KnownClass:
    """A class of a script whose meaning is known.

    Parameters
    ----------
    kind : Kind
        Kind of component that takes its place; "ignored" if it changes no label.
    name : str
        Name of the component.
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


def is_script(target: str) -> bool:
    """Return whether a ``_target_`` is a class of a bundle's own script."""
    return target.startswith("scripts.")


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
        if exc.reason is Reason.MODEL_UNSAFE:
            raise
        return None


def _unknown(target: str, file: str, sha256: str | None) -> ScanError:
    version = "which is missing" if sha256 is None else f"SHA-256 {sha256}"
    detail = f"{truncate(target)} is code of the bundle ({truncate(file)}, {version})"
    return ScanError(Reason.MODEL_UNSAFE, detail)


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
