"""Ask a source which studies it has, and let it give them: DICOM, or DICOMweb.

What a source says is checked: an answer that does not match the keys of its question is left out,
and what it gave is what is on the disk afterwards, whatever the counts of its answers say.

Nothing here is logged: identifiers name patients.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.message import Message
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

from pydicom import Dataset
from pydicom.uid import UID, AllTransferSyntaxes
from pynetdicom import build_role, evt

from scanloom.core import ScanError
from scanloom.io.dicom import uids
from scanloom.io.dicom.instance import read_instance
from scanloom.io.dicom.uids import is_uid
from scanloom.io.network.data_sets import (
    DataSets,
    Draft,
    Store,
    UnwantedError,
    configure_pynetdicom,
)
from scanloom.io.network.peer import (
    PENDING,
    STUDY_ROOT_FIND,
    DicomAddress,
    DicomConnection,
    LateError,
    NotOfferedError,
    RefusedError,
    UnreachableError,
    WebConnection,
    in_time,
)

T = TypeVar("T")

STUDY_ROOT_MOVE = "1.2.840.10008.5.1.4.1.2.2.2"
STUDY_ROOT_GET = "1.2.840.10008.5.1.4.1.2.2.3"
"""Study Root Query/Retrieve Information Model (PS3.4 C.6.2)."""
MAX_ANSWERS, MAX_ANSWERING_S = 200_000, 3600.0
"""To one question; a source that goes on is no help. Of each, only what is needed is kept."""
MAX_TEXT = 1024
"""Characters of a value that are kept; no value that is asked for may have more than 64."""
PAGE = 1000
"""Answers of a request of QIDO-RS."""
SYNTAXES = (
    # first, since DCMTK's archive gives all in the first one, and implicit VR loses something
    uids.EXPLICIT_VR_LITTLE_ENDIAN,
    *(each for each in map(str, AllTransferSyntaxes) if each != uids.EXPLICIT_VR_LITTLE_ENDIAN),
    uids.ENCAPSULATED_UNCOMPRESSED_EXPLICIT_VR_LITTLE_ENDIAN,
    uids.DEFLATED_IMAGE_FRAME_COMPRESSION,
)
MAX_CLASSES = 127 // len(SYNTAXES)
"""Storage classes of an association: each has a context for each transfer syntax, of 128 in all."""
CLASSES = {
    "CT": (
        uids.CT_IMAGE_STORAGE,
        uids.ENHANCED_CT_IMAGE_STORAGE,
        uids.LEGACY_CONVERTED_ENHANCED_CT_IMAGE_STORAGE,
    ),
    "MR": (
        uids.MR_IMAGE_STORAGE,
        uids.ENHANCED_MR_IMAGE_STORAGE,
        uids.LEGACY_CONVERTED_ENHANCED_MR_IMAGE_STORAGE,
    ),
    "PT": (
        uids.POSITRON_EMISSION_TOMOGRAPHY_IMAGE_STORAGE,
        uids.ENHANCED_PET_IMAGE_STORAGE,
        uids.LEGACY_CONVERTED_ENHANCED_PET_IMAGE_STORAGE,
    ),
    "NM": (uids.NUCLEAR_MEDICINE_IMAGE_STORAGE,),
}
"""Classes of a modality's images, at most `MAX_CLASSES`."""
MAX_LISTED = 100
"""SOPInstanceUIDs of a request."""
SLOWEST = 1024
"""Bytes a second: a source that gives fewer is cut off."""
NOT_OFFERED = frozenset({0x0122, 0x0124, 0x0211})
"""Status of a service that is offered to nobody, or not to us (PS3.7 C.5)."""


