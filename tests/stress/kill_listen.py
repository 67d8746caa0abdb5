"""Kills all that takes part while `scanloom listen` receives, segments and sends, and checks.

    python tests/stress/kill_listen.py --folder FOLDER [--studies 50] [--kills 20] [--seed 41]

Orthanc A, two storescu of DCMTK and two senders of pynetdicom send small CT studies at once to
`scanloom listen`, which segments them by a tiny network and sends SEG, SR and RTSTRUCT to Orthanc
B, by storage commitment. Studies are interleaved and shuffled, some compressed, slices doubled, the
last slices of every fifth study late; of one study each slice comes from both programs, whose bytes
differ. With SCANLOOM_SCANS, real ones are among them. Meanwhile SIGKILL ends receiver, worker, a
sender and Orthanc B, each `--kills` times at random moments, and half as often the delivery, the
network's process and the keeper, `listen` itself. Afterwards:

- each object that was acknowledged is in the spool, whole; so is every other file there; this is
  also looked at after each kill of the receiver
- each study is segmented, of all its slices; MR fits no rule
- each result is in B once, as it was published, and committed; B has nothing that the outbox does
  not know; the audit trail tells the same
- `scanloom verify` and `scanloom status` end with 0
- no process and no half file is left, after each kill of the keeper and at the end

Then strace looks at the receiver: each answer comes after the fsync of file and folders. Receivers
that sync later, never, or no folders must be noticed.

Needs Orthanc with its DICOMweb plugin, and DCMTK; strace for the last part. FOLDER must not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from pydicom import Dataset, dcmread
from pydicom.filebase import DicomBytesIO
from pydicom.uid import (
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGLSLossless,
    RLELossless,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from scanloom.engine.listen.outbox import ASKED, REPORTS, WAITING, Line, Outbox, outbox_folder
from scanloom.io.identity import read_key
from scanloom.io.output.audit import read_trail
from support import prompt_sender
from support.commands import scanloom_process
from support.layouts import case_folders
from support.listeners import position, processes, states, wait_for, write_workflow
from support.orthanc import Orthanc, running_orthanc
from support.real_scans import scans_folder
from support.receivers import Receiver, data_set, listening, read_journal, send
from support.synced_answers import FOLDERS_NEVER, LATE, NEVER, STRACE, answers_in
from support.targets import free_port, objects_of
from support.write_dicom import Coding, Words, write_series

SHAPE = (32, 24, 20)
LATE_SLICES = 6
KINDS = ("orthanc", "storescu", "pynetdicom")
SYNTAXES = (ExplicitVRLittleEndian, RLELossless, ExplicitVRLittleEndian, JPEGLSLossless)
STORESCU_OPTION = {
    RLELossless: "-xr",
    JPEGLSLossless: "-xt",
    ImplicitVRLittleEndian: "-xi",
}
REAL = {"compressed_series/sts002_rle": "storescu", "compressed_series/d2n_rle": "pynetdicom"}
"""A CT of few slices: of its noise by a random network, an RTSTRUCT has contours by the thousand,
for which Orthanc takes minutes."""
OBJECTS = 3
"""SEG, SR and RTSTRUCT of a case."""
CHUNK = 12
"""Files that Orthanc A, and a run of storescu, sends at once."""
PATIENCE = 900.0
"""Seconds for a state to come, beyond which the script fails."""
SOON = 60.0
"""Seconds that processes may outlive the keeper."""
PARTS = {"receiver": "parts receiver", "worker": "parts worker", "delivery": "parts delivery"}
NETWORK = "worker.child_main"


@dataclass(frozen=True)
class Study:
    """A study that is sent.

    Parameters
    ----------
    uid, modality : str
    files : list of Path
        In the order of the slices.
    by : str
        Kind of its senders; "both" for storescu and pynetdicom.
    late : int
        Slices at the end that are sent once the others were segmented.
    """

    uid: str
    modality: str
    files: list[Path]
    by: str
    late: int = 0


def make_studies(folder: Path, count: int) -> list[Study]:
    """Write studies, an MR among each 25, one by two programs; the last are real, if here."""
    studies = list[Study]()
    folder_of_real = scans_folder()
    real = REAL if folder_of_real is not None and count >= 10 else {}
    count -= len(real)
    for n in range(count):
        by = "both" if n == count - 1 else KINDS[n % 3]
        syntax = SYNTAXES[n % 4]
        stored = np.random.default_rng(n).integers(0, 2000, SHAPE).astype(np.int16)
        modality = "MR" if n % 25 == 20 else "CT"
        words = Words(modality, f"series {n}", f"study {n}", {"PatientID": f"CANARY-{n}"})
        coding, edit = Coding(syntax=syntax), encode_otherwise if by == "both" else None
        files = write_series(folder / f"{n}", stored, coding=coding, words=words, edit=edit)
        late = LATE_SLICES if n % 5 == 2 and modality == "CT" else 0
        studies.append(study_of(sorted(files, key=position), by, late))
    for name, by in real.items():
        files = [path for path in (folder_of_real / name).iterdir() if path.suffix == ".dcm"]
        studies.append(study_of(sorted(files, key=position), by))
    return studies


def encode_otherwise(k: int, ds: Dataset) -> None:
    """Add a sequence whose length is left open, which DCMTK states: its bytes differ then."""
    ds.ReferencedStudySequence = [Dataset()]
    ds["ReferencedStudySequence"].is_undefined_length = True


def study_of(files: list[Path], by: str, late: int = 0) -> Study:
    """Return the study of files."""
    header = dcmread(files[0], stop_before_pixels=True)
    return Study(str(header.StudyInstanceUID), str(header.Modality), files, by, late)


# --- senders --------------------------------------------------------------------------------------


class Sender(threading.Thread):
    """Sends files by a program until each was acknowledged, whatever is killed.

    Parameters
    ----------
    port : int
        Of the receiver.
    environment : mapping
        Of its processes.
    """

    def __init__(self, port: int, environment: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.port, self.environment = port, environment
        self.process: subprocess.Popen[str] | None = None
        self.acknowledged: list[Path] = []
        self._waiting: list[Path] = []
        self._lock, self._ended = threading.Lock(), threading.Event()

    def give(self, files: Iterable[Path]) -> None:
        """Add files to those that wait."""
        with self._lock:
            self._waiting += files

    @property
    def is_idle(self) -> bool:
        """Whether all were acknowledged."""
        with self._lock:
            return not self._waiting

    def run(self) -> None:
        """Send until the end."""
        while not self._ended.wait(0.1):
            with self._lock:
                files = list(self._waiting)
            if files:
                self.send_some(files)

    def send_some(self, files: list[Path]) -> None:
        """Send the first of some files."""
        raise NotImplementedError

    def take(self, paths: Iterable[Path]) -> None:
        """Note files that were acknowledged."""
        with self._lock:
            for path in paths:
                self._waiting.remove(path)
                self.acknowledged.append(path)

    def kill(self) -> bool:
        """Kill its process; return whether it ran."""
        process = self.process
        if process is None or process.poll() is not None:
            return False
        process.kill()
        return True

    def end(self) -> None:
        """End the thread and its process."""
        self._ended.set()
        self.kill()
        self.join(30)

    def started(self, command: Sequence[str], **streams: int) -> subprocess.Popen[str]:
        """Start a process of the program."""
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(self.environment),
            **streams,
        )
        return self.process


class Storescu(Sender):
    """DCMTK's."""

    def send_some(self, files: list[Path]) -> None:
        """See `Sender`."""
        syntax = syntax_of(files[0])
        chunk = [path for path in dict.fromkeys(files[: 4 * CHUNK]) if syntax_of(path) == syntax]
        option = STORESCU_OPTION.get(syntax)
        command = ["storescu", "-v", "-R", *filter(None, [option]), "-aet", "STORESCU"]
        command += ["-aec", "SCANLOOM", "-to", "20", "-ta", "20", "-td", "20"]
        command += ["127.0.0.1", str(self.port), *map(str, chunk[:CHUNK])]
        with self.started(command, stderr=subprocess.STDOUT) as process:
            sending = None
            for line in process.stdout or ():
                _, was_sending, path = line.partition("Sending file: ")
                if was_sending:
                    sending = Path(path.strip())
                elif "Received Store Response (Success)" in line and sending is not None:
                    self.take([sending])


