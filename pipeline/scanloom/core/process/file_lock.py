"""Exclusive locks by flock(2), which the system releases when their process ends."""

from __future__ import annotations

import errno
import time

POLL_INTERVAL_S = 0.05
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def lock_file(descriptor: int, timeout_s: float | None = None) -> bool:
    """Lock an open file or folder until it is closed.

    Parameters
    ----------
    descriptor : int
        File descriptor. Closing it releases the lock.
    timeout_s : float or None
        Seconds to wait for a lock that another process holds: 0 tries once, None waits for ever.

    Returns
    -------
    bool
        False if another process still holds the lock, or if the system or the file system does not
        support flock.

    Raises
    ------
    OSError
        For any other error of the system.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return False
    no_wait = 0 if timeout_s is None else fcntl.LOCK_NB
    deadline = time.monotonic() + (timeout_s or 0)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | no_wait)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        except OSError as exc:
            if exc.errno in _UNSUPPORTED:
                return False
            raise
        else:
            return True
