"""Numbers as DICOM decimal strings."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CHARACTERS = 16
"""Characters of a decimal string (PS3.5 6.2, DS)."""


def decimal_strings(values: Iterable[object] | None) -> list[str]:
    """Return numbers as decimal strings of at most 16 characters."""
    from pydicom.valuerep import format_number_as_ds

    if values is None:
        raise TypeError("decimal strings of no values")
    texts = map(str, values)
    return [t if len(t) <= MAX_CHARACTERS else format_number_as_ds(float(t)) for t in texts]