class Pynetdicom(Sender):
    """pynetdicom's, in a process that goes on."""

    def send_some(self, files: list[Path]) -> None:
        """See `Sender`."""
        command = [sys.executable, prompt_sender.__file__, str(self.port)]
        with self.started(command, stdin=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            with suppress(BrokenPipeError):
                while files:
                    for path in files[:CHUNK]:
                        process.stdin.write(f"{path}\n")
                    process.stdin.flush()
                    for path in files[:CHUNK]:
                        if process.stdout.readline() != f"{path}\n":  # it was killed
                            process.kill()
                            return
                        self.take([path])
                    with self._lock:
                        files = list(self._waiting)


class FromOrthanc(Sender):
    """Orthanc A, which has all its files before."""

    def __init__(self, port: int, environment: Mapping[str, str], server: Orthanc) -> None:
        super().__init__(port, environment)
        self.server, self.names = server, dict[Path, str]()

    def upload(self, files: Iterable[Path]) -> None:
        """Store files in Orthanc A."""
        for path in files:
            answer = json.loads(self.server.get("instances", path.read_bytes()))
            self.names[path] = answer["ID"]

    def send_some(self, files: list[Path]) -> None:
        """See `Sender`."""
        chunk = files[:CHUNK]
        job = {"Resources": [self.names[path] for path in chunk], "Synchronous": True}
        try:
            self.server.get("modalities/SCANLOOM/store", json.dumps(job).encode(), 60)
        except (OSError, urllib.error.URLError):  # the receiver or Orthanc A was killed
            return
        self.take(chunk)

    def kill(self) -> bool:
        """Kill Orthanc A, and start it again."""
        if self._ended.is_set():
            return False
        self.server.kill()
        self.server.start(self.environment)
        return True


def syntax_of(path: Path) -> str:
    """Return the transfer syntax of a file."""
    return str(dcmread(path, specific_tags=[], stop_before_pixels=True).file_meta.TransferSyntaxUID)


@dataclass
class Senders:
    """All senders, and which of them sends a study."""

    by_kind: dict[str, list[Sender]]
    seed: int

    def __iter__(self) -> Iterator[Sender]:
        for senders in self.by_kind.values():
            yield from senders

    def give(self, studies: Sequence[Study], *, late: bool = False) -> None:
        """Let slices of studies be sent: shuffled, interleaved, and each second one twice."""
        chance = random.Random(self.seed + len(studies))
        shares: dict[Sender, list[Path]] = {}
        for study in studies:
            kinds = ("storescu", "pynetdicom") if study.by == "both" else (study.by,)
            first = len(study.files) - study.late
            files = study.files[first:] if late else study.files[:first]
            for kind in kinds:
                senders = self.by_kind[kind]
                for n, path in enumerate(files):
                    shares.setdefault(senders[n % len(senders)], []).append(path)
                    if n % 2:  # by another sender of the same program, if there is one
                        shares.setdefault(senders[(n + 1) % len(senders)], []).append(path)
        for sender, files in shares.items():
            chance.shuffle(files)
            sender.give(files)

    @property
    def acknowledged(self) -> dict[Path, set[str]]:
        """The kinds of senders that were told a file is stored."""
        found: dict[Path, set[str]] = {}
        for kind, senders in self.by_kind.items():
            for sender in senders:
                for path in list(sender.acknowledged):
                    found.setdefault(path, set()).add(kind)
        return found


# --- checks ---------------------------------------------------------------------------------------


@dataclass
class SpoolCheck:
    """Compares the files of a spool with those that were sent, each state of a file once."""

    sent: Mapping[str, tuple[Path, Study]]
    seen: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, studies: Iterable[Study]) -> SpoolCheck:
        """Return the check of studies."""
        return cls({instance_of(path): (path, study) for study in studies for path in study.files})

    def look(self, spool: Path, acknowledged: Iterable[Path]) -> None:
        """Fail if a file in the spool is not whole, or one that was acknowledged is missing."""
        stored = {path.stem: path for path in (spool / "studies").glob("*/*/*.dcm")}
        for uid, path in stored.items():
            state = path.stat()
            stamp = state.st_mtime_ns, state.st_ino
            if self.seen.get(path) != stamp:
                assert_same(*self.sent[uid], path)
                self.seen[path] = stamp
        missing = {instance_of(path) for path in acknowledged} - stored.keys()
        assert not missing, f"{len(missing)} objects were acknowledged and are not in the spool"


