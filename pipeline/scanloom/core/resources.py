"""Folders that ship with the package: `models`, `data`, `workflows`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scanloom.core import Reason, ScanError


def shipped(kind: Literal["models", "data", "workflows"], package: Path | None = None) -> Path:
    """Return a shipped folder, from the installed package or else from the checkout.

    Parameters
    ----------
    kind : str
        Name of the folder.
    package : Path or None
        Folder of the package `scanloom`; None for the running one.

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
