"""Sources of models, and which of them a request names.

They are folders, zip files, files on the network, MONAI's model zoo, and repositories on Hugging
Face, where its newer bundles are.

Folders are copied and zip files unpacked within bounds: paths, links, sizes, ratio, count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final
from urllib.parse import quote, urldefrag, urlsplit

import yaml
from packaging.version import InvalidVersion, Version

from scanloom.convert.download import addresses
from scanloom.convert.download.transfer import (
    MAX_DOCUMENT_BYTES,
    MAX_FILE_BYTES,
    ConnectionLostError,
    Remote,
    check_address,
    fetch,
    stated_size,
)
from scanloom.convert.files import NO_OPTIONS, TASK_FILE, damaged, unsafe
from scanloom.convert.nnunet import previous_stages
from scanloom.convert.provenance import Digest
from scanloom.convert.readers import split_options, variant_name
from scanloom.convert.unread import unread_error
from scanloom.core import Reason, ScanError, did_you_mean, format_bytes, printable, read_error

_MAX_PATH_CHARACTERS: Final = 4096

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes received so far, and the total, None if unknown."""
_NNUNET_NAME: Final = re.compile(r"(.+__.+)__(\w+)")
_REPOSITORY: Final = re.compile(r"/([\w.-]+)/([\w.-]+)(?:/tree/([\w.-]+))?/?", re.ASCII)
_NAME: Final = re.compile(r"([\w-]{1,100})(?:@([\w.+-]{1,50}))?", re.ASCII)
_UNREAD_SUFFIXES: Final = (".ts", ".engine", ".trt")
"""Suffixes of files on Hugging Face that no reader takes: programs, and engines of one device."""
_LARGE_FILES: Final = ("large_files.yml", "large_files.yaml", "large_files.json")

MAX_FILES: Final = 10_000
"""Number of files of a model; TotalSegmentator's largest task has some 100."""
MAX_MODEL_BYTES: Final = 32 << 30
"""Total size of a model's files."""
MAX_EXPANSION: Final = 20
"""Largest ratio of unpacked to packed size above `ALWAYS_ALLOWED_BYTES`; that of weights is 1.2."""
ALWAYS_ALLOWED_BYTES: Final = 16 << 20
"""Unpacked size up to which any ratio is accepted: plans and configurations are text."""
MAX_DEPTH: Final = 20
MAX_NAME_BYTES: Final = 200
SCAN_SUFFIXES: Final = (".nii", ".nii.gz", ".npz", ".dcm", ".mha", ".nrrd")
"""Suffixes of scans and predictions, which training folders contain: they are left out."""
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED: Final = 0x1
_DOS, _UNIX = 0, 3
"""Values of a zip's create_system; with the second, external_attr holds the mode of the file."""
_CHUNK_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 60


@dataclass(frozen=True)
class Gathered:
    """Files of a model that were gathered.

    Parameters
    ----------
    address : str
        Address that they came from.
    published : bool
        Whether all were compared with published checksums.
    licence : str
        Licence as a record among them states it, empty if none does.
    """

    address: str
    published: bool
    licence: str = ""


