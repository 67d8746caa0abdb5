"""Ids that say nothing: keyed hashes, the same for the same scan wherever it lies."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scanloom.core import Reason, ScanError, Series, home
from scanloom.io.regular import open_regular, read_regular
from scanloom.own_python import is_ours, make_private_folder

KEY_BYTES = 32
ID_BYTES = 16
"""128 bit: no two scans of a million archives meet by chance."""
END_BYTES = 1 << 16
"""How much of a file's head and tail goes into its fingerprint."""
SAMPLES = 16
SAMPLE_BYTES = 1 << 12

_OF_OTHERS = (
    "the key file belongs to another user, or others may write to it or its folder: take that "
    "right from them if the key is yours, or name another place by --key or SCANLOOM_KEY"
)
_PIECE = 1 << 20
_THREADS = 4


def load_key(file: Path | None = None) -> bytes:
    """Return the secret key of all ids; made on first use, readable for its owner only.

    Parameters
    ----------
    file : Path or None
        Where it is kept; None for the path in SCANLOOM_KEY, or else `scanloom/key` in the user's
        configuration folder (XDG_CONFIG_HOME, or ~/.config), which is made with the key.

    Raises
    ------
    ScanError
        NOT_FOUND if the folder of a file that was named is not there: it may be mistyped;
        UNREADABLE if it can't be read or made, or lies in the usual place and may be somebody
        else's; DAMAGED if it is no key.
    """
    named = file or _named_by_environment()
    path = named or usual_key_file()
    if named and not named.parent.is_dir():
        detail = "the folder of the key file is not there: a key is made in a folder that is"
        raise ScanError(Reason.NOT_FOUND, detail)
    try:
        if not named and not _is_own_key(path):
            raise ScanError(Reason.UNREADABLE, _OF_OTHERS)
        key = read_regular(path, KEY_BYTES) if path.exists() else _make_key(path)
    except OSError as exc:
        elsewhere = "" if named else ": name another place by --key or SCANLOOM_KEY"
        detail = f"the key file can't be read or made ({type(exc).__name__}){elsewhere}"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    if len(key) != KEY_BYTES:
        held = len(key) if len(key) < KEY_BYTES else f"more than {KEY_BYTES}"
        raise ScanError(Reason.DAMAGED, f"the key file holds {held} bytes, not {KEY_BYTES}")
    return key


def read_key(file: Path | None = None) -> bytes:
    """Return the key that is there already, for who asks about ids and makes none.

    Parameters are those of `load_key`.

    Raises
    ------
    ScanError
        KEY_MISMATCH if there is none; UNREADABLE or DAMAGED as in `load_key`.
    """
    path = file or usual_key_file()
    if not path.exists():
        raise ScanError(Reason.KEY_MISMATCH, "there is no key here yet")
    return load_key(file)


def _is_own_key(path: Path) -> bool:
    """Whether no other user has, or could have, put a key into the usual place."""
    places = {place for file in (path, path.resolve()) for place in (file, file.parent)}
    return all(is_ours(place) for place in places if place.exists())


def key_fingerprint(key: bytes) -> str:
    """Return what tells one key from another and gives neither away."""
    return _text(_hash(key, b"key fingerprint", [b""]))


def case_id(series: Series, key: bytes, phase: int | None = None) -> str:
    """Return the id of a scan: 26 characters, the same whatever its path, machine or file order.

    It is made of study and series UID; where there is no series UID, of what the files hold. A
    volume that was chosen of several (`phase`) has an id of its own.

    Raises
    ------
    ScanError
        UNREADABLE if a file can't be read.
    """
    if series.series_uid:
        uids = [series.study_uid.encode(), series.series_uid.encode()]
        whole = _hash(key, b"case by uid", uids)
    else:
        prints = _of_each(series.files, key, _fingerprint)
        whole = _hash(key, b"case by files", sorted(prints))
    if phase is None:
        return _text(whole)
    return _text(_hash(key, b"phase", [whole, str(phase).encode()]))


