"""Foreign model formats: which reader takes a model folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import is_card
from scanloom.convert.files import NO_OPTIONS
from scanloom.core import Reason, ScanError, printable, slug

MAX_NAME: Final = 64
"""Most characters of a model's name, as of `is_slug`."""
_DIGITS: Final = 8
"""Digits of the hash at the end of a name that would be longer."""


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
        Returns the `ModelCard` of a folder, with the weights as they are there, or raises
        ScanError. Runs no code from the folder.
    has_options : bool
        Whether it takes the model's options, too.
    named : collection of str
        Options that the names of its cards say by themselves.
    """

    name: str
    accepts: Callable[[Path], bool]
    read: Callable[..., ModelCard]
    has_options: bool = False
    named: Collection[str] = ()


def readers() -> Iterator[ModelReader]:
    """Yield all formats; the first that accepts a folder reads it.

    Bundles whose scripts are known come before other bundles, whose reader refuses scripts, and a
    folder of TotalSegmentator before one of nnU-Net, of which it consists. Readers are imported
    here: models that were converted need none.
    """
    from scanloom.convert import meshnet, nnunet, onnx_model
    from scanloom.convert import totalsegmentator as total
    from scanloom.convert.monai import bundle

    yield ModelReader(
        "MONAI bundle with a MeshNet", meshnet.is_known_bundle, meshnet.read_known_bundle
    )
    yield ModelReader("MONAI bundle", bundle.is_bundle, bundle.read_bundle, has_options=True)
    yield ModelReader(
        "TotalSegmentator",
        total.is_totalsegmentator,
        total.read_totalsegmentator,
        has_options=True,
        named=("task",),
    )
    yield ModelReader("nnU-Net v2 model", nnunet.is_nnunet, nnunet.read_nnunet, has_options=True)
    yield ModelReader(
        "TensorFlow.js layer model", meshnet.is_layers_model, meshnet.read_layers_folder
    )
    yield ModelReader(
        "MeshNet with safetensors", meshnet.is_meshnet_folder, meshnet.read_meshnet_folder
    )
    yield ModelReader(
        "ONNX network with card.yaml", onnx_model.is_onnx_model, onnx_model.read_onnx_model
    )


def find_reader(folder: Path) -> ModelReader | None:
    """Return the first reader that accepts a folder, None if none does."""
    return next((reader for reader in readers() if reader.accepts(folder)), None)


def no_reader_error(folder: Path, detail: str) -> ScanError:
    """Return the error for a folder that no reader accepts.

    It says that the models are in subfolders, which format the folder has, or which are read.
    """
    from scanloom.convert.unread import unread_error

    if within := _models_within(folder):
        where = f"{len(within)} models are in folders of this one; give one of them"
        if len(within) == 1:
            where = f"the model is in its folder {printable(within[0].name)}; give that one"
        return ScanError(Reason.MODEL_UNKNOWN, where, str(folder))
    formats = ", ".join(reader.name for reader in readers())
    unknown = ScanError(Reason.MODEL_UNKNOWN, f"{detail} ({formats})", str(folder))
    return unread_error(folder) or unknown


def _models_within(folder: Path) -> list[Path]:
    """Return the subfolders that are models; [] for a file, or a folder that can't be listed."""
    with suppress(OSError):
        return [each for each in folder.iterdir() if each.is_dir() and find_reader(each)]
    return []


def source_folders(folder: Path, options: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders whose files may be read for a model: its own, and those next to it.

    A stage of nnU-Net's cascade lies next to the other one, and the dataset of TotalSegmentator
    that crops the scan next to the one that segments it. Of a folder of datasets, only those that
    the option `dataset` means are read.
    """
    from scanloom.convert.nnunet import datasets_in
    from scanloom.convert.totalsegmentator import is_totalsegmentator

    with suppress(OSError):  # what can't be listed can't be found by a reader either
        if chosen := options.get("dataset"):
            return tuple(datasets_in(folder, chosen)) or (folder,)
    own = folder.resolve()
    start = own.name.rpartition("__")[0].lower()
    # other datasets of nnU-Net are of no use to a model, and may be trained meanwhile
    if not start and own.name.lower().startswith("dataset") and is_totalsegmentator(own):
        start = "dataset"
    if not start:
        return (folder,)
    try:
        siblings = sorted(each for each in own.parent.iterdir() if each != own and each.is_dir())
    except OSError:  # what can't be listed can't be found by a reader either
        return (folder,)
    names = {each: (each.name, each.resolve().name) for each in siblings}  # it may be a link
    return (folder, *(e for e in siblings if any(n.lower().startswith(start) for n in names[e])))


def split_options(name: str) -> tuple[str, Mapping[str, str]]:
    """Return the name and the options of ``NAME:KEY=VALUE,KEY=VALUE``.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if an option has no value, or is given twice.
    """
    plain, _, text = name.rpartition(":")
    is_path = os.path.lexists(name)  # False where methods of Path raise
    of_address = not {*"/?&"}.isdisjoint(text.partition("=")[0])
    if not plain or "=" not in text or of_address or is_path:
        return name, {}
    pairs = [option.partition("=") for option in text.split(",")]
    options = {key.strip(): value.strip() for key, _, value in pairs}
    if len(options) < len(pairs) or not all(key and value for key, value in options.items()):
        detail = f"options are written KEY=VALUE,KEY=VALUE, got {printable(text)!r}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    return plain, options


def variant_name(name: str, options: Mapping[str, str]) -> str:
    """Return the name of a model with its options: with others it is another model.

    A name that would be too long ends in a hash instead.
    """
    chosen = [slug(text) for pair in sorted(options.items()) for text in pair]
    full = "-".join([name, *filter(None, chosen)])
    if len(full) <= MAX_NAME:
        return full
    start = full[: MAX_NAME - _DIGITS - 1].rstrip("-_")
    return f"{start}-{hashlib.sha256(full.encode()).hexdigest()[:_DIGITS]}"


def read_model(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> ModelCard:
    """Read a model folder with the first reader that accepts it.

    Parameters
    ----------
    options : mapping
        Options of the model, which become a part of its name.

    Raises
    ------
    ScanError
        MODEL_FORMAT for a folder of a format that is known and not read; MODEL_UNKNOWN if no
        reader accepts the folder, and for options of a format that has none; or as the reader.
    """
    reader = find_reader(folder)
    if reader is None and options and is_card(folder):
        detail = "a card has no options: those of its model were settled when it was added"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    if reader is None:
        raise no_reader_error(folder, "this folder is not a model")
    if not options:
        return reader.read(folder)
    if not reader.has_options:
        raise ScanError(Reason.MODEL_UNKNOWN, f"a {reader.name} has no options")
    card = reader.read(folder, options)
    added = {key: value for key, value in options.items() if key not in reader.named}
    return replace(card, name=variant_name(card.name, added))
