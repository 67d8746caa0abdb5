"""The question how many images a study has, answered by pynetdicom's service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydicom import Dataset

from scanloom.core import Reason, ScanError

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed", "ignore:Exception ignored in")

STUDY = "1.2.3"


def series(uid: str, modality: str, count: int | None) -> Dataset:
    answer = Dataset()
    answer.QueryRetrieveLevel = "SERIES"
    answer.StudyInstanceUID, answer.SeriesInstanceUID, answer.Modality = STUDY, uid, modality
    if count is not None:
        answer.NumberOfSeriesRelatedInstances = count
    return answer


@pytest.fixture
def service() -> Iterator[tuple[Any, list[Any], list[Dataset]]]:
    """A query service, what it will answer, and the identifiers that it was asked with."""
    from pynetdicom import AE, evt
    from scanloom.io.network.query import STUDY_ROOT_FIND, QueryService

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
    yield QueryService("PACS", "127.0.0.1", port), answers, asked
    server.shutdown()
    server.server_close()


def test_series_are_told_with_their_numbers(
    service: tuple[Any, list[Any], list[Dataset]],
) -> None:
    from scanloom.io.network.query import SeriesCount, series_of_study

    pacs, answers, asked = service
    answers += [(0xFF00, series("1.5", "CT", 20)), (0xFF00, series("1.6", "SR", None))]

    found = series_of_study(pacs, STUDY, "SCANLOOM")

    assert found == [SeriesCount("1.5", "CT", 20), SeriesCount("1.6", "SR", None)]
    assert (asked[0].StudyInstanceUID, asked[0].QueryRetrieveLevel) == (STUDY, "SERIES")


def test_an_unknown_study_has_no_series(service: tuple[Any, list[Any], list[Dataset]]) -> None:
    from scanloom.io.network.query import series_of_study

    assert series_of_study(service[0], STUDY, "SCANLOOM") == []


@pytest.mark.parametrize("answer", [(0xA700, None), (0xFF00, Dataset())], ids=["failure", "no UID"])
def test_no_answer_is_an_error(answer: Any, service: tuple[Any, list[Any], list[Dataset]]) -> None:
    from scanloom.io.network.query import series_of_study

    service[1].append(answer)
    with pytest.raises(ScanError) as refused:
        series_of_study(service[0], STUDY, "SCANLOOM")
    assert refused.value.reason is Reason.UNREADABLE


def test_a_service_that_is_down_is_an_error() -> None:
    from scanloom.io.network.query import QueryService, series_of_study

    with pytest.raises(ScanError, match="takes no association"):
        series_of_study(QueryService("PACS", "127.0.0.1", 1), STUDY, "SCANLOOM")
