"""The user's home folder."""

from __future__ import annotations

import os
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
