"""Converts a foreign model into a card with safetensors: once, in a child process with limits.

The child process is the border of trust. It parses whatever a foreign folder holds, with limits of
memory and time, and evaluates nothing of it. Here, only the card that it wrote is read.

Converted models are kept in the user's cache, by the path of their folder and their options, until
a file of the folder changes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from scanloom.cards.card import ModelCard, Weights
from scanloom.cards.card_file import CARD_FILE, WEIGHTS_FOLDER, is_card, read_card, write_card
from scanloom.convert.provenance import PROVENANCE_FILE
from scanloom.convert.readers import NO_OPTIONS, find_reader, source_folders
from scanloom.convert.weights import MAX_WEIGHTS, convert_weights
from scanloom.core import Reason, ScanError, user_cache_folder
from scanloom.core.process import lock_file
from scanloom.io.system.sandbox import SandboxLimits, report_progress, run_sandboxed
from scanloom.own_python import is_ours, make_private_folder

_SCHEMA: Final = 2
"""Increased when a reader makes another card of the same files: models are then converted again."""
_SOURCES_FILE: Final = "sources.json"
SILENCE_S: Final = 300.0
"""Longest time for one file of weights: a pickle may describe endless work."""
TOTAL_S: Final = 3600.0
MEMORY_BYTES: Final = 2 << 30
"""Memory of a conversion beside that of the weights; torch takes 0.3 GB of it."""
COPIES: Final = 6
"""Memory of a conversion in sizes of its largest file: the file, its tensors, their clones, the
safetensors, and the optimiser's two states."""


def has_card(folder: Path) -> bool:
    """Return whether the card of a folder is that of its model.

    A foreign model may have been changed since a card was written next to it: other weights of the
    same size, or a copy of a model that ships, edited. So that card counts only if no file of the
    folder was written, replaced or moved there later, by the time that no user can set (ctime).
    """
    if not is_card(folder) or find_reader(folder) is None:
        return is_card(folder)
    written = (folder / CARD_FILE).stat().st_ctime_ns
    record = str(folder / PROVENANCE_FILE)  # written last
    return all(ctime <= written for path, _, _, ctime, _ in _signature(folder) if path != record)


def load_card(
    folder: Path, options: Mapping[str, str] = NO_OPTIONS, *, ships: bool = False
) -> ModelCard:
    """Return the card of a model: its own, or that of its conversion, now or before.

    Parameters
    ----------
    folder : Path
        A model in this package's form, or in a foreign one.
    options : mapping
        Options of a foreign model, which become a part of its name.
    ships : bool
        Whether it is a model that ships: its card was converted from the bundle next to it.

    Raises
    ------
    ScanError
        As `read_card` and `convert_model`.
    """
    if not options and (has_card(folder) or (ships and is_card(folder))):
        return read_card(folder)
    source = folder.absolute()
    try:
        return _kept_or_converted(user_cache_folder() / "models", source, options)
    except OSError:  # no cache folder can be written: the conversion lasts as long as this process
        return _kept_or_converted(_own_folder(), source, options)


