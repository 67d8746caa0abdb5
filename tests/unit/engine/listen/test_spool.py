"""The spool: what is kept, what a kill and a full disk leave, and what can be read from it."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from scanloom.core import Reason, ScanError
from scanloom.engine.listen import spool as module
from scanloom.engine.listen.spool import (
    Spool,
    last_arrival,
    received_studies,
    study_size,
)
from scanloom.io.dicom.instance import Instance
from support.receivers import read_journal

CT = "1.2.840.10008.5.1.4.1.1.2"
ONE = Instance(CT, "1.2.3.1", "1.2.1", "1.2.2")
TWO = Instance(CT, "1.2.3.2", "1.2.1", "1.2.2")


def keep(spool: Spool, instance: Instance, content: bytes) -> str:
    draft = spool.draft()
    draft.write(content)
    return spool.keep(draft, instance, "PACS")


def place(folder: Path, instance: Instance) -> Path:
    return folder / "studies" / instance.study / instance.series / f"{instance.uid}.dcm"


def test_what_was_kept_is_there_and_private(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        assert keep(spool, ONE, b"one") == "new"

        path = place(spool.folder, ONE)
        assert path.read_bytes() == b"one"
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_nlink == 1
        assert not list((spool.folder / "incoming").iterdir())
        folders = [spool.folder, *(p for p in spool.folder.rglob("*") if p.is_dir())]
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.parametrize(
    ("changed", "held", "told"),
    [("newest", b"other", "changed"), ("first", b"one", "ignored")],
)
def test_the_same_object_again(changed: str, held: bytes, told: str, tmp_path: Path) -> None:
    with Spool(tmp_path / "spool", changed) as spool:
        assert keep(spool, ONE, b"one") == "new"
        assert keep(spool, ONE, b"one") == "same"
        assert keep(spool, ONE, b"other") == told

        assert place(spool.folder, ONE).read_bytes() == held
        assert [arrival.outcome for arrival in read_journal(spool.folder)] == ["new", told]
        assert not list((spool.folder / "incoming").iterdir())


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool"), pytest.raises(ScanError) as refused:
        Spool(tmp_path / "spool")
    assert refused.value.reason is Reason.LOCKED
    with Spool(tmp_path / "spool"):  # the lock ended with its holder
        pass


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        keep(spool, ONE, b"one")
        spool.draft().write(b"half")
    foreign = tmp_path / "spool" / "incoming" / "notes.txt"
    foreign.write_text("mine")

    with Spool(tmp_path / "spool") as spool:
        assert list((spool.folder / "incoming").iterdir()) == [foreign]
        assert place(spool.folder, ONE).read_bytes() == b"one"


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(module.os, "link", refuse)
    with Spool(tmp_path / "spool") as spool:
        assert keep(spool, ONE, b"one") == "new"
        assert keep(spool, ONE, b"one") == "same"
        assert place(spool.folder, ONE).read_bytes() == b"one"
        draft = spool.draft()
        with pytest.raises(FileExistsError):
            module.name_without_replacing(draft.path, place(spool.folder, ONE))


def test_files_and_names_are_synced_before_keep_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: bytes, name, folder; the folders' own names before."""
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def noted(descriptor: int) -> None:
        done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def linked(*names: Path, **how: bool) -> None:
        done.append("name")
        link(*names, **how)

    with Spool(tmp_path / "spool") as spool:
        keep(spool, ONE, b"one")
        monkeypatch.setattr(module.os, "fsync", noted)
        monkeypatch.setattr(module.os, "link", linked)
        draft = spool.draft()
        spool.keep(draft, TWO, "PACS")
        assert done == [f"sync {draft.path.name}", "name", f"sync {TWO.series}"]

        done.clear()
        other = Instance(CT, "1.2.3.3", "1.3.1", "1.3.2")
        spool.keep(spool.draft(), other, "PACS")
        assert done[1:3] == ["sync studies", f"sync {other.study}"]

        done.clear()
        assert spool.keep(spool.draft(), TWO, "PACS") == "same"  # of a process that was killed
        assert done[1:] == [f"sync {TWO.uid}.dcm", f"sync {TWO.series}"]


