"""Keep libraries from importing optional packages that are not needed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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


@contextmanager
def without_optional_imports() -> Iterator[None]:
    """Hide unused optional packages from imports in the block, unless already imported."""
    hidden = _hide(UNUSED_PACKAGES)
    try:
        yield
    finally:
        show_modules(*hidden)


def leave_out_unused_modules() -> None:
    """Hide unused modules for good, unless already imported: in a process of our own only.

    Other code of a process may need what scanloom does not.
    """
    _hide(UNUSED_MODULES)


def show_modules(*names: str) -> None:
    """Let hidden modules be imported again, for a command that needs them."""
    for name in names:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


def _hide(names: Sequence[str]) -> list[str]:
    """Stop imports of these modules by None in their place; return those not yet imported."""
    # Modules of other code in this process stay as they are
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None stops an import
    return hidden
