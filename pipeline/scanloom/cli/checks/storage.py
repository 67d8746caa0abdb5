"""Check the output disk, the key and the models."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scanloom.cli.checks.finding import Finding
from scanloom.core import ScanError, format_bytes

GIB = 1 << 30
LITTLE_SPACE = 2 * GIB
"""Enough for a few dozen cases with images."""
NO_SPACE = GIB // 10
"""Not enough for one case."""


def check_out(out: Path) -> Iterator[Finding]:
    """Check the disk of OUT: free space, and whether results can be published there."""
    existing = next((p for p in (out.absolute(), *out.absolute().parents) if p.exists()), Path("/"))
    name = f"{out}"
    if not existing.is_dir():
        yield Finding("output", name, "bad", "a file of this name exists", "choose another folder")
        return
    try:
        free = shutil.disk_usage(existing).free
    except OSError as exc:
        seen = f"can't be checked ({type(exc).__name__})"
        yield Finding("output", name, "bad", seen, "choose another folder")
        return
    yield judge_space(name, free)
    yield _publishing(existing, name)


def judge_space(name: str, free: int) -> Finding:
    """Return a finding for the free bytes of a disk."""
    seen = f"{format_bytes(free)} free"
    if free < NO_SPACE:
        return Finding("output", name, "bad", seen, "free space, or choose another disk with --out")
    if free < LITTLE_SPACE:
        return Finding("output", name, "warn", seen, "a case takes 5 to 200 MB: free space")
    return Finding("output", name, "ok", seen)


def _publishing(existing: Path, name: str) -> Finding:
    """Try the steps of publishing a case: write, fsync, rename, fsync the folder."""
    work = existing / f".scanloom-doctor-{secrets.token_hex(4)}"
    topic, step = "output", f"write, fsync, rename in {name}"
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
        intact = (work / "done" / "file").read_bytes() == b"scanloom"
    except OSError as exc:
        advice = "check permissions and mount options, or choose another folder with --out"
        return Finding(topic, step, "bad", f"fails ({type(exc).__name__})", advice)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not intact:
        advice = "do not use this disk: it returns other bytes than were written"
        return Finding(topic, step, "bad", "reads back wrong data", advice)
    return Finding(topic, step, "ok", "works")


def check_key() -> Iterator[Finding]:
    """Check the key of the case ids, or whether it can be created; does not create it."""
    from scanloom.io.identity import default_key_file, load_key

    file = default_key_file()
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        yield _key_to_be(file)
        return
    except OSError as exc:
        seen = f"can't be read ({type(exc).__name__})"
        yield Finding(
            "key", "key of the ids", "bad", seen, "check its permissions, or set SCANLOOM_KEY"
        )
        return
    try:
        load_key()
    except ScanError as exc:
        advice = "restore it from a backup: with another key all ids change"
        yield Finding("key", "key of the ids", "bad", f"{exc.detail} ({exc.code})", advice)
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        seen = f"present, but readable by others (mode {stat.S_IMODE(mode):04o})"
        yield Finding("key", "key of the ids", "warn", seen, f"chmod 600 {file}")
        return
    yield Finding("key", "key of the ids", "ok", "present, readable by you only")


def _key_to_be(file: Path) -> Finding:
    """Check that a key can be created, in the given folder or in the default one."""
    folder = file.parent
    if "SCANLOOM_KEY" not in os.environ:
        folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Finding("key", "key of the ids", "ok", "missing: created on first use")
    except OSError as exc:
        seen = f"missing and can't be created ({type(exc).__name__})"
        advice = "set HOME to a writable folder, or SCANLOOM_KEY to a key file"
        return Finding("key", "key of the ids", "bad", seen, advice)


def check_models() -> Iterator[Finding]:
    """Read every model's card and hash its weights."""
    from scanloom.cards.store import list_models

    try:
        entries = list_models()
    except ScanError as exc:
        yield Finding("models", "store", "bad", f"{exc.detail} ({exc.code})", "reinstall scanloom")
        return
    if not entries:
        yield Finding("models", "store", "bad", "there are no models", "reinstall scanloom")
    for entry in entries:
        if entry.card is not None:
            seen = f"{entry.card.version}, weights {entry.card.weights.sha256[:12]}"
            yield Finding("models", entry.name, "ok", seen)
        elif entry.error is not None:
            seen = f"{entry.error.detail} ({entry.error.code})"
            yield Finding("models", entry.name, "bad", seen, entry.error.reason.advice)
