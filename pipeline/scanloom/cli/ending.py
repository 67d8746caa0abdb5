"""The end of a process that has nothing left to do."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_end() -> Iterator[None]:
    """End the process soon after an exit in the block, once other exit functions have run.

    Python would free the millions of objects of torch and others one by one, which takes 0.15 s.
    Only for a process of our own: exit functions that were registered before do not run.
    """
    codes: list[int] = []
    atexit.register(_end, codes)  # exit functions run in reverse order: this one after all others
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, int):  # neither a message nor None
            codes.append(int(end.code))
        raise


def _end(codes: list[int]) -> None:
    """Exit with the code, if the block did; else, and if output is lost, as Python does."""
    if not codes:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(codes[0])
