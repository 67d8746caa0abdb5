"""Completions for the shell: models, structures, workflows, extra files, devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer  # typer evaluates the annotations of completions

from scanloom.options import EXTRAS

if TYPE_CHECKING:
    from scanloom.core import Structure


def models(incomplete: str) -> list[str]:
    """Return the names of the models in the store."""
    from scanloom.cards.store import stored_models

    return _starting(incomplete, stored_models())


def structures(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return labels of the models on the command line, or else of all; after a comma, the next."""
    before, comma, last = incomplete.rpartition(",")
    taken = set(before.split(","))
    labels = dict.fromkeys(s.label for s in _structures_of(ctx.params.get("models") or ()))
    return [before + comma + label for label in _starting(last, labels) if label not in taken]


def _structures_of(names: Iterable[str]) -> Iterable[Structure]:
    from scanloom.cards.store import find_model, stored_models
    from scanloom.core import ScanError

    for name in names or stored_models():
        try:
            yield from find_model(name).structures
        except ScanError:
            continue


def workflows(incomplete: str) -> list[str]:
    """Return the names of the shipped workflows; files are completed by the shell otherwise."""
    from scanloom.cli.workflows import shipped_workflows

    return _starting(incomplete, shipped_workflows())


def extras(incomplete: str) -> list[str]:
    """Return the names of the files on request."""
    return _starting(incomplete, EXTRAS)


def devices(incomplete: str) -> list[str]:
    """Return the kinds of devices."""
    return _starting(incomplete, ("auto", "cpu", "cuda"))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
