"""Model formats: which reader takes a model folder. MONAI bundles are the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scanloom.cards.card import ModelCard
from scanloom.cards.meshnet.folder import (
    is_layers_model,
    is_meshnet_folder,
    read_layers_folder,
    read_meshnet_folder,
)
from scanloom.cards.monai.bundle import is_bundle, read_bundle
from scanloom.core import Reason, ScanError


@dataclass(frozen=True)
class ModelReader:
    """A format of trained models on disk.

    Parameters
    ----------
    name : str
        Display name of the format.
    accepts : callable
        Returns whether a folder looks like this format. Cheap, and never raises.
    read : callable
        Returns the `ModelCard` of a folder, or raises ScanError. Runs no code from the folder and
        does not import torch.
    """

    name: str
    accepts: Callable[[Path], bool]
    read: Callable[[Path], ModelCard]


READERS: Final = (
    ModelReader("MONAI bundle", is_bundle, read_bundle),
    ModelReader("TensorFlow.js layer model", is_layers_model, read_layers_folder),
    ModelReader("MeshNet with safetensors", is_meshnet_folder, read_meshnet_folder),
)
"""All formats; the first that accepts a folder reads it."""


def is_model(folder: Path) -> bool:
    """Return whether any reader accepts a folder."""
    return any(reader.accepts(folder) for reader in READERS)


def read_model(folder: Path) -> ModelCard:
    """Read a model folder with the first reader that accepts it.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if no reader accepts the folder, or as the reader.
    """
    reader = next((reader for reader in READERS if reader.accepts(folder)), None)
    if reader is None:
        formats = ", ".join(reader.name for reader in READERS)
        raise ScanError(Reason.MODEL_DAMAGED, f"the folder is not a model ({formats})")
    return reader.read(folder)
