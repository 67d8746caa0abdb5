"""`fetch` asks sources of pynetdicom: what it keeps, what it asks again, and what it says."""

from __future__ import annotations

import re
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydicom import dcmread

from scanloom.engine.listen.nodes import make_finder
from scanloom.engine.listen.site import Ask
from scanloom.engine.listen.spool import INCOMING
from scanloom.io.identity import read_key
from scanloom.io.output.audit import read_trail
from support.commands import Ended, scanloom
from support.dicom_source import (
    Archive,
    kept,
    rows_of,
    same_data,
    serving,
    write_page,
    write_studies,
    write_table,
)
from support.https_server import write_certificate
from support.targets import free_port
from support.web_source import serving_web

pytest.importorskip("pynetdicom")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*unclosed", "ignore:Exception ignored in"),
    pytest.mark.usefixtures("own_key"),
]


@pytest.fixture
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANLOOM_KEY", str(tmp_path / "key"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two studies of one series each, A1 and A2."""
    return write_studies(tmp_path_factory.mktemp("studies"), "A1", "A2")


def fetch(folder: Path, archive: Archive, *options: str | Path, **source: Any) -> Ended:
    page = write_page(folder, archive.place | source, port=free_port())
    everything = ("--date", "2026-01-01..") if "--table" not in options else ()
    common = ("--from", "pacs", "--site", page, "-o", folder / "out", "-v")
    return scanloom("fetch", *common, *everything, *options)


def moving(folder: Path, archive: Archive, *options: str | Path, **source: Any) -> Ended:
    """Fetch with a port for C-MOVE that the archive knows."""
    port = free_port()
    archive.destinations["MOVED"] = port
    destination = {"title": "MOVED", "port": port}
    return fetch(folder, archive, *options, destination=destination, **source)


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["get", "move"])
def test_the_very_bytes_are_kept_and_not_asked_for_again(
    how: str, files: list[Path], tmp_path: Path
) -> None:
    with serving(files) as archive:
        first = moving(tmp_path, archive, retrieve=how)
        asked = archive.asked.copy()
        assert first.code == 0, first.err
        again = moving(tmp_path, archive, retrieve=how)
        assert archive.asked[f"{how} SERIES"] == asked[f"{how} SERIES"] == 2

    assert (first.code, again.code) == (0, 0), first.err
    assert same_data(files, kept(tmp_path / "out"))
    assert "2 studies whole, 10 new objects." in first.out
    assert "2 studies whole, 0 new objects." in again.out


def test_what_is_missing_is_asked_for_by_name(files: list[Path], tmp_path: Path) -> None:
    with serving(files) as archive:
        fetch(tmp_path, archive)
        gone = list(kept(tmp_path / "out").values())[::3]
        for path in gone:
            path.unlink()
        archive.sent.clear()
        ended = fetch(tmp_path, archive)
        sent = archive.sent

    assert ended.code == 0, ended.err
    assert sorted(sent) == sorted(path.stem for path in gone)
    assert same_data(files, kept(tmp_path / "out"))


def test_a_row_may_name_a_series_a_patient_and_a_day(files: list[Path], tmp_path: Path) -> None:
    series = str(dcmread(files[0]).SeriesInstanceUID)
    study = str(dcmread(files[-1]).StudyInstanceUID)
    columns = "SeriesInstanceUID,study_uid,note,patient_id,study_date"
    rows = [f"{series},,x,,", f",{study},,CANARY-ID,2026-01-02", ",,,CANARY-ID,20260103"]
    with serving(files) as archive:
        ended = fetch(tmp_path, archive, "--table", write_table(tmp_path, *rows, columns=columns))

    assert [row["reason"] for row in rows_of(tmp_path)] == ["", "", "NO_MATCH"]
    assert ended.code == 1
    assert same_data(files, kept(tmp_path / "out"))


