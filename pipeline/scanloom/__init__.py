"""scanloom segments medical scans and writes results that lie exactly on them."""

from __future__ import annotations

import os

from scanloom.version import __version__ as __version__  # public, of no use here

# before torch is used: see "No AMX for the time being" in docs/decisions.md
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

TYPE_CHECKING = False  # as of typing, which may not be the standard library's yet: see __main__

if TYPE_CHECKING:
    from scanloom.core import (
        CaseRecord,
        Flag,
        Grid,
        Measurement,
        Reason,
        ScanError,
        Segmentation,
        Structure,
        Volume,
    )
    from scanloom.engine.api import Model, load_model, measurements, segment
    from scanloom.io.read import load_volume

__all__ = [
    "CaseRecord",
    "Flag",
    "Grid",
    "Measurement",
    "Model",
    "Reason",
    "ScanError",
    "Segmentation",
    "Structure",
    "Volume",
    "load_model",
    "load_volume",
    "measurements",
    "segment",
]

_HOMES = {
    "Model": "scanloom.engine.api",
    "load_model": "scanloom.engine.api",
    "load_volume": "scanloom.io.read",
    "measurements": "scanloom.engine.api",
    "segment": "scanloom.engine.api",
}
"""Where names are defined that are not in `scanloom.core`. Imported on first access."""


def __getattr__(name: str) -> object:
    """Import a public name: `import scanloom` alone loads nothing heavy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "scanloom.core")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__", "__name__", "__version__"])