@dataclass(frozen=True)
class Downloads:
    """Downloads for a model, which are kept in a folder: a later attempt continues them."""

    folder: Path
    progress: Progress

    def get(self, remote: Remote, limit_bytes: int = MAX_FILE_BYTES) -> Path:
        """Return a downloaded file; errors as `fetch`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / hashlib.sha256(remote.address.encode()).hexdigest()[:24]
        label = printable(PurePosixPath(urlsplit(remote.address).path).name)
        fetch(remote, target, limit_bytes, partial(self.progress, label))
        return target

    def put(self, remote: Remote, target: Path, path: str) -> None:
        """Download a file to its path in a model's folder; the download stays, too."""
        file, goal = self.get(remote), target / safe_path(path)
        goal.parent.mkdir(parents=True, exist_ok=True)
        try:
            goal.hardlink_to(file)
        except FileExistsError as exc:
            raise damaged(f"{printable(path)} is listed twice") from exc
        except OSError:  # a file system without hard links
            shutil.copyfile(file, goal)

    def read_json(self, address: str) -> Any:
        """Return a JSON document from the network; it is downloaded anew each time."""
        file = self.get(Remote(address), MAX_DOCUMENT_BYTES)
        try:
            return json.loads(file.read_bytes())
        except (ValueError, RecursionError) as exc:
            raise _malformed("reply") from exc
        finally:
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class ModelSource:
    """Place that a model comes from.

    Parameters
    ----------
    name : str
        Name for the model, unless the user gives another.
    origin : str
        Text for the record: the address, or kind and name of a local source, whose path may name a
        person.
    gather : callable
        Writes the model's files below a folder.
    licence : str
        Licence as the source states it, empty if the model's own files do.
    remote : bool
        Whether the network is needed.
    list_files : callable
        Returns the files that will be downloaded; of a bundle in a zip file, without those that
        the bundle itself lists.
    options : mapping
        Options of the model, by which it is converted for good.
    folder : Path or None
        The source, if it is a folder on this machine.
    """

    name: str
    origin: str
    gather: Callable[[Path, Downloads], Gathered]
    licence: str = ""
    remote: bool = True
    list_files: Callable[[Downloads], Sequence[Remote]] = lambda downloads: ()
    options: Mapping[str, str] = field(default_factory=lambda: NO_OPTIONS)
    folder: Path | None = None

    def size(self, downloads: Downloads) -> int | None:
        """Return the bytes that will be downloaded, None if a server does not state them.

        Nothing but lists of files is downloaded. Errors as `fetch`.
        """
        sizes = [stated_size(remote) for remote in self.list_files(downloads)]
        return None if None in sizes else sum(size or 0 for size in sizes)


def find_source(request: str) -> ModelSource:
    """Return the source that a request names.

    Parameters
    ----------
    request : str
        Address, path of a folder or zip file, `brainchop/NAME`, `totalsegmentator/TASK`,
        `monai/NAME` of a bundle in MONAI's model zoo, with `@VERSION` or without, or a name that
        `known_request` knows; with options after a colon, as of `split_options`.

    Raises
    ------
    ScanError
        DOWNLOAD for an address that is not https; MODEL_UNKNOWN for a name that is not in a table.
    """
    plain, options = split_options(request)
    source = _find_source(plain)
    if not options:
        return source
    origin = f"{source.origin}{printable(request.removeprefix(plain))}"
    name = variant_name(source.name, options)
    return replace(source, name=name, origin=origin, options=options)


def _find_source(request: str) -> ModelSource:
    """Return the source of a request without options."""
    if "://" in request:
        return _repository(request) or _address(request)
    if not request.strip():
        raise ScanError(Reason.MODEL_UNKNOWN, "the name of the model is empty")
    # What is here comes before names: a folder may be called as a collection is
    path = Path(request)
    if "\0" not in request and len(request) < _MAX_PATH_CHARACTERS and path.exists():
        return _folder(path) if path.is_dir() else _zip_file(path)
    collection, _, name = request.rpartition("/")
    if collection.lower() == "brainchop":
        return _brainchop(name)
    if collection.lower() == "totalsegmentator":
        return _totalsegmentator(name.lower())
    if collection.lower() == "monai":
        return _zoo_bundle(name)
    # A bare name counts only if a table has it: a mistyped path sends nothing to the network
    bundle, at, _ = name.partition("@")
    if not collection and (known := addresses.known_request(bundle)) is not None:
        if "/" not in known:
            return _zoo_bundle(known if not at else name)
        if not at:
            return _find_source(known)
    refused = {*addresses.TOTALSEGMENTATOR_LICENSED, *addresses.TOTALSEGMENTATOR_CLEANED}
    if not collection and name.lower() in refused:
        return _totalsegmentator(name.lower())
    detail = f"there is no folder or zip file {printable(request[:200])!r}"
    if not collection and len(request) < _MAX_PATH_CHARACTERS:
        hint = did_you_mean(bundle, sorted(addresses.known_names()))
        detail += f", and no model of that name is known; {hint}"
    raise ScanError(Reason.MODEL_UNKNOWN, detail)


def _folder(folder: Path) -> ModelSource:
    """Return a folder on this machine as a source.

    nnU-Net's names of folders (TRAINER__PLANS__CONFIGURATION) are kept, below that of the model,
    and a cascade is copied with its first stage, which is next to it.
    """
    path = folder.resolve()
    if path.name.startswith("fold_") and (error := unread_error(path)) is not None:
        raise error  # here, where the plans are that lie next to it
    match = _NNUNET_NAME.fullmatch(path.name)
    name = f"{path.parent.name}_{match[2]}" if match else path.name
    origin = f"folder {printable(name)}"

    def gather(target: Path, downloads: Downloads) -> Gathered:
        if match is None:
            copy_folder(path, target)
        else:
            for stage in (path, *previous_stages(path, match[2])):
                copy_folder(stage, target / stage.name)
        return Gathered(origin, published=False)

    return ModelSource(name, origin, gather, remote=False, folder=path)