@pytest.mark.thorough
def test_words_and_modality_choose_series(files: list[Path], tmp_path: Path) -> None:
    with serving(files) as archive:
        none = fetch(tmp_path, archive, "--words", "thorax abdomen")
        mr = fetch(tmp_path, archive, "--modality", "mr")
        assert kept(tmp_path / "out") == {}
        both = fetch(tmp_path, archive, "--words", "THORAX canary", "--modality", "MR,CT")

    assert (none.code, mr.code, both.code) == (0, 0, 0)
    assert same_data(files, kept(tmp_path / "out"))


@pytest.mark.thorough
def test_two_at_a_time_and_doubled_rows(files: list[Path], tmp_path: Path) -> None:
    with serving(files) as archive:
        table = write_table(tmp_path, "A1", "A2", "A1", "A2", "A1")
        ended = fetch(tmp_path, archive, "--table", table, associations=3)
        assert archive.asked["get SERIES"] == 2

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))
    assert [row["row"] for row in rows_of(tmp_path)] == ["1", "2", "3", "4", "5"]


@pytest.mark.thorough
def test_tls_takes_the_authority_of_the_page_only(files: list[Path], tmp_path: Path) -> None:
    """Questions and C-GET; `ask` of a peer is a node like the source."""
    for name in ("good", "other"):
        (tmp_path / name).mkdir()
    good, other = (write_certificate(tmp_path / name) for name in ("good", "other"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*good)
    with serving(files, tls=context) as archive:
        right = fetch(tmp_path, archive, tls={"authorities": str(good[0])}, retrieve="get")
        wrong = fetch(tmp_path, archive, tls={"authorities": str(other[0])})
        plain = fetch(tmp_path, archive)
        ask = {name: archive.place[name] for name in ("title", "address", "port")}
        node = Ask(**ask, tls={"authorities": str(good[0])})
        with make_finder("SCANLOOM", node) as finder:
            (series,) = finder.find_series(study_of(files[0]))

    assert right.code == 0, right.err
    assert (wrong.code, plain.code) == (65, 65)
    assert "TLS failed: self-signed certificate (SOURCE_AWAY)" in wrong.err
    assert same_data(files, kept(tmp_path / "out"))
    assert series.instances == 5


def study_of(path: Path) -> str:
    return str(dcmread(path, stop_before_pixels=True).StudyInstanceUID)


def test_a_sender_may_be_asked_by_dicomweb(files: list[Path]) -> None:
    with serving_web(files) as archive, make_finder("SCANLOOM", Ask(url=archive.url)) as finder:
        (series,) = finder.find_series(study_of(files[0]))
        assert finder.find_series("1.2.3") == []

    assert (series.instances, series.modality) == (5, "CT")


# --- rows that fail -------------------------------------------------------------------------------


def test_a_row_that_fails_has_its_reason_and_its_neighbours_go_on(
    files: list[Path], tmp_path: Path
) -> None:
    other = write_studies(tmp_path / "more", "B1", PatientID="CANARY-OTHER")
    for path in other:
        ds = dcmread(path)
        ds.AccessionNumber = "A2"
        ds.save_as(path)
    with serving([*files, *other]) as archive:
        table = write_table(tmp_path, "A1", "A2", "NONE", "A*", '"A1,x"', "''")
        ended = fetch(tmp_path, archive, "--table", table)

    assert ended.code == 1
    codes = [row["reason"] for row in rows_of(tmp_path)]
    assert codes == ["", "MATCH_AMBIGUOUS", "NO_MATCH", "ROW_INVALID", "NO_MATCH", "NO_MATCH"]
    assert same_data(files[:5], kept(tmp_path / "out"))
    assert "row 2: 2 studies of several patients match (MATCH_AMBIGUOUS)" in ended.err
    assert "row 4: its accession_number is too long, or has a wildcard" in ended.err


def test_a_study_without_a_uid_stops_no_other(files: list[Path], tmp_path: Path) -> None:
    (nameless,) = write_studies(tmp_path / "more", "B1", slices=1)
    ds = dcmread(nameless)
    ds.StudyInstanceUID = ""
    ds.save_as(nameless)
    with serving([*files, nameless]) as archive:
        ended = fetch(tmp_path, archive)
        of_table = fetch(tmp_path, archive, "--table", write_table(tmp_path, "B1", "A1"))

    assert (ended.code, of_table.code) == (1, 1)
    assert "row 1: the source has a study whose StudyInstanceUID is no UID" in ended.err
    assert "row 1: the source has a study whose StudyInstanceUID is no UID" in of_table.err
    assert [row["reason"] for row in rows_of(tmp_path)] == ["NOT_FETCHED", ""]
    assert same_data(files, kept(tmp_path / "out"))


def test_a_source_that_ignores_keys_gives_no_other_study(files: list[Path], tmp_path: Path) -> None:
    with serving(files, ignores_keys=True) as archive:
        ended = fetch(tmp_path, archive, "--table", write_table(tmp_path, "A2"))

    assert ended.code == 0, ended.err
    assert same_data(files[5:], kept(tmp_path / "out"))


@pytest.mark.thorough
def test_more_than_is_listed_is_not_whole(files: list[Path], tmp_path: Path) -> None:
    with serving(files, more=2) as archive:
        ended = fetch(tmp_path, archive, "--table", write_table(tmp_path, "A1"))

    assert ended.code == 1
    assert "row 1: 2 objects of 7 did not come" in ended.err
    assert rows_of(tmp_path)[0]["series"] == "0"


# --- sources that misbehave -----------------------------------------------------------------------


def test_without_c_get_it_moves(files: list[Path], tmp_path: Path) -> None:
    with serving(files, gets=False) as archive:
        ended = moving(tmp_path, archive)
        assert archive.asked["move SERIES"] == 2

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


def test_a_c_get_that_is_refused_becomes_a_c_move(files: list[Path], tmp_path: Path) -> None:
    with serving(files, status=0xA702) as archive:
        ended = moving(tmp_path, archive)

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


def test_a_c_move_with_failures_keeps_the_others(files: list[Path], tmp_path: Path) -> None:
    broken = str(dcmread(files[2]).SOPInstanceUID)
    with serving(files, gets=False, broken={broken}) as archive:
        ended = moving(tmp_path, archive)

    assert ended.code == 1
    codes = Counter(row["reason"] for row in rows_of(tmp_path))
    assert codes == {"": 1, "NOT_FETCHED": 1}
    assert "1 object of 5 did not come" in ended.err
    assert "it could not give 1 objects (status B000)" in ended.err
    assert len(kept(tmp_path / "out")) == 9


@pytest.mark.thorough
def test_a_title_that_the_source_does_not_know(files: list[Path], tmp_path: Path) -> None:
    with serving(files, gets=False) as archive:
        ended = fetch(tmp_path, archive)

    assert ended.code == 1
    assert "it does not know the title that it was to send to" in ended.err


def test_an_object_is_longer_than_a_message_may_be(tmp_path: Path) -> None:
    """The limit of a peer's messages is not one of objects, which go to the disk as they come."""
    from scanloom.io.network.peer import MAX_MESSAGE_BYTES

    (file,) = write_studies(tmp_path / "long", "A1", slices=1)
    dataset, side = dcmread(file), 1024
    dataset.Rows = dataset.Columns = side
    dataset.PixelData = bytes(side * side * dataset.BitsAllocated // 8)
    dataset.save_as(file)
    assert file.stat().st_size > MAX_MESSAGE_BYTES

    with serving([file]) as archive:
        ended = fetch(tmp_path, archive, retrieve="get")

    assert ended.code == 0, ended.err
    assert same_data([file], kept(tmp_path / "out"))


@pytest.mark.thorough
def test_classes_that_are_not_told_follow_from_the_modality(
    files: list[Path], tmp_path: Path
) -> None:
    """Or else C-MOVE has to do."""
    scout = write_studies(tmp_path / "more", "B1", Modality="XA")
    with serving([*files, *scout], tells_classes=False) as archive:
        got = fetch(tmp_path, archive, retrieve="get")
        had = kept(tmp_path / "out")
        moved = moving(tmp_path, archive)

    assert (got.code, moved.code) == (1, 0), moved.err
    assert "it does not say of which classes its objects are" in got.err
    assert same_data(files, had)
    assert same_data([*files, *scout], kept(tmp_path / "out"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["get", "move"])
def test_a_source_that_stops_in_the_middle_is_tried_again(
    how: str, files: list[Path], tmp_path: Path
) -> None:
    with serving(files, ends_after=2, breaks=2) as archive:
        ended = moving(tmp_path, archive, retrieve=how)

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


def test_a_source_that_starts_again_is_asked_again(files: list[Path], tmp_path: Path) -> None:
    """Such as at night: three rows failed at once, and no more were asked for."""
    with serving(files, ends_questions=2) as archive:
        ended = fetch(tmp_path, archive, "--table", write_table(tmp_path, "A1", "A2"))

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


@pytest.mark.thorough
def test_a_c_get_that_ends_the_association_becomes_a_c_move(
    files: list[Path], tmp_path: Path
) -> None:
    with serving(files, ends_after=0, breaks=1) as archive:
        ended = moving(tmp_path, archive)
        assert (archive.asked["get SERIES"], archive.asked["move SERIES"]) == (2, 1)

    assert ended.code == 0, ended.err
    assert same_data(files, kept(tmp_path / "out"))


@pytest.mark.thorough
def test_a_source_that_always_stops_is_given_up(files: list[Path], tmp_path: Path) -> None:
    with serving(files, ends_after=0) as archive:
        ended = fetch(tmp_path, archive, retrieve="get")

    assert ended.code == 1
    assert [row["reason"] for row in rows_of(tmp_path)] == ["SOURCE_AWAY"] * 2
    assert "5 objects of 5 did not come: it ended the association before its answer" in ended.err


@pytest.mark.thorough
def test_a_silent_source_is_left(files: list[Path], tmp_path: Path) -> None:
    with serving(files, silent_after=0) as archive:
        table, began = write_table(tmp_path, "A1"), time.monotonic()
        ended = fetch(tmp_path, archive, "--table", table, retrieve="get", patience=3, retry=0.1)
        lasted = time.monotonic() - began

    assert ended.code == 1
    assert "did not come: it gave nothing for 3 s" in ended.err
    assert lasted < 120
    assert not list((tmp_path / "out/private/fetched" / INCOMING).iterdir())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"title": "OTHER"}, "pacs: it rejects us: it has another title"),
        ({"port": 1}, "pacs: it can't be reached"),
    ],
)
def test_a_source_that_is_not_there(
    how: dict[str, Any], message: str, files: list[Path], tmp_path: Path
) -> None:
    with serving(files) as archive:
        ended = fetch(tmp_path, archive, **how)

    assert ended.code == 65
    assert message in ended.err
    assert "(SOURCE_AWAY)" in ended.err


