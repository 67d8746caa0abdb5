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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Protocol
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
)
from scanloom.convert.provenance import Digest
from scanloom.core import Reason, ScanError, did_you_mean, format_bytes, printable

TASK_FILE: Final = "totalsegmentator.json"
"""Name of a file that states the task for which TotalSegmentator's datasets were downloaded."""
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
_UNIX: Final = 3
"""Value of a zip's create_system for which external_attr holds the mode of the file."""
_CHUNK_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 60


def find_source(request: str) -> Source:
    """Return the source that a request names.

    Parameters
    ----------
    request : str
        Address, path of a folder or zip file, `brainchop/NAME`, `totalsegmentator/TASK`,
        `monai/NAME` of a bundle in MONAI's model zoo, with `@VERSION` or without, or the bundle's
        name alone if it is one of `ZOO_BUNDLES`.

    Raises
    ------
    ScanError
        DOWNLOAD for an address that is not https; MODEL_UNKNOWN for a name that is not in a table.
    """
    if "://" in request:
        return HuggingFace.parse(request) or _address(request)
    if not request.strip():
        raise ScanError(Reason.MODEL_UNKNOWN, "the name of the model is empty")
    # What is here comes before names: a folder may be called as a collection is
    path = Path(request)
    if "\0" not in request and len(request) < _MAX_PATH_CHARACTERS and path.exists():
        return LocalFolder(path) if path.is_dir() else LocalZip(path)
    collection, _, name = request.rpartition("/")
    if collection.lower() == "brainchop":
        return _brainchop(name)
    if collection.lower() == "totalsegmentator":
        return _totalsegmentator(name.lower())
    if collection.lower() == "monai":
        return ZooBundle.parse(name)
    # A bare name counts only if the table has it: a mistyped path sends nothing to the network
    known = addresses.ZOO_BUNDLES
    bundle = name.partition("@")[0]
    if not collection and bundle.lower() in map(str.lower, known):
        return ZooBundle.parse(name)
    detail = f"there is no folder or zip file {printable(request[:200])!r}"
    if not collection and len(request) < _MAX_PATH_CHARACTERS:
        hint = did_you_mean(bundle, known)
        detail += f", and no model of that name is known; {hint}"
    raise ScanError(Reason.MODEL_UNKNOWN, detail)


def _address(address: str) -> RemoteZips:
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
    return RemoteZips(name, plain, (Remote(plain, digest),))


def _brainchop(name: str) -> RemoteFiles:
    digests = addresses.BRAINCHOP_MODELS.get(name)
    if digests is None:
        raise _unknown("brainchop", name, addresses.BRAINCHOP_MODELS)
    origin = f"{addresses.BRAINCHOP}/public/models/{name}"
    files = {
        file: Remote(f"{origin}/{file}", Digest("sha256", sha256))
        for file, sha256 in digests.items()
    }
    licence, sha256 = addresses.BRAINCHOP_LICENCE
    files[licence] = Remote(f"{addresses.BRAINCHOP}/{licence}", Digest("sha256", sha256))
    return RemoteFiles(name, origin, files, licence="MIT")


def _totalsegmentator(task: str) -> RemoteZips:
    if task in addresses.TOTALSEGMENTATOR_LICENSED:
        detail = f"the weights of {task} need a licence: get them with TotalSegmentator, and give "
        raise ScanError(Reason.LICENCE, f"{detail}their folder")
    numbers = addresses.TOTALSEGMENTATOR_TASKS.get(task)
    if numbers is None:
        raise _unknown("totalsegmentator", task, addresses.TOTALSEGMENTATOR_TASKS)
    by_number = {
        int(dataset[7:10]): f"{addresses.TOTALSEGMENTATOR}/{release}/{quote(dataset)}.zip"
        for release, datasets in addresses.TOTALSEGMENTATOR_DATASETS.items()
        for dataset in datasets
    }
    zips = tuple(Remote(by_number[number]) for number in numbers)
    text = json.dumps({"task": task, "datasets": numbers})
    origin = f"{addresses.TOTALSEGMENTATOR}#{task}"
    return RemoteZips(task, origin, zips, licence="Apache-2.0", texts={TASK_FILE: text})


