"""`scanloom listen` in a process of its own, and senders of pynetdicom and DCMTK."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydicom import dcmread
from pydicom.uid import UID

from scanloom.engine.listen.spool import Arrival, JournalFollower
from support.processes import next_line

DEADLINE = 120  # s for a process to begin or to end: two cores may be busy


@dataclass
class Receiver:
    """A process that receives, and the folder of its site."""

    process: subprocess.Popen[str]
    port: int
    folder: Path

    @property
    def spool(self) -> Path:
        return self.folder / "out" / "private" / "spool"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the process, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)

    def stored(self) -> dict[str, Path]:
        """Return the files of the spool by SOPInstanceUID."""
        return {path.stem: path for path in (self.spool / "studies").glob("*/*/*.dcm")}

    def memory(self) -> int:
        """Return the largest resident memory so far, bytes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def read_journal(spool: Path) -> list[Arrival]:
    """Return all arrivals of a spool."""
    journal = JournalFollower(spool)
    journal._read.clear()
    return list(journal.new())


def write_site(folder: Path, **keys: Any) -> Path:
    """Write a site that takes pynetdicom's and DCMTK's senders; `keys` replace its own."""
    titles = ("PYNETDICOM", "STORESCU", "DCMSEND", "ECHOSCU")
    site = {"port": 0, "reserve": "1 MB", "peers": [{"title": title} for title in titles]}
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(site | keys))
    return path


@contextlib.contextmanager
def listening(
    folder: Path,
    wrap: Sequence[str] = (),
    program: str = "",
    options: Sequence[str] = (),
    **keys: Any,
) -> Iterator[Receiver]:
    """Yield a receiver; it is killed at the end, if it runs still.

    `wrap` is a command that starts it, such as strace; `program` is Python that runs before it.
    """
    site = write_site(folder, **keys)
    code = f"{program}\nfrom scanloom.cli.main import main\nmain()"
    arguments = ["listen", site, "--out", folder / "out", "--log", folder / "log", *options]
    command = [*wrap, sys.executable, "-c", code, *map(str, arguments)]
    errors = (folder / "errors").open("a")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ}
    )
    try:
        line = next_line(process)
        if not line.startswith("Listening"):
            pytest.fail(f"no receiver: {line} {(folder / 'errors').read_text()}")
        yield Receiver(process, int(line.split(" port ")[1].split()[0]), folder)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE)
        if process.stdout:
            process.stdout.close()
        errors.close()


def data_set(path: Path) -> bytes:
    """Return a file without preamble and meta header."""
    content = path.read_bytes()
    assert content[128:132] == b"DICM"
    return content[144 + int.from_bytes(content[140:144], "little") :]


@contextlib.contextmanager
def association(
    port: int,
    files: Iterable[Path] = (),
    title: str = "PYNETDICOM",
    called: str = "SCANLOOM",
    tls: Any = None,
) -> Iterator[Any]:
    """Yield an association of pynetdicom that offers each class of files in its own syntax."""
    from pynetdicom import AE, _config, evt

    from support.dicom_target import pause_surely

    _config.STORE_SEND_CHUNKED_DATASET = True  # the bytes of the file, whatever they are
    entity = AE(title)
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = 30
    entity.add_requested_context("1.2.840.10008.1.1")
    offered = set()
    for path in files:
        meta = dcmread(path, specific_tags=[], stop_before_pixels=True).file_meta
        offered.add((str(meta.MediaStorageSOPClassUID), str(meta.TransferSyntaxUID)))
    for sop_class, syntax in sorted(offered):
        entity.add_requested_context(sop_class, UID(syntax))

    made = entity.associate(
        *("127.0.0.1", port),
        ae_title=called,
        tls_args=tls,
        evt_handlers=[(evt.EVT_CONN_OPEN, pause_surely)],
    )
    try:
        yield made
    finally:
        if made.is_established:
            made.release()
        elif made.dul.is_alive():  # pynetdicom leaves the socket of one that was cut off open
            made.dul.kill_dul()
            made.dul.join(30)
        if made.dul.socket is not None and made.dul.socket.socket is not None:
            made.dul.socket.socket.close()


def send(port: int, files: Sequence[Path], **how: Any) -> dict[Path, int | None]:
    """Send files in their order; return the status of each, None for no answer."""
    answers: dict[Path, int | None] = {}
    with association(port, files, **how) as made:
        for path in files:
            try:
                status = made.send_c_store(path)
                answers[path] = status.Status if status else None
            except (RuntimeError, ValueError, AttributeError):  # the association has ended
                answers[path] = None
    return answers


def dcmtk(program: str) -> str:
    """Return the path of a program of DCMTK; skip the test by name where it is absent."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} of DCMTK is not installed")
    return found
