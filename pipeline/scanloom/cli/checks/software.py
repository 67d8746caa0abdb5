"""Check Python and the libraries."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from scanloom.cli.checks.finding import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TOPIC = "software"


def check_software() -> Iterator[Finding]:
    """Check Python, the platform and every required library."""
    yield Finding(TOPIC, "Python", "ok", platform.python_version())
    yield _platform()
    for requirement in sorted(requirements(), key=lambda r: r.name.lower()):
        yield _library(requirement)


def requirements() -> list[Requirement]:
    """Return the requirements in scanloom's metadata, without extras."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in metadata.requires("scanloom") or []]
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
