"""The cause of an unforeseen error: memory and machine are told from scanloom and from scans."""

from __future__ import annotations

import errno
import getpass
import os
import pwd
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from scanloom.cards.card import Weights
from scanloom.cards.card_file import read_card
from scanloom.convert.files import read_bytes
from scanloom.convert.provenance import PROVENANCE_FILE, read_provenance
from scanloom.convert.weights import find_weights
from scanloom.core import Reason, ScanError, blame, read_error
from scanloom.inference.network.loading import read_weights
from scanloom.io.dicom.header.header import parsing
from scanloom.io.system.archives import list_members
from scanloom.io.system.shared_memory import shared_empty


def no_memory() -> None:
    raise MemoryError


def no_memory_by_the_system() -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def no_library() -> None:
    import scanloom_has_no_such_module  # type: ignore[import-not-found]  # noqa: F401


def no_library_mapped() -> None:
    raise ImportError("libx.so: failed to map segment from shared object")


def no_file() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        os.open(os.devnull, os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def foreign() -> None:
    raise KeyError("Doe^Jane")


def ours() -> None:
    raise ScanError(Reason.SLICE_GAP, "slice 7 of 20")


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (no_memory, Reason.OUT_OF_MEMORY),
        (no_memory_by_the_system, Reason.OUT_OF_MEMORY),
        (no_library_mapped, Reason.OUT_OF_MEMORY),
        (no_library, Reason.ENVIRONMENT),
        (no_file, Reason.ENVIRONMENT),
        (foreign, Reason.INTERNAL),
        (ours, Reason.SLICE_GAP),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_blames_what_is_at_fault(fails: Callable[[], None], reason: Reason) -> None:
    reported = told_of(fails)

    assert reported.reason is reason
    assert "Doe" not in reported.detail


@pytest.mark.parametrize("reason", [Reason.OUT_OF_MEMORY, Reason.ENVIRONMENT, Reason.INTERNAL])
def test_what_says_nothing_of_a_scan_is_tried_again(reason: Reason) -> None:
    assert reason.retry


def test_a_user_without_a_name_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    nobody = max(entry.pw_uid for entry in pwd.getpwall()) + 4711
    monkeypatch.setattr(os, "getuid", lambda: nobody)

    assert told_of(getpass.getuser).reason is Reason.ENVIRONMENT
    assert told_of(Path.home).reason is Reason.ENVIRONMENT


def test_no_folder_for_temporary_files_is_the_machines_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])

    assert "TMPDIR" in told_of(tempfile.mkdtemp).detail


def test_no_thread_is_the_machines_fault() -> None:
    with little_address_space():
        reported = told_of(start_many)

    assert reported.reason in (Reason.ENVIRONMENT, Reason.OUT_OF_MEMORY)


def start_many() -> None:
    over = threading.Event()
    try:
        for _ in range(400):  # 8 MiB of stack each
            threading.Thread(target=over.wait, daemon=True).start()
    finally:
        over.set()


@contextmanager
def little_address_space() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EMFILE, Reason.ENVIRONMENT),
        (errno.ENFILE, Reason.ENVIRONMENT),
        (errno.ENOMEM, Reason.OUT_OF_MEMORY),
        (errno.EIO, Reason.UNREADABLE),
        (errno.ESTALE, Reason.UNREADABLE),
        (errno.EACCES, Reason.UNREADABLE),
        (errno.ENOENT, Reason.MODEL_DAMAGED),
        (errno.EISDIR, Reason.MODEL_DAMAGED),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_a_file_is_blamed_for_its_own_faults_only(number: int, reason: Reason) -> None:
    error = OSError(number, os.strerror(number), "DOE_JANE.pt")
    told = read_error(error, "model.pt", Reason.MODEL_DAMAGED)
    assert told.reason is reason
    assert "DOE" not in told.detail


READERS: dict[str, Callable[[Path], object]] = {
    "card.json": lambda file: read_card(file.parent),
    PROVENANCE_FILE: lambda file: read_provenance(file.parent),
    "metadata.json": lambda file: read_bytes(file, file.name),
    "model.pt": lambda file: find_weights(file, None, file.name),
    "model.safetensors": lambda file: read_weights(Weights(file, "")),
    "scan.dcm": lambda file: parse(file.open),
    "archive.zip": list_members,
}


@pytest.mark.parametrize("name", READERS)
def test_too_many_open_files_convict_no_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"{}")
    read = READERS[name]
    with suppress(ScanError):  # imports what it needs
        read(file)
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        told = told_of(lambda: read(file))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert told.reason in (Reason.ENVIRONMENT, Reason.UNREADABLE)


def parse(open_file: Callable[[], object]) -> None:
    """Parse an element whose value is read from the file when it is asked for."""
    with parsing("a text of a header"):
        open_file()


def told_of(fails: Callable[[], object]) -> ScanError:
    try:
        fails()
    except Exception as error:  # noqa: BLE001 whichever it is
        return blame(error)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("write", ["file", "memory"])
def test_a_limit_of_file_sizes_is_not_taken_for_a_lack_of_memory(
    write: str, tmp_path: Path
) -> None:
    """Memory that processes share counts as a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        if write == "file":
            (tmp_path / "file").write_bytes(bytes(1 << 20))
        else:
            shared_empty((1 << 20,), "u1")
    except (OSError, ScanError, MemoryError) as error:
        reported = blame(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert reported.reason is Reason.ENVIRONMENT
    assert "ulimit -f" in reported.detail


def test_a_device_with_a_fault_can_be_done_without() -> None:
    """The default, `auto`, would choose it again."""
    error = type("AcceleratorError", (RuntimeError,), {})("CUDA error: unspecified launch failure")
    reported = blame(error)
    assert reported.reason is Reason.DEVICE_UNAVAILABLE
    assert '`device="cpu"`' in str(reported)
