"""Notices about the key of the case ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scanloom.cli.console import say


@contextmanager
def report_new_key(key: Path | None) -> Iterator[None]:
    """Report on stderr a key that is created in the block, so that a wrong path is noticed.

    Also warn about an explicit key file that another user may read or change. The default key
    file is refused in that case, but an explicit one may be intended.
    """
    from scanloom.io.identity import default_key_file
    from scanloom.own_python import is_ours

    file = key or default_key_file()
    explicit = bool(key or os.environ.get("SCANLOOM_KEY"))
    with suppress(OSError):  # missing or unreadable: reported when it is loaded
        if explicit and not is_ours(file):
            warning = "belongs to another user or is writable by others: case ids depend on it"
            say(f"scanloom: the key in {file} {warning}.", err=True)
    existed = os.path.exists(file)  # noqa: PTH110 False where Path.exists() raises
    try:
        yield
    finally:
        if not existed and os.path.exists(file):  # noqa: PTH110
            say(
                f"scanloom: created a new key in {file}. Back it up: case ids depend on it.",
                err=True,
            )
