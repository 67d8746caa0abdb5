"""Access to NVIDIA's management library (NVML), which reports on GPUs without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


@contextmanager
def nvml_handles() -> Iterator[list[Any] | None]:
    """Initialise NVML for a block; an NVMLError raised in the block ends it quietly.

    Yields
    ------
    list or None
        A handle per NVIDIA device, in NVML's order; None without a working driver.
    """
    import pynvml

    with ExitStack() as stack:
        handles = None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            count = pynvml.nvmlDeviceGetCount()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        with suppress(pynvml.NVMLError):
            yield handles