_INSTANCES: dict[Path, str] = {}


def instance_of(path: Path) -> str:
    """Return the SOPInstanceUID of a file that was sent."""
    if path not in _INSTANCES:
        _INSTANCES[path] = str(dcmread(path, specific_tags=["SOPInstanceUID"]).SOPInstanceUID)
    return _INSTANCES[path]


def assert_same(sent: Path, study: Study, kept: Path) -> None:
    """Fail unless a kept file has what was sent: its bytes; for those that encode headers anew,
    its elements and the bytes of its pixels."""
    if data_set(kept) == data_set(sent):
        return
    assert study.by != "pynetdicom", f"{kept} is not what was sent"
    one, other = dcmread(sent), dcmread(kept)
    assert one.file_meta.TransferSyntaxUID == other.file_meta.TransferSyntaxUID, (sent, kept)
    assert one == other, f"{kept} is not what was sent"


def check_results(receiver: Receiver, studies: Sequence[Study], archive: Orthanc) -> Counter[str]:
    """Fail unless each study has its result, of all slices, once in B, and everybody says so."""
    out = receiver.folder / "out"
    outcomes = {study: state.outcome for study, state in states(receiver.spool).items()}
    assert outcomes == expected(studies)
    cases = case_folders(out)
    documents = [json.loads((case / "case.json").read_text()) for case in cases]
    slices = sorted(document["grid"]["shape"][2] for document in documents)
    assert slices == sorted(len(s.files) for s in studies if s.modality == "CT")
    assert "MAYBE_INCOMPLETE" not in str(documents)

    newest, kept = objects_of(*cases), archive.instances()
    assert len(newest) >= OBJECTS * len(cases)
    names = Counter(uid for uid, _ in kept)
    assert set(names.values()) == {1}, "an object is in B twice"
    assert newest.keys() <= names.keys(), "a result is not in B"
    for uid, name in kept:
        if uid in newest:
            there = dcmread(DicomBytesIO(archive.get(f"instances/{name}/file")))
            assert there == dcmread(newest[uid])
    outbox = Outbox(outbox_folder(out))
    delivered, failed = list(outbox.delivered_lines()), outbox.failed_lines()
    assert not outbox.open_lines()
    assert all("changed, replaced or removed" in line.reason for line in failed), failed
    assert {line.instance for line in failed}.isdisjoint(newest)
    lines = Counter(line.instance for line in delivered)
    assert set(lines.values()) == {1}
    assert newest.keys() <= lines.keys() <= names.keys()
    assert names.keys() <= lines.keys() | {line.instance for line in failed}
    assert {line.proof for line in delivered} == {"committed"}
    return check_trail(out, delivered, failed, cases)


