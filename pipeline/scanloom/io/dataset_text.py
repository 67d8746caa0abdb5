"""Text of a pydicom dataset, read without converting its values.

To convert a value that is not valid, pydicom would warn and show it: it may name a patient.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydicom import Dataset


UID = re.compile(r"(?=.{1,64}$)(0|[1-9]\d*)(\.(0|[1-9]\d*))+")
"""A valid UID (PS3.5 9.1)."""


def plain_text(header: Dataset, keyword: str) -> str:
    """Return ASCII text as it is stored, values joined by a backslash; empty if it is missing."""
    if keyword not in header:
        return ""
    value: object = header.get_item(keyword).value
    if isinstance(value, bytes):
        return value.decode("ascii", "replace").strip("\0 ")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\\".join(str(v) for v in value)
    return "" if value is None else str(value).strip("\0 ")


def decoded_text(value: object) -> str:
    """Return text as pydicom decodes it, values joined by a backslash; "" for none.

    Of the Chinese of ISO 2022 IR 58, pydicom leaves the escape sequences in the text.
    """
    if value is None:
        return ""
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return "\\".join(map(str, values)).replace("\x1b$)A", "")


def matching_text(header: Dataset, keyword: str, pattern: re.Pattern[str]) -> str:
    """Return the text of an attribute if all of it matches, else an empty string."""
    text = plain_text(header, keyword)
    return text if pattern.fullmatch(text) else ""


def valid_uid(header: Dataset, keyword: str) -> str:
    """Return a UID if it is valid, else an empty string."""
    return matching_text(header, keyword, UID)


MAX_CHARACTERS = 16
"""Characters of a decimal string (PS3.5 6.2, DS)."""


def decimal_strings(values: Iterable[object] | None) -> list[str]:
    """Return numbers as decimal strings of at most 16 characters."""
    from pydicom.valuerep import format_number_as_ds

    if values is None:
        raise TypeError("decimal strings of no values")
    texts = map(str, values)
    return [t if len(t) <= MAX_CHARACTERS else format_number_as_ds(float(t)) for t in texts]
