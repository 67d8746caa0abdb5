"""Model archives: one file with models, for a machine without a network.

An archive is a zip file with a list of its models and, for each, a folder with the card, the
weights, the licence files, and a record with the hashes of all of them. Models of foreign formats
are in it as converted. It may come from anybody: it is unpacked within the bounds of any zip file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from scanloom.cards.card_file import CARD_FILE, WEIGHTS_FOLDER, write_card
from scanloom.convert.conversion import all_weights
from scanloom.convert.download.sources import (
    Downloads,
    Gathered,
    ModelSource,
    find_source,
    unpack_zip,
)
from scanloom.convert.files import LICENCE_PLACES, MAX_BYTES, damaged, truncate
from scanloom.convert.provenance import (
    PROVENANCE_FILE,
    FileRecord,
    Provenance,
    check_files,
    read_provenance,
    write_provenance,
)
from scanloom.convert.store import ModelEntry, describe_model
from scanloom.core import Reason, ScanError, printable, slug
from scanloom.io.system.atomic_write import check_replaceable, fsync_path
from scanloom.io.system.disk_errors import output_error
from scanloom.io.system.scratch_folders import HIDDEN_PREFIX, locked_temporary_folder

LIST_FILE: Final = "scanloom-models.json"
"""Name of the file in an archive that lists its models; by it an archive is recognized."""
_SCHEMA: Final = 1
_MAX_MODELS: Final = 1000
_MAX_ADDRESS: Final = 2000
"""Characters of an address that are kept; of a task of TotalSegmentator there are up to 700."""
_LICENCES: Final = re.compile(r"licen[cs]e|copying|notice", re.IGNORECASE)
"""Names of files that accompany a model to other machines, those on training data included."""
_CHUNK_BYTES: Final = 1 << 20
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Date of all members: that of a zip file's first day, so that hashes tell of models alone."""


def write_archive(names: Sequence[str], file: Path) -> tuple[ModelEntry, ...]:
    """Write models into one file, which `models add` reads; return the models.

    Parameters
    ----------
    names : sequence of str
        Models of the store or folders, as of `find_model`, also with options.
    file : Path
        The archive. An archive that exists is replaced, another file is not.

    Raises
    ------
    ScanError
        As `find_model`; MODEL_UNKNOWN for a model that ships, and for two of one name; MODEL_HASH
        if weights are not those of the card; DISK_FULL or OUTPUT_UNWRITABLE: there is then no file,
        or the earlier one.
    """
    models = {name: describe_model(name) for name in names}
    entries = tuple(models.values())
    titles = [_folder_name(entry) for entry in entries]
    if repeated := {title for title in titles if titles.count(title) > 1}:
        detail = f"two of the models have the name {sorted(repeated)[0]}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    for entry in entries:
        if entry.section == "ships":
            detail = f"{entry.name} ships with scanloom: every installation has it"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
    check_replaceable(file, "the model archive")
    if file.exists() and not _names_in(file):
        detail = f"{printable(file.name)} exists, and is not a model archive"
        raise ScanError(Reason.OUTPUT_UNWRITABLE, detail)

    try:
        # what killed commands left is removed: an archive may have gigabytes
        with locked_temporary_folder(file.parent, HIDDEN_PREFIX) as folder:
            draft = folder / "archive"
            with zipfile.ZipFile(draft, "w") as archive:
                document = json.dumps({"schema": _SCHEMA, "models": titles}, indent=1)
                archive.writestr(zipfile.ZipInfo(LIST_FILE, _DATE), document)
                for entry in entries:
                    _write_model(archive, entry, folder)
            fsync_path(draft)
            draft.replace(file)
            fsync_path(file.parent)
    except OSError as exc:
        raise output_error(exc, "the model archive") from exc
    return entries


def _folder_name(entry: ModelEntry) -> str:
    """Return the name of a model in an archive, and in the store into which it is added."""
    return slug(entry.card.name if entry.card else entry.name)  # options are joined by hyphens


