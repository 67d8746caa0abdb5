"""Keep libraries from importing optional packages that are not needed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

UNUSED_PACKAGES = (
    "cffi",
    "ignite",
    "matplotlib",
    "mpl_toolkits",
    "nrrd",
    "requests",
    "scipy.signal",
    "skimage",
    "sklearn",
    "tifffile",
)
"""MONAI imports these if they are installed, for plots, training, metrics, files and transforms
that are not used here. That takes 3 s, and on a new machine longer, for a font cache. Numba parses
C declarations with cffi; pydicom downloads its own test files with requests."""

UNUSED_MODULES = (
    "monai.apps.auto3dseg",
    "monai.apps.deepedit",
    "monai.apps.deepgrow",
    "monai.apps.detection",
    "monai.apps.generation",
    "monai.apps.nnunet",
    "monai.apps.nuclick",
    "monai.apps.pathology",
    "monai.apps.reconstruction",
    "monai.apps.vista3d",
    "monai.auto3dseg",
    "monai.engines",
    "monai.inferers",
    "monai.losses",
    "monai.metrics",
    "monai.optimizers",
)
"""`import monai` imports all modules of MONAI, and passes over those that can't be imported. Its
networks need none of these."""

UNUSED_TABLES = "pandas"
"""MONAI and pyarrow import pandas if it is installed. Only `join` needs it: `bring_back_pandas`."""


@contextmanager
def without_optional_imports() -> Iterator[None]:
    """Hide unused optional packages from imports in the block, unless already imported."""
    hidden = _hide(UNUSED_PACKAGES)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def leave_out_unused_modules() -> None:
    """Hide unused modules for good, unless already imported: in a process of our own only.

    Other code of a process may need what scanloom does not.
    """
    _hide(UNUSED_MODULES)
    if UNUSED_TABLES not in sys.modules and not any(isinstance(f, _Absent) for f in sys.meta_path):
        sys.meta_path.insert(0, _Absent())


def bring_back_pandas() -> None:
    """Let pandas be imported again: pyarrow needs it for times in nanoseconds of others' tables."""
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Absent)]


def _hide(names: Sequence[str]) -> list[str]:
    """Stop imports of these modules by None in their place; return those not yet imported."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None stops an import
    return hidden


class _Absent(MetaPathFinder, Loader):
    """Answers imports of pandas with the error of a package that is not installed.

    Unlike None in `sys.modules`, which Cython takes for a module: pyarrow would fail. A search that
    imports nothing succeeds: torch's compiler looks for pandas to know its folder.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == UNUSED_TABLES else None

    def create_module(self, spec: ModuleSpec) -> NoReturn:
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    def exec_module(self, module: ModuleType) -> NoReturn:
        raise NotImplementedError  # not reached: there is no module to execute
