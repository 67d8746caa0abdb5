"""Where models are: those that ship, and the user's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from scanloom.cards.bundle import read_bundle, slug
from scanloom.cards.card import ModelCard
from scanloom.cards.shipped import shipped
from scanloom.core import Reason, ScanError, home, nearest


@dataclass(frozen=True)
class ModelEntry:
    """A bundle in the store: its card, or why it has none."""

    name: str
    folder: Path
    card: ModelCard | None
    error: ScanError | None


def shipped_models() -> Path:
    """Return the folder of the models that ship; errors as `shipped`."""
    return shipped("models")


def user_models() -> Path:
    """Return the folder of the user's own models, which need not be there.

    `$XDG_DATA_HOME/scanloom/models`, by default `~/.local/share/scanloom/models` (XDG Base
    Directory Specification: a relative path there is to be ignored).
    """
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    data = named if named.is_absolute() else home() / ".local" / "share"
    return data / "scanloom" / "models"


def find_model(name_or_folder: str) -> ModelCard:
    """Return the card of a model.

    Parameters
    ----------
    name_or_folder : str
        A name from the store, those that ship first; or else the path of a bundle's folder.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN where it is neither, with the names there are; or as `read_bundle`.
    """
    known = _bundles()
    if name_or_folder in known:
        return read_bundle(known[name_or_folder])
    if os.path.isdir(name_or_folder):  # noqa: PTH112 - says no where Path raises
        return read_bundle(Path(name_or_folder))
    hint = nearest(name_or_folder, sorted(known))
    raise ScanError(Reason.MODEL_UNKNOWN, f"there is no model {name_or_folder!r}; {hint}")


def list_models() -> tuple[ModelEntry, ...]:
    """Return what is in the store, by name; a broken bundle with its error."""
    return tuple(_entry(name, folder) for name, folder in sorted(_bundles().items()))


def _entry(name: str, folder: Path) -> ModelEntry:
    try:
        return ModelEntry(name, folder, read_bundle(folder), None)
    except ScanError as exc:
        return ModelEntry(name, folder, None, exc)


def _bundles() -> dict[str, Path]:
    """Return the bundle folders of the store by name; where two share one, that which ships."""
    found: dict[str, Path] = {}
    for place in _places():
        for folder in sorted(place.iterdir()) if place.is_dir() else ():
            if (folder / "configs").is_dir():
                found.setdefault(slug(folder.name), folder)
    return found


def _places() -> tuple[Path, ...]:
    """Return the folders of models; an installation without its models can still use others."""
    try:
        return shipped_models(), user_models()
    except ScanError:
        return (user_models(),)
