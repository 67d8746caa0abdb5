"""The model store: models that ship, those of a shared folder, and the user's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import is_card
from scanloom.convert.conversion import all_weights, load_card
from scanloom.convert.download import addresses
from scanloom.convert.files import NO_OPTIONS
from scanloom.convert.provenance import Provenance, check_files, file_digest, read_provenance
from scanloom.convert.readers import find_reader, split_options, variant_name
from scanloom.convert.unread import unread_error
from scanloom.core import Reason, ScanError, did_you_mean, printable, slug, user_data_folder
from scanloom.core.paths import shipped

SHARED_VARIABLE = "SCANLOOM_MODELS"
"""Variable that names folders with models that several users share, separated as in PATH."""

OWN_FORMAT = "scanloom card"
"""Format of models that are no foreign ones."""

_SHOWN_CHARACTERS = 200

Section = Literal["ships", "shared", "own"]


class StoredModel(NamedTuple):
    """A folder of the store, and the part of the store that it belongs to."""

    folder: Path
    section: Section


@dataclass(frozen=True)
class ModelEntry:
    """A model in the store: its card, or the error of reading it.

    Parameters
    ----------
    name : str
        Name of the model in the store.
    folder : Path
        Folder of the model.
    card : ModelCard or None
        None if it can't be read.
    error : ScanError or None
        Reason for a missing card.
    section : "ships", "shared", "own" or None
        Part of the store; None for a folder outside of the store.
    format : str
        Name of the reader; empty without one.
    provenance : Provenance or None
        Record of `models add`; None for models that were put there by hand, or ship.
    """

    name: str
    folder: Path
    card: ModelCard | None
    error: ScanError | None
    section: Section | None = None
    format: str = ""
    provenance: Provenance | None = None


def shipped_models() -> Path:
    """Return the folder of the shipped models; errors as `shipped`."""
    return shipped("models")


def shared_models() -> tuple[Path, ...]:
    """Return the shared folders that the variable SCANLOOM_MODELS names; they may be read-only."""
    names = os.environ.get(SHARED_VARIABLE, "").split(os.pathsep)
    return tuple(Path(name).absolute() for name in names if name)


def user_models() -> Path:
    """Return the folder of the user's own models, which may not exist.

    `$XDG_DATA_HOME/scanloom/models`, by default `~/.local/share/scanloom/models`.
    """
    return user_data_folder() / "models"


def find_model(name_or_folder: str) -> ModelCard:
    """Return the card of a model; its files are compared with the record of `models add`.

    Parameters
    ----------
    name_or_folder : str
        Name of a model in the store (those that ship first, then shared ones, then the user's
        own), or path of a model folder; with options after a colon, as of `split_options`.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN, with the known names, if it is neither; MODEL_HASH if a file changed since
        the model was added; or as `read_model`.
    """
    plain, options = split_options(name_or_folder)
    located = locate_model(plain)
    return _load(located.name, located.folder, located.section, options)


def locate_model(name_or_folder: str) -> ModelEntry:
    """Return the folder of a model, without its card; arguments and errors as `find_model`."""
    if (stored := _find_stored(name_or_folder)) is not None:
        return stored
    if os.path.isdir(name_or_folder):  # noqa: PTH112 - False where Path.is_dir() raises
        folder = Path(name_or_folder)
        return ModelEntry(slug(folder.resolve().name), folder, None, None)
    if os.path.isfile(name_or_folder):  # noqa: PTH113 - False where Path.is_file() raises
        if (error := unread_error(Path(name_or_folder))) is not None:
            raise error
        detail = "a file is not a model's folder; `scanloom models add FILE` adds a zip file"
        raise ScanError(Reason.MODEL_UNKNOWN, detail, name_or_folder)
    # after folders: they may be called as a collection's model is
    request = addresses.known_request(name_or_folder)
    stored = None if request is None else _find_stored(slug(request.rpartition("/")[2]))
    if stored is not None:
        return stored
    missing = [printable(str(root)) for root in shared_models() if not root.is_dir()]
    lost = f"; {SHARED_VARIABLE} names {missing[0]}, which is not a folder" if missing else ""
    raise ScanError(Reason.MODEL_UNKNOWN, f"{_not_there(name_or_folder, request)}{lost}")


def absolute_name(name_or_folder: str) -> str:
    """Return a name that means the same model in all working folders: of a folder, its whole path.

    The argument and errors are as of `find_model`.
    """
    plain, _ = split_options(name_or_folder)
    if _find_stored(plain) is not None or not os.path.isdir(plain):  # noqa: PTH112  # as above
        return name_or_folder
    return os.path.abspath(plain) + name_or_folder[len(plain) :]  # noqa: PTH100  # keeps links


def missing_request(name_or_folder: str) -> str | None:
    """Return the request by which `models add` gets a model; None if it is there, or unknown.

    The argument is as of `find_model`; errors as of `split_options`.
    """
    plain, _ = split_options(name_or_folder)
    request = addresses.known_request(plain)
    if request is None or os.path.lexists(plain):
        return None
    try:
        locate_model(plain)
    except ScanError:
        return request
    return None


def _find_stored(name: str) -> ModelEntry | None:
    """Return the model of a name in the store; no other folder is inspected."""
    for each, stored in _stored_folders():
        if each == name and is_model(stored.folder):
            return ModelEntry(each, stored.folder, None, None, stored.section)
    return None


def _not_there(name: str, request: str | None) -> str:
    """Return why there is no model of a name, and how to get it."""
    shown = repr(name[:_SHOWN_CHARACTERS])
    if request is not None:
        return f"the model {shown} is not in the store; `scanloom models add {request}` gets it"
    if name.lower().removeprefix("totalsegmentator/") in addresses.TOTALSEGMENTATOR_LICENSED:
        return f"the weights of {shown} need a licence: get them with TotalSegmentator"
    if os.sep in name:
        return f"there is no folder {shown}"
    hint = did_you_mean(name, sorted({*stored_models(), *addresses.known_names()}))
    return f"there is no model or folder {shown}; {hint}"


def describe_model(name_or_folder: str) -> ModelEntry:
    """Return a model with card, format and provenance; arguments and errors as `find_model`."""
    plain, options = split_options(name_or_folder)
    located = locate_model(plain)
    entry = _entry(located.name, located.folder, located.section, options)
    if entry.error is not None:
        raise entry.error
    return entry


def list_models() -> tuple[ModelEntry, ...]:
    """Return the models of the store by name; a broken model with its error."""
    return tuple(_entry(name, *model) for name, model in sorted(stored_models().items()))


def verify_model(entry: ModelEntry, options: Mapping[str, str] = NO_OPTIONS) -> None:
    """Read a model, with its options, and compare all of its files with the record of `models add`.

    Raises
    ------
    ScanError
        MODEL_HASH if a file differs; or as `read_model`.
    """
    provenance = read_provenance(entry.folder)
    if provenance is not None:
        check_files(entry.folder, provenance, large=True)
    check_weights(load_card(entry.folder, options, ships=entry.section == "ships"))


def check_weights(card: ModelCard) -> None:
    """Compare the weights of all networks of a model with its card: MODEL_HASH if they differ."""
    for weights in all_weights(card):
        if not weights.file.is_file() or file_digest(weights.file) != weights.sha256:
            raise ScanError(Reason.MODEL_HASH, "the weights differ from those of the card")


def is_model(folder: Path) -> bool:
    """Return whether a folder is a model of this package's form, or of one that is converted."""
    return is_card(folder) or find_reader(folder) is not None