def check_trail(
    out: Path, delivered: Sequence[Line], failed: Sequence[Line], cases: Sequence[Path]
) -> Counter[str]:
    """Fail unless the audit trail tells what there is; return what was counted."""
    told = list(read_trail(out, read_key()))
    sent = {line["sha256"] for line in told if line["event"] == "sent"}
    assert sent == {line.sha256 for line in delivered}
    segmented = {line["case"] for line in told if line["event"] == "segmented"}
    assert segmented == {case.name for case in cases}
    counts = Counter(str(line["event"]) for line in told)
    return counts + Counter({"in B": len(delivered), "older ones given up": len(failed)})


def expected(studies: Iterable[Study]) -> dict[str, str]:
    """Return the outcome of each study."""
    return {study.uid: "done" if study.modality == "CT" else "no rule" for study in studies}


def left_over(receiver: Receiver, mark: str, temporary: Path) -> list[str]:
    """Return processes, files on their way and temporary files that are still there."""
    out = receiver.folder / "out"
    outbox = outbox_folder(out)
    Outbox(outbox).tidy()
    look_for(lambda: not processes(mark), SOON, 0.1)
    found = [f"process {name}" for name in processes(mark).values()]
    for folder in (receiver.spool / "incoming", receiver.spool / "clearing", out / ".work"):
        found += map(str, folder.iterdir() if folder.is_dir() else ())
    for name in (WAITING, ASKED, REPORTS):
        found += [str(path) for path in (outbox / name).iterdir() if path.suffix == ".json"]
    found += [str(path) for path in out.rglob("*") if path.name.endswith((".part", ".tmp"))]
    found += [str(path) for path in temporary.iterdir() if not is_of_dask(path)]
    return found


