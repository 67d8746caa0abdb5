"""`fetch` asks DICOMweb servers: answers that are cut, drip, or are none."""

from __future__ import annotations

import re
import ssl
import time
from pathlib import Path

import pytest
from pydicom import Dataset, dcmread

from scanloom.engine.listen.spool import INCOMING
from support.commands import Ended, scanloom
from support.dicom_source import kept, same_data, write_page, write_studies, write_table
from support.https_server import write_certificate
from support.web_source import WebArchive, serving_web

pytest.importorskip("dicomweb_client")

from scanloom.io.network.peer import RefusedError, UnreachableError
from scanloom.io.network.source import Keys, WebSource

pytestmark = pytest.mark.usefixtures("own_key")


@pytest.fixture
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two studies of one series each, A1 and A2."""
    return write_studies(tmp_path_factory.mktemp("studies"), "A1", "A2")


def fetch(folder: Path, archive: WebArchive, *options: str | Path, **source: object) -> Ended:
    page = write_page(folder, archive.place | source)
    everything = ("--date", "2026-01-01..") if "--table" not in options else ()
    common = ("--from", "pacs", "--site", page, "-o", folder / "out", "-v")
    return scanloom("fetch", *common, *everything, *options)


@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
def test_the_very_bytes_are_kept(framing: str, files: list[Path], tmp_path: Path) -> None:
    with serving_web(files, framing=framing) as archive:
        first = fetch(tmp_path, archive)
        again = fetch(tmp_path, archive)
        accepted = archive.accepted

    assert (first.code, again.code) == (0, 0), first.err
    assert all(a.read_bytes() == kept(tmp_path / "out")[uid(a)].read_bytes() for a in files)
    assert len(accepted) == 2
    assert "transfer-syntax=*" in accepted[0]


def uid(path: Path) -> str:
    return str(dcmread(path, stop_before_pixels=True).SOPInstanceUID)


@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
@pytest.mark.parametrize("cut", [2, 15, 700])
def test_what_is_cut_short_is_not_taken_for_whole(
    framing: str, cut: int, files: list[Path], tmp_path: Path
) -> None:
    """The end of the last delimiter, half a delimiter, or a part of the last object is missing."""
    with serving_web(files, framing=framing, cuts=[cut] * 3) as archive:
        table = write_table(tmp_path, "A1")
        cut_short = fetch(tmp_path, archive, "--table", table)
        had = kept(tmp_path / "out")
        whole = fetch(tmp_path, archive, "--table", table)

    if cut > 2:
        assert cut_short.code == 1
        assert len(had) in ((4,) if framing == "close" else (0, 4))
        assert "of 5 did not come: its answer was cut short (SOURCE_AWAY)" in cut_short.err
    assert whole.code == 0, whole.err
    assert same_data(files[:5], kept(tmp_path / "out"))
    assert not list((tmp_path / "out/private/fetched" / INCOMING).iterdir())


def test_only_what_is_missing_is_asked_for(files: list[Path], tmp_path: Path) -> None:
    with serving_web(files) as archive:
        fetch(tmp_path, archive)
        gone = list(kept(tmp_path / "out").values())[:2]
        for path in gone:
            path.unlink()
        archive.asked.clear()
        ended = fetch(tmp_path, archive)
        given = [path for path in archive.asked if not path.endswith("instances")][-4:]

    assert ended.code == 0, ended.err
    assert {path.rpartition("/")[2] for path in given} >= {path.stem for path in gone}
    assert same_data(files, kept(tmp_path / "out"))


def test_answers_come_in_pages(files: list[Path], tmp_path: Path) -> None:
    with serving_web(files, page=2) as archive:
        ended = fetch(tmp_path, archive)

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


def test_a_server_that_ignores_offsets_is_not_asked_for_ever(
    files: list[Path], tmp_path: Path
) -> None:
    with serving_web(files, ignores_offset=True) as archive:
        ended = fetch(tmp_path, archive)

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"status": 404}, "it does not give them (HTTP 404) (NOT_FETCHED)"),
        ({"status": 401}, "it does not take our credentials (HTTP 401) (SOURCE_AWAY)"),
        ({"status": 503}, "it has too much to do, or is away (HTTP 503) (SOURCE_AWAY)"),
        ({"plain": True}, "it answers by something else than objects (NOT_FETCHED)"),
    ],
)
def test_other_answers_are_named(
    how: dict[str, object], message: str, files: list[Path], tmp_path: Path
) -> None:
    with serving_web(files[:5], **how) as archive:
        ended = fetch(tmp_path, archive)

    assert ended.code == 1
    assert f"row 1: 5 objects of 5 did not come: {message}" in ended.err
    assert "CANARY" not in ended.err
    assert kept(tmp_path / "out") == {}


def test_a_server_that_drips_is_left(files: list[Path], tmp_path: Path) -> None:
    with serving_web(files[:5], drips=True) as archive:
        began = time.monotonic()
        ended = fetch(tmp_path, archive, patience=0.7)

    assert ended.code == 1
    assert time.monotonic() - began < 120  # the whole takes longer
    assert "SOURCE_AWAY" in ended.err


@pytest.mark.parametrize("limit", [1 << 20, 1 << 40])
def test_an_answer_without_end_is_left(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its length, or as it is late: nothing reads on, and fills the memory."""
    monkeypatch.setattr("scanloom.io.network.peer.GRACE_S", 0.0)
    monkeypatch.setattr("scanloom.io.network.peer.WebConnection.max_answer_bytes", limit)
    late = limit > 1 << 30
    error = (UnreachableError, "did not answer") if late else (RefusedError, "has no end")
    with serving_web([], endless=True) as archive:
        patience = 0.5 if late else 60.0
        with (
            WebSource(archive.url, None, None, patience) as source,
            pytest.raises(error[0]) as told,
        ):
            source.find_studies(Keys())
        assert archive.left.wait(60)
    assert error[1] in told.value.reason


