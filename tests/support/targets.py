"""Published cases with DICOM results, and targets that they are sent to."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydicom import Dataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from scanloom.engine.listen.outbox import Outbox
from scanloom.engine.listen.site import Site, read_site
from scanloom.io.output.layout import case_folder
from support import canaries, dicom_target
from support.dicom_target import RTSTRUCT, SEG, SR
from support.processes import next_line
from support.receivers import DEADLINE, data_set

FILES = {"segmentation": SEG, "measurements": SR, "rtstruct": RTSTRUCT}


def write_case(
    out: Path, name: str, classes: dict[str, str] = FILES, study: str = "", size: int = 5000
) -> Path:
    """Write a case as `publish` leaves it: small objects, their checksums, a timing of 1 s."""
    folder = case_folder(out, name)
    (folder / "dicom").mkdir(parents=True)
    study = study or generate_uid(entropy_srcs=[name])
    for file, sop_class in classes.items():
        ds = Dataset()
        ds.SOPClassUID, ds.SOPInstanceUID = sop_class, generate_uid()
        ds.StudyInstanceUID, ds.SeriesInstanceUID = study, generate_uid()
        ds.PatientName = canaries.BIRDS[0]
        ds.PatientID = canaries.BIRDS[0]
        ds.PixelData = hashlib.sha256(name.encode()).digest() * (size // 32)
        ds["PixelData"].VR = "OB"
        ds.ensure_file_meta()
        ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        ds.save_as(folder / "dicom" / f"{file}.dcm", enforce_file_format=True)
    (folder / "case.json").write_text('{"schema": 2}\n')
    timing = {"schema": 2, "steps": {"network": {"wall_s": 1.0, "cpu_s": 1.0}}}
    (folder / "timing.json").write_text(json.dumps(timing))
    sign(folder)
    return folder


def sign(folder: Path) -> None:
    """Write the checksums of a case."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    names = [name for name in names if name not in ("timing.json", "SHA256SUMS")]
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    text = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    (folder / "SHA256SUMS").write_text(text)


def objects_of(*folders: Path) -> dict[str, Path]:
    """Return the files of cases by SOPInstanceUID."""
    from pydicom import dcmread

    paths = [path for folder in folders for path in (folder / "dicom").glob("*.dcm")]
    return {
        str(dcmread(path, specific_tags=["SOPInstanceUID"]).SOPInstanceUID): path for path in paths
    }


@dataclass
class Target:
    """A target that keeps what it is sent, and its folder."""

    port: int
    folder: Path

    def stored(self) -> dict[str, Path]:
        """Return the data sets by SOPInstanceUID."""
        return {path.stem: path for path in self.folder.glob("*.dcm")}

    def told(self, word: str) -> Counter[str]:
        """Return how often each thing was asked."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(line.partition(" ")[2] for line in lines if line.startswith(f"{word} "))

    def has(self, *folders: Path) -> bool:
        """Return whether it has exactly the objects of cases, byte by byte."""
        sent, kept = objects_of(*folders), self.stored()
        return sent.keys() == kept.keys() and all(
            kept[uid].read_bytes() == data_set(path) for uid, path in sent.items()
        )


@contextlib.contextmanager
def running_target(folder: Path, *, own_process: bool = False, **config: Any) -> Iterator[Target]:
    """Yield a target of `dicom_target`; in a process of its own if this one receives, too."""
    folder.mkdir(exist_ok=True, parents=True)
    config = {"folder": str(folder), **config}
    if not own_process:
        server = dicom_target.serve(config)
        try:
            yield Target(server.server_address[1], folder)
        finally:
            server.shutdown()
            gc.collect()  # pynetdicom leaves sockets of failed connections in cycles
        return
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, dicom_target.__file__, str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Target(int(next_line(process)), folder)
    finally:
        process.kill()
        process.wait(DEADLINE)
        if process.stdout:
            process.stdout.close()


def target_keys(port: int, name: str = "pacs", **keys: Any) -> dict[str, Any]:
    """Return the keys of a target in a page, which is tried again soon."""
    short = {"patience": 30, "retry": 0.2, "report_within": 60, "give_up": 600}
    place = {"name": name, "title": "TARGET", "address": "127.0.0.1", "port": port}
    return {**place, **short, **keys}


def site_of(folder: Path, targets: Sequence[dict[str, Any]], **keys: Any) -> Site:
    """Return a site with targets, whose page is `folder/site.yaml`."""
    path = folder / "site.yaml"
    path.write_text(
        yaml.safe_dump({"peers": [{"title": "PYNETDICOM"}], "targets": list(targets), **keys})
    )
    return read_site(path)


def free_port() -> int:
    """Return a TCP port that is free, and that the system gives to nobody who asks for any."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_until_settled(outbox: Outbox, seconds: float = 120.0, target: str = "") -> None:
    """Wait until each line, or each of a target, was delivered or given up."""
    deadline = time.monotonic() + seconds
    while True:
        lines = [line for line in outbox.open_lines() if target in ("", line.target)]
        if not lines or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not lines, lines
