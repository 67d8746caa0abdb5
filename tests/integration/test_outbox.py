"""Results are sent to targets of pynetdicom and DCMTK: committed, found, refused, or given up."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scanloom.engine.listen.delivery import deliver
from scanloom.engine.listen.outbox import Outbox, outbox_folder
from scanloom.engine.listen.site import Site
from scanloom.io.identity import key_fingerprint, load_key
from scanloom.io.output.audit import read_trail
from scanloom.io.output.layout import fan_out
from scanloom.io.output.private import private_folder
from support import canaries
from support.commands import scanloom
from support.dicom_target import LABELMAP, RTSTRUCT, SEG, SR, pause_surely
from support.https_server import write_certificate
from support.layouts import both_layouts
from support.listeners import wait_for
from support.receivers import DEADLINE, data_set, dcmtk, listening
from support.targets import (
    FILES,
    free_port,
    objects_of,
    running_target,
    site_of,
    target_keys,
    wait_until_settled,
    write_case,
)

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.filterwarnings("ignore:.*unclosed")
THOROUGH = pytest.mark.thorough


@contextlib.contextmanager
def delivery(site: Site, outbox: Outbox) -> Iterator[None]:
    """Deliver in a thread while the block runs."""
    end, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            deliver(site, outbox, end)
        except BaseException as exc:  # noqa: BLE001
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(DEADLINE)
    assert not errors
    assert not thread.is_alive()


def outbox_of(tmp_path: Path) -> Outbox:
    return Outbox(outbox_folder(tmp_path / "out"))


def proofs(outbox: Outbox) -> dict[str, int]:
    lines = list(outbox.delivered_lines())
    return {proof: sum(x.proof == proof for x in lines) for proof in {x.proof for x in lines}}


@pytest.fixture
def case(tmp_path: Path, layout: str) -> Path:
    if layout == "fanned":
        fan_out(tmp_path / "out")
    return write_case(tmp_path / "out", "caseone")


# --- proofs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "keys", "proof"),
    [
        ({"commit": "same association"}, {}, "committed"),
        pytest.param(
            {"commit": "same association"}, {"commitment": "yes"}, "committed", marks=THOROUGH
        ),
        ({"find": True}, {}, "found"),
        pytest.param(
            {"commit": "never", "find": True}, {"report_within": 0.5}, "found", marks=THOROUGH
        ),
        pytest.param(
            {"commit": "same association", "find": True},
            {"commitment": "no"},
            "found",
            marks=THOROUGH,
        ),
        ({}, {}, "acknowledged"),
    ],
)
def test_what_a_target_offers_proves_delivery(
    config: dict[str, object], keys: dict[str, object], proof: str, case: Path, tmp_path: Path
) -> None:
    outbox = outbox_of(tmp_path)
    with running_target(tmp_path / "target", **config) as target:
        site = site_of(tmp_path, [target_keys(target.port, **keys)])
        outbox.add(case, "pacs")
        with delivery(site, outbox):
            wait_until_settled(outbox)
        assert target.has(case)
        assert set(target.told("store").values()) == {1}
    assert proofs(outbox) == {proof: 3}


@THOROUGH
def test_reports_come_to_the_port_of_listen(tmp_path: Path) -> None:
    """`listen` takes the report of its target, which may not store, and of nobody else."""
    port = free_port()
    case = write_case(tmp_path / "site" / "out", "caseone")
    with running_target(
        tmp_path / "t", own_process=True, commit="own port", report_to=port
    ) as target:
        keys = target_keys(target.port, commitment="yes", report_within=30)
        with listening(tmp_path / "site", port=port, targets=[keys]) as receiver:
            outbox = Outbox(outbox_folder(receiver.folder / "out"))
            outbox.add(case, "pacs")
            wait_until_settled(outbox)
            assert target.has(case)
            assert receiver.stop() == 0
    assert proofs(outbox) == {"committed": 3}
    assert "TARGET at 127.0.0.1: 1 reported" in receiver.log
    assert not any(bird in receiver.log for bird in canaries.BIRDS)
    assert not any(uid in receiver.log for uid in objects_of(case))


@THOROUGH
def test_who_may_report_may_not_store_and_who_may_store_not_report(tmp_path: Path) -> None:
    from pydicom import Dataset
    from pydicom.uid import ExplicitVRLittleEndian
    from pynetdicom import AE, build_role, evt
    from pynetdicom.sop_class import StorageCommitmentPushModel as Model
    from pynetdicom.sop_class import StorageCommitmentPushModelInstance as Instance

    case = write_case(tmp_path / "elsewhere", "caseone")
    file = case / "dicom" / "segmentation.dcm"
    report = Dataset()
    report.TransactionUID, report.ReferencedSOPSequence = "1.2.3", []
    with listening(tmp_path / "site", targets=[target_keys(104)]) as receiver:
        answers = {}
        for title in ("TARGET", "PYNETDICOM"):
            entity = AE(title)
            entity.add_requested_context(SEG, ExplicitVRLittleEndian)
            entity.add_requested_context(Model)
            role = build_role(Model, scp_role=True)
            made = entity.associate(
                *("127.0.0.1", receiver.port),
                ae_title="SCANLOOM",
                ext_neg=[role],
                evt_handlers=[(evt.EVT_CONN_OPEN, pause_surely)],
            )
            stored = made.send_c_store(file).Status
            status, _ = made.send_n_event_report(report, 1, Model, Instance)
            answers[title] = stored, status.Status
            made.release()
        assert answers == {"TARGET": (0x0124, 0x0115), "PYNETDICOM": (0, 0x0124)}
        assert len(receiver.stored()) == 1
        assert not list((receiver.folder / "out/private/outbox/reports").iterdir())


# --- refusals ------------------------------------------------------------------------------------


def test_one_refused_class_is_given_up_and_the_others_go(tmp_path: Path) -> None:
    classes = {**FILES, "labelmap": LABELMAP}
    case = write_case(tmp_path / "out", "caseone", classes)
    outbox = outbox_of(tmp_path)
    with running_target(tmp_path / "target", find=True) as target:
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [target_keys(target.port)]), outbox):
            wait_until_settled(outbox)
        assert len(target.stored()) == 3
    (failed,) = outbox.failed_lines()
    assert (failed.sop_class, failed.refusals) == (LABELMAP, 1)
    assert failed.reason.startswith("it does not take ")


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        pytest.param(
            {"refuse": {SR: 0xC000}}, "it can't understand the object (status C000)", marks=THOROUGH
        ),
        pytest.param(
            {"refuse": {SR: 0x0110}}, "it refuses the object (status 0110)", marks=THOROUGH
        ),
        ({"refuse": {SR: -1}}, "it ended the association, or did not answer within 30 s"),
        pytest.param(
            {"fail": {SR: 0x0110}}, "not committed: processing failed (0110)", marks=THOROUGH
        ),
    ],
)
def test_one_object_is_refused_until_the_end_and_the_others_go(
    trouble: dict[str, object], reason: str, case: Path, tmp_path: Path
) -> None:
    outbox = outbox_of(tmp_path)
    with running_target(tmp_path / "target", commit="same association", **trouble) as target:
        outbox.add(case, "pacs")
        keys = target_keys(target.port, retry=0.05)
        with delivery(site_of(tmp_path, [keys]), outbox):
            wait_until_settled(outbox)
    (failed,) = outbox.failed_lines()
    assert (failed.sop_class, failed.reason, failed.refusals) == (SR, reason, 5)
    assert proofs(outbox) == {"committed": 2}


@pytest.mark.parametrize("trouble", [pytest.param("refuse", marks=THOROUGH), "fail"])
def test_what_was_refused_once_is_sent_again(trouble: str, case: Path, tmp_path: Path) -> None:
    outbox = outbox_of(tmp_path)
    value = {trouble: {RTSTRUCT: 0xA700 if trouble == "refuse" else 0x0213}, "times": 1}
    with running_target(tmp_path / "target", commit="same association", **value) as target:
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [target_keys(target.port, report_within=0.5)]), outbox):
            wait_until_settled(outbox)
        assert target.has(case)
        assert sorted(target.told("store").values()) == [1, 1, 2]
    assert proofs(outbox) == {"committed": 3}


def test_what_is_refused_because_it_is_there_is_delivered(case: Path, tmp_path: Path) -> None:
    """The answer to an earlier attempt was lost, and the target takes no object twice."""
    outbox, there = outbox_of(tmp_path), objects_of(case)
    refuse = {SR: 0xA700, RTSTRUCT: 0x0111}
    with running_target(tmp_path / "target", find=True, refuse=refuse) as target:
        for uid, path in there.items():
            (target.folder / f"{uid}.dcm").write_bytes(data_set(path))
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [target_keys(target.port)]), outbox):
            wait_until_settled(outbox)
    assert proofs(outbox) == {"found": 3}


@THOROUGH
def test_dcmtk_without_commitment_and_queries(tmp_path: Path) -> None:
    """DCMTK's storescp knows no Label Map: that one is given up, the others are acknowledged."""
    case = write_case(tmp_path / "out", "caseone", {**FILES, "labelmap": LABELMAP})
    outbox, port = outbox_of(tmp_path), free_port()
    (tmp_path / "kept").mkdir()
    command = [dcmtk("storescp"), "-aet", "TARGET", "-od", str(tmp_path / "kept"), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [target_keys(port)]), outbox):
            wait_until_settled(outbox)
    finally:
        process.kill()
        process.wait(DEADLINE)
    assert proofs(outbox) == {"acknowledged": 3}
    assert [line.file for line in outbox.failed_lines()] == ["dicom/labelmap.dcm"]
    assert len(list((tmp_path / "kept").iterdir())) == 3


