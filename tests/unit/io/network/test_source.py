"""Questions to sources, their answers, and the parts of an answer of several."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydicom import DataElement, Dataset

pytest.importorskip("pynetdicom")

from scanloom.io.network import source
from scanloom.io.network.data_sets import Draft
from scanloom.io.network.peer import DicomAddress, RefusedError, UnreachableError
from scanloom.io.network.source import (
    DicomFinder,
    Keys,
    Pulse,
    SeriesFound,
    SeriesRequest,
    StudyFound,
    part_drafts,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed", "ignore:Exception ignored in")

STUDY = "1.2.3"
Service = tuple[DicomAddress, list[Any], list[Dataset]]


def series(uid: str, modality: str, count: int | None) -> Dataset:
    answer = Dataset()
    answer.QueryRetrieveLevel = "SERIES"
    answer.StudyInstanceUID, answer.SeriesInstanceUID, answer.Modality = STUDY, uid, modality
    if count is not None:
        answer.NumberOfSeriesRelatedInstances = count
    return answer


@pytest.fixture
def service() -> Iterator[Service]:
    """A query service, what it will answer, and the identifiers that it was asked with."""
    from pynetdicom import AE, evt

    from scanloom.io.network.peer import STUDY_ROOT_FIND

    answers: list[Any] = []
    asked: list[Dataset] = []

    def find(event: evt.Event) -> Iterator[Any]:
        asked.append(event.identifier)
        yield from answers

    entity = AE("PACS")
    entity.add_supported_context(STUDY_ROOT_FIND)
    handlers = [(evt.EVT_C_FIND, find)]
    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=handlers)
    assert server is not None
    port = server.server_address[1]
    yield DicomAddress("SCANLOOM", "PACS", "127.0.0.1", port, patience=5), answers, asked
    server.shutdown()
    server.server_close()


def test_series_are_told_with_their_numbers(service: Service) -> None:
    address, answers, asked = service
    answers += [(0xFF00, series("1.5", "CT", 20)), (0xFF00, series("1.6", "SR", None))]

    with DicomFinder(address) as finder:
        found = finder.find_series(STUDY)

    assert found == [SeriesFound("1.5", "CT", 20), SeriesFound("1.6", "SR", None)]
    assert (asked[0].StudyInstanceUID, asked[0].QueryRetrieveLevel) == (STUDY, "SERIES")


def test_an_unknown_study_has_no_series(service: Service) -> None:
    with DicomFinder(service[0]) as finder:
        assert finder.find_series(STUDY) == []


@pytest.mark.parametrize("answer", [(0xA700, None), (0xFF00, Dataset())], ids=["failure", "no UID"])
def test_no_answer_is_an_error(answer: Any, service: Service) -> None:
    service[1].append(answer)
    with DicomFinder(service[0]) as finder, pytest.raises(RefusedError):
        finder.find_series(STUDY)


def test_an_answer_that_fills_the_memory_is_not_read(service: Service) -> None:
    answer = series("1.5", "CT", 20)
    answer.EncapsulatedDocument = bytes(2 << 20)
    service[1].append((0xFF00, answer))
    with DicomFinder(service[0]) as finder, pytest.raises(UnreachableError):
        finder.find_series(STUDY)


def test_answers_that_go_on_for_too_long_are_no_help(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them comes in time: 200,000 may take months."""
    monkeypatch.setattr(source, "MAX_ANSWERING_S", 0.2)
    service[1].extend((0xFF00, series(f"1.{n}", "CT", 1)) for n in range(3000))
    with DicomFinder(service[0]) as finder, pytest.raises(RefusedError, match="no end"):
        finder.find_series(STUDY)


def test_a_value_beyond_any_size_is_not_kept_whole() -> None:
    """An answer may have a megabyte, and there may be 200,000."""
    answer = series("1.5", "CT", 20)
    answer["SeriesDescription"] = DataElement(0x0008103E, "UT", "x" * 100_000)
    assert source._series_found(answer).description == "x" * source.MAX_TEXT


def test_a_service_that_is_down_is_an_error() -> None:
    address = DicomAddress("SCANLOOM", "PACS", "127.0.0.1", 1, patience=2)
    with pytest.raises(UnreachableError, match="can't be reached"), DicomFinder(address):
        pass


