"""Model formats: which reader takes a model folder.

The readers of formats other than MONAI bundles are imported when a folder is none: the shipped
models are bundles, and the imports take a tenth of the time in which a scan is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scanloom.cards.card import ModelCard
from scanloom.cards.meshnet.zoo import is_known_bundle, read_known_bundle
from scanloom.cards.monai.bundle import NO_OPTIONS, is_bundle, read_bundle
from scanloom.core import Reason, ScanError, printable, slug


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
    read_with : callable, optional
        Likewise, with the model's options, for formats that have any.
    """

    name: str
    accepts: Callable[[Path], bool]
    read: Callable[[Path], ModelCard]
    read_with: Callable[[Path, Mapping[str, str]], ModelCard] | None = None


def _is_totalsegmentator(folder: Path) -> bool:
    from scanloom.cards.totalsegmentator.folder import is_totalsegmentator

    return is_totalsegmentator(folder)


def _read_totalsegmentator(folder: Path) -> ModelCard:
    from scanloom.cards.totalsegmentator.folder import read_totalsegmentator

    return read_totalsegmentator(folder)


def _is_nnunet(folder: Path) -> bool:
    from scanloom.cards.nnunet.folder import is_nnunet

    return is_nnunet(folder)


def _read_nnunet(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> ModelCard:
    from scanloom.cards.nnunet.folder import read_nnunet

    return read_nnunet(folder, options)


def _is_dataset_folder(folder: Path) -> bool:
    from scanloom.cards.totalsegmentator.folder import is_dataset_folder

    return is_dataset_folder(folder)


def _read_dataset_folder(folder: Path) -> ModelCard:
    from scanloom.cards.totalsegmentator.folder import read_dataset_folder

    return read_dataset_folder(folder)


def _is_layers_model(folder: Path) -> bool:
    from scanloom.cards.meshnet.folder import is_layers_model

    return is_layers_model(folder)


def _read_layers_folder(folder: Path) -> ModelCard:
    from scanloom.cards.meshnet.folder import read_layers_folder

    return read_layers_folder(folder)


def _is_meshnet_folder(folder: Path) -> bool:
    from scanloom.cards.meshnet.folder import is_meshnet_folder

    return is_meshnet_folder(folder)


def _read_meshnet_folder(folder: Path) -> ModelCard:
    from scanloom.cards.meshnet.folder import read_meshnet_folder

    return read_meshnet_folder(folder)


READERS: Final = (
    ModelReader("MONAI bundle with a MeshNet", is_known_bundle, read_known_bundle),
    ModelReader("MONAI bundle", is_bundle, read_bundle, read_bundle),
    ModelReader("TotalSegmentator", _is_totalsegmentator, _read_totalsegmentator),
    ModelReader("nnU-Net v2 model", _is_nnunet, _read_nnunet, _read_nnunet),
    ModelReader("nnU-Net v2 datasets", _is_dataset_folder, _read_dataset_folder),
    ModelReader("TensorFlow.js layer model", _is_layers_model, _read_layers_folder),
    ModelReader("MeshNet with safetensors", _is_meshnet_folder, _read_meshnet_folder),
)
"""All formats; the first that accepts a folder reads it."""


def find_reader(folder: Path) -> ModelReader | None:
    """Return the first reader that accepts a folder, None if none does."""
    return next((reader for reader in READERS if reader.accepts(folder)), None)


def is_model(folder: Path) -> bool:
    """Return whether any reader accepts a folder."""
    return find_reader(folder) is not None


def split_options(name: str) -> tuple[str, Mapping[str, str]]:
    """Return the name and the options of ``NAME:KEY=VALUE,KEY=VALUE``.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if an option has no value, or is given twice.
    """
    plain, _, text = name.rpartition(":")
    if not plain or "=" not in text or "/" in text.partition("=")[0]:
        return name, {}
    pairs = [option.partition("=") for option in text.split(",")]
    options = {key.strip(): value.strip() for key, _, value in pairs}
    if len(options) < len(pairs) or not all(key and value for key, value in options.items()):
        detail = f"options are written KEY=VALUE,KEY=VALUE, got {printable(text)!r}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    return plain, options


def variant_name(name: str, options: Mapping[str, str]) -> str:
    """Return the name of a model with its options: with others it is another model."""
    chosen = [slug(text) for pair in sorted(options.items()) for text in pair]
    return "-".join([name, *filter(None, chosen)])


def read_model(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> ModelCard:
    """Read a model folder with the first reader that accepts it.

    Parameters
    ----------
    folder : Path
        The model.
    options : mapping
        Options of the model, which become a part of its name.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if no reader accepts the folder, and for options of a format that has none;
        or as the reader.
    """
    reader = find_reader(folder)
    if reader is None:
        formats = ", ".join(reader.name for reader in READERS)
        raise ScanError(
            Reason.MODEL_UNKNOWN, f"this folder is not a model ({formats})", str(folder)
        )
    if not options:
        return reader.read(folder)
    if reader.read_with is None:
        raise ScanError(Reason.MODEL_UNKNOWN, f"a {reader.name} has no options")
    card = reader.read_with(folder, options)
    return replace(card, name=variant_name(card.name, options))