def _write_model(archive: zipfile.ZipFile, entry: ModelEntry, scratch: Path) -> None:
    """Write the folder of a model; its card and record are made in a private folder."""
    card = entry.card
    if card is None:
        raise ValueError("the model has no card")
    files = dict[str, FileRecord]()

    def add(path: str, file: Path) -> None:
        info = zipfile.ZipInfo(f"{_folder_name(entry)}/{path}", _DATE)
        digest, size = hashlib.sha256(), 0
        # the size is not known yet: beyond 4 GiB, zip files have another form
        with file.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
                size += len(chunk)
        files[path] = FileRecord(size, digest.hexdigest())

    write_card(card, scratch)
    add(CARD_FILE, scratch / CARD_FILE)
    for each in all_weights(card):
        path = f"{WEIGHTS_FOLDER}/{each.sha256}.safetensors"
        if path in files:
            continue
        add(path, each.file)
        if files[path].sha256 != each.sha256:
            detail = f"the weights of {card.name} differ from those of the card"
            raise ScanError(Reason.MODEL_HASH, detail)
    for file in sorted({file for place in LICENCE_PLACES for file in entry.folder.glob(place)}):
        fits = file.is_file() and not file.is_symlink() and file.stat().st_size <= MAX_BYTES
        if fits and _LICENCES.search(file.name):
            add(file.relative_to(entry.folder).as_posix(), file)
    known = entry.provenance
    record = Provenance(
        source=known.source if known else f"folder {entry.name}",
        address=known.address if known else f"folder {entry.name}",
        added=datetime.now(UTC).isoformat(timespec="seconds"),
        licence=known.licence if known else card.license,
        accepted=False,  # by the user of another machine, it is asked for again
        published=known.published if known else False,
        files=files,
    )
    write_provenance(scratch, record)
    add(PROVENANCE_FILE, scratch / PROVENANCE_FILE)


def find_sources(request: str) -> tuple[ModelSource, ...]:
    """Return the models of an archive, or else the one source of a request; as `find_source`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the list of an archive is malformed; NEWER_VERSION if its schema is
        unknown; or as `find_source`.
    """
    file = Path(request)
    is_file = "://" not in request and os.path.isfile(request)  # noqa: PTH113 - never raises
    names = _names_in(file) if is_file else ()
    origin = f"model archive {printable(file.name)}"
    sources = (ModelSource(n, origin, partial(_gather, file, n), remote=False) for n in names)
    return tuple(sources) or (find_source(request),)


def _names_in(file: Path) -> tuple[str, ...]:
    """Return the names of the models in an archive, none for other files; errors as above."""
    listed = None
    # damaged archives raise errors of many types; `unpack_zip` reports those of zip files
    with suppress(Exception), zipfile.ZipFile(file) as archive, archive.open(LIST_FILE) as stream:
        listed = stream.read(MAX_BYTES)
    if listed is None:
        return ()
    try:
        document = json.loads(listed)
        schema, names = document["schema"], document["models"]
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise damaged(f"{LIST_FILE} is malformed") from exc
    if schema != _SCHEMA:
        raise ScanError(Reason.NEWER_VERSION, f"{LIST_FILE} has another schema")
    if not isinstance(names, list) or not 0 < len(names) <= _MAX_MODELS:
        raise damaged(f"{LIST_FILE} lists no models, or too many")
    if not all(isinstance(name, str) and name and slug(name) == name for name in names):
        raise damaged(f"{LIST_FILE} lists a name that no model can have")
    return tuple(dict.fromkeys(names))


def _gather(file: Path, name: str, target: Path, downloads: Downloads) -> Gathered:
    """Unpack a model of an archive, and compare its files with their record."""
    unpack_zip(file, target, f"{name}/")
    record = read_provenance(target)
    if record is None:
        raise damaged(f"the archive has no record of {name}")
    check_files(target, record, large=True)
    (target / PROVENANCE_FILE).unlink()  # one of this machine is written
    address, licence = truncate(record.address, _MAX_ADDRESS), truncate(record.licence)
    # what its publisher has said can't be asked here
    return Gathered(address, published=False, licence=licence)
