"""Add models to the user's part of the store, and remove them: whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import CARD_FILE, WEIGHTS_FOLDER, read_card
from scanloom.convert.conversion import convert_model
from scanloom.convert.download.sources import (
    Downloads,
    Gathered,
    ModelSource,
    Progress,
    find_source,
)
from scanloom.convert.files import LICENCE_PLACES, TASK_FILE
from scanloom.convert.provenance import (
    Provenance,
    check_files,
    hash_files,
    read_provenance,
    write_provenance,
)
from scanloom.convert.readers import find_reader, no_reader_error
from scanloom.convert.store import check_weights, is_model, stored_models, user_models
from scanloom.convert.unread import unread_error
from scanloom.core import Reason, ScanError, printable, slug
from scanloom.core.process import lock_file
from scanloom.io.system.atomic_write import fsync_path

OFFLINE_VARIABLE: Final = "SCANLOOM_OFFLINE"
"""Variable that forbids the use of the network, unless it is empty or 0."""
_WORK: Final = ".adding"
"""Folder of downloads, unfinished models and locks, inside the user's part of the store."""
_DOWNLOADS: Final = "downloads"
_MAX_NESTING: Final = 8
"""Folders around a model in a zip file."""
_SHOWN_MODELS: Final = 5


@dataclass(frozen=True)
class Licence:
    """Licence of a model.

    Parameters
    ----------
    name : str
        As the model or its source states it.
    texts : tuple of str
        Texts of the licence files: code and weights may have licences of their own.
    """

    name: str
    texts: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The texts as one."""
        return "\n\n".join(self.texts)

    @property
    def has_conditions(self) -> bool:
        """Whether one of the licences excludes commercial use."""
        texts = (self.name, *(text for text in self.texts if not _GNU.search(text)))
        return any(map(_CONDITIONS.search, texts))


Accept = Callable[[str, Licence], bool]
"""Returns whether the user accepts the licence of the model of that name."""

_SECTIONS: Final = {
    "ships": "the models that ship",
    "shared": "a shared folder",
    "own": "your own store",
}
_FILES: Final = re.compile(r"(licen[cs]e|copying|weights_licen[cs]e)([._-][\w.-]*)?", re.IGNORECASE)
_MAX_BYTES: Final = 1 << 20
_CONDITIONS: Final = re.compile(
    r"non-?\s?commercial|BY[- ]NC|(academic|research) (use|purposes?) only"
    r"|only for (academic|research)",
    re.IGNORECASE,
)
_GNU: Final = re.compile(r"GNU (LESSER |AFFERO )?GENERAL PUBLIC LICENSE", re.IGNORECASE)
"""Licences that mention non-commercial distribution without asking for it."""


@dataclass(frozen=True)
class AddOptions:
    """Options of `add_model`.

    Parameters
    ----------
    accept : callable
        Asked once about a licence that has conditions.
    name : str or None
        Name of the model in the store; None for that of its source.
    offline : bool
        Whether the network must not be used.
    progress : callable
        Receives the progress of downloads.
    on_wait : callable
        Called if another process is adding a model of this name.
    """

    accept: Accept
    name: str | None = None
    offline: bool = False
    progress: Progress = lambda name, received, total: None
    on_wait: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Added:
    """Name and folder of a model that was added, or that was in the store already."""

    name: str
    folder: Path
    already: bool = False


def add_model(request: str | ModelSource, options: AddOptions) -> Added:
    """Copy or download a model into the user's part of the store.

    The model is built under a temporary name and published by one rename. Of several processes that
    add the same model, one downloads and the others wait.

    Parameters
    ----------
    request : str or ModelSource
        As in `find_source`, or a source, such as a model of an archive.
    options : AddOptions
        Name, and answers to questions.

    Raises
    ------
    ScanError
        MODEL_EXISTS if the name is taken; OFFLINE; LICENCE if its conditions are not accepted; as
        the source, or as `read_model` if no reader can read the model. Nothing is added then.
    OSError
        If the store can't be written.
    """
    source = find_source(request) if isinstance(request, str) else request
    name = slug(options.name if options.name is not None else source.name)
    if not name:
        detail = "the model's name has neither a-z nor 0-9: give one by --name"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    with _work_folder(name, options.on_wait) as work:
        if _has(name, source):
            return Added(name, user_models() / name, already=True)
        if source.remote and (options.offline or is_offline()):
            raise ScanError(Reason.OFFLINE, f"{source.origin} is on the network")
        try:
            added = _build(name, source, work, options)
        except ScanError as exc:
            started = any((work / _DOWNLOADS).glob("*"))
            if not started or not (exc.reason.retry or exc.reason is Reason.LICENCE):
                shutil.rmtree(work, ignore_errors=True)  # no further attempt needs the downloads
            raise
        shutil.rmtree(work, ignore_errors=True)
        return added


def source_size(source: ModelSource) -> int | None:
    """Return the bytes that a source will download, None if unknown; errors as `ModelSource.size`.

    Lists of files are downloaded for that, and not kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        return source.size(Downloads(Path(folder), lambda name, received, total: None))


