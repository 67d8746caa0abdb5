"""Classes in the scripts of MONAI's Model Zoo that have a counterpart here.

A script of a bundle is never run. If its file has a known hash, its class is known too, and a
module of this package takes its place. Hashes are those of versions in the history of
github.com/Project-MONAI/model-zoo whose meaning is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scanloom.cards.monai.config.values import Kind, truncate
from scanloom.cards.monai.files import read_text
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
}
"""Known classes by the ``_target_`` of a config."""


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