def test_without_room_a_draft_takes_all_and_keeps_nothing(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool", reserve=1 << 60) as spool:
        assert not spool.has_room()
        draft = spool.draft()
        assert draft.write(b"bytes") == 5
        with pytest.raises(OSError, match="reserve"):
            spool.keep(draft, ONE, "PACS")
        assert not list(spool.folder.rglob("*.part")) + list(spool.folder.rglob("*.dcm"))
        assert list(read_journal(spool.folder)) == []


@pytest.mark.parametrize("name", ["write", "fsync", "close", "unlink"])
def test_a_share_that_is_away_is_told_to_the_sender_and_nobody_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the question for room, which is asked in the thread that reads the connection."""

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with Spool(tmp_path / "spool") as spool:
        draft = spool.draft()
        with monkeypatch.context() as patch:
            patch.setattr(module.shutil, "disk_usage", away)
            assert draft.write(b"bytes") == 5
        with pytest.raises(OSError, match=r"[Ss]tale"):
            spool.keep(draft, ONE, "PACS")

        draft = spool.draft()
        draft.write(b"bytes")
        with monkeypatch.context() as patch:
            patch.setattr(module.os, name, away)
            if name == "write":
                draft.write(b"more")
            if name != "unlink":
                with pytest.raises(OSError, match=r"[Ss]tale"):
                    spool.keep(draft, ONE, "PACS")
            draft.discard()
        draft.discard()
        assert keep(spool, ONE, b"one") == "new"


def test_the_reserve_is_twice_the_largest_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spool(tmp_path / "spool") as spool:
        keep(spool, ONE, bytes(600))
        keep(spool, TWO, bytes(400))
    for free, enough in ((2001, True), (1999, False)):
        usage = type("usage", (), {"free": free})
        with Spool(tmp_path / "spool") as spool:
            monkeypatch.setattr(module.shutil, "disk_usage", lambda _, usage=usage: usage)
            assert spool.has_room() is enough
            monkeypatch.undo()


def test_arrivals_can_be_read_after_a_kill(tmp_path: Path) -> None:
    """Half a line at the end is left out, and the next line is whole."""
    spool = Spool(tmp_path / "spool")
    before = time.time()
    keep(spool, ONE, b"one")
    [file] = (spool.folder / "journal").iterdir()
    spool.__exit__(None, None, None)
    with file.open("ab") as log:
        log.write(b'{"time":1,"outcome":"ne')

    with Spool(tmp_path / "spool") as spool:
        keep(spool, TWO, b"two")
        first, second = read_journal(spool.folder)

    assert (first.instance, second.instance) == (ONE.uid, TWO.uid)
    assert (first.study, first.series, first.sender) == (ONE.study, ONE.series, "PACS")
    assert before <= first.time <= second.time <= time.time()


def test_folders_tell_of_arrivals_without_the_journal(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        keep(spool, ONE, b"one")
        [study] = received_studies(spool.folder)
        assert study.name == ONE.study
        assert study_size(study) == 3
        for folder in (study, study / ONE.series):
            os.utime(folder, (1000, 1000))
        keep(spool, ONE, b"one")
        assert last_arrival(study) == 1000  # nothing came that was not there
        keep(spool, ONE, b"another")
        assert abs(last_arrival(study) - time.time()) < 60


@pytest.mark.parametrize(
    "name", ["..", "../../x", "1/2", "1.2.", "", "1.2.x", "1" * 65, "\uff11.2"]
)
def test_no_uid_that_could_be_a_path_is_an_instance(name: str) -> None:
    for field in ("uid", "study", "series"):
        uids = {"uid": "1.2", "study": "1.2", "series": "1.2", field: name}
        with pytest.raises(ValueError, match="no UID"):
            Instance(CT, **uids)