@dataclass(frozen=True)
class Keys:
    """Values that a study has to have; an empty one is for any.

    Parameters
    ----------
    accession, study, series, patient : str
        AccessionNumber, StudyInstanceUID, SeriesInstanceUID, PatientID.
    dates : (str, str)
        First and last StudyDate, YYYYMMDD.
    modalities : tuple of str
        Of which a series has one.
    """

    accession: str = ""
    study: str = ""
    series: str = ""
    patient: str = ""
    dates: tuple[str, str] = ("", "")
    modalities: tuple[str, ...] = ()

    def names(self) -> dict[str, str]:
        """Return the keys of a question at the level of studies."""
        first, last = self.dates
        date = first if first == last else f"{first}-{last}"
        modality = self.modalities[0] if len(self.modalities) == 1 else ""
        return {
            "StudyInstanceUID": self.study,
            "AccessionNumber": self.accession,
            "PatientID": self.patient,
            "StudyDate": date,
            "ModalitiesInStudy": modality,
        }

    def fits(self, answer: Dataset) -> bool:
        """Return whether an answer matches, as far as it tells: some sources ignore keys."""
        for name in ("StudyInstanceUID", "AccessionNumber", "PatientID"):
            key, value = self.names()[name], _text(answer, name)
            if key and value and value != key:
                return False
        first, last = self.dates
        date = _text(answer, "StudyDate").replace(".", "")
        return not date or ((not first or first <= date) and (not last or date <= last))


@dataclass(frozen=True)
class StudyFound:
    """A study as a source describes it; what it does not tell is empty.

    Parameters
    ----------
    study : str
        StudyInstanceUID, which may be malformed.
    patient, issuer, born : str
        PatientID, IssuerOfPatientID and PatientBirthDate.
    """

    study: str
    patient: str = ""
    issuer: str = ""
    born: str = ""
    description: str = ""


@dataclass(frozen=True)
class SeriesFound:
    """A series as a source describes it; `instances` is None if it does not say."""

    series: str
    modality: str
    instances: int | None
    description: str = ""


@dataclass(frozen=True)
class SeriesRequest:
    """A request for a series, or for some of its instances.

    Parameters
    ----------
    classes : mapping
        The class of each instance that is wanted, by its UID.
    whole : bool
        Whether these are all of the series.
    modality : str
        By which classes are guessed that the source did not tell.
    """

    study: str
    series: str
    classes: Mapping[str, str]
    whole: bool
    modality: str = ""

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the keys of requests by C-GET or C-MOVE."""
        keys = {"StudyInstanceUID": self.study, "SeriesInstanceUID": self.series}
        if self.whole:
            yield {"QueryRetrieveLevel": "SERIES", **keys}
            return
        instances = sorted(self.classes)
        for n in range(0, len(instances), MAX_LISTED):
            listed = instances[n : n + MAX_LISTED]
            yield {"QueryRetrieveLevel": "IMAGE", **keys, "SOPInstanceUID": listed}


class Pulse:
    """When a source gave something last; used by several threads.

    Parameters
    ----------
    patience : float
        Seconds; the longest silence. A few bytes are silence, too.
    """

    def __init__(self, patience: float) -> None:
        self.patience, self._last, self._bytes = patience, time.monotonic(), 0
        self._is_over = False

    def beat(self) -> None:
        """Note that something was completed."""
        self._last, self._bytes = time.monotonic(), 0

    def add(self, count: int) -> None:
        """Note bytes."""
        self._bytes += count
        if self._bytes >= SLOWEST * self.patience:
            self.beat()

    def stop(self) -> None:
        """Let the source count as silent: nobody waits for it any more."""
        self._is_over = True

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for too long."""
        return self._is_over or time.monotonic() - self._last > self.patience


class _Watch:
    """Cuts a connection off when it is silent for too long; a context manager."""

    def __init__(self, pulse: Pulse, cut: Callable[[], object]) -> None:
        self._pulse, self._cut, self.was_silent = pulse, cut, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def _look(self) -> None:
        while not self._over.wait(min(0.5, self._pulse.patience / 4)):
            if self._pulse.is_silent:
                self.was_silent = True
                self._cut()
                return

    def __enter__(self) -> Self:
        self._pulse.beat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def _text(answer: Dataset, name: str) -> str:
    """Return the value of an answer as text; "" if it has none."""
    value = answer.get(name)
    return "" if value is None else str(value)[:MAX_TEXT].strip()


def _study_found(answer: Dataset) -> StudyFound:
    names = ("PatientID", "IssuerOfPatientID", "PatientBirthDate", "StudyDescription")
    return StudyFound(*(_text(answer, name) for name in ("StudyInstanceUID", *names)))


def _series_found(answer: Dataset) -> SeriesFound:
    count = _text(answer, "NumberOfSeriesRelatedInstances")
    series, modality = _uid(answer, "SeriesInstanceUID"), _text(answer, "Modality")
    instances = int(count) if count else None
    return SeriesFound(series, modality, instances, _text(answer, "SeriesDescription"))