# --- targets in trouble --------------------------------------------------------------------------


def test_a_silent_target_stops_no_other(case: Path, tmp_path: Path) -> None:
    """One accepts connections and says nothing; the other is served meanwhile."""
    outbox = outbox_of(tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        running_target(tmp_path / "target", find=True) as target,
    ):
        keys = [
            target_keys(silent.getsockname()[1], "silent", patience=900),
            target_keys(target.port, "pacs"),
        ]
        for name in ("silent", "pacs"):
            outbox.add(case, name)
        with delivery(site_of(tmp_path, keys), outbox):  # its end waits for no silent one
            wait_for(lambda: sum(proofs(outbox).values()) == 3)
            assert target.has(case)
    assert {line.target for line in outbox.open_lines()} == {"silent"}


@pytest.mark.thorough
def test_a_target_that_comes_back_gets_everything(case: Path, tmp_path: Path) -> None:
    outbox, port = outbox_of(tmp_path), free_port()
    outbox.add(case, "pacs")
    with delivery(site_of(tmp_path, [target_keys(port, retry=0.1)]), outbox):
        wait_for(lambda: outbox.trouble("pacs").tries >= 3)
        assert outbox.trouble("pacs").reason == "it can't be reached"
        with running_target(tmp_path / "target", find=True, port=port) as target:
            wait_until_settled(outbox)
            assert target.has(case)
            wait_for(lambda: outbox.trouble("pacs").tries == 0)