def _unknown(collection: str, name: str, known: Mapping[str, object]) -> ScanError:
    hint = did_you_mean(name, sorted(known))
    return ScanError(Reason.MODEL_UNKNOWN, f"{collection} has no {printable(name[:200])!r}; {hint}")


@dataclass(frozen=True)
class Gathered:
    """Address that files came from, and whether all were compared with published checksums."""

    address: str
    published: bool


class Source(Protocol):
    """Place that a model comes from."""

    @property
    def name(self) -> str:
        """Name for the model, unless the user gives another."""

    @property
    def origin(self) -> str:
        """Text for the record: the address, or kind and name of a local source."""

    @property
    def remote(self) -> bool:
        """Whether the network is needed."""

    @property
    def licence(self) -> str:
        """Licence as the source states it, empty if the model's own files do."""

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Write the model's files below `target`; downloads are kept in `work`."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine.

    nnU-Net's names of folders (TRAINER__PLANS__CONFIGURATION) are kept, below that of the model,
    and a cascade is copied with its first stage, which is next to it.
    """

    path: Path
    remote: bool = field(default=False, init=False)
    licence: str = field(default="", init=False)

    @property
    def name(self) -> str:
        """Name of the folder; for nnU-Net's, the data set and the configuration."""
        path = self.path.resolve()
        if _NNUNET_NAME.fullmatch(path.name):
            return f"{path.parent.name}_{path.name.rpartition('__')[2]}"
        return path.name

    @property
    def origin(self) -> str:
        """Name of the folder; its path may name a person."""
        return f"folder {printable(self.name)}"

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Copy the files."""
        path = self.path.resolve()
        match = _NNUNET_NAME.fullmatch(path.name)
        if match is None:
            copy_folder(path, target)
        else:
            first = path.with_name(f"{match[1]}__3d_lowres")
            stages = [first] if match[2] == "3d_cascade_fullres" and first.is_dir() else []
            for folder in (*stages, path):
                copy_folder(folder, target / folder.name)
        return Gathered(self.origin, published=False)


@dataclass(frozen=True)
class LocalZip:
    """A zip file on this machine."""

    path: Path
    remote: bool = field(default=False, init=False)
    licence: str = field(default="", init=False)

    @property
    def name(self) -> str:
        """Name of the file without its suffix."""
        return self.path.stem

    @property
    def origin(self) -> str:
        """Name of the file; its path may name a person."""
        return f"zip file {printable(self.path.name)}"

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Unpack the file."""
        if not self.path.is_file():
            detail = f"{printable(self.path.name)} is neither a folder nor a zip file"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        unpack_zip(self.path, target)
        return Gathered(self.origin, published=False)


@dataclass(frozen=True)
class RemoteZips:
    """Zip files on the network, unpacked into one folder.

    Parameters
    ----------
    name, origin, licence : str
        As in `Source`.
    zips : tuple of Remote
        The files.
    texts : mapping of str to str
        Further files: path and content.
    """

    name: str
    origin: str
    zips: tuple[Remote, ...]
    licence: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    remote: bool = field(default=True, init=False)

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download and unpack the files."""
        files = [download(remote, work, progress) for remote in self.zips]
        for file in files:
            unpack_zip(file, target)
        for path, text in self.texts.items():
            (target / path).write_text(text, encoding="utf-8")
        published = all(remote.digest is not None for remote in self.zips)
        return Gathered(", ".join(remote.address for remote in self.zips), published)


@dataclass(frozen=True)
class RemoteFiles:
    """Single files on the network, by their paths in the model's folder."""

    name: str
    origin: str
    files: Mapping[str, Remote]
    licence: str = ""
    remote: bool = field(default=True, init=False)

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download the files."""
        for path, remote in self.files.items():
            put_file(download(remote, work, progress), target, path)
        published = all(remote.digest is not None for remote in self.files.values())
        return Gathered(self.origin, published)


def download(
    remote: Remote, work: Path, progress: Progress, limit_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Return a downloaded file in the folder `work`; errors as `fetch`."""
    work.mkdir(parents=True, exist_ok=True)
    target = work / hashlib.sha256(remote.address.encode()).hexdigest()[:24]
    label = printable(PurePosixPath(urlsplit(remote.address).path).name)
    fetch(remote, target, limit_bytes, partial(progress, label))
    return target


