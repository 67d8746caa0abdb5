"""Converts a foreign model into a card with safetensors: once, in a child process with limits.

The child process is the border of trust. It parses whatever a foreign folder holds, with limits of
memory and time, and evaluates nothing of it. Here, only the card that it wrote is read.

Converted models are kept in the user's cache, by the path of their folder and their options, until
a file of the folder changes.
"""

from __future__ import annotations

import atexit
import errno
import filecmp
import hashlib
import json
import os
import re
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
from scanloom.convert.files import NO_OPTIONS
from scanloom.convert.provenance import PROVENANCE_FILE, read_provenance
from scanloom.convert.readers import find_reader, source_folders
from scanloom.convert.weights import MAX_WEIGHTS, convert_weights
from scanloom.core import Reason, ScanError, format_bytes, user_cache_folder
from scanloom.core.process import lock_file
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.sandbox import SandboxLimits, report_progress, run_sandboxed
from scanloom.io.system.scratch_folders import make_locked_folder, scratch_errors
from scanloom.own_python import is_ours, make_private_folder

_SCHEMA: Final = 6
"""Increased when a reader makes another card of the same files: models are then converted again."""
_SOURCES_FILE: Final = "sources.json"
"""Record of a conversion: the files that it was made of, and its weights."""
_UNWRITABLE: Final = (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE)
_MODEL_FOLDER: Final = re.compile(r"dataset\d|.*__.*__", re.IGNORECASE)
"""Names of nnU-Net's folders of datasets and models, which may be links."""
SILENCE_S: Final = 300.0
"""Longest processor time for one file of weights: a pickle may describe endless work."""
TOTAL_S: Final = 3600.0
MEMORY_BYTES: Final = 2 << 30
"""Memory of a conversion beside that of the weights; torch takes 0.3 GB of it."""
IMPORTED_ONCE: Final = (
    *("torch", "safetensors.torch"),
    *("scanloom.convert.meshnet", "scanloom.convert.monai.bundle", "scanloom.convert.nnunet"),
    *("scanloom.convert.onnx_model", "scanloom.convert.totalsegmentator"),
)
"""What the server of child processes imports: else each of them spends 0.3 s on it."""
COPIES: Final = 6
"""Memory of a conversion in sizes of its largest file: the file, its tensors, their clones, the
safetensors, and the optimiser's two states."""


def has_card(folder: Path) -> bool:
    """Return whether the card of a folder is that of its model.

    A card next to a foreign model may be of any other one. It counts only if `models add` wrote it,
    as the record says, and no file of the folder was written, replaced or moved there later, by the
    time that no user can set (ctime): large files are not compared with the record here.
    """
    if not is_card(folder) or find_reader(folder) is None:
        return is_card(folder)
    provenance = read_provenance(folder)
    if provenance is None or CARD_FILE not in provenance.files:
        return False
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
    except (OSError, ScanError) as exc:
        # no cache folder can be written: the conversion lasts as long as this process
        if isinstance(exc, ScanError) and exc.reason not in _UNWRITABLE:
            raise
        return _kept_or_converted(_own_folder(), source, options)


@cache
def _own_folder() -> Path:
    """Return a folder that is removed when this process ends; SCRATCH_FULL if there is none.

    If it is killed, the next process that makes such a folder removes it.
    """
    with scratch_errors("for converted models"):
        folder, lock = make_locked_folder(Path(tempfile.gettempdir()))
    atexit.register(lambda: (shutil.rmtree(folder, ignore_errors=True), lock and lock.close()))
    return folder


