"""Check Python and the libraries."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from scanloom.cli.checks.finding import Finding
from scanloom.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TOPIC = "software"


def check_software() -> Iterator[Finding]:
    """Check Python, the platform and every required library."""
    yield Finding(TOPIC, "Python", "ok", platform.python_version())
    yield _platform()
    known = requirements()
    if not known:
        seen = f"{__version__}, not installed: which libraries it needs is not known here"
        yield Finding(TOPIC, "scanloom", "warn", seen, "pip install scanloom")
    for requirement in sorted(known, key=lambda r: r.name.lower()):
        yield _library(requirement)


def requirements() -> list[Requirement]:
    """Return the requirements in scanloom's metadata, without extras."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("scanloom") or []
    except metadata.PackageNotFoundError:  # on Python's path without being installed
        return []
    parsed = [Requirement(line) for line in lines]
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _platform() -> Finding:
    seen = f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        return Finding(TOPIC, "platform", "ok", seen)
    return Finding(TOPIC, "platform", "warn", seen, "scanloom is tested on Linux only")


def _library(requirement: Requirement) -> Finding:
    advice = f"pip install --upgrade '{requirement.name}{requirement.specifier}'"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(TOPIC, requirement.name, "bad", "not installed", advice)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(
            TOPIC, requirement.name, "bad", f"{version}, not {requirement.specifier}", advice
        )
    return Finding(TOPIC, requirement.name, "ok", version)