def _zip_file(path: Path) -> ModelSource:
    origin = f"zip file {printable(path.name)}"

    def gather(target: Path, downloads: Downloads) -> Gathered:
        if (error := unread_error(path)) is not None:
            raise error
        if not path.is_file():
            detail = f"{printable(path.name)} is neither a folder nor a zip file"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        unpack_zip(path, target)
        return Gathered(origin, published=False)

    return ModelSource(path.stem, origin, gather, remote=False)


def _address(address: str) -> ModelSource:
    """Return the source for the address of a zip file, pinned by `#sha256=...` or not."""
    plain, fragment = urldefrag(address)
    check_address(plain)
    digest = None
    if fragment:
        algorithm, _, value = fragment.partition("=")
        if algorithm != "sha256":
            raise ScanError(Reason.DOWNLOAD, "the address may end in #sha256=HEX and nothing else")
        digest = parse_digest("sha256", value)
    name = PurePosixPath(urlsplit(plain).path).name.removesuffix(".zip")

    def gather(target: Path, downloads: Downloads) -> Gathered:
        unpack_zip(downloads.get(Remote(plain, digest)), target)
        return Gathered(plain, published=digest is not None)

    return ModelSource(name, plain, gather, list_files=lambda downloads: [Remote(plain)])


def _brainchop(name: str) -> ModelSource:
    digests = addresses.BRAINCHOP_MODELS.get(name)
    if digests is None:
        raise _unknown("brainchop", name, addresses.BRAINCHOP_MODELS)
    origin = f"{addresses.BRAINCHOP}/public/models/{name}"
    licence, licence_sha256 = addresses.BRAINCHOP_LICENCE
    files = {
        file: Remote(f"{origin}/{file}", Digest("sha256", sha256))
        for file, sha256 in digests.items()
    }
    files[licence] = Remote(f"{addresses.BRAINCHOP}/{licence}", Digest("sha256", licence_sha256))

    def gather(target: Path, downloads: Downloads) -> Gathered:
        for path, remote in files.items():
            downloads.put(remote, target, path)
        return Gathered(origin, published=True)

    return ModelSource(name, origin, gather, "MIT", list_files=lambda downloads: [*files.values()])


def _totalsegmentator(task: str) -> ModelSource:
    if task in addresses.TOTALSEGMENTATOR_LICENSED:
        detail = f"the weights of {task} need a licence: get them with TotalSegmentator, and give "
        raise ScanError(Reason.LICENCE, f"{detail}their folder")
    if task in addresses.TOTALSEGMENTATOR_CLEANED:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{task}: {addresses.CLEANED_BY_SHAPE}")
    if task not in addresses.TOTALSEGMENTATOR_TASKS:
        raise _unknown("totalsegmentator", task, addresses.TOTALSEGMENTATOR_TASKS)

    def gather(target: Path, downloads: Downloads) -> Gathered:
        zips = task_zips(task)
        # all are downloaded first: a lost connection leaves nothing to unpack twice
        for file in [downloads.get(Remote(address)) for address in zips]:
            unpack_zip(file, target)
        text = json.dumps({"task": task, "datasets": addresses.TOTALSEGMENTATOR_TASKS[task]})
        (target / TASK_FILE).write_text(text, encoding="utf-8")
        return Gathered(", ".join(zips), published=False)

    origin = f"{addresses.TOTALSEGMENTATOR}#{task}"

    def list_files(downloads: Downloads) -> list[Remote]:
        return [Remote(address) for address in task_zips(task)]

    return ModelSource(task, origin, gather, licence="Apache-2.0", list_files=list_files)


def task_zips(task: str) -> list[str]:
    """Return the addresses of the data sets of a task of TotalSegmentator."""
    by_number = {
        int(dataset[7:10]): f"{addresses.TOTALSEGMENTATOR}/{release}/{quote(dataset)}.zip"
        for release, datasets in addresses.TOTALSEGMENTATOR_DATASETS.items()
        for dataset in datasets
    }
    return [by_number[number] for number in addresses.TOTALSEGMENTATOR_TASKS[task]]


