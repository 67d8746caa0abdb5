"""Several things done beside each other: writers, each of its own files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_beside(*tasks: Callable[[], object]) -> None:
    """Run tasks in threads, and return when all have ended.

    Parameters
    ----------
    tasks : callable
        Without arguments; what they return is not looked at.

    Raises
    ------
    BaseException
        That of the first task, in their order, that raised one.
    """
    with ThreadPoolExecutor(max(1, len(tasks))) as pool:
        running = [pool.submit(task) for task in tasks]
    for ended in running:
        ended.result()
