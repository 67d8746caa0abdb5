"""A source of pynetdicom: it answers questions about files, gives them, and misbehaves."""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydicom import Dataset, dcmread
from pydicom.uid import AllTransferSyntaxes

from support.receivers import data_set
from support.write_dicom import Words, noise, write_series

FIND, MOVE, GET = (f"1.2.840.10008.5.1.4.1.2.2.{n}" for n in (1, 2, 3))
CT, MR, SR = (f"1.2.840.10008.5.1.4.1.1.{end}" for end in ("2", "4", "88.22"))
LEVELS = {
    "STUDY": ("StudyInstanceUID",),
    "SERIES": ("StudyInstanceUID", "SeriesInstanceUID"),
    "IMAGE": ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"),
}


@dataclass
class Archive:
    """What a source has, and how it misbehaves.

    Parameters
    ----------
    files : list of Path
    gets, moves : bool
        Whether it offers C-GET and C-MOVE.
    port : int
    destinations : dict
        Port of each title that it sends to.
    callers : sequence of str
        Titles that it knows; any without.
    more : int
        How many more instances of a series it says to have than it lists.
    ends_after : int or None
        Objects after which it ends an association.
    ends_questions : int
        How many questions about series it answers by ending the association.
    breaks : int
        How often it does so.
    silent_after : int or None
        Objects after which it is silent.
    broken : set of str
        SOPInstanceUIDs that it can't send.
    status : int
        Of a C-GET that it refuses.
    ignores_keys : bool
        Whether it answers with all that it has.
    asked : Counter
        How often each thing was asked for.
    """

    files: list[Path]
    gets: bool = True
    moves: bool = True
    port: int = 0
    destinations: dict[str, int] = field(default_factory=dict)
    callers: Sequence[str] = ()
    more: int = 0
    ends_after: int | None = None
    ends_questions: int = 0
    breaks: int = 10**6
    silent_after: int | None = None
    broken: set[str] = field(default_factory=set)
    status: int = 0
    ignores_keys: bool = False
    tells_classes: bool = True
    asked: Counter[str] = field(default_factory=Counter)
    sent: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    keys: list[Dataset] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """The keys of a source in a page, with short waits."""
        place = {"name": "pacs", "title": "ARCHIVE", "address": "127.0.0.1", "port": self.port}
        return {**place, "patience": 20, "retry": 0.1}

    def headers(self) -> list[Dataset]:
        return [dcmread(path, stop_before_pixels=True) for path in self.files]

    def matching(self, question: Dataset) -> list[tuple[Path, Dataset]]:
        names = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
        names += ("AccessionNumber", "PatientID")
        found = []
        for path, header in zip(self.files, self.headers(), strict=True):
            wanted = {name: question.get(name) or "" for name in names}
            if self.ignores_keys:
                wanted["AccessionNumber"] = wanted["PatientID"] = ""
            if all(_fits(header.get(name, ""), value) for name, value in wanted.items()):
                dates = str(question.get("StudyDate") or "")
                first, dash, last = dates.partition("-")
                last = last if dash else first
                date = str(header.get("StudyDate", ""))
                if (first or date) <= date <= (last or date):
                    found.append((path, header))
        return found

    def find(self, event: Any) -> Iterator[Any]:
        question = event.identifier
        self.keys.append(question)
        self.asked[f"find {question.QueryRetrieveLevel}"] += 1
        names = LEVELS[question.QueryRetrieveLevel]
        if question.QueryRetrieveLevel == "SERIES" and self.ends_questions:
            self.ends_questions -= 1
            event.assoc.abort()
            return
        matching = self.matching(question)
        numbers = Counter(header.SeriesInstanceUID for _, header in matching)
        told = set()
        for _, header in matching:
            uids = tuple(header[name].value for name in names)
            if uids in told:
                continue
            told.add(uids)
            answer = Dataset()
            answer.QueryRetrieveLevel = question.QueryRetrieveLevel
            for element in question:
                if element.keyword == "NumberOfSeriesRelatedInstances":
                    answer.NumberOfSeriesRelatedInstances = (
                        numbers[header.SeriesInstanceUID] + self.more
                    )
                elif element.keyword in header:
                    answer[element.tag] = header[element.tag]
            for name in names:
                answer[name] = header[name]
            if not self.tells_classes:
                answer.pop("SOPClassUID", None)
            yield 0xFF00, answer

    def _wanted(self, event: Any, kind: str) -> list[Path]:
        request = event.identifier
        self.asked[f"{kind} {request.QueryRetrieveLevel}"] += 1
        self.keys.append(request)
        return [path for path, _ in self.matching(request)]

    def _objects(self, event: Any, paths: Sequence[Path]) -> Iterator[Any]:
        breaks = self.ends_after is not None and self.breaks > 0
        for n, path in enumerate(paths):
            if breaks and n == self.ends_after:
                self.breaks -= 1
                event.assoc.abort()
                return
            if n == self.silent_after:
                self.over.wait(300)
            ds = dcmread(path)
            self.sent.append(str(ds.SOPInstanceUID))
            if ds.SOPInstanceUID in self.broken:
                ds = Dataset()
                ds.PatientID = "no class"  # can't be sent
            yield 0xFF00, ds

    def get(self, event: Any) -> Iterator[Any]:
        paths = self._wanted(event, "get")
        yield len(paths)
        if self.status:
            yield self.status, None
            return
        yield from self._objects(event, paths)

    def move(self, event: Any) -> Iterator[Any]:
        paths = self._wanted(event, "move")
        title = str(event.move_destination).strip()
        if title not in self.destinations:
            yield None, None
            return
        yield "127.0.0.1", self.destinations[title]
        yield len(paths)
        yield from self._objects(event, paths)