def _unknown(collection: str, name: str, known: Mapping[str, object]) -> ScanError:
    hint = did_you_mean(name, sorted(known))
    return ScanError(Reason.MODEL_UNKNOWN, f"{collection} has no {printable(name[:200])!r}; {hint}")


def parse_digest(algorithm: str, value: str) -> Digest:
    """Return a published checksum; MODEL_HASH if it is malformed."""
    try:
        return Digest(algorithm, value.strip().lower())  # type: ignore[arg-type]  # is checked
    except ValueError as exc:
        raise ScanError(Reason.MODEL_HASH, f"a published checksum is {exc}") from exc


def _repository(address: str) -> ModelSource | None:
    """Return the repository on Hugging Face that an address names, None for other addresses."""
    match = _REPOSITORY.fullmatch(address.removeprefix(addresses.HUGGING_FACE))
    if match is None or not address.startswith(f"{addresses.HUGGING_FACE}/"):
        return None
    return _hugging_face(match[1], match[2], match[3] or "main")


def _hugging_face(owner: str, repository: str, revision: str) -> ModelSource:
    """Return a repository at one revision; its list of files states SHA-256 or git blobs."""
    base = f"{addresses.HUGGING_FACE}/{owner}/{repository}"
    listing = (
        f"{addresses.HUGGING_FACE}/api/models/{owner}/{repository}/tree/{revision}?recursive=true"
    )
    origin = f"{base}/tree/{revision}"

    def list_paths(downloads: Downloads) -> Iterator[tuple[str, Remote]]:
        entries = downloads.read_json(listing)
        if not isinstance(entries, list) or len(entries) > MAX_FILES:
            raise _malformed("list of files")
        for entry in entries:
            try:
                path = str(entry["path"])
                if entry["type"] != "file":
                    continue
                large = entry.get("lfs")
                algorithm, value = ("sha256", large["oid"]) if large else ("git", entry["oid"])
                size = int(entry["size"])
            except (KeyError, TypeError, ValueError, AttributeError) as exc:
                raise _malformed("list of files") from exc
            safe_path(path)
            # after its path is checked: a list with one that leaves the folder is not to be trusted
            if path.startswith(".") or path.endswith(_UNREAD_SUFFIXES):
                continue
            address = f"{base}/resolve/{revision}/{quote(path)}"
            yield path, Remote(address, parse_digest(algorithm, str(value)), size)

    def gather(target: Path, downloads: Downloads) -> Gathered:
        for path, remote in list_paths(downloads):
            downloads.put(remote, target, path)
        return Gathered(origin, _complete(target, downloads))

    def list_files(downloads: Downloads) -> list[Remote]:
        return [remote for _, remote in list_paths(downloads)]

    return ModelSource(repository, origin, gather, list_files=list_files)


def _zoo_bundle(request: str) -> ModelSource:
    """Return the bundle of MONAI's model zoo for `NAME` or `NAME@VERSION`; the newest without.

    It is downloaded from where the zoo's list leads to, else from Hugging Face.
    """
    match = _NAME.fullmatch(request)
    if match is None:
        detail = f"{printable(request[:200])!r} is neither a file, a folder nor a model's name"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)

    def find(downloads: Downloads) -> tuple[Remote | None, ModelSource]:
        """Return the zip file that the list names, if any, and the repository in its place."""
        listing = downloads.read_json(addresses.ZOO_LIST)
        bundle, version, entry = _find_bundle(listing, match[1], match[2])
        try:
            address, checksum = str(entry["source"]), str(entry["checksum"])
        except (KeyError, TypeError) as exc:
            raise _malformed("list of the model zoo") from exc
        repository = _repository(address)
        if repository is not None:
            return None, repository
        archive = Remote(address, parse_digest("sha1", checksum))
        return archive, _hugging_face(addresses.ZOO_OWNER, bundle, version)

    def is_gone(exc: ScanError) -> bool:
        """Return whether the list names an address that is no more: the repository is."""
        return exc.reason is Reason.DOWNLOAD and not isinstance(exc, ConnectionLostError)

    def gather(target: Path, downloads: Downloads) -> Gathered:
        archive, repository = find(downloads)
        if archive is None:
            return repository.gather(target, downloads)
        try:
            file = downloads.get(archive)
        except ScanError as exc:
            if not is_gone(exc):
                raise
            return repository.gather(target, downloads)
        unpack_zip(file, target)
        folders = [folder for folder in target.iterdir() if folder.is_dir()]
        folder = folders[0] if len(folders) == 1 else target
        return Gathered(archive.address, _complete(folder, downloads))

    def list_files(downloads: Downloads) -> Sequence[Remote]:
        archive, repository = find(downloads)
        if archive is None:
            return repository.list_files(downloads)
        try:
            return [Remote(archive.address, size=stated_size(archive))]
        except ScanError as exc:
            if not is_gone(exc):
                raise
            return repository.list_files(downloads)

    return ModelSource(match[1], f"MONAI model zoo: {request}", gather, list_files=list_files)