def _kept_or_converted(models: Path, source: Path, options: Mapping[str, str]) -> ModelCard:
    """Return the card of a model that was converted into a folder of models, now or before."""
    subject = json.dumps([_SCHEMA, str(source), sorted(options.items())])
    entry = models / hashlib.sha256(subject.encode()).hexdigest()[:32]
    if (card := _kept(entry, source, options)) is not None:
        return card
    make_private_folder(models)
    if not is_ours(models):
        raise PermissionError("others can write to the cache")
    descriptor = os.open(entry.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if lock_file(descriptor):  # without locks, two processes may do the same work
            _remove_leftovers(models, entry)
        return _kept(entry, source, options) or _convert_into(entry, source, options)
    finally:
        os.close(descriptor)


def _remove_leftovers(models: Path, entry: Path) -> None:
    """Remove what killed conversions left, and conversions that nobody will read again.

    That are those of models that are no longer there, and of readers before `_SCHEMA`.
    """
    for draft in models.glob("*.*"):
        if draft.is_dir() and (draft.stem == entry.name or _is_free(draft.with_suffix(".lock"))):
            shutil.rmtree(draft, ignore_errors=True)
    for file in models.glob(f"*/{_SOURCES_FILE}"):
        with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            record = json.loads(file.read_bytes())
            present = any(Path(root).exists() for root in record["sources"])
            if not present or record["schema"] < _SCHEMA:
                shutil.rmtree(file.parent, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    """Return whether no process holds the lock of a conversion."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return lock_file(descriptor, 0)
    finally:
        os.close(descriptor)


def _kept(entry: Path, source: Path, options: Mapping[str, str]) -> ModelCard | None:
    """Return the card of an earlier conversion; None if it is missing or its source changed.

    Its own weights may have changed too: cleaners of caches remove files that were not read for
    long, and after a power failure files may be empty.
    """
    try:
        record = json.loads((entry / _SOURCES_FILE).read_bytes())
        same = record["sources"] == _signatures(source, options)
        same = same and _sizes(entry) == record["weights"] and is_ours(entry.parent)
        return read_card(entry) if same else None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, ScanError):
        return None  # missing, or half removed


def _sizes(entry: Path) -> dict[str, list[int]]:
    """Return size and time of the weights of a conversion; OSError if a link leads to nothing."""
    listed = {file.name: file.stat() for file in (entry / WEIGHTS_FOLDER).iterdir()}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in listed.items()}


def _convert_into(entry: Path, source: Path, options: Mapping[str, str]) -> ModelCard:
    """Convert a model, and put it in the place of an earlier conversion."""
    draft, former = (entry.with_name(f"{entry.name}.{secrets.token_hex(4)}") for _ in range(2))
    draft.mkdir(mode=0o700)
    try:
        # listed before they are read: a file that changes meanwhile is read again next time
        sources = _signatures(source, options)
        convert_model(source, options, draft)
        _share_weights(draft)
        record = {"schema": _SCHEMA, "sources": sources, "weights": _sizes(draft)}
        (draft / _SOURCES_FILE).write_text(json.dumps(record), encoding="utf-8")
        with suppress(OSError):  # renamed first: a process may be about to read its weights
            entry.rename(former)
        try:
            draft.rename(entry)
        except OSError:  # another process was first, on a file system without locks
            if _kept(entry, source, options) is None:
                raise
        return read_card(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _share_weights(draft: Path) -> None:
    """Replace weights that another conversion has too, with other options, by links to its file."""
    for file in (draft / WEIGHTS_FOLDER).iterdir():
        files = draft.parent.glob(f"*/{WEIGHTS_FOLDER}/{file.name}")
        twin = next((each for each in files if not each.samefile(file)), None)
        if twin is not None and not file.is_symlink():
            with suppress(OSError):  # a file system without hard links
                if filecmp.cmp(twin, file, shallow=False):  # it may be damaged
                    os.link(twin, draft / "link")
                    (draft / "link").replace(file)


def _signatures(source: Path, options: Mapping[str, str]) -> dict[str, list[list[Any]]]:
    """Return the signatures of all folders whose files may be read for a model, by path."""
    return {str(root): _signature(root) for root in source_folders(source, options)}


def _signature(folder: Path) -> list[list[Any]]:
    """Return path, size, times and inode of all files below a folder.

    Links to folders elsewhere are followed to models of nnU-Net only: readers refuse files behind
    others, which may hold an archive of scans.
    """
    listed, folders, visited = list[list[Any]](), [folder], set[tuple[int, int]]()
    for current in folders:
        with suppress(OSError):  # what can't be listed can't be read by a reader either
            status = current.stat()
            if (status.st_dev, status.st_ino) in visited:  # a loop of links
                continue
            visited.add((status.st_dev, status.st_ino))
            for entry in os.scandir(current):
                if entry.is_dir():
                    path = Path(entry.path)
                    names = (entry.name, path.resolve().name) if entry.is_symlink() else ()
                    if not names or any(map(_MODEL_FOLDER.match, names)):
                        folders.append(path)
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
        Of the reader; MODEL_UNSAFE if it takes more memory or processor time than a model needs;
        MODEL_DAMAGED if it crashes; ENVIRONMENT if the machine is too busy.
    """
    listed = _signatures(source, options).values()
    sizes = [size for files in listed for _, size, *_ in files]
    memory = MEMORY_BYTES + COPIES * min(max(sizes, default=0), MAX_WEIGHTS)
    limits = SandboxLimits(memory, SILENCE_S, TOTAL_S)
    # native code that gets no memory ends its process, too
    crashed = f"to read it crashes the reader, which may take {format_bytes(memory)}"
    try:
        run_sandboxed(convert_job, source, dict(options), out, limits=limits, modules=IMPORTED_ONCE)
    except ScanError as exc:
        ours = {
            Reason.TOO_LARGE: (Reason.MODEL_UNSAFE, "to read it takes more memory than a model"),
            Reason.DECODE_TIMEOUT: (Reason.MODEL_UNSAFE, "to read it takes more work than a model"),
            Reason.DAMAGED: (Reason.MODEL_DAMAGED, crashed),
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

    card = read_model(source, options)
    try:
        write_card(_with_weights(card, convert), out)
    except OSError as exc:
        if exc.errno == errno.EFBIG:  # a limit of processes, not of the disk
            raise
        raise output_error(exc, "the converted model") from exc


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


def all_weights(card: ModelCard) -> tuple[Weights, ...]:
    """Return the weights of all networks of a model, those that run on request only included."""
    unique = dict[Weights, Weights]()
    _with_weights(card, lambda weights: unique.setdefault(weights, weights))
    return tuple(unique)
