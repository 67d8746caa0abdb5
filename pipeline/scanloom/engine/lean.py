"""A process that starts quickly: what a library imports only in case it is wanted is left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNWANTED = ("matplotlib", "mpl_toolkits", "ignite", "scipy.signal", "skimage", "cffi")
"""MONAI imports them where they are installed, for pictures, training and transforms that nobody
here asks for: 2 s, and on a fresh machine a cache of fonts that takes longer, and says so. Numba
reads declarations in C with cffi."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Let packages that are not imported yet, and not wanted, seem not to be installed."""
    hidden = [name for name in UNWANTED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None stops an import
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