def test_a_title_that_it_does_not_know(files: list[Path], tmp_path: Path) -> None:
    with serving(files, callers=["SOMEBODY"]) as archive:
        ended = fetch(tmp_path, archive)

    assert "it rejects us: it does not know our title (SOURCE_AWAY)" in ended.err


def test_an_unknown_name_is_a_mistake_of_the_page(files: list[Path], tmp_path: Path) -> None:
    with serving(files) as archive:
        ended = fetch(tmp_path, archive, "--from", "pasc")

    assert ended.code == 65
    assert "no source is called pasc: did you mean pacs?" in ended.err


@pytest.mark.thorough
def test_a_source_that_is_away_is_not_tried_for_every_row(
    files: list[Path], tmp_path: Path
) -> None:
    with serving(files) as archive:
        table = write_table(tmp_path, *(f"A{n}" for n in range(6)))
        ended = fetch(tmp_path, archive, "--table", table, port=1)

    assert ended.code == 1
    assert [row["reason"] for row in rows_of(tmp_path)] == ["SOURCE_AWAY"] * 6
    assert [row["detail"][:9] for row in rows_of(tmp_path)][3:] == ["not asked"] * 3


@pytest.mark.thorough
def test_a_source_that_answers_questions_only_is_not_tried_for_every_row(
    files: list[Path], tmp_path: Path
) -> None:
    """Each row would take three times `patience`."""
    with serving(files, silent_after=0) as archive:
        table = write_table(tmp_path, *["A1", "A2"] * 3)
        keys = {"retrieve": "get", "patience": 0.5, "retry": 0.1}
        ended = fetch(tmp_path, archive, "--table", table, **keys)

    assert ended.code == 1
    assert [row["reason"] for row in rows_of(tmp_path)] == ["SOURCE_AWAY"] * 6
    assert [row["detail"][:9] for row in rows_of(tmp_path)][3:] == ["not asked"] * 3


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_rates_are_kept(files: list[Path], tmp_path: Path) -> None:
    with serving(files) as archive:
        began = time.monotonic()
        ended = fetch(tmp_path, archive, per_second=5)

    assert ended.code == 0
    assert time.monotonic() - began >= 2