def study_id(study_uid: str, key: bytes) -> str:
    """Return the id of a study: 26 characters."""
    return _text(_hash(key, b"study by uid", [study_uid.encode("utf-8", "replace")]))


def file_id(path: Path, instance_uid: str, key: bytes) -> str:
    """Return the id of one file: 26 characters, the same wherever it lies.

    Parameters
    ----------
    path : Path
        Opened only where there is no UID.
    instance_uid : str
        SOPInstanceUID; empty where the file has none.

    Raises
    ------
    ScanError
        UNREADABLE if the file must be read and can't be.
    """
    if instance_uid:
        return _text(_hash(key, b"file by uid", [instance_uid.encode("utf-8", "replace")]))
    return _text(_hash(key, b"file by content", _of_each([path], key, _fingerprint)))


def source_hash(series: Series, key: bytes) -> str:
    """Return a keyed hash of all that the files hold, to tell whether a source changed.

    It knows neither paths nor order, nor how often the same content is there.

    Raises
    ------
    ScanError
        UNREADABLE if a file can't be read.
    """
    return _text(_hash(key, b"source", sorted(set(_of_each(series.files, key, _whole_file)))))


def channels_hash(series: Sequence[Series], key: bytes) -> str:
    """Return a keyed hash of what the files of all input channels hold; their order counts.

    Raises
    ------
    ScanError
        UNREADABLE if a file can't be read.
    """
    hashes = [source_hash(one, key) for one in series]
    if len(hashes) == 1:
        return hashes[0]
    return _text(_hash(key, b"channels", [one.encode() for one in hashes]))


def source_stamp(stamps: Sequence[str], key: bytes) -> str:
    """Return a keyed hash of each input series' stamp, joined by spaces; empty if one has none."""
    if not all(stamps):
        return ""
    return " ".join(_text(_hash(key, b"stamp", [stamp.encode()])) for stamp in stamps)


def usual_key_file() -> Path:
    """Return where the key is kept if no file is named; it need not be there yet."""
    if named := _named_by_environment():
        return named
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else home() / ".config") / "scanloom" / "key"


def _named_by_environment() -> Path | None:
    named = os.environ.get("SCANLOOM_KEY")
    return Path(named) if named else None


def _make_key(path: Path) -> bytes:
    """Write a new key whole, then link it into place: who comes second takes the first one."""
    make_private_folder(path.parent)
    key = secrets.token_bytes(KEY_BYTES)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails where the key is there already: never overwritten
        except FileExistsError:
            return read_regular(path, KEY_BYTES)
    finally:
        draft.unlink()
    return key


def _hash(key: bytes, purpose: bytes, parts: Iterable[bytes]) -> bytes:
    """Return BLAKE2b of the parts, each with its length, so that none can pass into the next."""
    digest = hashlib.blake2b(key=key, digest_size=ID_BYTES)
    for part in (purpose, *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _text(digest: bytes) -> str:
    return base64.b32encode(digest).decode().rstrip("=").lower()


def _of_each(
    files: Sequence[Path], key: bytes, what: Callable[[Path, bytes], bytes]
) -> list[bytes]:
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda file: what(file, key), files))
    except OSError as exc:
        detail = f"a file can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc


def _whole_file(path: Path, key: bytes) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=ID_BYTES)
    piece = bytearray(_PIECE)
    with open_regular(path) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.digest()


def _fingerprint(path: Path, key: bytes) -> bytes:
    """Return a hash of size, head, tail and samples between: enough to tell files apart."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        between = max(size - 2 * END_BYTES, 0)
        places = [(0, END_BYTES), (max(size - END_BYTES, 0), END_BYTES)]
        places += [
            (END_BYTES + between * n // SAMPLES, SAMPLE_BYTES)
            for n in range(SAMPLES if between else 0)
        ]
        parts = [size.to_bytes(8, "little")]
        for offset, count in places:
            file.seek(offset)
            parts.append(file.read(count))
    return _hash(key, b"file", parts)