@THOROUGH
def test_a_target_that_stays_away_is_given_up(case: Path, tmp_path: Path) -> None:
    outbox, port = outbox_of(tmp_path), free_port()
    outbox.add(case, "pacs")
    keys = target_keys(port, retry=0.2, give_up=1)
    with delivery(site_of(tmp_path, [keys]), outbox):
        wait_until_settled(outbox)
    assert {line.reason for line in outbox.failed_lines()} == {"it can't be reached"}


@pytest.mark.parametrize(
    ("keys", "site", "reason"),
    [
        ({"title": "OTHER"}, {}, "it rejects us: it has another title"),
        ({}, {"title": "STRANGER"}, "it rejects us: it does not know our title"),
    ],
)
def test_wrong_titles_are_named(
    keys: dict[str, object], site: dict[str, object], reason: str, case: Path, tmp_path: Path
) -> None:
    outbox = outbox_of(tmp_path)
    with running_target(tmp_path / "target", callers=["SCANLOOM"]) as target:
        outbox.add(case, "pacs")
        page = [target_keys(target.port, retry=60) | keys]
        with delivery(site_of(tmp_path, page, **site), outbox):
            wait_for(lambda: outbox.trouble("pacs").tries)
    assert outbox.trouble("pacs").reason == reason


@THOROUGH
@pytest.mark.parametrize(("commitment", "end"), [("yes", "failed"), ("auto", "delivered")])
def test_reports_that_never_come_have_an_end(
    commitment: str, end: str, case: Path, tmp_path: Path
) -> None:
    """One that commits itself but never reports, and can't be asked."""
    outbox = outbox_of(tmp_path)
    with running_target(tmp_path / "target", commit="never") as target:
        outbox.add(case, "pacs")
        keys = target_keys(target.port, commitment=commitment, report_within=0.3)
        with delivery(site_of(tmp_path, [keys]), outbox):
            wait_for(lambda: len(target.told("commit")) > 1)
        with delivery(site_of(tmp_path, [keys | {"give_up": 1}]), outbox):
            wait_until_settled(outbox)
        assert set(target.told("store").values()) == {1}
    ended = [*outbox.failed_lines(), *outbox.delivered_lines()]
    assert [line.state for line in ended] == [end] * 3


def test_commitment_at_another_port(case: Path, tmp_path: Path) -> None:
    """One node stores, and another one of the same archive commits."""
    folder = tmp_path / "target"
    with (
        running_target(folder) as target,
        running_target(folder, commit="same association") as other,
    ):
        committer = {"title": "TARGET", "port": other.port}
        outbox, keys = outbox_of(tmp_path), target_keys(target.port, commitment="yes")
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [keys | {"committer": committer}]), outbox):
            wait_until_settled(outbox)
        assert target.has(case)
    assert {line.proof for line in outbox.delivered_lines()} == {"committed"}


@THOROUGH
def test_tls(case: Path, tmp_path: Path) -> None:
    """A target with a certificate of the authority that the page names, and one of another."""
    for name in ("good", "other"):
        (tmp_path / name).mkdir()
    good, other = (write_certificate(tmp_path / name) for name in ("good", "other"))
    outbox, context = outbox_of(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*good)
    with running_target(tmp_path / "target", find=True, tls=context) as target:
        tls = [{"authorities": str(certificate)} for certificate, _ in (good, other)]
        targets = [
            target_keys(target.port, "pacs", tls=tls[0]),
            target_keys(target.port, "wrong", tls=tls[1], retry=60),
        ]
        for name in ("pacs", "wrong"):
            outbox.add(case, name)
        with delivery(site_of(tmp_path, targets), outbox):
            wait_until_settled(outbox, target="pacs")
            wait_for(lambda: outbox.trouble("wrong").tries)
        assert target.has(case)
    assert outbox.trouble("wrong").reason == "TLS failed: self-signed certificate"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_target_that_does_not_take_our_certificate(
    version: ssl.TLSVersion, case: Path, tmp_path: Path
) -> None:
    """By TLS 1.3 it says so after the handshake, when it was asked for an association."""
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    theirs, ours = (write_certificate(tmp_path / name) for name in ("theirs", "ours"))
    outbox, context = outbox_of(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*theirs)
    context.load_verify_locations(theirs[0])
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, version
    tls = {"authorities": str(theirs[0]), "certificate": str(ours[0]), "key": str(ours[1])}
    with running_target(tmp_path / "target", find=True, tls=context) as target:
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [target_keys(target.port, tls=tls)]), outbox):
            reason = wait_for(lambda: outbox.trouble("pacs").reason)
    assert reason.startswith("TLS failed: ") or reason.endswith("does not take our certificate")


def test_renewed_certificates_are_read_again(case: Path, tmp_path: Path) -> None:
    """Of a target that is away as long as the file of its authority is being written."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = (write_certificate(tmp_path / name) for name in ("old", "new"))
    outbox, context = outbox_of(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*new)
    with running_target(tmp_path / "target", find=True, tls=context) as target:
        keys = target_keys(target.port, tls={"authorities": str(old[0])})
        outbox.add(case, "pacs")
        with delivery(site_of(tmp_path, [keys]), outbox):
            wait_for(lambda: outbox.trouble("pacs").reason.startswith("TLS failed"))
            old[0].write_text("half")
            wait_for(lambda: "can't be read" in outbox.trouble("pacs").reason)
            new[0].replace(old[0])
            wait_until_settled(outbox)
        assert target.has(case)


# --- what is sent --------------------------------------------------------------------------------


def test_a_case_made_again_replaces_what_waited(case: Path, tmp_path: Path) -> None:
    """The line of the older bytes is given up, the newer ones are sent."""
    outbox = outbox_of(tmp_path)
    old = outbox.add(case, "pacs")
    shutil.rmtree(case)
    case = write_case(tmp_path / "out", "caseone")
    new = outbox.add(case, "pacs")
    assert {line.id for line in old}.isdisjoint(line.id for line in new)
    with running_target(tmp_path / "target", find=True) as target:
        with delivery(site_of(tmp_path, [target_keys(target.port)]), outbox):
            wait_until_settled(outbox)
        assert target.has(case)
    assert {line.id for line in outbox.failed_lines()} == {line.id for line in old}
    assert {line.id for line in outbox.delivered_lines()} == {line.id for line in new}


def test_a_case_without_dicom_has_nothing_to_send(tmp_path: Path) -> None:
    write_case(tmp_path / "out", "caseone", {})
    site_of(tmp_path, [target_keys(104)])
    code, _, err = send(tmp_path)
    assert code == 65
    assert "there are no DICOM results in these cases" in err


def test_a_file_changed_since_is_not_sent(case: Path, tmp_path: Path) -> None:
    outbox = outbox_of(tmp_path)
    outbox.add(case, "pacs")
    path = case / "dicom" / "rtstruct.dcm"
    path.write_bytes(path.read_bytes() + b"\0\0")
    with running_target(tmp_path / "target", find=True) as target:
        with delivery(site_of(tmp_path, [target_keys(target.port)]), outbox):
            wait_until_settled(outbox)
        assert len(target.stored()) == 2
    assert [line.file for line in outbox.failed_lines()] == ["dicom/rtstruct.dcm"]


# --- by hand -------------------------------------------------------------------------------------


def send(tmp_path: Path, *more: str) -> tuple[int, str, str]:
    page = tmp_path / "site.yaml"
    ended = scanloom("send", tmp_path / "out", "--to", "pacs", "--site", page, *more)
    return ended.code, ended.out, ended.err


@both_layouts
def test_send_and_status(case: Path, tmp_path: Path) -> None:
    """One class is refused at first; sending again delivers it, and once more sends nothing."""
    with running_target(
        tmp_path / "t", own_process=True, find=True, refuse={SR: 0x0122}, times=1
    ) as target:
        site_of(tmp_path, [target_keys(target.port, commitment="no")])
        key, out = load_key(tmp_path / "key"), tmp_path / "out"
        with private_folder(out, key_fingerprint(key)):  # as a run with `--key` leaves it
            pass
        first = send(tmp_path, "--key", str(tmp_path / "key"))
        told = scanloom("status", out)
        sent = [(line["event"], line["target"]) for line in read_trail(out, key)]
        second, third = send(tmp_path), send(tmp_path)
        settled = scanloom("status", tmp_path / "out", "--json")
        assert target.has(case)
        assert sum(target.told("store").values()) == 4

    assert sent == [("sent", "pacs")] * 2
    assert first[0] == 1
    assert (
        "measurements.dcm of case caseone: given up: it refuses the object (status 0122)"
        in first[1]
    )
    assert "2 of 3 objects at the target" in first[1]
    assert told.code == 1
    assert "Outbox, pacs: 2 there, 1 given up." in told.out
    assert (second[0], third[0], settled.code) == (0, 0, 0)
    assert "3 of 3 objects at the target" in third[1]
    assert settled.document["outbox"]["counts"] == {"pacs": {"found": 3}}
    for text in (first[1], first[2], told.out, json.dumps(settled.document)):
        assert not any(bird in text for bird in canaries.BIRDS)
        assert not any(uid in text for uid in objects_of(case))


@THOROUGH
def test_send_takes_reports_at_the_port_of_the_site(case: Path, tmp_path: Path) -> None:
    port = free_port()
    with running_target(
        tmp_path / "t", own_process=True, commit="own port", report_to=port
    ) as target:
        site_of(tmp_path, [target_keys(target.port, commitment="yes")], port=port)
        code, out, _ = send(tmp_path)
    assert code == 0
    assert out.count("delivered (committed)") == 3


def test_send_to_one_that_is_away_says_so_and_keeps_the_lines(case: Path, tmp_path: Path) -> None:
    site_of(tmp_path, [target_keys(free_port(), retry=60)])
    code, out, _ = send(tmp_path, "--wait", "20")
    assert code == 1
    assert out.count(": waits: it can't be reached") == 3
    assert len(outbox_of(tmp_path).open_lines()) == 3
    told = scanloom("status", tmp_path / "out")
    assert told.code == 0
    assert "pacs: it can't be reached; attempt 2 in 0:0" in told.out


@THOROUGH
def test_send_refuses_a_changed_case_and_sends_the_others(case: Path, tmp_path: Path) -> None:
    write_case(tmp_path / "out", "casetwo")
    (case / "case.json").write_text("{}")
    with running_target(tmp_path / "t", own_process=True, find=True) as target:
        site_of(tmp_path, [target_keys(target.port)])
        code, out, _ = send(tmp_path)
        assert target.has(tmp_path / "out" / "cases" / "casetwo")
    assert code == 1
    assert "case caseone: the case differs from what was published, and is not sent" in out


@THOROUGH
def test_send_beside_listen(tmp_path: Path) -> None:
    """The receiver delivers and takes the reports; the command watches."""
    port, out, name = free_port(), tmp_path / "site" / "out", "case" + 22 * "a"
    outbox, first = Outbox(outbox_folder(out)), write_case(out, "first")
    with running_target(
        tmp_path / "t", own_process=True, commit="own port", report_to=port
    ) as target:
        keys = target_keys(target.port, commitment="yes")
        with listening(tmp_path / "site", port=port, targets=[keys]) as receiver:
            outbox.add(first, "pacs")
            wait_until_settled(outbox)  # the receiver has the lock of those who deliver
            case, other = write_case(out, name), write_case(out, f"{canaries.BIRDS[0]}_2")
            page = tmp_path / "site" / "site.yaml"
            ended = scanloom("send", out, "--to", "pacs", "--site", page, case.name, other.name)
            assert receiver.stop() == 0
        assert target.has(first, case, other)
    assert ended.code == 0
    assert ended.out.count("delivered (committed)") == 6
    assert f"pacs has dicom/segmentation.dcm of case {name}: committed" in receiver.log
    assert not any(bird in receiver.log for bird in canaries.BIRDS)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "pasc"], 65, "no target is called pasc: did you mean pacs?"),
        (["--to", "pacs", "nocase"], 65, "there is no case nocase in the output folder"),
    ],
)
def test_a_wrong_name_is_refused(
    arguments: list[str], code: int, message: str, case: Path, tmp_path: Path
) -> None:
    site_of(tmp_path, [target_keys(104)])
    ended = scanloom("send", tmp_path / "out", "--site", tmp_path / "site.yaml", *arguments)
    assert ended.code == code
    assert message in ended.err
    assert not outbox_folder(tmp_path / "out").exists()
