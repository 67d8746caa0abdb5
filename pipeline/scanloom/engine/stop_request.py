"""The request to stop a run, and its end by force when its time to stop is up."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_POLL_INTERVAL_S = 0.02
_CLEANER = "from multiprocessing.resource_tracker"
_LEAKS = "ignore::UserWarning:multiprocessing.resource_tracker"
"""Python's process that cleans up would warn of what the killed ones leave to it."""


class StopRequest(threading.Event):
    """Set it to stop a run after the current writes; `give_up` ends what goes on nevertheless."""

    def __init__(self) -> None:
        super().__init__()
        if _LEAKS not in sys.warnoptions:
            sys.warnoptions.append(_LEAKS)
        self._hand_back: Callable[[], None] | None = None
        self._ending = threading.Lock()

    @contextmanager
    def handing_back(self, hand_back: Callable[[], None]) -> Iterator[None]:
        """Let `give_up` call a function, while the block runs, when no child process is left."""
        self._hand_back = hand_back
        try:
            yield
        finally:
            self._hand_back = None

    def give_up(self, patience: float) -> None:
        """Kill all child processes, then hand back what the run holds; the caller ends this one.

        What the run holds stays held if a process can't be killed, as on a share that hangs, or if
        that takes longer than `patience` seconds.
        """
        until = time.monotonic() + patience

        # What other threads say of processes that are gone is no news
        sys.unraisablehook = lambda _: None

        def end() -> None:
            with self._ending:  # several signals may end a run at the same moment
                if kill_children(until) and self._hand_back is not None:
                    self._hand_back()
                    self._hand_back = None

        # In a thread: a file system that hangs must not keep the process
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(patience)


def kill_children(until: float) -> bool:
    """Kill all processes below this one; return whether they are gone before a monotonic time.

    The one by which Python removes what killed processes leave ends last, by itself.
    """
    import psutil

    cleaner, seen = set[psutil.Process](), set[psutil.Process]()
    while True:
        # Again and again: a thread may be about to replace one that was killed
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                is_cleaner = any(a.startswith(_CLEANER) for a in child.cmdline())
                (cleaner if is_cleaner else seen).add(child)
        alive = [child for child in seen if _is_alive(child)]
        if not alive:
            break
        if time.monotonic() > until:
            return False
        for child in alive:
            with suppress(psutil.Error):
                child.kill()
        time.sleep(_POLL_INTERVAL_S)
    if cleaner:
        pipe = resource_tracker.getfd()
        if pipe is not None:
            os.close(pipe)  # it ends when no process has the other end
        psutil.wait_procs(cleaner, max(0.0, until - time.monotonic()))
    return True


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
