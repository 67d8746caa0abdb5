"""Model formats: which reader takes a model folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scanloom.cards.card import ModelCard
from scanloom.cards.monai.bundle import is_bundle, read_bundle
from scanloom.cards.nnunet.folder import is_nnunet, read_nnunet
from scanloom.cards.totalsegmentator.folder import (
    is_dataset_folder,
    is_totalsegmentator,
    read_dataset_folder,
    read_totalsegmentator,
)
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
    ModelReader("TotalSegmentator", is_totalsegmentator, read_totalsegmentator),
    ModelReader("nnU-Net v2 model", is_nnunet, read_nnunet),
    ModelReader("nnU-Net v2 datasets", is_dataset_folder, read_dataset_folder),
)
"""All formats; the first that accepts a folder reads it."""


def find_reader(folder: Path) -> ModelReader | None:
    """Return the first reader that accepts a folder, None if none does."""
    return next((reader for reader in READERS if reader.accepts(folder)), None)


def is_model(folder: Path) -> bool:
    """Return whether any reader accepts a folder."""
    return find_reader(folder) is not None


def read_model(folder: Path) -> ModelCard:
    """Read a model folder with the first reader that accepts it.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if no reader accepts the folder, or as the reader.
    """
    reader = find_reader(folder)
    if reader is None:
        formats = ", ".join(reader.name for reader in READERS)
        raise ScanError(Reason.MODEL_DAMAGED, f"the folder is not a model ({formats})")
    return reader.read(folder)
