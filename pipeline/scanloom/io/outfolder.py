"""An output folder as others meet it: what tells it from any folder, and what is ours in it."""

from __future__ import annotations

import os

from scanloom.io.private import KEY_FINGERPRINT, PRIVATE

CASES = "cases"
FIRST_WRITTEN = frozenset({".work", "runs", PRIVATE})
"""What a run makes before an output folder is known as one."""
WRITTEN = FIRST_WRITTEN | {
    CASES,
    "failed",
    "report",
    "bids",
    *(f"{table}.{kind}" for table in ("manifest", "measurements") for kind in ("csv", "parquet")),
}
"""All that scanloom writes into an output folder."""


def is_output(folder: str, inside: list[str]) -> bool:
    """Whether a folder is an output folder.

    Parameters
    ----------
    folder : str
    inside : list of str
        The names in it.
    """
    if PRIVATE not in inside:
        return False
    try:
        os.stat(os.path.join(folder, PRIVATE, KEY_FINGERPRINT))  # noqa: PTH116, PTH118
    except PermissionError:  # somebody else's
        return CASES in inside
    except OSError:
        return False
    return True