def stored_models() -> dict[str, StoredModel]:
    """Return the models of the store by name; those of the first section take precedence."""
    models: dict[str, StoredModel] = {}
    for name, stored in _stored_folders():
        if is_model(stored.folder):
            models.setdefault(name, stored)
    return models


def _stored_folders() -> Iterator[tuple[str, StoredModel]]:
    """Yield the folders of the store, which may be models, with their names, by precedence."""
    for root, section in _roots():
        for folder in _folders(root):
            if name := slug(folder.name):
                yield name, StoredModel(folder, section)


def _entry(
    name: str,
    folder: Path,
    section: Section | None,
    options: Mapping[str, str] = NO_OPTIONS,
) -> ModelEntry:
    reader = find_reader(folder)
    form = reader.name if reader else OWN_FORMAT * is_card(folder)
    provenance = None
    try:
        provenance = read_provenance(folder)
        card = _load(name, folder, section, options)
        return ModelEntry(name, folder, card, None, section, form, provenance)
    except ScanError as exc:
        return ModelEntry(name, folder, None, exc, section, form, provenance)


def _load(
    name: str, folder: Path, section: Section | None, options: Mapping[str, str]
) -> ModelCard:
    """Return the card of a model, and compare its files with its record, if there is one.

    A card in the store has the name that the model has there; readers may choose another. Large
    files are not compared here, unless they are converted: weights are when they are loaded.
    """
    provenance = read_provenance(folder)
    if provenance is not None:
        check_files(folder, provenance, large=bool(options))
    card = load_card(folder, options, ships=section == "ships")
    return card if section is None else replace(card, name=variant_name(name, options))


def _folders(root: Path) -> list[Path]:
    """Return the entries of a part of the store by name; hidden ones are downloads in progress."""
    try:
        return sorted(path for path in root.iterdir() if not path.name.startswith("."))
    except OSError:  # missing, or another user's
        return []


def _roots() -> Iterator[tuple[Path, Section]]:
    """Yield the folders of the store; the shipped one may be missing from an installation."""
    with suppress(ScanError):
        yield shipped_models(), "ships"
    for folder in shared_models():
        yield folder, "shared"
    yield user_models(), "own"