def test_a_damaged_and_a_foreign_object_do_not_stop_the_others(
    files: list[Path], tmp_path: Path
) -> None:
    foreign = files[7].read_bytes()
    swaps = {uid(files[0]): files[0].read_bytes()[:-50], uid(files[1]): foreign}
    with serving_web(files[:5], swaps=swaps) as archive:
        ended = fetch(tmp_path, archive)

    assert ended.code == 1
    assert re.search(r"2 objects of 5 did not come: it gave an object that", ended.err)
    assert kept(tmp_path / "out").keys() == {uid(path) for path in files[2:5]}


def test_the_authority_of_the_page_counts_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "other"):
        (tmp_path / name).mkdir()
    (good, key), (other, _) = (write_certificate(tmp_path / name) for name in ("good", "other"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(good, key)
    with serving_web([], tls=context) as archive:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(other))
        with WebSource(archive.url, None, str(good), 20) as source:
            assert source.find_studies(Keys()) == []
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(good))
        with (
            WebSource(archive.url, None, str(other), 20) as source,
            pytest.raises(UnreachableError, match="TLS failed: self-signed certificate"),
        ):
            source.find_studies(Keys())


def test_a_series_of_a_study_is_found_without_the_study_in_its_answer(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """QIDO-RS needs not repeat the study that the address names."""
    header, other = dcmread(files[0]), dcmread(files[-1])
    names = ("StudyInstanceUID", "SeriesInstanceUID")
    study, series = (str(header[name].value) for name in names)
    with (
        serving_web(files) as archive,
        WebSource(archive.url, None, None, 20) as source,
    ):
        real = source._get_json

        def without_study(path: str, params: dict[str, object]) -> list[Dataset]:
            answers = real(path, params)
            for answer in answers if path.endswith("series") and study in path else ():
                del answer.StudyInstanceUID
            return answers

        monkeypatch.setattr(source, "_get_json", without_study)
        assert [each.study for each in source.find_studies(Keys(study=study, series=series))] == [
            study
        ]
        assert source.find_studies(Keys(study=study, series=str(other.SeriesInstanceUID))) == []


def test_a_number_that_is_none_is_told(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has infinity, of which pydicom makes no integer."""
    count = {"00201209": {"vr": "IS", "Value": [float("inf")]}}
    monkeypatch.setattr(Dataset, "to_json_dict", lambda dataset: count)
    with (
        serving_web(files) as archive,
        WebSource(archive.url, None, None, 20) as source,
        pytest.raises(RefusedError, match="can't be read"),
    ):
        source.find_series(str(dcmread(files[0]).StudyInstanceUID))


def test_a_server_that_is_not_there(files: list[Path], tmp_path: Path) -> None:
    with serving_web(files) as archive:
        ended = fetch(tmp_path, archive, url="http://127.0.0.1:1/web")

    assert ended.code == 65
    assert "pacs: it can't be reached (ConnectionError) (SOURCE_AWAY)" in ended.err