@cache
def _own_folder() -> Path:
    """Return a folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="scanloom-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _kept_or_converted(models: Path, source: Path, options: Mapping[str, str]) -> ModelCard:
    """Return the card of a model that was converted into a folder of models, now or before."""
    subject = json.dumps([_SCHEMA, str(source), sorted(options.items())])
    entry = models / hashlib.sha256(subject.encode()).hexdigest()[:32]
    card = _kept(entry)
    if card is not None:
        return card
    make_private_folder(models)
    if not is_ours(models):
        raise PermissionError("others can write to the cache")
    descriptor = os.open(entry.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if lock_file(descriptor):  # without locks, two processes may do the same work
            _remove_leftovers(models, entry)
        return _kept(entry) or _convert_into(entry, source, options)
    finally:
        os.close(descriptor)


def _remove_leftovers(models: Path, entry: Path) -> None:
    """Remove what a killed conversion left, and conversions of models that are no longer there."""
    for draft in models.glob(f"{entry.name}.*"):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
    for file in models.glob(f"*/{_SOURCES_FILE}"):
        with suppress(OSError, ValueError, AttributeError):
            if not any(Path(root).exists() for root in json.loads(file.read_bytes())):
                shutil.rmtree(file.parent, ignore_errors=True)


def _kept(entry: Path) -> ModelCard | None:
    """Return the card of an earlier conversion, None if there is none or its source changed."""
    try:
        sources = json.loads((entry / _SOURCES_FILE).read_bytes())
        same = all(_signature(Path(root)) == listed for root, listed in sources.items())
        return read_card(entry) if same and is_ours(entry.parent) else None
    except (OSError, ValueError, AttributeError, ScanError):  # missing, or half removed
        return None


def _convert_into(entry: Path, source: Path, options: Mapping[str, str]) -> ModelCard:
    """Convert a model, and put it in the place of an earlier conversion."""
    draft = entry.with_name(f"{entry.name}.{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    try:
        # listed before they are read: a file that changes meanwhile is read again next time
        sources = {str(root): _signature(root) for root in source_folders(source)}
        convert_model(source, options, draft)
        (draft / _SOURCES_FILE).write_text(json.dumps(sources), encoding="utf-8")
        _share_weights(draft)
        shutil.rmtree(entry, ignore_errors=True)
        try:
            draft.rename(entry)
        except OSError:  # another process was first, on a file system without locks
            if _kept(entry) is None:
                raise
        return read_card(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _share_weights(draft: Path) -> None:
    """Replace weights that another conversion has too, with other options, by links to its file."""
    for file in (draft / WEIGHTS_FOLDER).iterdir():
        files = draft.parent.glob(f"*/{WEIGHTS_FOLDER}/{file.name}")
        twin = next((each for each in files if not each.samefile(file)), None)
        if twin is not None and not file.is_symlink():
            with suppress(OSError):  # a file system without hard links
                os.link(twin, draft / "link")
                (draft / "link").replace(file)


def _signature(folder: Path) -> list[list[Any]]:
    """Return path, size, times and inode of all files below a folder that are not hidden."""
    listed, folders, visited = list[list[Any]](), [folder], set[tuple[int, int]]()
    for current in folders:
        with suppress(OSError):  # what can't be listed can't be read by a reader either
            status = current.stat()
            if (status.st_dev, status.st_ino) in visited:  # a loop of links
                continue
            visited.add((status.st_dev, status.st_ino))
            for entry in os.scandir(current):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(Path(entry.path))
                    continue
                with suppress(OSError):  # a link to nothing
                    s = entry.stat()
                    listed.append([entry.path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino])
    return sorted(listed)


def convert_model(source: Path, options: Mapping[str, str], out: Path) -> None:
    """Convert a foreign model in a child process: write `card.json` and the weights.

    Parameters
    ----------
    source : Path
        The foreign model.
    options : mapping
        Its options.
    out : Path
        Folder of the card; it may be the source itself.

    Raises
    ------
    ScanError
        Of the reader; MODEL_UNSAFE if it takes more memory or time than a model needs;
        MODEL_DAMAGED if it crashes.
    """
    sizes = [size for root in source_folders(source) for _, size, *_ in _signature(root)]
    memory = MEMORY_BYTES + COPIES * min(max(sizes, default=0), MAX_WEIGHTS)
    limits = SandboxLimits(memory, SILENCE_S, TOTAL_S)
    try:
        run_sandboxed(convert_job, source, dict(options), out, limits=limits, modules=("torch",))
    except ScanError as exc:
        ours = {
            Reason.TOO_LARGE: (Reason.MODEL_UNSAFE, "to read it takes more memory than a model"),
            Reason.DECODE_TIMEOUT: (Reason.MODEL_UNSAFE, "to read it takes more time than a model"),
            Reason.DAMAGED: (Reason.MODEL_DAMAGED, "to read it crashes the reader"),
        }
        if exc.reason not in ours:
            raise
        raise ScanError(*ours[exc.reason]) from exc


def convert_job(source: Path, options: dict[str, str], out: Path) -> None:
    """Read a foreign model, and write its card and weights; see `convert_model`."""
    from scanloom.convert.readers import read_model

    converted = dict[Weights, Weights]()

    def convert(weights: Weights) -> Weights:
        if weights not in converted:
            report_progress()
            converted[weights] = convert_weights(weights, out)
        return converted[weights]

    write_card(_with_weights(read_model(source, options), convert), out)


def _with_weights(card: ModelCard, convert: Callable[[Weights], Weights]) -> ModelCard:
    """Return a card with other weights in all of its networks."""

    def inner(holder: Any) -> Any:
        return holder and replace(holder, card=holder.card and _with_weights(holder.card, convert))

    return replace(
        card,
        weights=convert(card.weights),
        folds=tuple(map(convert, card.folds)),
        stage=inner(card.stage),
        parts=tuple(_with_weights(network, convert) for network in card.parts),
        subset=inner(card.subset),
        fast=inner(card.fast),
    )
