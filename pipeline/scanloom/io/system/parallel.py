"""Concurrent tasks: writers that each write their own files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run_parallel(*tasks: Callable[[], object]) -> None:
    """Run tasks concurrently, in threads; return when all have ended.

    Raises
    ------
    BaseException
        The exception of the first failed task, in the order of `tasks`.
    """
    with ThreadPoolExecutor(max(1, len(tasks))) as pool:
        futures = [pool.submit(task) for task in tasks]
    for future in futures:
        future.result()