def is_of_dask(path: Path) -> bool:
    """Return whether a folder has Dask's certificate and its key, for milliseconds of its start.

    Dask writes them to load them; a kill just then leaves them, of a cluster that is no more.
    """
    names = {each.name for each in path.iterdir()} if path.is_dir() else {""}
    return names <= {"dask.crt", "dask.pem"} and path.stat().st_mode & 0o077 == 0


# --- the script -----------------------------------------------------------------------------------


@dataclass
class Killer:
    """Kills, at random moments or in the midst of something, and counts.

    Parameters
    ----------
    receiver : Receiver
    mark : str
        In the environment of all processes of `listen`.
    senders : Senders
    archive : Orthanc
        B.
    chance : Random
    check : SpoolCheck
    patience : float
        Seconds in which one that does something is looked for.
    kills, moments : Counter
        By process, and what was going on.
    """

    receiver: Receiver
    mark: str
    senders: Senders
    archive: Orthanc
    chance: random.Random
    check: SpoolCheck
    environment: Mapping[str, str]
    patience: float
    kills: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)

    def kill(self, victim: str) -> None:
        """Kill one in the midst of what it does; receiver and senders every second time."""
        spool = self.receiver.spool
        outbox = Outbox(outbox_folder(self.receiver.folder / "out"))
        busy: dict[str, Callable[[], object]] = {
            "receiver": lambda: any((spool / "incoming").iterdir()),
            "sender": lambda: any((spool / "incoming").iterdir()),
            "worker": self.works,
            "network": self.works,
            "archive": outbox.open_lines,
            "delivery": outbox.open_lines,
        }
        at_network = victim in ("receiver", "sender")
        if not at_network or self.kills[victim] % 2:
            seconds = min(8 if at_network else 40, self.patience)
            look_for(busy[victim], seconds, 0.001 if at_network else 0.1)
        if victim == "network":
            time.sleep(self.chance.uniform(0.0, 0.5))  # then it has nothing more to do
        elif not at_network or not self.kills[victim] % 2:
            time.sleep(self.chance.uniform(0.0, 3.0))
        self.note()
        if victim == "sender":
            running = wait_for(lambda: self.kill_a_sender(), 60)
            assert running
        elif victim == "archive":
            self.archive.kill()
            time.sleep(self.chance.uniform(0.0, 1.0))
            self.archive.start(self.environment)
        else:
            part = PARTS.get(victim, NETWORK)

            def running() -> list[int]:
                return [p for p, name in processes(self.mark).items() if part in name]

            found = wait_for(running, 120)
            with suppress(ProcessLookupError):
                os.kill(found[0], 9)
        self.kills[victim] += 1
        if victim == "receiver":
            time.sleep(0.1)  # an answer may be on its way
            self.check.look(spool, self.senders.acknowledged)

    def kill_keeper(self) -> None:
        """Kill `listen` itself: all its processes end by themselves."""
        self.note()
        self.receiver.process.kill()
        self.receiver.process.wait(30)
        self.kills["keeper"] += 1
        wait_for(lambda: not processes(self.mark), SOON)
        time.sleep(0.1)
        self.check.look(self.receiver.spool, self.senders.acknowledged)

    def kill_a_sender(self) -> bool:
        """Kill one of the senders that run."""
        senders = [sender for sender in self.senders if not sender.is_idle]
        senders = senders or [each for each in self.senders if not isinstance(each, Storescu)]
        self.chance.shuffle(senders)
        return any(sender.kill() for sender in senders)

    def works(self) -> bool:
        """Return whether a study is with the workers."""
        return any(state.outcome == "begun" for state in states(self.receiver.spool).values())

    def note(self) -> None:
        """Count what is going on."""
        outbox = Outbox(outbox_folder(self.receiver.folder / "out"))
        self.moments["kills"] += 1
        self.moments["with a study in work"] += self.works()
        self.moments["with a data set on its way"] += any(
            (self.receiver.spool / "incoming").iterdir()
        )
        self.moments["with results on their way"] += bool(outbox.open_lines())


