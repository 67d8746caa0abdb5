"""Files of a case that are written only on request: names, and short descriptions.

Workflow schema, `Outputs` and the help of the command line derive from this table. It imports
nothing, so that help needs no NumPy.
"""

from __future__ import annotations

from typing import Final

EXTRAS: Final = {
    "image": "the scan, as image.nii.gz",
    "masks": "a mask for each structure",
    "uncertainty": "maps of the uncertainty of labels",
}
"""Description of each optional writer by its name: see `scanloom.engine.case.writers`."""


def describe_extras() -> str:
    """Return all descriptions with their names, as a list in words."""
    *first, last = (f"{description} ({name})" for name, description in EXTRAS.items())
    return f"{', '.join(first)}, or {last}"