def put_file(file: Path, target: Path, path: str) -> None:
    """Give a downloaded file its path in a model's folder; the download stays, too."""
    goal = target / safe_path(path)
    goal.parent.mkdir(parents=True, exist_ok=True)
    try:
        goal.hardlink_to(file)
    except FileExistsError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{printable(path)} is listed twice") from exc
    except OSError:  # a file system without hard links
        shutil.copyfile(file, goal)


def parse_digest(algorithm: str, value: str) -> Digest:
    """Return a published checksum; MODEL_HASH if it is malformed."""
    try:
        return Digest(algorithm, value.strip().lower())  # type: ignore[arg-type]  # is checked
    except ValueError as exc:
        raise ScanError(Reason.MODEL_HASH, f"a published checksum is {exc}") from exc


@dataclass(frozen=True)
class HuggingFace:
    """A repository on Hugging Face at one revision.

    Its files are compared with the SHA-256, or the git blobs, that the list of files states.
    """

    owner: str
    repository: str
    revision: str = "main"
    licence: str = field(default="", init=False)
    remote: bool = field(default=True, init=False)

    @classmethod
    def parse(cls, address: str) -> HuggingFace | None:
        """Return the repository that an address names, None for other addresses."""
        match = _REPOSITORY.fullmatch(address.removeprefix(addresses.HUGGING_FACE))
        if match is None or not address.startswith(f"{addresses.HUGGING_FACE}/"):
            return None
        return cls(match[1], match[2], match[3] or "main")

    @property
    def name(self) -> str:
        """Name of the repository."""
        return self.repository

    @property
    def origin(self) -> str:
        """Address of the repository at its revision."""
        return f"{self._base}/tree/{self.revision}"

    @property
    def _base(self) -> str:
        return f"{addresses.HUGGING_FACE}/{self.owner}/{self.repository}"

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download the files."""
        listing = (
            f"{addresses.HUGGING_FACE}/api/models/{self.owner}/{self.repository}"
            f"/tree/{self.revision}?recursive=true"
        )
        for path, remote in self._files(_document(listing, work, progress)):
            put_file(download(remote, work, progress), target, path)
        return Gathered(self.origin, _complete(target, work, progress))

    def _files(self, entries: Any) -> Iterator[tuple[str, Remote]]:
        """Yield path and address of the files that a reader may need."""
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
            if path.startswith(".") or path.endswith(_UNREAD_SUFFIXES):
                continue
            address = f"{self._base}/resolve/{self.revision}/{quote(path)}"
            yield path, Remote(address, parse_digest(algorithm, str(value)), size)


@dataclass(frozen=True)
class ZooBundle:
    """A bundle of MONAI's model zoo; its newest version, unless another is named."""

    bundle: str
    version: str | None = None
    licence: str = field(default="", init=False)
    remote: bool = field(default=True, init=False)

    @classmethod
    def parse(cls, request: str) -> ZooBundle:
        """Return the bundle for `NAME` or `NAME@VERSION`; MODEL_UNKNOWN if it is malformed."""
        match = _NAME.fullmatch(request)
        if match is None:
            detail = f"{printable(request[:200])!r} is neither a file, a folder nor a model's name"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        return cls(match[1], match[2])

    @property
    def name(self) -> str:
        """Name of the bundle."""
        return self.bundle

    @property
    def origin(self) -> str:
        """Name in the zoo, with the version if it is given."""
        return f"MONAI model zoo: {self.bundle}" + (f"@{self.version}" if self.version else "")

    def gather(self, work: Path, target: Path, progress: Progress) -> Gathered:
        """Download the bundle from where the zoo's list leads to, else from Hugging Face."""
        bundle, version, entry = self._find(_document(addresses.ZOO_LIST, work, progress))
        twin = HuggingFace(addresses.ZOO_OWNER, bundle, version)
        try:
            source, checksum = str(entry["source"]), str(entry["checksum"])
        except (KeyError, TypeError) as exc:
            raise _malformed("list of the model zoo") from exc
        repository = HuggingFace.parse(source)
        if repository is not None:
            return repository.gather(work, target, progress)
        try:
            archive = download(Remote(source, parse_digest("sha1", checksum)), work, progress)
        except ScanError as exc:
            if exc.reason is not Reason.DOWNLOAD or isinstance(exc, ConnectionLostError):
                raise
            return twin.gather(work, target, progress)
        unpack_zip(archive, target)
        folders = [folder for folder in target.iterdir() if folder.is_dir()]
        folder = folders[0] if len(folders) == 1 else target
        return Gathered(source, _complete(folder, work, progress))

    def _find(self, listing: Any) -> tuple[str, str, Any]:
        """Return name, version and entry of the bundle in the zoo's list."""
        if not isinstance(listing, dict):
            raise _malformed("list of the model zoo")
        versions: dict[str, dict[str, Any]] = {}
        for key, entry in listing.items():
            bundle, _, version = key.removesuffix(".zip").rpartition("_v")
            versions.setdefault(bundle, {})[version] = entry
        names = {bundle.lower(): bundle for bundle in versions if bundle}
        bundle = names.get(self.bundle.lower())
        if bundle is None:
            hint = did_you_mean(self.bundle, sorted(names.values()))
            detail = f"MONAI's model zoo has no {self.bundle!r}; {hint}"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        version = self.version or max(versions[bundle], key=_order)
        if version not in versions[bundle]:
            hint = did_you_mean(version, sorted(versions[bundle], key=_order))
            detail = f"{bundle} has no version {version}; {hint}"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        return bundle, version, versions[bundle][version]