def test_studies_are_asked_for_by_keys_and_checked(service: Service) -> None:
    """An answer with another accession number, or of another day, is left out."""
    address, answers, asked = service
    days = {"1.1": "20260102", "1.2": "20250102", "1.3": "", "1.4": "20260102"}
    for uid, day in days.items():
        answer = Dataset()
        answer.StudyInstanceUID, answer.StudyDate, answer.PatientID = uid, day, "P"
        answer.AccessionNumber = "A2" if uid == "1.4" else "A1"
        answers.append((0xFF00, answer))

    with DicomFinder(address) as finder:
        found = finder.find_studies(Keys(accession="A1", dates=("20260101", "20260131")))

    assert found == [StudyFound("1.1", "P"), StudyFound("1.3", "P")]
    assert (asked[0].AccessionNumber, asked[0].StudyDate) == ("A1", "20260101-20260131")


@pytest.mark.parametrize(
    ("dates", "told"),
    [
        (("", ""), ""),
        (("20260101", "20260101"), "20260101"),
        (("20260101", ""), "20260101-"),
        (("", "20260101"), "-20260101"),
    ],
)
def test_dates_are_ranges_of_dicom(dates: tuple[str, str], told: str) -> None:
    assert Keys(dates=dates).names()["StudyDate"] == told


def test_instances_are_listed_in_parts() -> None:
    classes = {f"1.{n}": "1.2" for n in range(230)}
    some = list(SeriesRequest("1", "2", classes, whole=False).requests())
    (whole,) = SeriesRequest("1", "2", classes, whole=True).requests()

    assert [len(each["SOPInstanceUID"]) for each in some] == [100, 100, 30]
    assert {uid for each in some for uid in each["SOPInstanceUID"]} == classes.keys()
    assert whole["QueryRetrieveLevel"] == "SERIES"


def test_a_few_bytes_are_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pulse = Pulse(0.2)
    for _ in range(4):
        now[0] += 0.1
        pulse.add(10)
    assert pulse.is_silent
    pulse.add(1000)
    assert not pulse.is_silent


class Kept:
    """A store whose drafts are bytes in memory."""

    def __init__(self) -> None:
        self.discarded = 0

    def draft(self) -> Any:
        store = self

        class Made:
            data = b""

            def write(self, data: bytes) -> int:
                self.data += data
                return len(data)

            def discard(self) -> None:
                store.discarded += 1

        return Made()


PARTS = (b"one\r\n--XY", b"", b"\r\n--X", b"\0" * 100)
BODY = b"".join(b"--X Y\r\nContent-Type: application/dicom\r\n\r\n" + p + b"\r\n" for p in PARTS)
KIND = 'multipart/related; type="application/dicom"; boundary="X Y"'


def parts(body: bytes, size: int) -> list[bytes]:
    """Return the parts of an answer that comes in chunks of some bytes."""
    store: Any = Kept()
    chunks = (body[n : n + size] for n in range(0, len(body), size))
    found: list[Draft] = list(part_drafts(KIND, chunks, store, Pulse(60)))
    assert not store.discarded
    return [each.data for each in found]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 10_000])
def test_parts_of_an_answer_are_found_however_it_is_cut(size: int) -> None:
    assert parts(BODY + b"--X Y--\r\n", size) == list(PARTS)
    assert parts(b"a preamble\r\n" + BODY + b"--X Y--", size) == list(PARTS)


@pytest.mark.parametrize("end", [1, 2, 5, 9, 20, 120])
def test_an_answer_without_its_end_is_an_error(end: int) -> None:
    with pytest.raises(UnreachableError, match="cut short"):
        parts((BODY + b"--X Y--")[:-end], 16)


@pytest.mark.parametrize(
    "kind", ["text/html", "multipart/related", "application/dicom", "multipart/mixed; boundary=X"]
)
def test_other_answers_are_refused(kind: str) -> None:
    store: Any = Kept()
    with pytest.raises(RefusedError, match="something else than objects"):
        next(part_drafts(kind, [b""], store, Pulse(60)))
