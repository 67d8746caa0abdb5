"""The output disk, the key, the models."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scanloom.cli.checks.finding import Finding
from scanloom.core import ScanError

GIB = 1 << 30
LITTLE_SPACE = 2 * GIB
"""Some dozens of cases with images."""
NO_SPACE = GIB // 10
"""Not even one."""


def check_out(out: Path) -> Iterator[Finding]:
    """Look at the disk where OUT is or will be: room, and whether results survive there."""
    place = next((p for p in (out.absolute(), *out.absolute().parents) if p.exists()), Path("/"))
    name = f"{out}"
    if not place.is_dir():
        yield Finding("output", name, "bad", "a file is in the way", "name another folder")
        return
    try:
        free = shutil.disk_usage(place).free
    except OSError as exc:
        seen = f"can't be looked at ({type(exc).__name__})"
        yield Finding("output", name, "bad", seen, "name another folder")
        return
    yield judge_space(name, free)
    yield _publishing(place, name)


def judge_space(name: str, free: int) -> Finding:
    """Judge the free bytes of a disk."""
    seen = f"{free / GIB:.1f} GiB free"
    if free < NO_SPACE:
        return Finding("output", name, "bad", seen, "make room, or name another disk with --out")
    if free < LITTLE_SPACE:
        return Finding("output", name, "warn", seen, "a case takes 5 to 200 MB: make room")
    return Finding("output", name, "ok", seen)


def _publishing(place: Path, name: str) -> Finding:
    """Do what publishing a case does: write, fsync, rename, fsync the folder."""
    work = place / f".scanloom-doctor-{secrets.token_hex(4)}"
    topic, what = "output", f"write, fsync, rename in {name}"
    try:
        (work / "new").mkdir(parents=True)
        file = work / "new" / "file"
        with file.open("wb") as stream:
            stream.write(b"scanloom")
            stream.flush()
            os.fsync(stream.fileno())
        (work / "new").rename(work / "done")
        handle = os.open(work, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        whole = (work / "done" / "file").read_bytes() == b"scanloom"
    except OSError as exc:
        advice = "check permissions and mount options, or name another folder with --out"
        return Finding(topic, what, "bad", f"fails ({type(exc).__name__})", advice)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not whole:
        advice = "do not use this disk: it gives back other bytes than were written"
        return Finding(topic, what, "bad", "read back wrong", advice)
    return Finding(topic, what, "ok", "works")


def check_key() -> Iterator[Finding]:
    """Look at the key of the case ids, or whether it can be made; it is not made here."""
    from scanloom.io.identity import load_key, usual_key_file

    file = usual_key_file()
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        yield _key_to_be(file)
        return
    except OSError as exc:
        seen = f"can't be read ({type(exc).__name__})"
        yield Finding("key", "key of the ids", "bad", seen, "check its permissions, or use --key")
        return
    try:
        load_key()
    except ScanError as exc:
        advice = "get it from a backup: with another key all ids change"
        yield Finding("key", "key of the ids", "bad", f"{exc.detail} ({exc.code})", advice)
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        seen = f"there, but others may read it (mode {stat.S_IMODE(mode):04o})"
        yield Finding("key", "key of the ids", "warn", seen, f"chmod 600 {file}")
        return
    yield Finding("key", "key of the ids", "ok", "there, readable for you only")


def _key_to_be(file: Path) -> Finding:
    """Look whether a key can be made: in a folder that was named, or one that is made with it."""
    folder = file.parent
    if "SCANLOOM_KEY" not in os.environ:
        folder = next(place for place in (folder, *folder.parents) if place.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Finding("key", "key of the ids", "ok", "not there yet: made on first use")
    except OSError as exc:
        seen = f"not there, and can't be made ({type(exc).__name__})"
        advice = "set HOME to a folder that can be written, or name a key by SCANLOOM_KEY"
        return Finding("key", "key of the ids", "bad", seen, advice)


def check_models() -> Iterator[Finding]:
    """Read every model's card and hash its weights."""
    from scanloom.cards.store import list_models

    try:
        entries = list_models()
    except ScanError as exc:
        yield Finding("models", "store", "bad", f"{exc.detail} ({exc.code})", "install it again")
        return
    if not entries:
        yield Finding("models", "store", "bad", "no model is there", "install scanloom again")
    for entry in entries:
        if entry.card is not None:
            seen = f"{entry.card.version}, weights {entry.card.weights.sha256[:12]}"
            yield Finding("models", entry.name, "ok", seen)
        elif entry.error is not None:
            seen = f"{entry.error.detail} ({entry.error.code})"
            yield Finding("models", entry.name, "bad", seen, entry.error.reason.advice)
