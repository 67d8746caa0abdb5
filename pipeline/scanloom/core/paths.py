"""Folders of the user and of the package: home, cache, config and data, and shipped files."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from scanloom.core.errors import ScanError, check_type
from scanloom.core.reasons import Reason

NOWHERE = Path("/nonexistent")
"""Debian's home folder of users without one: it does not exist and can't be created."""


def given_path(path: str | Path, name: str) -> Path:
    """Return the path that an argument gives; an empty text would be the current folder.

    Raises
    ------
    TypeError
        If it is no path.
    ValueError
        If the text is empty.
    """
    check_type(path, (str, os.PathLike), f"{name} must be a path, as str or Path")
    if isinstance(path, str) and not path.strip():
        raise ValueError(f"{name} must be a path; the text is empty")
    return Path(path)


def home() -> Path:
    """Return the user's home folder; an empty HOME counts as unset, not as the root folder."""
    if variable := os.environ.get("HOME"):
        return Path(variable)
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return NOWHERE


def user_cache_folder() -> Path:
    """Return the folder of scanloom's caches, by default `~/.cache/scanloom`."""
    return _user_folder("cache")


def user_config_folder() -> Path:
    """Return the folder of scanloom's configuration, by default `~/.config/scanloom`."""
    return _user_folder("config")


def user_data_folder() -> Path:
    """Return the folder of scanloom's data, by default `~/.local/share/scanloom`."""
    return _user_folder("data")


def _user_folder(kind: Literal["cache", "config", "data"]) -> Path:
    """Return a folder of the XDG Base Directory Specification, or its like on other systems."""
    from platformdirs import PlatformDirs

    try:
        folder: Path = getattr(PlatformDirs("scanloom", appauthor=False), f"user_{kind}_path")
    except RuntimeError:  # a user without a home folder
        return NOWHERE / "scanloom" / kind
    return folder


_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Variables with the user's name, which Python reads before the system's (`getpass.getuser`)."""
_CACHE_VARIABLES = {
    "XDG_CACHE_HOME": "cache",
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variables for the cache folders of libraries, which default to the home folder."""


def settle_in() -> None:
    """Set environment variables for users without a name or a writable home, as in containers.

    They apply to this process and its children; variables that are set already are kept. Caches go
    into a private temporary folder, removed when this process exits.
    """
    if not any(map(os.environ.get, _USER_VARIABLES)) and not _has_user_name():
        os.environ["USER"] = f"uid{os.getuid()}"
    missing = [name for name in _CACHE_VARIABLES if not os.environ.get(name)]
    if not missing or os.access(home(), os.W_OK):
        return
    with suppress(OSError):  # without a folder for temporary files there are no caches
        folder = tempfile.mkdtemp(prefix="scanloom-caches-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in missing:
            os.environ[name] = str(Path(folder, _CACHE_VARIABLES[name]))


def _has_user_name() -> bool:
    """Return whether the system has a name for the user."""
    import pwd

    try:
        return bool(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False


def shipped(kind: Literal["models", "data", "workflows"], package: Path | None = None) -> Path:
    """Return a shipped folder, from the installed package or else from the checkout.

    Raises
    ------
    ScanError
        NOT_FOUND if neither has it.
    """
    package = Path(__file__).parents[1] if package is None else package
    installed = package / "_shipped" / kind
    if installed.is_dir():
        return installed
    root = package.parent.parent  # a checkout: ROOT/pipeline/scanloom
    if (root / "pyproject.toml").is_file() and (root / kind).is_dir():
        return root / kind
    raise ScanError(Reason.NOT_FOUND, f"the shipped folder `{kind}` is missing")


def shipped_workflows() -> dict[str, Path]:
    """Return the files of the shipped workflows by name."""
    return {path.stem: path for path in sorted(shipped("workflows").glob("*.yaml"))}
