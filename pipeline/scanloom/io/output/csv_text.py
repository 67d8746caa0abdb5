"""Cells of CSV files that a spreadsheet must not execute."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-](inf|nan)", re.ASCII)
_FORMULA_PREFIXES = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""Characters that begin a formula in a spreadsheet, the full-width forms of = + - @ included."""


def escape_formula(cell: str) -> str:
    """Return a CSV cell that no spreadsheet executes: a formula gets an apostrophe before it.

    Numbers stay as they are: "-3.5" is not a formula, "-3.5+1" is.
    """
    if cell.startswith(_FORMULA_PREFIXES) and not _NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell
