"""`scanloom listen`: senders of several programs, what is refused, and what no sender can do."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydicom import Dataset, dcmread
from pydicom.uid import DeflatedExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless

from support import canaries
from support.commands import Ended, scanloom
from support.https_server import write_certificate
from support.listeners import wait_for
from support.real_scans import scans
from support.receivers import (
    DEADLINE,
    Receiver,
    association,
    data_set,
    dcmtk,
    listening,
    read_journal,
    send,
    write_site,
)
from support.synced_answers import FOLDERS_NEVER, LATE, NEVER, STRACE, answers_in
from support.write_dicom import Coding, Words, noise, write_series

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.filterwarnings("ignore:Invalid value for VR", "ignore:.*unclosed")


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    """A receiver that all tests of this module share that don't end it."""
    titles = ("PYNETDICOM", "STORESCU", "DCMSEND", "ECHOSCU")
    peers = [{"title": title, "addresses": "127.0.0.1"} for title in titles]
    folder = tmp_path_factory.mktemp("receiver")
    with listening(folder, limits={"associations": 6}, peers=peers) as started:
        yield started


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    """A receiver for those who say nothing, which waits long enough for a busy machine."""
    limits = {"idle": "4 s", "handshake": "3 s"}
    with listening(tmp_path_factory.mktemp("impatient"), limits=limits) as started:
        yield started


def series(
    folder: Path, name: str, slices: int = 4, syntax: str = "1.2.840.10008.1.2.1"
) -> list[Path]:
    """Write a series with a study of its own."""
    words = Words(name=name, study=name)
    return write_series(
        folder / name, noise((16, 12, slices)), coding=Coding(syntax=syntax), words=words
    )


def uid_of(path: Path) -> str:
    return str(dcmread(path, specific_tags=["SOPInstanceUID"]).SOPInstanceUID)


def assert_kept(receiver: Receiver, files: list[Path]) -> None:
    """Each file is in the spool: the bytes of its data set, in its own syntax."""
    stored = receiver.stored()
    for path in files:
        kept = stored[uid_of(path)]
        assert data_set(kept) == data_set(path)
        was, now = dcmread(path).file_meta, dcmread(kept).file_meta
        assert now.TransferSyntaxUID == was.TransferSyntaxUID
        assert now.MediaStorageSOPInstanceUID == was.MediaStorageSOPInstanceUID
        assert now.MediaStorageSOPClassUID == was.MediaStorageSOPClassUID
    assert not list((receiver.spool / "incoming").iterdir())


# --- senders -------------------------------------------------------------------------------------


def test_what_is_kept_is_what_was_sent_and_names_the_sender(
    receiver: Receiver, tmp_path: Path
) -> None:
    files = [*series(tmp_path, "plain"), *series(tmp_path, "rle", syntax=RLELossless)]

    assert set(send(receiver.port, files).values()) == {0}

    assert_kept(receiver, files)
    meta = dcmread(receiver.stored()[uid_of(files[0])]).file_meta
    assert meta.SendingApplicationEntityTitle == "PYNETDICOM"
    assert meta.ReceivingApplicationEntityTitle == "SCANLOOM"
    ids = {uid_of(path) for path in files}
    lines = [line for line in read_journal(receiver.spool) if line.instance in ids]
    assert {(line.outcome, line.sender) for line in lines} == {("new", "PYNETDICOM")}
    assert {line.instance for line in lines} == ids


def test_dcmtk_sends_and_asks(receiver: Receiver, tmp_path: Path) -> None:
    port = str(receiver.port)
    address = ["-aec", "SCANLOOM", "127.0.0.1", port]
    for name, program in (("one", "storescu"), ("two", "dcmsend")):
        files = series(tmp_path, name)
        command = [dcmtk(program), "-aet", program.upper(), *address, *map(str, files)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        stored = receiver.stored()
        for path in files:
            assert dcmread(stored[uid_of(path)]) == dcmread(path)
    subprocess.run([dcmtk("echoscu"), *address], check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_four_at_once_interleaved_doubled_and_compressed(
    receiver: Receiver, tmp_path: Path
) -> None:
    """Real series, plain and compressed, single and multi-frame; each instance at least twice."""
    names = ["compressed_series/d2n_jpegls", "compressed_series/sts002_rle", "mr"]
    names += ["transfer_syntaxes/wg04", "enhanced"]
    found: dict[str, Path] = {}
    for path in sorted(each for name in names for each in scans(name).rglob("*.dcm")):
        ds = dcmread(path, stop_before_pixels=True)
        if ds.get("StudyInstanceUID") and ds.get("SOPInstanceUID") == ds.file_meta.get(
            "MediaStorageSOPInstanceUID"
        ):
            found.setdefault(ds.SOPInstanceUID, path)
    files = list(found.values())
    assert len(files) > 40
    answers: list[dict[Path, int | None]] = []

    def sender(seed: int) -> None:
        mine = [path for n, path in enumerate(files) if (n + seed) % 4 < 2] * 2
        random.Random(seed).shuffle(mine)
        answers.append(send(receiver.port, mine))

    threads = [threading.Thread(target=sender, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert len(answers) == 4
    assert Counter(status for each in answers for status in each.values()).keys() == {0}
    assert set().union(*answers) == set(files)
    assert_kept(receiver, files)
    told = Counter(line.instance for line in read_journal(receiver.spool))
    assert {told[uid_of(path)] for path in files} == {1}
    assert receiver.memory() < 150 << 20


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian])
def test_private_classes_and_any_syntax_are_kept(
    syntax: str, receiver: Receiver, tmp_path: Path
) -> None:
    files = series(tmp_path, f"private {syntax}")
    for path in files:
        ds = dcmread(path)
        ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = "1.2.826.0.1.3680043.8.498.77"
        ds.file_meta.TransferSyntaxUID = syntax
        ds.save_as(path, implicit_vr=syntax == ImplicitVRLittleEndian, little_endian=True)

    assert set(send(receiver.port, files).values()) == {0}
    assert_kept(receiver, files)


def test_the_same_bytes_of_another_sender_are_kept_once(receiver: Receiver, tmp_path: Path) -> None:
    files = series(tmp_path, "twice")
    for title in ("PYNETDICOM", "STORESCU"):
        assert set(send(receiver.port, files, title=title).values()) == {0}

    ids = {uid_of(path) for path in files}
    lines = [line for line in read_journal(receiver.spool) if line.instance in ids]
    assert [line.outcome for line in lines] == ["new"] * len(files)


# --- other bytes, other patients -----------------------------------------------------------------


def test_corrected_headers_replace_and_are_told(receiver: Receiver, tmp_path: Path) -> None:
    files = series(tmp_path, "corrected")
    send(receiver.port, files)
    header = dcmread(files[1])
    header.PatientName = "Corrected^Name"
    header.save_as(files[1])

    assert set(send(receiver.port, files).values()) == {0}

    assert_kept(receiver, files)
    lines = [line for line in read_journal(receiver.spool) if line.instance == uid_of(files[1])]
    assert [line.outcome for line in lines] == ["new", "changed"]


def test_two_patients_under_one_study_are_kept_as_sent(receiver: Receiver, tmp_path: Path) -> None:
    files = series(tmp_path, "first")
    for path in series(tmp_path, "second"):
        header = dcmread(path)
        header.StudyInstanceUID = dcmread(files[0]).StudyInstanceUID
        header.PatientID, header.PatientName = "2", "Second"
        header.save_as(path)
        files.append(path)

    assert set(send(receiver.port, files).values()) == {0}

    assert_kept(receiver, files)
    assert len({receiver.stored()[uid_of(path)].parents[1] for path in files}) == 1


# --- what is refused -----------------------------------------------------------------------------


def rewrite(path: Path, edit: Callable[[Dataset], None]) -> None:
    ds = dcmread(path)
    edit(ds)
    ds.save_as(path)


@pytest.mark.parametrize("evil", ["../../x", "..", "1.2/3", "/etc/x", "1.2.x"])
@pytest.mark.parametrize(
    ("keyword", "status"),
    [("StudyInstanceUID", 0xC000), ("SeriesInstanceUID", 0xC000), ("SOPInstanceUID", 0x0117)],
)
def test_uids_never_become_paths(
    keyword: str, status: int, evil: str, receiver: Receiver, tmp_path: Path
) -> None:
    before = {path for path in receiver.folder.rglob("*") if path.suffix != ".part"}
    bad, *good = series(tmp_path, f"evil {evil} {keyword}")

    def edit(ds: Dataset) -> None:
        setattr(ds, keyword, evil)
        ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID

    rewrite(bad, edit)
    answers = send(receiver.port, [bad, *good])

    assert answers.pop(bad) == status
    assert set(answers.values()) == {0}
    new = {path for path in receiver.folder.rglob("*") if path not in before}
    assert {path.suffix for path in new if path.is_file()} <= {".dcm", ".jsonl", ".lock"}
    assert len([path for path in new if path.is_file() and path.suffix == ".dcm"]) == len(good)


def test_a_data_set_other_than_its_command_is_refused(receiver: Receiver, tmp_path: Path) -> None:
    one, two, good = series(tmp_path, "differs", slices=3)
    rewrite(one, lambda ds: setattr(ds.file_meta, "MediaStorageSOPInstanceUID", "1.2.3"))
    rewrite(two, lambda ds: setattr(ds, "SOPClassUID", "1.2.840.10008.5.1.4.1.1.4"))

    assert list(send(receiver.port, [one, two, good]).values()) == [0xA900, 0xA900, 0]
    assert_kept(receiver, [good])


def test_truncated_and_mutated_data_sets_harm_no_other(receiver: Receiver, tmp_path: Path) -> None:
    files = [*series(tmp_path, "mutated", slices=40), *series(tmp_path, "cut", 3, RLELossless)]
    chance = random.Random(9)
    cut, mutated, good = files[-2:], files[:30], files[30:-2]
    for path in cut:
        path.write_bytes(path.read_bytes()[: -chance.randrange(1, 150)])
    for path in mutated:
        content = bytearray(path.read_bytes())
        start = 144 + int.from_bytes(content[140:144], "little")
        for _ in range(chance.randrange(1, 40)):
            content[chance.randrange(start, len(content) - 384)] = chance.randrange(256)
        path.write_bytes(content)
    meta = {
        path: str(
            dcmread(
                path, specific_tags=[], stop_before_pixels=True
            ).file_meta.MediaStorageSOPInstanceUID
        )
        for path in files
    }

    answers = send(receiver.port, files)

    assert {answers[path] for path in cut} == {0xC000}
    assert set(answers.values()) <= {0, 0xA900, 0xC000}
    assert_kept(receiver, good)
    stored = receiver.stored()
    for path in mutated:
        assert (answers[path] == 0) == (meta[path] in stored)
        if answers[path] == 0:
            assert data_set(stored[meta[path]]) == data_set(path)


@pytest.mark.parametrize(
    ("title", "called", "diagnostic"), [("OTHER", "SCANLOOM", 3), ("PYNETDICOM", "OTHER", 7)]
)
def test_wrong_titles_are_rejected(
    title: str, called: str, diagnostic: int, receiver: Receiver
) -> None:
    with association(receiver.port, title=title, called=called) as made:
        assert made.is_rejected
        answer = made.acceptor.primitive
        assert (answer.result, answer.result_source, answer.diagnostic) == (1, 1, diagnostic)


def test_a_sender_that_uses_tls_by_mistake_is_told(impatient: Receiver) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(bytes.fromhex("16030100050100000100"))  # the begin of a TLS handshake
        read_to_the_end(connection)

    wait_for(lambda: "a connection from 127.0.0.1 sent no DICOM; if it was TLS" in impatient.log)


def test_other_addresses_are_not_answered(receiver: Receiver) -> None:
    connection = socket.create_connection(
        ("127.0.0.1", receiver.port), source_address=("127.0.0.2", 0)
    )
    connection.settimeout(14)  # before a silent one would be closed
    with contextlib.suppress(ConnectionError):
        assert connection.recv(1) == b""
    connection.close()
    assert "127.0.0.2: no peer has this address" in receiver.log


def test_more_associations_than_allowed_are_rejected_for_a_while(
    receiver: Receiver, tmp_path: Path
) -> None:
    files = series(tmp_path, "many")
    made = [association(receiver.port) for _ in range(7)]
    try:
        opened = [each.__enter__() for each in made]
        assert [each.is_established for each in opened] == [True] * 6 + [False]
        assert opened[-1].acceptor.primitive.result == 2  # transient
    finally:
        for each in made:
            each.__exit__(None, None, None)
    assert set(send(receiver.port, files).values()) == {0}


# --- what no sender can do -----------------------------------------------------------------------


def silent(port: int, count: int = 12) -> list[socket.socket]:
    """Connect, and say nothing."""
    return [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]


def read_to_the_end(connection: socket.socket) -> None:
    """Read until the receiver closes the connection; fail if it does not."""
    connection.settimeout(DEADLINE)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    connection.close()


def test_silent_connections_stop_nobody_and_are_closed(impatient: Receiver, tmp_path: Path) -> None:
    files = series(tmp_path, "beside silence")
    connections = silent(impatient.port)

    assert set(send(impatient.port, files).values()) == {0}

    assert_kept(impatient, files)
    for connection in connections:
        read_to_the_end(connection)


@pytest.mark.thorough
def test_many_silent_connections_bar_their_own_address_only(tmp_path: Path) -> None:
    """Each address has places of its own, so that one machine does not take all."""
    files = series(tmp_path, "beside many")
    with listening(tmp_path / "site", limits={"handshake": "300 s"}) as receiver:
        many = [
            socket.create_connection(("127.0.0.1", receiver.port), DEADLINE, ("127.0.0.9", 0))
            for _ in range(140)
        ]
        assert set(send(receiver.port, files).values()) == {0}
        assert "127.0.0.9: too many are silent" in receiver.log
        for connection in many:
            connection.close()


def test_an_association_left_open_ends(impatient: Receiver) -> None:
    with association(impatient.port) as made:
        assert made.send_c_echo().Status == 0
        wait_for(lambda: not made.is_established)
        assert made.is_aborted


def test_a_byte_a_second_is_cut_off_and_harms_no_other(impatient: Receiver, tmp_path: Path) -> None:
    """Before the request, and in the middle of a data set."""
    files = series(tmp_path, "beside a slow one")
    with association(impatient.port, files) as made:
        header = struct.pack(">BBL", 4, 0, 5000) + struct.pack(">LBB", 4996, 1, 3)
        slow = made.dul.socket.socket
        early = silent(impatient.port, 1)[0]
        ended = set()
        for byte in (b"\1", *(header[n : n + 1] for n in range(len(header))), *[b"\0"] * 40):
            for connection, sent in ((early, b"\1\0\0\0\4\0"[:1]), (slow, byte)):
                try:
                    connection.sendall(sent)
                except OSError:
                    ended.add(connection)
            if len(ended) == 2:
                break
            time.sleep(0.8)
        assert len(ended) == 2
        early.close()
    assert set(send(impatient.port, files).values()) == {0}
    assert not list((impatient.spool / "incoming").iterdir())


@pytest.mark.parametrize(
    "content",
    [
        struct.pack(">BBL", 1, 0, 1 << 31),  # a PDU of 2 GB
        struct.pack(">BBL", 4, 0, 10) + b"0123456789",  # data before a request
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\1\0\0\0\0\4" + b"\xff" * 4,
        bytes(1000),
    ],
)
def test_what_is_no_dicom_ends_its_connection_only(
    content: bytes, impatient: Receiver, tmp_path: Path
) -> None:
    connection = silent(impatient.port, 1)[0]
    connection.sendall(content)
    read_to_the_end(connection)
    files = series(tmp_path, f"beside {content[:9]!r}")
    assert set(send(impatient.port, files).values()) == {0}


@pytest.mark.slow
def test_mutated_streams_leave_nothing_and_harm_no_other(
    impatient: Receiver, tmp_path: Path
) -> None:
    """What DICOM peers never send: the bytes of an association, some of them changed or lost."""
    receiver = impatient
    files, chance = series(tmp_path, "stream", slices=2), random.Random(5)
    parts = recorded_stream(receiver.port, files)
    threads = len(list(Path(f"/proc/{receiver.process.pid}/task").iterdir()))
    for _ in range(100):
        mutated = [bytearray(part) for part in parts]
        one = mutated[chance.choice([0, chance.randrange(len(parts))])]
        for _ in range(chance.randrange(1, 6)):
            one[chance.randrange(len(one))] = chance.randrange(256)
        del one[chance.choice([len(one), chance.randrange(len(one))]) :]
        connection = silent(receiver.port, 1)[0]
        connection.settimeout(0.1)
        with contextlib.suppress(OSError):
            for part in mutated:
                connection.sendall(part)
                with contextlib.suppress(TimeoutError):
                    connection.recv(4096)
        connection.close()

    task = Path(f"/proc/{receiver.process.pid}/task")
    wait_for(lambda: len(list(task.iterdir())) <= threads + 1)
    assert set(send(receiver.port, files).values()) == {0}
    assert_kept(receiver, files)


def recorded_stream(port: int, files: list[Path]) -> list[bytes]:
    """Return what a sender sends: the request of an association, then each PDU."""
    from pynetdicom import evt

    sent: list[bytes] = []
    with association(port, files) as made:
        made.bind(evt.EVT_DATA_SENT, lambda event: sent.append(event.data))
        for path in files:
            made.send_c_store(path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE)
        request: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            connection.settimeout(DEADLINE)
            request.append(connection.recv(1 << 16))
            connection.close()

        accepting = threading.Thread(target=answer, daemon=True)
        accepting.start()
        with association(server.getsockname()[1], files):
            accepting.join(DEADLINE)
    return [*request, *sent]


def test_an_aborted_association_leaves_nothing(receiver: Receiver, tmp_path: Path) -> None:
    files = series(tmp_path, "aborted")
    with association(receiver.port, files) as made:
        assert made.send_c_store(files[0]).Status == 0
        context = next(
            c for c in made.accepted_contexts if c.abstract_syntax != "1.2.840.10008.1.1"
        )
        begin_data_set(made, context.context_id, files[1])
        wait_for(lambda: any((receiver.spool / "incoming").iterdir()))
        made.abort()
    wait_for(lambda: not any((receiver.spool / "incoming").iterdir()))
    assert uid_of(files[0]) in receiver.stored()
    assert uid_of(files[1]) not in receiver.stored()


def begin_data_set(made: object, context: int, path: Path) -> None:
    """Send a C-STORE request with the first half of its data set."""
    from pynetdicom.dimse_messages import C_STORE_RQ
    from pynetdicom.dimse_primitives import C_STORE

    ds, request = dcmread(path, stop_before_pixels=True), C_STORE()
    request.MessageID, request.Priority = 77, 0
    request.AffectedSOPClassUID, request.AffectedSOPInstanceUID = ds.SOPClassUID, ds.SOPInstanceUID
    request._dataset_path = (path, 144)
    message = C_STORE_RQ()
    message.primitive_to_message(request)
    parts = list(message.encode_msg(context, 200))
    for part in parts[: len(parts) // 2]:
        made.dul.send_pdu(part)


# --- TLS -----------------------------------------------------------------------------------------


def certificates(folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    return write_certificate(folder)


def client(certificate: Path, key: Path, server: Path) -> tuple[ssl.SSLContext, str]:
    context = ssl.create_default_context(cafile=str(server))
    context.load_cert_chain(certificate, key)
    return context, "127.0.0.1"


@pytest.mark.slow
def test_tls_takes_known_certificates_and_silence_stops_nobody(tmp_path: Path) -> None:
    own, friend, stranger = (certificates(tmp_path / name) for name in ("own", "friend", "other"))
    tls = {"certificate": str(own[0]), "key": str(own[1]), "clients": str(friend[0])}
    files = series(tmp_path, "encrypted", slices=12)
    limits = {"handshake": "2 s"}
    with listening(tmp_path / "site", tls=tls, limits=limits) as receiver:
        connections = silent(receiver.port)
        plain = silent(receiver.port, 1)[0]
        plain.sendall(b"\1\0\0\0\0\4")

        assert set(send(receiver.port, files, tls=client(*friend, own[0])).values()) == {0}

        assert_kept(receiver, files)
        with association(receiver.port, tls=client(*stranger, own[0])) as made:
            assert not made.is_established
        with association(receiver.port) as made:  # without TLS
            assert not made.is_established
        for connection in (*connections, plain):
            read_to_the_end(connection)
        assert set(send(receiver.port, files, tls=client(*friend, own[0])).values()) == {0}
        assert receiver.stop() == 0
    assert "a connection from 127.0.0.1 failed (TLS: self-signed certificate)" in receiver.log
    assert "the certificate of `tls` expires on 20" in receiver.log  # in a day


@pytest.mark.slow
def test_a_renewed_certificate_is_taken_while_it_receives(tmp_path: Path) -> None:
    """A new certificate whose key is not there yet changes nothing."""
    own, friend, new = (certificates(tmp_path / name) for name in ("own", "friend", "new"))
    tls = {"certificate": str(own[0]), "key": str(own[1]), "clients": str(friend[0])}
    before, after = series(tmp_path, "before"), series(tmp_path, "after")
    trusted = shutil.copy(own[0], tmp_path / "trusted.pem")
    with listening(tmp_path / "site", tls=tls, options=["-v"]) as receiver:
        new[0].replace(own[0])
        wait_for(lambda: "`tls` has changed, and is not taken" in receiver.log)
        assert set(send(receiver.port, before, tls=client(*friend, trusted)).values()) == {0}
        new[1].replace(own[1])
        wait_for(lambda: "`tls` has changed: its certificates were read again" in receiver.log)
        assert set(send(receiver.port, after, tls=client(*friend, own[0])).values()) == {0}
        with association(receiver.port, tls=client(*friend, trusted)) as made:
            assert not made.is_established


# --- the process ---------------------------------------------------------------------------------


def test_status_tells_of_a_receiver_without_rules(tmp_path: Path) -> None:
    def told() -> str:
        lines = scanloom("status", tmp_path / "site" / "out").out.splitlines()
        return next((line for line in lines if line.startswith("Listen")), "")

    with listening(tmp_path / "site") as receiver:
        assert told() == "Listen: all processes run."
        second = listen(write_site(tmp_path), receiver.folder / "out")
        assert second.code
        assert told() == "Listen: all processes run."
        assert receiver.stop() == 0
    assert re.fullmatch(r"Listen: ended [0-9:]+ ago\.", told())
    with listening(tmp_path / "full", reserve="100 PiB") as receiver:
        text = scanloom("status", receiver.folder / "out").out
        assert "the receiver: refuses all objects, since the disk has no room" in text


@pytest.mark.parametrize("number", [15, pytest.param(2, marks=pytest.mark.slow)])
def test_it_ends_after_the_running_data_set(number: int, tmp_path: Path) -> None:
    [path] = write_series(tmp_path / "big", noise((2048, 2048, 1)), words=Words(name="b"))[:1]
    with listening(tmp_path / "site") as receiver:
        statuses: list[int | None] = []
        with association(receiver.port, [path]) as made:
            sender = threading.Thread(
                target=lambda: statuses.append(made.send_c_store(path).get("Status")),
                daemon=True,
            )
            sender.start()
            # on a busy machine the whole data set may come between two looks
            while not statuses and not any((receiver.spool / "incoming").iterdir()):
                time.sleep(0.005)
            receiver.process.send_signal(number)
            sender.join(DEADLINE)
            assert receiver.process.wait(DEADLINE) == 0
        assert statuses == [0]
        assert_kept(receiver, [path])


def listen(site: Path, out: Path) -> Ended:
    """Run a `listen` that has to refuse in this process; one that listens is ended, and fails."""
    late = threading.Timer(DEADLINE, os.kill, (os.getpid(), signal.SIGINT))
    late.start()
    try:
        return scanloom("listen", site, "--out", out)
    finally:
        late.cancel()


def test_a_second_process_on_one_spool_is_refused(receiver: Receiver, tmp_path: Path) -> None:
    site = write_site(tmp_path)
    ended = listen(site, receiver.folder / "out")

    assert ended.code == 65
    assert "(LOCKED)" in ended.err


def test_a_port_in_use_and_a_missing_certificate_are_told(
    receiver: Receiver, tmp_path: Path
) -> None:
    taken = listen(write_site(tmp_path, port=receiver.port), tmp_path / "o")
    tls = {"certificate": "a.pem", "key": "b.pem", "clients": "c.pem"}
    missing = listen(write_site(tmp_path, tls=tls), tmp_path / "o")

    assert (taken.code, missing.code) == (1, 1)
    assert f"port {receiver.port} can't be used: another process has it" in taken.err
    assert "a certificate of the site, or its key, can't be read" in missing.err


def test_without_pynetdicom_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynetdicom", None)
    for module in ("peer", "receiver"):
        monkeypatch.delitem(sys.modules, f"scanloom.io.network.{module}", raising=False)

    ended = listen(write_site(tmp_path), tmp_path / "out")

    assert ended.code == 1
    assert "pip install 'scanloom[hospital]'" in ended.err
    assert not (tmp_path / "out").exists()


def test_nothing_but_the_spool_names_a_patient(tmp_path: Path) -> None:
    """Whole, mutated and refused data sets whose every word is a canary; all that is logged."""
    files = write_series(tmp_path / "s", noise((16, 12, 5)), edit=canaries.fill)
    chance = random.Random(3)
    for path in files[2:]:
        content = bytearray(path.read_bytes())
        for _ in range(20):
            content[chance.randrange(400, len(content))] = chance.randrange(256)
        path.write_bytes(content)
    rewrite(files[1], lambda ds: setattr(ds, "SOPClassUID", "1.2.CANARY"))
    with listening(tmp_path / "site", options=["--debug"]) as receiver:
        answers = send(receiver.port, files)
        assert receiver.stop() == 0
        assert list(answers.values())[:2] == [0, 0xA900]

    told = [receiver.folder / name for name in ("log", "errors")]
    journal = list((receiver.spool / "journal").iterdir())
    for path in (*told, *journal):
        assert not any(bird.encode() in path.read_bytes() for bird in canaries.BIRDS)
    assert b"PYNETDICOM at 127.0.0.1: " in told[0].read_bytes()
    names = [str(path.relative_to(receiver.folder)) for path in receiver.folder.rglob("*")]
    assert not any(bird in name for bird in canaries.BIRDS for name in names)
    out = receiver.folder / "out"
    assert {path.name for path in out.iterdir()} == {"private", "listen"}
    status = (out / "listen" / "status.json").read_bytes()
    assert not any(bird.encode() in status for bird in canaries.BIRDS)


def test_the_process_loads_nothing_heavy(receiver: Receiver) -> None:
    """No torch, no MONAI, in its memory map; the figure is far below 150 MiB."""
    maps = Path(f"/proc/{receiver.process.pid}/maps").read_text()

    assert "torch" not in maps
    assert receiver.memory() < 150 << 20


@pytest.mark.slow
def test_idle_associations_take_next_to_nothing(tmp_path: Path) -> None:
    """Their threads wake a few times a second, and at once when something comes."""
    with listening(tmp_path / "site") as receiver, contextlib.ExitStack() as stack:
        made = [stack.enter_context(association(receiver.port)) for _ in range(20)]
        time.sleep(2)
        before = wake_ups(receiver)
        time.sleep(2)
        assert (
            wake_ups(receiver) - before < 1000
        )  # 10,000 and more if each looked 50 times a second
        began = time.monotonic()
        assert [each.send_c_echo().Status for each in made] == [0] * 20
        assert time.monotonic() - began < 20 * 0.25  # half of what they sleep, if nothing woke them


def wake_ups(receiver: Receiver) -> int:
    """Return how often threads of a receiver have waited for something so far."""
    texts = [
        (task / "status").read_text()
        for task in Path(f"/proc/{receiver.process.pid}/task").iterdir()
    ]
    return sum(int(re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", text)[0]) for text in texts)


SLOW_DISK = """
import time
from scanloom.engine.listen.spool import Spool
keep = Spool.keep
def slow(*words):
    time.sleep(0.7)
    return keep(*words)
Spool.keep = slow
"""


@pytest.mark.slow
def test_an_answer_that_took_long_is_sent_at_once(tmp_path: Path) -> None:
    files, took = series(tmp_path, "slow disk"), list[float]()
    with (
        listening(tmp_path / "site", program=SLOW_DISK) as receiver,
        association(receiver.port, files) as made,
    ):
        for path in files:
            began = time.monotonic()
            assert made.send_c_store(path).Status == 0
            took.append(time.monotonic() - began)
    assert 0.7 < min(took) < 0.9, took  # the least of four: a busy machine has one that is quick


# --- synced before it is answered ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "",
        LATE,
        pytest.param(NEVER, marks=pytest.mark.thorough),
        pytest.param(FOLDERS_NEVER, marks=pytest.mark.thorough),
    ],
    ids=["scanloom", "a mutant that syncs later", "never", "never a folder"],
)
def test_system_calls_come_in_order(program: str, tmp_path: Path) -> None:
    """Between two answers: the data set's fsync, its name, and the folder's fsync.

    Of an object that is new, that comes again, and that replaces another.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    files = series(tmp_path, "traced", slices=3)
    changed = Path(shutil.copy(files[0], tmp_path / "changed.dcm"))
    rewrite(changed, lambda ds: setattr(ds, "PatientName", "Other"))
    sent = [*files, files[1], changed]
    trace = tmp_path / "trace"
    strace = [*STRACE, "-o", str(trace)]
    probe = subprocess.run([*strace, "true"], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip("strace can't trace here")
    with listening(tmp_path / "site", wrap=strace, program=program) as receiver:
        assert set(send(receiver.port, sent).values()) == {0}
        child = subprocess.run(
            ["pgrep", "-P", str(receiver.process.pid)], capture_output=True, text=True, check=True
        )
        subprocess.run(["kill", child.stdout.strip()], check=True)
        receiver.process.wait(60)

    outcomes = [line.outcome for line in read_journal(receiver.spool)]
    assert outcomes == ["new"] * 3 + ["changed"]
    assert answers_in(trace.read_text()) == [not program] * len(sent)