def _order(version: str) -> tuple[bool, Version]:
    """Return a sort key for versions: malformed ones come first."""
    try:
        return True, Version(version)
    except InvalidVersion:
        return False, Version("0")


def _complete(folder: Path, work: Path, progress: Progress) -> bool:
    """Check the files that a bundle's `large_files` lists, and download those that are missing.

    Returns
    -------
    bool
        Whether all of them have published checksums.
    """
    name = next((name for name in _LARGE_FILES if (folder / name).is_file()), None)
    if name is None:
        return True
    published = True
    for path, remote in _large_files(folder / name):
        published &= remote.digest is not None
        if path.endswith(_UNREAD_SUFFIXES):
            continue
        file = folder / safe_path(path)
        if not file.is_file():
            put_file(download(remote, work, progress), folder, path)
        elif remote.digest is not None and not remote.digest.matches(file):
            detail = f"{printable(path)} differs from the checksum in {name}"
            raise ScanError(Reason.MODEL_HASH, detail)
    return published


def _large_files(file: Path) -> Iterator[tuple[str, Remote]]:
    """Yield path, address and checksum of the files that a bundle's `large_files` lists."""
    try:
        with file.open("rb") as stream:
            entries = yaml.safe_load(stream.read(MAX_DOCUMENT_BYTES))["large_files"]
        files = [
            (str(e["path"]), str(e["url"]), e.get("hash_type"), e.get("hash_val")) for e in entries
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{file.name} is malformed") from exc
    for path, address, algorithm, value in files:
        digest = parse_digest(str(algorithm), str(value)) if algorithm and value else None
        yield path, Remote(address, digest)


def _document(address: str, work: Path, progress: Progress) -> Any:
    """Return a JSON document from the network; it is downloaded anew each time."""
    file = download(Remote(address), work, progress, MAX_DOCUMENT_BYTES)
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise _malformed("reply") from exc
    finally:
        file.unlink(missing_ok=True)


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
    bounds, root = _Bounds(), source.resolve()
    for file, name in _files(source):
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            detail = f"{_shown(name)} is a link out of the folder: replace it with the file"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        try:
            stream = file.open("rb")
        except OSError as exc:
            raise ScanError(Reason.MODEL_DAMAGED, f"{_shown(name)} can't be read") from exc
        with stream:
            bounds.add(os.fstat(stream.fileno()).st_size)
            _write(stream, target, safe_path(name))


def unpack_zip(archive: Path, target: Path) -> None:
    """Unpack the files of a zip archive into a folder; hidden files and scans are left out.

    All names, sizes and types are checked before the first file is written.

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
        raise ScanError(Reason.MODEL_DAMAGED, "the file is not a zip archive") from exc
    with opened:
        members = _checked(opened.infolist(), archive.stat().st_size)
        for info, path in members:
            if _is_wanted(path.as_posix()):
                _unpack_member(opened, info, target, path)


def _checked(
    infos: list[zipfile.ZipInfo], packed_bytes: int
) -> list[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """Return the files of an archive with their safe paths."""
    bounds = _Bounds(packed_bytes)
    members: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for info in infos:
        mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            detail = f"{_shown(info.filename)} is a link or a special file"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        path = safe_path(info.orig_filename.removesuffix("/"))
        if info.is_dir():
            continue
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
            detail = "the zip archive is encrypted, or compressed by an unusual method"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
        if path in members:
            raise ScanError(Reason.MODEL_UNSAFE, f"{_shown(info.filename)} occurs twice")
        bounds.add(info.file_size)
        members[path] = info
    for path in members:
        if any(parent in members for parent in path.parents):
            raise ScanError(Reason.MODEL_UNSAFE, f"{_shown(str(path))} lies below a file")
    return [(info, path) for path, info in members.items()]


def _unpack_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path, path: PurePosixPath
) -> None:
    try:
        stream = archive.open(info)
    except Exception as exc:
        raise ScanError(Reason.MODEL_DAMAGED, "the zip archive is damaged") from exc
    with stream:
        _write(stream, target, path)


class _Bounds:
    """Counts files and bytes, and refuses too many.

    Parameters
    ----------
    packed_bytes : int or None
        Size of the archive; None for a folder.
    """

    def __init__(self, packed_bytes: int | None = None) -> None:
        self._packed_bytes = packed_bytes
        self._files = self._bytes = 0

    def add(self, size: int) -> None:
        """Count a file; errors as `unpack_zip`."""
        self._files += 1
        self._bytes += size
        if self._files > MAX_FILES or self._bytes > MAX_MODEL_BYTES:
            detail = f"the model has more than {MAX_FILES} files or {format_bytes(MAX_MODEL_BYTES)}"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        if self._packed_bytes is None or self._bytes <= ALWAYS_ALLOWED_BYTES:
            return
        if self._bytes > MAX_EXPANSION * self._packed_bytes:
            detail = (
                f"a zip archive of {format_bytes(self._packed_bytes)} would expand to more than"
            )
            raise ScanError(Reason.MODEL_UNSAFE, f"{detail} {format_bytes(self._bytes)}")


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the wanted files of a folder with their names relative to it."""

    def unreadable(exc: OSError) -> None:
        raise ScanError(Reason.UNREADABLE, "a folder of the model can't be read") from exc

    for root, folders, names in os.walk(folder, onerror=unreadable):
        for name in folders:
            if Path(root, name).is_symlink() and _is_wanted(name):
                detail = f"the folder {_shown(name)} is a link: replace it with the folder"
                raise ScanError(Reason.MODEL_UNSAFE, detail)
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
        and not set("\\:") & {*name}
        and len(levels) <= MAX_DEPTH
        and all(len(level.encode()) <= MAX_NAME_BYTES for level in levels)
    )
    if not safe:
        raise ScanError(Reason.MODEL_UNSAFE, f"{_shown(name)} is not a path inside the model")
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
        raise ScanError(Reason.MODEL_DAMAGED, "a file of the model is damaged") from exc
    return chunk


def _shown(name: str) -> str:
    """Return a file name for a message."""
    short = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}..."
    return printable(short)
