"""The model store: shipped models and the user's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from scanloom.cards.card import ModelCard
from scanloom.cards.readers import is_model, read_model
from scanloom.core import Reason, ScanError, did_you_mean, slug, user_data_folder
from scanloom.core.resources import shipped


@dataclass(frozen=True)
class ModelEntry:
    """A model in the store: its card, or the error of reading it."""

    name: str
    folder: Path
    card: ModelCard | None
    error: ScanError | None


def shipped_models() -> Path:
    """Return the folder of the shipped models; errors as `shipped`."""
    return shipped("models")


def user_models() -> Path:
    """Return the folder of the user's own models, which may not exist.

    `$XDG_DATA_HOME/scanloom/models`, by default `~/.local/share/scanloom/models`.
    """
    return user_data_folder() / "models"


def find_model(name_or_folder: str) -> ModelCard:
    """Return the card of a model.

    Parameters
    ----------
    name_or_folder : str
        Name of a model in the store (shipped models first), or path of a model folder.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN, with the known names, if it is neither; or as `read_model`.
    """
    known = _model_folders()
    if name_or_folder in known:
        return read_model(known[name_or_folder])
    if os.path.isdir(name_or_folder):  # noqa: PTH112 - False where Path.is_dir() raises
        return read_model(Path(name_or_folder))
    hint = did_you_mean(name_or_folder, sorted(known))
    raise ScanError(Reason.MODEL_UNKNOWN, f"there is no model {name_or_folder!r}; {hint}")


def list_models() -> tuple[ModelEntry, ...]:
    """Return the models of the store by name; a broken model with its error."""
    return tuple(_entry(name, folder) for name, folder in sorted(_model_folders().items()))


def _entry(name: str, folder: Path) -> ModelEntry:
    try:
        return ModelEntry(name, folder, read_model(folder), None)
    except ScanError as exc:
        return ModelEntry(name, folder, None, exc)


def _model_folders() -> dict[str, Path]:
    """Return the model folders of the store by name; shipped models take precedence."""
    folders: dict[str, Path] = {}
    for root in _roots():
        for folder in sorted(root.iterdir()) if root.is_dir() else ():
            if is_model(folder):
                folders.setdefault(slug(folder.name), folder)
    return folders


def _roots() -> tuple[Path, ...]:
    """Return the folders of the store; the shipped one may be missing from an installation."""
    try:
        return shipped_models(), user_models()
    except ScanError:
        return (user_models(),)
