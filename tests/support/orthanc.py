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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.receivers import DEADLINE
from support.targets import free_port

PROGRAMS = ("Orthanc", "/usr/sbin/Orthanc")
DICOM_WEB = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")


@dataclass
class Orthanc:
    """A server, and its one user."""

    port: int
    http: int
    user: str = "lab"
    password: str = "of the lab"

    @property
    def web(self) -> str:
        """Address of DICOMweb."""
        return f"http://127.0.0.1:{self.http}/dicom-web"

    def get(self, path: str, data: bytes | None = None) -> bytes:
        """Return the answer to a request of its own interface."""
        words = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        headers = {"Authorization": f"Basic {words}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())

    def stored(self) -> dict[str, bytes]:
        """Return the files that it has by SOPInstanceUID."""
        files = {}
        for name in json.loads(self.get("instances")):
            uid = json.loads(self.get(f"instances/{name}"))["MainDicomTags"]["SOPInstanceUID"]
            files[uid] = self.get(f"instances/{name}/file")
        return files


@contextlib.contextmanager
def running_orthanc(
    folder: Path, at: int = 0, **modalities: tuple[str, str, int]
) -> Iterator[Orthanc]:
    """Yield a server, at a DICOM port, that knows some modalities: title, address, port."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None or not DICOM_WEB.exists():
        pytest.skip("Orthanc with its DICOMweb plugin is not installed")
    server = Orthanc(at or free_port(), free_port())
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "StorageDirectory": str(folder / "db"),
        "IndexDirectory": str(folder / "db"),
        "Plugins": [str(DICOM_WEB)],
        "HttpPort": server.http,
        "DicomPort": server.port,
        "DicomAet": "ORTHANC",
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
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([program, str(folder / "orthanc.json")], stdout=log, stderr=log)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError, urllib.error.URLError):
                server.get("system")
                break
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait(DEADLINE)
