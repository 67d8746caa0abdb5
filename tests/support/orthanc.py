"""Orthanc in a process of its own: a PACS with DICOM and DICOMweb, on free ports."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.targets import free_port

PROGRAMS = ("Orthanc", "/usr/sbin/Orthanc")
DICOM_WEB = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
START_S = 60.0
"""Until it answers, and until it has ended; two cores may be busy."""


@dataclass
class Orthanc:
    """A server, and its one user; it can be killed, and started again with what it keeps.

    Parameters
    ----------
    folder : Path
        Of its settings, its files and its log.
    port, http : int
        Of DICOM, and of its own interface and DICOMweb.
    title : str
        Its AE title.
    """

    folder: Path
    port: int
    http: int
    title: str = "ORTHANC"
    user: str = "lab"
    password: str = "of the lab"
    process: subprocess.Popen[bytes] | None = None

    @property
    def web(self) -> str:
        """Address of DICOMweb."""
        return f"http://127.0.0.1:{self.http}/dicom-web"

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start its process, and wait until it answers."""
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        assert program is not None
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [program, str(self.folder / "orthanc.json")],
                stdout=log,
                stderr=log,
                env=environment,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("system")
                return
            time.sleep(0.1)
        self.kill()
        pytest.fail(f"Orthanc does not answer; see {self.folder / 'log'}")

    def kill(self) -> None:
        """Kill its process, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)

    def get(self, path: str, data: bytes | None = None, patience: float = 20) -> bytes:
        """Return the answer to a request of its own interface."""
        words = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {words}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=patience) as answer:
            return bytes(answer.read())

    def instances(self) -> list[tuple[str, str]]:
        """Return the SOPInstanceUID of each object that it has, with its name of it."""
        found = json.loads(self.get("instances?expand", patience=60))
        return [(each["MainDicomTags"]["SOPInstanceUID"], each["ID"]) for each in found]

    def stored(self) -> dict[str, bytes]:
        """Return the files that it has by SOPInstanceUID."""
        return {uid: self.get(f"instances/{name}/file") for uid, name in self.instances()}


@contextlib.contextmanager
def running_orthanc(
    folder: Path,
    at: int = 0,
    title: str = "ORTHANC",
    environment: Mapping[str, str] | None = None,
    **modalities: tuple[str, str, int],
) -> Iterator[Orthanc]:
    """Yield a server, at a DICOM port, that knows some modalities: title, address, port."""
    if not any(map(shutil.which, PROGRAMS)) or not DICOM_WEB.exists():
        pytest.skip("Orthanc with its DICOMweb plugin is not installed")
    server = Orthanc(folder, at or free_port(), free_port(), title)
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "StorageDirectory": str(folder / "db"),
        "IndexDirectory": str(folder / "db"),
        "Plugins": [str(DICOM_WEB)],
        "HttpPort": server.http,
        "DicomPort": server.port,
        "DicomAet": title,
        "DicomCheckCalledAet": True,
        "RegisteredUsers": {server.user: server.password},
        "AuthenticationEnabled": True,
        "DicomAlwaysAllowStore": True,
        "DicomAlwaysAllowFind": True,
        "UnknownSopClassAccepted": True,
        "DicomModalities": modalities,
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (folder / "orthanc.json").write_text(json.dumps(config))
    try:
        server.start(environment)
        yield server
    finally:
        server.kill()
