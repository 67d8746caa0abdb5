"""Ask a query service by C-FIND (PS3.4 C) which series of a study it has, and how many instances.

Nothing here is logged: identifiers name patients.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydicom import Dataset
from pynetdicom import AE, _config

from scanloom.core import Reason, ScanError

STUDY_ROOT_FIND = "1.2.840.10008.5.1.4.1.2.2.1"
"""Study Root Query/Retrieve Information Model (PS3.4 C.6.2)."""
PENDING = (0xFF00, 0xFF01)
TIMEOUT_S = 15.0
MAX_SERIES = 4096
"""Longest answer: a service that goes on is no help."""


@dataclass(frozen=True)
class QueryService:
    """A query service: its AE title, IP address and TCP port."""

    title: str
    address: str
    port: int


@dataclass(frozen=True)
class SeriesCount:
    """A series as a query service describes it; `instances` is None if it does not say."""

    series: str
    modality: str
    instances: int | None


def series_of_study(service: QueryService, study: str, calling: str) -> list[SeriesCount]:
    """Return the series of a study that a query service has; none if it does not know the study.

    Parameters
    ----------
    service : QueryService
    study : str
        StudyInstanceUID.
    calling : str
        Own AE title.

    Raises
    ------
    ScanError
        UNREADABLE if it gives no answer.
    """
    _config.LOG_HANDLER_LEVEL = "none"  # it would format each identifier, and name patients
    entity = AE(calling)
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = TIMEOUT_S
    entity.connection_timeout = TIMEOUT_S
    entity.add_requested_context(STUDY_ROOT_FIND)
    query = Dataset()
    query.QueryRetrieveLevel = "SERIES"
    query.StudyInstanceUID = study
    query.SeriesInstanceUID = query.Modality = ""
    query.NumberOfSeriesRelatedInstances = None
    association = entity.associate(service.address, service.port, ae_title=service.title)
    if not association.is_established:
        detail = "the query service takes no association"
        raise ScanError(Reason.UNREADABLE, detail)
    found: list[SeriesCount] = []
    try:
        for status, answer in association.send_c_find(query, STUDY_ROOT_FIND):
            code = status.get("Status") if status else None
            if code == 0:
                return found
            if code not in PENDING or answer is None or len(found) == MAX_SERIES:
                break
            found.append(_series_count(answer))
    except (ValueError, RuntimeError, AttributeError, TypeError, OverflowError) as exc:
        detail = f"the query service's answer can't be read ({type(exc).__name__})"
        raise ScanError(Reason.UNREADABLE, detail) from exc
    finally:
        association.release() if association.is_established else association.abort()
    raise ScanError(Reason.UNREADABLE, "the query service ended without an answer")


def _series_count(answer: Dataset) -> SeriesCount:
    count = answer.get("NumberOfSeriesRelatedInstances")
    instances = None if count in (None, "") else int(count)
    return SeriesCount(str(answer.SeriesInstanceUID), str(answer.get("Modality") or ""), instances)