def look_for(what: Callable[[], object], seconds: float, pause: float) -> bool:
    """Return whether something is true within some seconds; looked at after each pause."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


@contextmanager
def site_environment(mark: str, temporary: Path) -> Iterator[dict[str, str]]:
    """Mark what is started in the block, and give it a temporary folder; yield what was before."""
    before = dict(os.environ)
    name, _, value = mark.partition("=")
    temporary.mkdir()
    os.environ[name], os.environ["TMPDIR"] = value, str(temporary)
    try:
        yield before
    finally:
        os.environ.clear()
        os.environ.update(before)


def kill_all(
    folder: Path, count: int, kills: int, seed: int, cluster: str = "local"
) -> Counter[str]:
    """Send studies, kill, and check; return what was counted.

    Parameters
    ----------
    folder : Path
        Is made.
    count : int
        Studies.
    kills : int
        Of receiver, worker, senders and Orthanc B, each.
    seed : int
    cluster : "local" or "none"
        Where the network runs.

    Raises
    ------
    AssertionError
        If something is wrong, or comes too late.
    """
    folder.mkdir(parents=True)
    studies = make_studies(folder / "scans", count)
    workflow = write_workflow(folder / "workflow", outputs={"also": ["sr", "rtstruct"]})
    port, chance, mark = free_port(), random.Random(seed), f"LISTENS={folder}"
    us = {"SCANLOOM": ("SCANLOOM", "127.0.0.1", port)}
    rounds, began = max(1, kills // 2), time.monotonic()
    with ExitStack() as stack:
        before = stack.enter_context(site_environment(mark, folder / "tmp"))
        pacs = stack.enter_context(running_orthanc(folder / "pacs", 0, "PACS", before, **us))
        archive = stack.enter_context(running_orthanc(folder / "b", 0, "ARCHIVE", before, **us))
        first = FromOrthanc(port, before, pacs)
        first.upload(path for study in studies if study.by == "orthanc" for path in study.files)
        senders = Senders(
            {
                "orthanc": [first],
                "storescu": [Storescu(port, before) for _ in range(2)],
                "pynetdicom": [Pynetdicom(port, before) for _ in range(2)],
            },
            seed,
        )
        for sender in senders:
            stack.callback(sender.end)
            sender.start()
        target = {"name": "b", "title": "ARCHIVE", "address": "127.0.0.1", "port": archive.port}
        keys = {
            "port": port,
            "peers": [{"title": name} for name in ("PACS", "STORESCU", "PYNETDICOM")],
            "rules": [{"workflow": str(workflow), "select": {"modality": "CT"}, "send": "b"}],
            "targets": [{**target, "commitment": "yes", "retry": 0.2, "report_within": 5}],
            "quiet": "2 s",
            "cluster": cluster,
        }
        killer: Killer | None = None
        late = list[Study]()
        for number in range(rounds):
            with listening(folder / "site", **keys) as receiver:
                if killer is None:
                    check = SpoolCheck.of(studies)
                    patience = 40.0 if kills > 1 else 3.0  # few studies are soon done
                    parts = (receiver, mark, senders, archive, chance, check, before)
                    killer = Killer(*parts, patience)
                killer.receiver = receiver
                late = send_late(receiver, senders, late)
                now = studies[number::rounds]
                late += [study for study in now if study.late]
                senders.give(now)
                victims = ["receiver", "worker", "sender", "archive"] * (kills // rounds)
                victims += ["delivery"]
                # The network first: it ends when all that came is segmented.
                for victim in ["network", *chance.sample(victims, len(victims))]:
                    killer.kill(victim)
                    took = time.monotonic() - began
                    print(f"{took:5.0f} s, {number + 1}/{rounds}: {victim}", flush=True)
                half = sum(len(studies[each::rounds]) for each in range(number + 1)) // 2
                look_for(partial(is_done, receiver, half), PATIENCE / 3, 0.5)  # or it would be idle
                killer.kill_keeper()
        assert killer is not None
        with listening(folder / "site", **keys) as receiver:
            killer.receiver = receiver
            settle(receiver, senders, studies, late, archive)
            check.look(receiver.spool, senders.acknowledged)
            counts = check_results(receiver, studies, archive)
            assert receiver.stop() == 0
        assert not (left := left_over(receiver, mark, folder / "tmp")), left
        assert {path for study in studies for path in study.files} == set(senders.acknowledged)
        for command in ("verify", "status"):
            ended = scanloom_process(command, "--out", folder / "site" / "out")
            assert ended.code == 0, (command, ended.out, ended.err)
    assert min(killer.kills[each] for each in ("receiver", "worker", "sender", "archive")) >= kills
    outcomes = Counter(line.outcome for line in read_journal(receiver.spool))
    assert outcomes["changed"], "what two programs sent has the same bytes"
    counts += Counter({f"journal: {name}": n for name, n in outcomes.items()})
    return killer.kills + killer.moments + counts


def is_done(receiver: Receiver, count: int) -> bool:
    """Return whether so many studies are done."""
    return sum(state.outcome == "done" for state in states(receiver.spool).values()) >= count


def send_late(receiver: Receiver, senders: Senders, late: list[Study]) -> list[Study]:
    """Send the late slices of the studies that were segmented without; return the others."""
    known = states(receiver.spool)
    done = [study for study in late if study.uid in known and known[study.uid].outcome == "done"]
    if done:
        senders.give(done, late=True)
    return [study for study in late if study not in done]


def settle(
    receiver: Receiver,
    senders: Senders,
    studies: Sequence[Study],
    late: list[Study],
    archive: Orthanc,
) -> None:
    """Wait until everything was sent, segmented and delivered."""
    out = receiver.folder / "out"
    wait_for(lambda: all(sender.is_idle for sender in senders), PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while late := send_late(receiver, senders, late):
        assert time.monotonic() < deadline, "studies without their late slices are not segmented"
        time.sleep(0.5)
    wait_for(lambda: all(sender.is_idle for sender in senders), PATIENCE)

    def is_settled() -> bool:
        found = {study: state.outcome for study, state in states(receiver.spool).items()}
        newer = [
            study
            for study, state in states(receiver.spool).items()
            if arrived(receiver.spool / "studies" / study) > state.seen
        ]
        return (
            found == expected(studies) and not newer and not Outbox(outbox_folder(out)).open_lines()
        )

    wait_for(is_settled, 2 * PATIENCE)


def arrived(study: Path) -> float:
    """Return when the last object of a study came."""
    return max(each.stat().st_mtime for each in (study, *study.iterdir()))


def prove_order(folder: Path) -> None:
    """Fail unless strace sees each answer after the syncs, and notices receivers without them."""
    files = make_studies(folder / "scans", 2)[1].files[:4]
    programs = {"scanloom": "", "syncs later": LATE, "never": NEVER, "no folders": FOLDERS_NEVER}
    for name, program in programs.items():
        trace = folder / f"{name}.strace"
        wrap = [*STRACE, "-o", str(trace)]
        with listening(folder / name, wrap=wrap, program=program) as receiver:
            assert set(send(receiver.port, files).values()) == {0}
            child = Path(f"/proc/{receiver.process.pid}/task/{receiver.process.pid}/children")
            os.kill(int(child.read_text().split()[0]), 15)
            receiver.process.wait(60)
        answers = answers_in(trace.read_text())
        assert answers == [not program] * len(files), (name, answers)
        print(f"{name}: {answers.count(True)} of {len(answers)} answers after the syncs")


def main() -> int:
    """Print what was counted, or end with what was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--studies", type=int, default=50)
    parser.add_argument("--kills", type=int, default=20, help="of each process")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--cluster", default="local", choices=["local", "none"])
    options = parser.parse_args()
    missing = [name for name in ("storescu", "Orthanc") if shutil.which(name) is None]
    if missing and not Path("/usr/sbin/Orthanc").exists():
        print(f"not tried: {', '.join(missing)} is not installed")
        return 77
    warnings.filterwarnings("ignore", module="pydicom")  # of values in real scans
    began = time.monotonic()
    counts = kill_all(
        options.folder.absolute(), options.studies, options.kills, options.seed, options.cluster
    )
    print(f"{options.studies} studies, {time.monotonic() - began:.0f} s")
    for name, number in counts.items():
        print(f"{number:6d} {name}")
    if shutil.which("strace"):
        prove_order(options.folder.absolute() / "order")
    else:
        print("the order of system calls was not looked at: strace is not installed")
    print("no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
