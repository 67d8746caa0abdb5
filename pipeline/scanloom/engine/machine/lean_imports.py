"""Keep libraries from importing optional packages that are not needed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED_PACKAGES = (
    "cffi",
    "ignite",
    "matplotlib",
    "mpl_toolkits",
    "scipy.signal",
    "skimage",
    "sklearn",
)
"""MONAI imports these if they are installed, for plots, training, metrics and transforms that are
not used here. That takes 3 s, and on a new machine longer, for a font cache. Numba parses C
declarations with cffi."""


@contextmanager
def without_optional_imports() -> Iterator[None]:
    """Hide unused optional packages from imports in the block, unless already imported."""
    hidden = [name for name in UNUSED_PACKAGES if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None stops an import
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