def _study_that_fits(keys: Keys, answer: Dataset) -> StudyFound | None:
    return _study_found(answer) if keys.fits(answer) else None


def _study_of(keys: Keys, answer: Dataset) -> str | None:
    if _text(answer, "SeriesInstanceUID") != keys.series:
        return None
    return keys.study or _uid(answer, "StudyInstanceUID")  # which QIDO-RS does not repeat


def _instance_found(answer: Dataset) -> tuple[str, str]:
    return _uid(answer, "SOPInstanceUID"), _text(answer, "SOPClassUID")


def _uid(answer: Dataset, name: str) -> str:
    """Return the UID of an answer; ValueError if it has none."""
    uid = _text(answer, name)
    if not is_uid(uid):
        raise ValueError(f"no {name}")
    return uid


WADO = 'multipart/related; type="application/dicom"; transfer-syntax=*'
"""What is accepted: objects in the syntax that they have (PS3.18 8.7.3.5.2)."""
CHUNK_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 14
STUDY_NAMES = ("PatientBirthDate", "IssuerOfPatientID", "StudyDescription")
SERIES_NAMES = ("Modality", "SeriesDescription", "NumberOfSeriesRelatedInstances")
"""What is asked for beside the keys."""


class Finder(ABC):
    """A source while it is asked.

    Every question raises UnreachableError, RefusedError if the answer is none, or NotOfferedError.
    """

    def find_studies(self, keys: Keys) -> list[StudyFound]:
        """Return the studies that match; of a series, only that which has it."""
        if keys.series:
            names = {"StudyInstanceUID": keys.study, "SeriesInstanceUID": keys.series}
            studies = self._find("SERIES", names, (), partial(_study_of, keys))
            if not studies:
                return []
            keys = replace(keys, study=studies[0])
        return self._find("STUDY", keys.names(), STUDY_NAMES, partial(_study_that_fits, keys))

    def find_series(self, study: str) -> list[SeriesFound]:
        """Return the series of a study; none if the source does not know it."""
        names = {"StudyInstanceUID": study, "SeriesInstanceUID": ""}
        return self._find("SERIES", names, SERIES_NAMES, _series_found)

    def find_instances(self, study: str, series: str) -> dict[str, str]:
        """Return the SOPInstanceUIDs of a series, with their classes, "" if it does not say."""
        names = {"StudyInstanceUID": study, "SeriesInstanceUID": series, "SOPInstanceUID": ""}
        return dict(self._find("IMAGE", names, ["SOPClassUID"], _instance_found))

    @abstractmethod
    def _find(
        self,
        level: Literal["STUDY", "SERIES", "IMAGE"],
        keys: Mapping[str, str],
        more: Sequence[str],
        read: Callable[[Dataset], T | None],
    ) -> list[T]:
        """Return what is read of the answers, as they come, but not None.

        `more` are elements that are asked for beside the keys.
        """


# --- DICOM ----------------------------------------------------------------------------------------


class DicomFinder(Finder, DicomConnection):
    """An association for questions by C-FIND."""

    def __init__(self, address: DicomAddress) -> None:
        super().__init__(address, [STUDY_ROOT_FIND])

    def _find(
        self,
        level: str,
        keys: Mapping[str, str],
        more: Sequence[str],
        read: Callable[[Dataset], T | None],
    ) -> list[T]:
        """See `Finder`."""
        if self._context(STUDY_ROOT_FIND) is None:
            raise NotOfferedError("it offers no queries")
        question = Dataset()
        question.QueryRetrieveLevel = level
        if not all(value.isascii() for value in keys.values()):
            question.SpecificCharacterSet = "ISO_IR 192"
        for name, value in keys.items():
            setattr(question, name, value)
        for name in more:
            setattr(question, name, None)
        self._made.dimse_timeout = self._address.patience
        answers = _Answers(read)
        pulse = Pulse(self._address.patience)
        with _Watch(pulse, self.cut):
            for status, answer in self._responses(question):
                pulse.beat()
                code = status.get("Status") if status else None
                if code == 0:
                    return answers.checked()
                if code is None:
                    raise UnreachableError("it ended the association, or gives no answer")
                if code not in PENDING:
                    raise RefusedError(f"it refuses the question (status {code:04X})")
                if answer is None or answers.is_endless:
                    break
                answers.add(answer)
        self.cut()
        raise RefusedError("its answer can't be read, or has no end")

    def _responses(self, question: Dataset) -> Iterator[tuple[Dataset, Dataset | None]]:
        """Yield status and answer of each response; UnreachableError, RefusedError."""
        try:
            yield from self._made.send_c_find(question, STUDY_ROOT_FIND)
        except Exception as exc:
            if not self._made.is_established:
                raise UnreachableError(f"the association ended ({type(exc).__name__})") from exc
            raise RefusedError(f"its answer can't be read ({type(exc).__name__})") from exc


