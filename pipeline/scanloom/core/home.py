"""The user's home folder, and what there is where there is none."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

NOWHERE = Path("/nonexistent")
"""Debian's home of who has none: nothing is found there, and nothing can be made."""


def home() -> Path:
    """Return the user's home folder; an empty HOME counts as none, not as the root folder."""
    if named := os.environ.get("HOME"):
        return Path(named)
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return NOWHERE
    except ImportError:  # no POSIX
        return Path.home()


_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where Python looks for the user's name before it asks the system (`getpass.getuser`)."""
_CACHES = {
    "XDG_CACHE_HOME": "cache",
    "MPLCONFIGDIR": "matplotlib",
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variables that name folders which libraries make at home, else."""


def settle_in() -> None:
    """Give libraries what they ask for of a user without a name or a home, as in containers.

    The variables hold for this process and all that it starts; none that is set is changed. Caches
    go into a private folder that goes with this process.
    """
    if not any(map(os.environ.get, _NAMES)) and not _is_known():
        os.environ["USER"] = f"uid{os.getuid()}"
    missing = [name for name in _CACHES if not os.environ.get(name)]
    if not missing or os.access(home(), os.W_OK):
        return
    with suppress(OSError):  # without a folder for temporary files there are no caches
        folder = tempfile.mkdtemp(prefix="scanloom-caches-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in missing:
            os.environ[name] = str(Path(folder, _CACHES[name]))


def _is_known() -> bool:
    """Whether the system has a name for the user."""
    try:
        import pwd

        return bool(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False
    except ImportError:  # no POSIX
        return True
