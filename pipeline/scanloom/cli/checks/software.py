"""Python and the libraries."""

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
    """Look at Python, the platform and every library that scanloom needs."""
    yield Finding(TOPIC, "Python", "ok", platform.python_version())
    yield _platform()
    for wanted in sorted(requirements(), key=lambda r: r.name.lower()):
        yield _library(wanted)


def requirements() -> list[Requirement]:
    """Return what scanloom's own metadata asks for, without the extras."""
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in metadata.requires("scanloom") or []]
    return [r for r in listed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _platform() -> Finding:
    seen = f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        return Finding(TOPIC, "platform", "ok", seen)
    return Finding(TOPIC, "platform", "warn", seen, "scanloom is tested on Linux only")


def _library(wanted: Requirement) -> Finding:
    advice = f"pip install --upgrade '{wanted.name}{wanted.specifier}'"
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return Finding(TOPIC, wanted.name, "bad", "not installed", advice)
    if not wanted.specifier.contains(version, prereleases=True):
        return Finding(TOPIC, wanted.name, "bad", f"{version}, not {wanted.specifier}", advice)
    return Finding(TOPIC, wanted.name, "ok", version)
