"""scanloom segments medical scans and writes results that lie exactly on them."""

from __future__ import annotations

import os

# before torch is used: see "No AMX for the time being" in docs/decisions.md
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

TYPE_CHECKING = False  # as of typing, which may not be the standard library's yet: see __main__

if TYPE_CHECKING:
    from scanloom.core import Flag, Outputs, Reason, ScanError, Segmentation, Volume
    from scanloom.engine.api import load_model, segment
    from scanloom.io.read import load_volume

__all__ = [
    "Flag",
    "Outputs",
    "Reason",
    "ScanError",
    "Segmentation",
    "Volume",
    "load_model",
    "load_volume",
    "segment",
]

_HOMES = {
    "Flag": "scanloom.core",
    "Outputs": "scanloom.core",
    "Reason": "scanloom.core",
    "ScanError": "scanloom.core",
    "Segmentation": "scanloom.core",
    "Volume": "scanloom.core",
    "load_model": "scanloom.engine.api",
    "load_volume": "scanloom.io.read",
    "segment": "scanloom.engine.api",
}
"""Where each public name is defined; it is imported on first access."""


def __getattr__(name: str) -> object:
    """Import a public name: `import scanloom` alone loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
