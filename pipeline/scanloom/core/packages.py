"""Versions of packages, which may be on Python's path without being installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec

from scanloom.version import __version__

UNKNOWN = "unknown"


def package_version(distribution: str, module: str = "") -> str | None:
    """Return the version of a package; None if Python does not find its module.

    Parameters
    ----------
    distribution : str
        Name under which it is installed, as in `pip install`.
    module : str
        Name under which it is imported; by default, the same.

    Returns
    -------
    str or None
        `UNKNOWN` for a module on the path that neither an installer nor itself states a version of.
    """
    name = module or distribution
    if sys.modules.get(name) is None:
        try:
            if find_spec(name) is None:
                return None
        except (ImportError, ValueError):  # an import hook refuses it, or it left a broken entry
            return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", UNKNOWN))


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of scanloom and of packages; those that are not there are left out."""
    versions = {name: package_version(name) for name in names}
    return {
        "scanloom": __version__,
        **{name: version for name, version in versions.items() if version is not None},
    }