def _find_bundle(listing: Any, requested: str, version: str | None) -> tuple[str, str, Any]:
    """Return name, version and entry of a bundle in the zoo's list."""
    if not isinstance(listing, dict):
        raise _malformed("list of the model zoo")
    versions: dict[str, dict[str, Any]] = {}
    for key, entry in listing.items():
        bundle, _, listed = key.removesuffix(".zip").rpartition("_v")
        versions.setdefault(bundle, {})[listed] = entry
    names = {bundle.lower(): bundle for bundle in versions if bundle}
    name = names.get(requested.lower())
    if name is None:
        hint = did_you_mean(requested, sorted(names.values()))
        raise ScanError(Reason.MODEL_UNKNOWN, f"MONAI's model zoo has no {requested!r}; {hint}")
    version = version or max(versions[name], key=_order)
    if version not in versions[name]:
        hint = did_you_mean(version, sorted(versions[name], key=_order))
        raise ScanError(Reason.MODEL_UNKNOWN, f"{name} has no version {version}; {hint}")
    return name, version, versions[name][version]


def _order(version: str) -> tuple[bool, Version]:
    """Return a sort key for versions: malformed ones come first."""
    try:
        return True, Version(version)
    except InvalidVersion:
        return False, Version("0")


def _complete(folder: Path, downloads: Downloads) -> bool:
    """Check the files that a bundle's `large_files` lists, and download those that are missing.

    Returns
    -------
    bool
        Whether all of them have published checksums.
    """
    name = next((name for name in _LARGE_FILES if (folder / name).is_file()), None)
    if name is None:
        return True
    try:
        with (folder / name).open("rb") as stream:
            entries = yaml.safe_load(stream.read(MAX_DOCUMENT_BYTES))["large_files"]
        files = [
            (str(e["path"]), str(e["url"]), e.get("hash_type"), e.get("hash_val")) for e in entries
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as exc:
        raise damaged(f"{name} is malformed") from exc
    published = True
    for path, address, algorithm, value in files:
        digest = parse_digest(str(algorithm), str(value)) if algorithm and value else None
        published &= digest is not None
        if path.endswith(_UNREAD_SUFFIXES):
            continue
        file = folder / safe_path(path)
        if not file.is_file():
            downloads.put(Remote(address, digest), folder, path)
        elif digest is not None and not digest.matches(file):
            detail = f"{printable(path)} differs from the checksum in {name}"
            raise ScanError(Reason.MODEL_HASH, detail)
    return published


def _malformed(document: str) -> ScanError:
    return ScanError(Reason.DOWNLOAD, f"the {document} is malformed")


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files of a model folder to a new folder.

    Hidden files, caches and scans are left out. Links to files within the folder are copied as
    files.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if a link leads out of the folder, or the bounds are exceeded; MODEL_DAMAGED if
        a file can't be read.
    OSError
        If a file can't be written.
    """
    size, root = 0, source.resolve()
    for count, (file, name) in enumerate(_files(source), 1):
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise unsafe(f"{_shown(name)} is a link out of the folder: replace it with the file")
        try:
            stream = file.open("rb")
        except OSError as exc:
            raise read_error(exc, _shown(name), Reason.MODEL_DAMAGED) from exc
        with stream:
            # of the open file: it may have been replaced since the walk
            size += os.fstat(stream.fileno()).st_size
            _check_bounds(count, size)
            _write(stream, target, safe_path(name))


def unpack_zip(archive: Path, target: Path, below: str = "") -> None:
    """Unpack the files of a zip archive into a folder; hidden files and scans are left out.

    All names, sizes and types are checked before the first file is written. With `below`, only
    files in that folder of the archive are unpacked, without its name.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for paths that leave the folder, links, special files and archives that expand
        excessively; MODEL_DAMAGED if it is not a zip archive, damaged or encrypted.
    OSError
        If a file can't be written.
    """
    try:
        opened = zipfile.ZipFile(archive)
    except Exception as exc:  # damaged archives raise errors of many types
        detail = "the file is no zip archive, or cut off; unpack others, and add the folder"
        raise damaged(detail) from exc
    with opened:
        members = _checked(opened.infolist(), archive.stat().st_size)
        for info, path in members:
            if not _is_wanted(path.as_posix()) or not path.is_relative_to(below):
                continue
            try:
                stream = opened.open(info)
            except Exception as exc:
                raise damaged("the zip archive is damaged") from exc
            with stream:
                _write(stream, target, path.relative_to(below))


def _checked(
    infos: list[zipfile.ZipInfo], packed_bytes: int
) -> list[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """Return the files of an archive with their safe paths."""
    size = 0
    members: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for info in infos:
        mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise unsafe(f"{_shown(info.filename)} is a link or a special file")
        name = info.orig_filename
        if info.create_system == _DOS:  # PowerShell separates folders as Windows does
            name = name.replace("\\", "/")
        path = safe_path(name.removesuffix("/"))
        if name.endswith("/"):
            continue
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
            raise damaged("the zip archive is encrypted, or compressed by an unusual method")
        # the second of two equal names would replace what was checked as the first
        if path in members:
            raise unsafe(f"{_shown(info.filename)} occurs twice")
        members[path] = info
        size += info.file_size
        _check_bounds(len(members), size, packed_bytes)
    for path in members:
        if any(parent in members for parent in path.parents):
            raise unsafe(f"{_shown(str(path))} lies below a file")
    return [(info, path) for path, info in members.items()]


def _check_bounds(files: int, size: int, packed: int | None = None) -> None:
    """Refuse too many files or bytes, also for the packed bytes of an archive: MODEL_UNSAFE."""
    if files > MAX_FILES or size > MAX_MODEL_BYTES:
        detail = f"the model has more than {MAX_FILES} files or {format_bytes(MAX_MODEL_BYTES)}"
        raise unsafe(detail)
    if packed is not None and size > max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * packed):
        detail = f"a zip archive of {format_bytes(packed)} would expand to more than"
        raise unsafe(f"{detail} {format_bytes(size)}")


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the wanted files of a folder with their names relative to it."""

    def unreadable(exc: OSError) -> None:
        raise ScanError(Reason.UNREADABLE, "a folder of the model can't be read") from exc

    for root, folders, names in os.walk(folder, onerror=unreadable):
        for name in folders:
            if Path(root, name).is_symlink() and _is_wanted(name):
                raise unsafe(f"the folder {_shown(name)} is a link: replace it with the folder")
        folders[:] = sorted(name for name in folders if _is_wanted(name))
        for name in sorted(names):
            file = Path(root, name)
            if _is_wanted(name) and file.is_file():
                yield file, file.relative_to(folder).as_posix()


def _is_wanted(name: str) -> bool:
    """Return whether a file can belong to a model: not hidden, no cache, no scan."""
    levels = PurePosixPath(name).parts
    caches = {"__pycache__", "__MACOSX"} & {*levels}
    hidden = caches or any(level.startswith(".") for level in levels)
    return not hidden and not name.lower().endswith(SCAN_SUFFIXES)


def safe_path(name: str) -> PurePosixPath:
    r"""Return the relative path of a file in a model.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if it is absolute, contains `..`, `\` or control characters, or is too long.
    """
    path = PurePosixPath(name)
    levels = name.split("/")
    safe = (
        name.isprintable()
        and not path.is_absolute()
        and not {"", ".", ".."} & {*levels}
        # separators and drives of Windows, to which a model may be copied
        and not set("\\:") & {*name}
        and len(levels) <= MAX_DEPTH
        and all(len(level.encode()) <= MAX_NAME_BYTES for level in levels)
    )
    if not safe:
        raise unsafe(f"{_shown(name)} is not a path inside the model")
    return path


def _write(stream: IO[bytes], target: Path, path: PurePosixPath) -> None:
    """Write a new file and flush it to disk."""
    file = target / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as output:
        while chunk := _read(stream):
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())


def _read(stream: Any) -> bytes:
    """Return the next bytes of a file or a member of an archive."""
    try:
        chunk: bytes = stream.read(_CHUNK_BYTES)
    except Exception as exc:  # a wrong checksum, damaged compression, a lost disk
        raise damaged("a file of the model is damaged") from exc
    return chunk


def _shown(name: str) -> str:
    short = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    return printable(short)