def is_offline() -> bool:
    """Return whether the environment forbids the use of the network."""
    return os.environ.get(OFFLINE_VARIABLE, "") not in ("", "0")


def remove_model(name: str) -> None:
    """Remove a model from the user's part of the store.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if the user has no such model; models that ship or are shared stay.
    OSError
        If it can't be removed.
    """
    model = stored_models().get(name)
    folder = _own_folder(name)
    if folder is None:
        note = "" if model is None else f" of your own: it is in {_SECTIONS[model.section]}"
        raise ScanError(Reason.MODEL_UNKNOWN, f"there is no model {printable(name[:200])!r}{note}")
    with _work_folder(name, lambda: None) as work:
        if folder.is_symlink():
            folder.unlink()
        else:
            work.mkdir(parents=True, exist_ok=True)
            folder.rename(work / f"removed.{secrets.token_hex(4)}")
        shutil.rmtree(work, ignore_errors=True)


def _own_folder(name: str) -> Path | None:
    """Return the folder of the user's own model of this name, or None."""
    root = user_models()
    folders = root.iterdir() if root.is_dir() else ()
    visible = (folder for folder in folders if not folder.name.startswith("."))
    return next((folder for folder in visible if slug(folder.name) == name), None)


def _has(name: str, source: ModelSource) -> bool:
    """Return whether a model was added from this source already, and is unchanged.

    Raises
    ------
    ScanError
        MODEL_EXISTS if the name belongs to another model; MODEL_HASH if the model has changed.
    """
    model = stored_models().get(name)
    if model is not None and model.section != "own":
        detail = f"the name {name} belongs to a model in {_SECTIONS[model.section]}"
        raise ScanError(Reason.MODEL_EXISTS, detail)
    folder = _own_folder(name)
    if folder is None or not source.remote:
        return False  # the content of local sources is compared
    provenance = read_provenance(folder)
    if provenance is None or provenance.source != source.origin:
        raise _exists(name)
    check_files(folder, provenance, large=True)
    return True


def _build(name: str, source: ModelSource, work: Path, options: AddOptions) -> Added:
    """Gather the files of a model, check them, and publish its folder."""
    staging = work / f"staging.{secrets.token_hex(4)}"
    (staging / "files").mkdir(parents=True)
    try:
        downloads = Downloads(work / _DOWNLOADS, options.progress)
        folder = staging / name
        if source.options and source.folder is not None:  # of large folders, a part is chosen
            gathered, root = Gathered(source.origin, published=False), source.folder
        else:
            gathered = source.gather(staging / "files", downloads)
            root = _find_root(staging / "files")
        if source.options:  # settled for good: only what was chosen is kept
            _convert_chosen(root.absolute(), source.options, folder.absolute())
        else:
            root.rename(folder)  # readers name a model by its folder
            if find_reader(folder) is not None:  # whatever card lies next to it
                convert_model(folder.absolute(), {}, folder.absolute())
        card = read_card(folder)
        check_weights(card)
        record = _record(folder, card, source, gathered, options.accept)
        # Files are links to downloads: to remove these later would make files look newer than the
        # card, which then does not count (`has_card`), and the model would be converted again
        shutil.rmtree(downloads.folder, ignore_errors=True)
        os.utime(folder / CARD_FILE)
        return _publish(folder, user_models() / name, record)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _convert_chosen(source: Path, options: Mapping[str, str], folder: Path) -> None:
    """Convert a model with options into a new folder, with the files of its licence."""
    folder.mkdir()
    convert_model(source, options, folder)
    for link in filter(Path.is_symlink, [*(folder / WEIGHTS_FOLDER).iterdir()]):
        file = link.resolve()
        link.unlink()
        shutil.copyfile(file, link)
    for file in licence_files(source):
        (folder / file.relative_to(source).parent).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.relative_to(source))