def _fits(value: Any, wanted: Any) -> bool:
    if not wanted:
        return True
    if isinstance(wanted, str):
        return fnmatch.fnmatchcase(str(value), wanted)
    return str(value) in [str(each) for each in wanted]


@contextlib.contextmanager
def serving(files: Sequence[Path], tls: Any = None, **how: Any) -> Iterator[Archive]:
    """Yield a source in threads of this process."""
    from pynetdicom import AE, _config, build_context, evt

    _config.LOG_HANDLER_LEVEL = "none"
    archive = Archive(list(files), **how)
    entity = AE("ARCHIVE")
    entity.require_called_aet = True
    entity.require_calling_aet = list(archive.callers)
    services = [FIND, *([GET] if archive.gets else ()), *([MOVE] if archive.moves else ())]
    for service in services:
        entity.add_supported_context(service)
    for sop_class in {str(header.SOPClassUID) for header in archive.headers()}:
        entity.add_supported_context(sop_class, AllTransferSyntaxes, scu_role=False, scp_role=True)
        entity.add_requested_context(sop_class, AllTransferSyntaxes[:2])
    entity.requested_contexts = [
        build_context(str(header.SOPClassUID), header.file_meta.TransferSyntaxUID)
        for header in {
            (str(h.SOPClassUID), str(h.file_meta.TransferSyntaxUID)): h for h in archive.headers()
        }.values()
    ]
    handlers = [
        (evt.EVT_C_FIND, archive.find),
        (evt.EVT_C_GET, archive.get),
        (evt.EVT_C_MOVE, archive.move),
    ]
    server = entity.start_server(
        ("127.0.0.1", 0), block=False, evt_handlers=handlers, ssl_context=tls
    )
    assert server is not None
    archive.port = server.server_address[1]
    try:
        yield archive
    finally:
        archive.over.set()
        server.shutdown()
        server.server_close()
        time.sleep(0.01)
        gc.collect()  # pynetdicom leaves sockets of failed connections in cycles


def write_studies(folder: Path, *names: str, slices: int = 5, **more: Any) -> list[Path]:
    """Write a study of one small CT series for each name, which is its accession number."""
    files = []
    for name in names:
        words = Words(
            name=name,
            study=name,
            more={
                "AccessionNumber": name,
                "PatientName": "CANARY^NAME",
                "PatientID": "CANARY-ID",
                "StudyDate": "20260102",
                "StudyDescription": "CANARY thorax",
                **more,
            },
        )
        files += write_series(folder / name, noise((8, 8, slices)), words=words)
    return files


def kept(out: Path) -> dict[str, Path]:
    """Return the files that were fetched by SOPInstanceUID."""
    return {path.stem: path for path in (out / "private/fetched/studies").glob("*/*/*.dcm")}


def objects_of(files: Sequence[Path]) -> dict[str, Path]:
    """Return files by SOPInstanceUID."""
    return {str(dcmread(path, stop_before_pixels=True).SOPInstanceUID): path for path in files}


def same_data(files: Sequence[Path], fetched: dict[str, Path]) -> bool:
    """Return whether files and fetched ones are the same, byte by byte of the data sets."""
    sources = objects_of(files)
    return sources.keys() == fetched.keys() and all(
        data_set(path) == data_set(fetched[uid]) and syntax(path) == syntax(fetched[uid])
        for uid, path in sources.items()
    )


def syntax(path: Path) -> str:
    """Return the transfer syntax of a file."""
    return str(dcmread(path, specific_tags=[]).file_meta.TransferSyntaxUID)


def write_page(folder: Path, source: dict[str, Any], **keys: Any) -> Path:
    """Write a site with one source."""
    page = folder / "site.yaml"
    page.write_text(yaml.safe_dump({"reserve": "1 MB", "sources": [source], **keys}))
    return page


def write_table(folder: Path, *rows: str, columns: str = "accession_number") -> Path:
    """Write a table of accession numbers, or of other columns."""
    table = folder / "wanted.csv"
    table.write_text("\n".join([columns, *rows]) + "\n")
    return table


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return what became of the rows."""
    with (folder / "out/private/fetched/fetched.csv").open(newline="") as file:
        return list(csv.DictReader(file))