@pytest.mark.thorough
def test_outside_its_hours_a_source_is_not_asked(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock says 12:00 at first, and 19:00 after some looks."""
    looks = iter([12, 12, 18])
    monkeypatch.setattr("scanloom.engine.listen.fetch.now_of_day", lambda: 60 * next(looks, 19))
    with serving(files) as archive:
        ended = fetch(tmp_path, archive, hours="19:00-06:00")

    assert ended.code == 0, ended.err
    assert ended.err.count("pacs may be asked at 19:00-06:00: waiting") == 2  # log and terminal
    assert same_data(files, kept(tmp_path / "out"))


@pytest.mark.parametrize("how", ["get", "move"])
def test_a_full_disk_ends_it(how: str, files: list[Path], tmp_path: Path) -> None:
    """Also where the source is told that there is no room, and says only that it sent nothing."""
    port = free_port()
    with serving(files, destinations={"SCANLOOM": port}) as archive:
        place = archive.place | {"retrieve": how}
        page = write_page(tmp_path, place, reserve="999 TB", port=port)
        options = ("--from", "pacs", "--site", page, "--date", "2026-01-01..")
        ended = scanloom("fetch", *options, "-o", tmp_path / "out")

    assert ended.code == 74
    assert "DISK_FULL" in ended.err


# --- who asked, and who is named ------------------------------------------------------------------


def test_the_trail_tells_and_nothing_names_a_patient(files: list[Path], tmp_path: Path) -> None:
    with serving(files) as archive:
        table = write_table(tmp_path, "A1", "A9")
        log = tmp_path / "log"
        ended = fetch(tmp_path, archive, "--table", table, "--log", log, "--debug")

    lines = list(read_trail(tmp_path / "out", read_key()))
    assert [line["event"] for line in lines] == ["asked", "fetched"]
    assert (lines[0]["source"], lines[0]["rows"]) == ("pacs", 2)
    told = ended.out + ended.err + log.read_text() + str(lines)
    uids = {str(dcmread(path).StudyInstanceUID) for path in files}
    assert not [uid for uid in uids if uid in told]
    assert not re.search(r"CANARY|\bA[19]\b|1\.2\.826\.0", told)
    assert (tmp_path / "out/private/fetched/fetched.csv").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "'--from'"),
        (["--from", "pacs"], "'--site'"),
        (["--from", "pacs", "--site", "x.yaml"], "not all that the source has"),
        (["--from", "pacs", "--date", "2026-13-01"], "a day, or days such as"),
    ],
)
def test_what_is_missing_is_named(options: Sequence[str], message: str, tmp_path: Path) -> None:
    ended = scanloom("fetch", *options, "-o", tmp_path / "out")

    assert ended.code == 2
    assert message in " ".join(ended.err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_a_site_without_peers_receives_nothing(files: list[Path], tmp_path: Path) -> None:
    with serving(files[:1]) as archive:
        ended = scanloom("listen", write_page(tmp_path, archive.place), "-o", tmp_path / "out")

    assert ended.code == 65
    assert "`peers` is missing: nobody may send (SITE)" in ended.err