def _find_root(folder: Path) -> Path:
    """Return the folder that a reader accepts: the only one of those that lie highest.

    Files of a licence that lie above it are moved to it.
    """
    level, visited = [folder], list[Path]()
    for _ in range(_MAX_NESTING):
        visited += level
        models = list(filter(is_model, level))
        if len(models) > 1:
            shown = ", ".join(printable(each.name[:60]) for each in sorted(models)[:_SHOWN_MODELS])
            detail = f"the source holds {len(models)} models ({shown}): add them one by one"
            raise ScanError(Reason.MODEL_UNKNOWN, f"{detail}, each by its folder")
        if models:
            _move_licences(folder, models[0])
            return models[0]
        if (folder / TASK_FILE).is_file():  # a part of it is another model
            break
        level = sorted(path for above in level for path in above.iterdir() if path.is_dir())
    # a format is recognized by the folder above its parts, such as folds
    known = next(filter(None, map(unread_error, visited)), None)
    raise known or no_reader_error(folder, "the source holds no model")


def _move_licences(folder: Path, model: Path) -> None:
    """Move files of a licence between a folder and a model below it to the model."""
    for above in model.parents:
        if not above.is_relative_to(folder):
            return
        for file in filter(_is_licence, above.iterdir()):
            if not (model / file.name).exists():
                file.rename(model / file.name)


def _record(
    folder: Path, card: ModelCard, source: ModelSource, gathered: Gathered, accept: Accept
) -> Provenance:
    """Return the record of a model; LICENCE if conditions of its licence are not accepted."""
    licence = read_licence(folder, gathered.licence or source.licence or card.license)
    conditions = licence.has_conditions
    if conditions and not accept(folder.name, licence):
        detail = f"the licence of {folder.name} excludes commercial use, and was not accepted"
        raise ScanError(Reason.LICENCE, detail)
    return Provenance(
        source=source.origin,
        address=gathered.address,
        added=datetime.now(UTC).isoformat(timespec="seconds"),
        licence=licence.name,
        accepted=conditions,
        published=gathered.published,
        files=hash_files(folder),
    )


def _publish(folder: Path, target: Path, record: Provenance) -> Added:
    """Rename a complete model into the store, unless an equal one is there."""
    present = _own_folder(target.name)
    if present is not None:
        provenance = read_provenance(present)
        if provenance is None or provenance.files != record.files:
            raise _exists(target.name)
        check_files(present, provenance, large=True)
        return Added(target.name, present, already=True)
    write_provenance(folder, record)
    for root, _, names in os.walk(folder):
        for path in (*(Path(root, name) for name in names), Path(root)):
            fsync_path(path)
    try:
        folder.rename(target)
    except OSError as exc:
        if target.exists():  # on a file system without locks, another process was first
            raise _exists(target.name) from exc
        raise
    fsync_path(target.parent)
    return Added(target.name, target)


def _exists(name: str) -> ScanError:
    return ScanError(Reason.MODEL_EXISTS, f"your store has another model of the name {name}")


@contextmanager
def _work_folder(name: str, on_wait: Callable[[], None]) -> Iterator[Path]:
    """Hold the lock of a model's name, and yield the path of its work folder, which may not exist.

    Where the file system has no locks, the folder is private, and no attempt is continued.
    """
    root = user_models() / _WORK
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked = lock_file(descriptor, timeout_s=0)
        if not locked:
            on_wait()
            locked = lock_file(descriptor)
        yield root / (name if locked else f"{name}.{secrets.token_hex(4)}")
    finally:
        os.close(descriptor)


def read_licence(folder: Path, name: str) -> Licence:
    """Return the licence of a model with the text of its licence files."""
    texts = []
    for file in licence_files(folder):
        with file.open("rb") as stream:
            texts.append(stream.read(_MAX_BYTES).decode("utf-8", errors="replace"))
    return Licence(name, tuple(texts))


def licence_files(folder: Path) -> list[Path]:
    """Return the licence files of a model."""
    files = {file for place in LICENCE_PLACES for file in folder.glob(place)}
    return sorted(filter(_is_licence, files))


def _is_licence(file: Path) -> bool:
    is_own = file.is_file() and not file.is_symlink()  # what a link leads to is not the model's
    return is_own and _FILES.fullmatch(file.name) is not None