class _Answers(Generic[T]):
    """Values read of the answers to a question, which are not kept themselves."""

    def __init__(self, read: Callable[[Dataset], T | None]) -> None:
        self._read, self._values = read, list[T]()
        self._count, self._began = 0, time.monotonic()
        self._fault: Exception | None = None

    @property
    def is_endless(self) -> bool:
        """Whether there are too many answers, or they take too long."""
        is_late = time.monotonic() - self._began > MAX_ANSWERING_S
        return is_late or self._count >= MAX_ANSWERS

    def add(self, answer: Dataset) -> None:
        """Read an answer."""
        self._count += 1
        try:
            read = self._read(answer)
        except Exception as exc:  # noqa: BLE001  # foreign data raise errors of many types
            self._fault = exc
        else:
            self._values += [] if read is None else [read]

    def checked(self) -> list[T]:
        """Return what was read; RefusedError if an answer is malformed."""
        if self._fault is not None:
            kind = type(self._fault).__name__
            raise RefusedError(f"its answer can't be read ({kind})") from self._fault
        return self._values


class _Retrieval(DicomConnection):
    """An association on which objects are asked for.

    Parameters
    ----------
    service : str
        STUDY_ROOT_GET or STUDY_ROOT_MOVE.
    pulse : Pulse
        Beats when something comes.
    """

    def __init__(
        self,
        address: DicomAddress,
        service: str,
        pulse: Pulse,
        objects: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(address, [service], objects)
        self._service, self._pulse = service, pulse

    def _retrieve(self, send: Callable[[Dataset], Any], keys: Mapping[str, Any]) -> None:
        """Send a request, and take what comes until its last answer."""
        if self._context(self._service) is None:
            raise NotOfferedError("it does not offer this service")
        request = Dataset()
        for name, value in keys.items():
            setattr(request, name, value)
        self._made.dimse_timeout = None  # the watch cuts the connection off
        status = Dataset()
        with _Watch(self._pulse, self.cut) as watch:
            try:
                for status, _ in send(request):  # noqa: B007  # the last one counts
                    self._pulse.beat()
            except Exception as exc:
                raise UnreachableError(f"the association ended ({type(exc).__name__})") from exc
        code = status.get("Status")
        if code is None or code in PENDING:
            why = f"gave nothing for {self._pulse.patience:.0f} s" if watch.was_silent else ""
            raise UnreachableError(f"it {why or 'ended the association before its answer'}")
        if code in NOT_OFFERED:
            raise NotOfferedError(f"it does not offer this service (status {code:04X})")
        if code:
            failed = status.get("NumberOfFailedSuboperations")
            which = f"{failed} objects" if failed else "what was asked for"
            raise RefusedError(
                f"it could not give {which} (status {code:04X}{_CAUSES.get(code, '')})"
            )


_CAUSES = {
    0xA701: ": it has no room to look",
    0xA702: ": it has no room to send, or can't reach us",
    0xA801: ": it does not know the title that it was to send to",
    0xA900: ": it does not know them",
}
"""Status of C-GET and C-MOVE (PS3.4 C.4.2.1.5, C.4.3.1.4)."""


class _Getter(_Retrieval):
    """An association on which a source gives objects by C-GET."""

    def __init__(
        self, address: DicomAddress, classes: Collection[str], store: Store, pulse: Pulse
    ) -> None:
        configure_pynetdicom()
        # A context for each syntax: of one with several, the source may choose, and convert
        objects = [(each, syntax) for each in classes for syntax in SYNTAXES]
        super().__init__(address, STUDY_ROOT_GET, pulse, objects)
        self._classes = classes
        self._data_sets = DataSets(store, lambda: address.title, address.own_title, may_store=True)

    def _handlers(self) -> list[Any]:
        """Return the handlers of the association's events."""

        def begin(event: Any) -> None:
            event.assoc.data_sets = self._data_sets

        more = [(evt.EVT_CONN_OPEN, begin), (evt.EVT_C_STORE, self._data_sets.take)]
        return [*super()._handlers(), *more]

    def _roles(self) -> list[Any]:
        """Return the roles that are asked for."""
        return [build_role(UID(each), scp_role=True) for each in self._classes]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._data_sets.discard()

    def get(self, keys: Mapping[str, Any]) -> None:
        """Ask for objects, and keep them as they come.

        Raises
        ------
        UnreachableError, RefusedError, NotOfferedError
        """
        try:
            self._retrieve(lambda request: self._made.send_c_get(request, STUDY_ROOT_GET), keys)
        except RefusedError as exc:
            ours = [each for each in self._data_sets.counts if each.startswith("refused")]
            if ours:
                raise RefusedError(f"what came was {ours[0]}") from exc
            raise


def get(address: DicomAddress, request: SeriesRequest, store: Store, pulse: Pulse) -> None:
    """Ask a source for instances by C-GET, and keep them as they come.

    Raises
    ------
    UnreachableError, RefusedError, NotOfferedError
        Some may have come all the same.
    """
    classes, part = sorted(set(request.classes.values())), request
    is_told = bool(classes) and all(map(is_uid, classes))
    if not is_told:  # as by DCMTK's archive
        classes = sorted(CLASSES.get(request.modality, ()))
    if not classes:
        raise RefusedError("it does not say of which classes its objects are")
    for n in range(0, len(classes), MAX_CLASSES):
        listed = classes[n : n + MAX_CLASSES]
        if is_told:
            of_them = {uid: each for uid, each in request.classes.items() if each in listed}
            whole = request.whole and len(of_them) == len(request.classes)
            part = replace(request, classes=of_them, whole=whole)
        with _Getter(address, listed, store, pulse) as getter:
            for keys in part.requests():
                getter.get(keys)


def move(address: DicomAddress, request: SeriesRequest, title: str, pulse: Pulse) -> None:
    """Ask a source to send instances to a title by C-MOVE; a receiver keeps them.

    Raises
    ------
    UnreachableError, RefusedError, NotOfferedError
        Some may have come all the same.
    """
    with _Retrieval(address, STUDY_ROOT_MOVE, pulse) as mover:
        for keys in request.requests():
            mover._retrieve(
                lambda identifier: mover._made.send_c_move(identifier, title, STUDY_ROOT_MOVE), keys
            )


# --- DICOMweb -------------------------------------------------------------------------------------


class WebSource(Finder, WebConnection):
    """A DICOMweb server that is asked by QIDO-RS, and gives by WADO-RS."""

    def _find(
        self,
        level: str,
        keys: Mapping[str, str],
        more: Sequence[str],
        read: Callable[[Dataset], T | None],
    ) -> list[T]:
        """See `Finder`; page by page, until none has anything new."""
        answers, known = _Answers(read), set[str]()
        study, series = keys["StudyInstanceUID"], keys.get("SeriesInstanceUID", "")
        place = f"studies/{study}/series"
        name, path, told = {
            "STUDY": ("StudyInstanceUID", "studies", ()),
            "SERIES": ("SeriesInstanceUID", place if study else "series", ("StudyInstanceUID",)),
            "IMAGE": ("SOPInstanceUID", f"{place}/{series}/instances", keys),
        }[level]
        filters = {key: value for key, value in keys.items() if value and key not in told}
        params: dict[str, Any] = {**filters, "limit": PAGE}
        params |= {"includefield": ",".join(more)} if more else {}
        while not answers.is_endless:
            ask = partial(self._get_json, path, dict(params))
            page = self._ask(ask, missing=list[Dataset]())
            new = {_text(each, name): each for each in page}
            if new.keys() <= known:
                return answers.checked()
            for uid, answer in new.items():
                if uid not in known:
                    answers.add(answer)
            known |= new.keys()
            params["offset"] = len(known)
        raise RefusedError("its answer has no end")

    def _get_json(self, path: str, params: dict[str, Any]) -> list[Dataset]:
        # `get_remaining` of its own searches goes on for ever with a server that ignores `offset`
        url = f"{self._client.base_url}/{path}"
        documents = self._client._http_get_application_json(url, params=params)
        return [Dataset.from_json(each) for each in documents]

    def give(self, request: SeriesRequest, store: Store, name: str, pulse: Pulse) -> None:
        """Ask for instances by WADO-RS, and keep them as they come, in the syntax that they have.

        Parameters
        ----------
        name : str
            Of the source, for the store.

        Raises
        ------
        UnreachableError, RefusedError, NotOfferedError
            Some may have come all the same.
        """
        url = f"{self._client.base_url}/studies/{request.study}/series/{request.series}"
        urls = [url]
        if not request.whole:
            urls = [f"{url}/instances/{uid}" for uid in sorted(request.classes)]
        for each in urls:
            pulse.beat()
            answers: list[Any] = []
            try:
                with self._explained("retrieve"):
                    take = partial(self._take, each, store, name, pulse, answers)
                    in_time(take, lambda: pulse.is_silent)
            except LateError as exc:
                raise UnreachableError(f"it gave nothing for {pulse.patience:.0f} s") from exc
            finally:
                for answer in answers:  # else a thread that is left alone reads on
                    with suppress(Exception):
                        answer.raw.connection.sock.shutdown(socket.SHUT_RDWR)

    def _take(self, url: str, store: Store, name: str, pulse: Pulse, answers: list[Any]) -> None:
        """Keep the parts of an answer; one that is damaged or unwanted does not stop the others."""
        faults: list[str] = []
        with self._client._http_get(url, headers={"Accept": WADO}, stream=True) as answer:
            answers.append(answer)
            chunks = answer.iter_content(CHUNK_BYTES)
            for draft in part_drafts(answer.headers.get("Content-Type", ""), chunks, store, pulse):
                try:
                    if pulse.is_silent:  # else all that is buffered would be kept after the end
                        raise UnreachableError("it gave nothing in time")
                    if draft.error is not None:
                        raise RefusedError("what it gives can't be written")
                    store.keep(draft, read_instance(draft.path), name)
                except ScanError as exc:
                    faults.append(f"it gave an object that can't be read ({exc.code})")
                except OSError as exc:
                    raise RefusedError("what it gives can't be written") from exc
                except UnwantedError:
                    faults.append("it gave an object that was not asked for")
                finally:
                    draft.discard()
        if faults:
            raise RefusedError(faults[0])


def part_drafts(
    content_type: str, chunks: Iterable[bytes], store: Store, pulse: Pulse
) -> Iterator[Draft]:
    """Yield a draft for each part of a multipart answer (RFC 2046 5.1.1), once its end has come.

    dicomweb-client's own reader holds a part in memory, and takes one that is cut off for whole.

    Raises
    ------
    UnreachableError
        If the answer ends before its last delimiter.
    RefusedError
        If it is none of several parts.
    """
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/related" or not boundary:
        raise RefusedError("it answers by something else than objects")
    mark = b"\r\n--" + boundary.encode("latin-1")
    rest, in_head, draft = b"\r\n", False, None  # the first delimiter may come at once
    try:
        for chunk in chunks:
            pulse.add(len(chunk))
            rest += chunk
            while True:
                if in_head:
                    if rest.startswith(b"--"):
                        return
                    end = rest.find(b"\r\n\r\n")
                    if end < 0:
                        break
                    rest, in_head, draft = rest[end + 4 :], False, store.draft()
                end = rest.find(mark)
                whole = end >= 0
                end = end if whole else max(0, len(rest) - len(mark) + 1)
                if draft is not None:
                    draft.write(rest[:end])
                if not whole:
                    rest = rest[end:]
                    break
                rest, in_head = rest[end + len(mark) :], True
                if draft is not None:
                    yield draft
                    draft = None
            if in_head and len(rest) > MAX_HEAD_BYTES:
                raise RefusedError("its answer can't be read (a part has no end of its header)")
    finally:
        if draft is not None:
            draft.discard()
    raise UnreachableError("its answer was cut short")
