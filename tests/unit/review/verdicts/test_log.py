"""The log of verdicts: kept before it is answered, damage named, held by one process."""

from __future__ import annotations

import hashlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from scanloom.core import Reason, ScanError
from scanloom.engine.results.verify import verify
from scanloom.review.verdicts.log import (
    COMMENTS,
    REVIEW,
    VERDICTS,
    VerdictLog,
    read_verdicts,
    reviewer_codes,
)
from scanloom.review.verdicts.verdict import Seen, Verdict
from support.faults import on_small_disk
from support.processes import next_line

SEEN = Seen("recipe", {"segmentation.nii.gz": "0" * 64})


def verdict(case: str = "a", reviewer: str = "r1", decision: str = "accept") -> Verdict:
    return Verdict(case, reviewer, SEEN, decision)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[VerdictLog]:
    with closing(VerdictLog(tmp_path)) as log:
        yield log


def file_of(out: Path) -> Path:
    return out / REVIEW / VERDICTS


def test_verdicts_come_back_as_they_were(log: VerdictLog) -> None:
    judged = Verdict("a", "r1", SEEN, "edit", {"m/liver": "reject"}, ("leak",), 12.5)

    kept = log.append(judged)

    assert read_verdicts(log.out) == [kept]
    assert (kept.number, kept.decision, kept.structures) == (1, "edit", {"m/liver": "reject"})
    assert (kept.tags, kept.seconds, kept.comment) == (("leak",), 12.5, False)


def test_a_line_decides_about_its_case_or_undoes_another(log: VerdictLog) -> None:
    log.append(replace(verdict(), decision=None, structures={"m/liver": "accept"}))
    with pytest.raises(ScanError, match="REVIEW_DAMAGED"):
        read_verdicts(log.out)


def test_the_last_verdict_counts_and_undo_restores_the_one_before(log: VerdictLog) -> None:
    log.append(verdict(decision="accept"))
    log.append(verdict(decision="reject"))
    log.append(verdict(reviewer="r2"))
    assert log.stack.current()["a"]["r1"].decision == "reject"

    log.undo("r1", "a")

    assert log.stack.current()["a"]["r1"].decision == "accept"
    log.undo("r1", "a")
    assert set(log.stack.current()["a"]) == {"r2"}
    assert log.undo("r1", "a") is None
    assert log.count == len(read_verdicts(log.out)) == 5


def test_comments_and_names_are_private(log: VerdictLog) -> None:
    codes = reviewer_codes(log.out, ["Anna Doe", "Ben"])
    kept = log.append(verdict(reviewer=codes["Anna Doe"]), "Mr Roe's left kidney")

    assert log.comment_of(kept) == "Mr Roe's left kidney"
    assert codes == {"Anna Doe": "r1", "Ben": "r2"}
    assert reviewer_codes(log.out, ["Cleo", "Ben"]) == {"Cleo": "r3", "Ben": "r2"}
    for path in (log.out / "review").rglob("*"):
        assert not path.is_file() or b"Roe" not in path.read_bytes()
        assert not path.is_file() or b"Anna" not in path.read_bytes()
    for name in (COMMENTS, "reviewers.json"):
        assert (log.out / "private" / name).stat().st_mode & 0o777 == 0o600


def test_names_that_differ_in_case_are_one_reviewer(log: VerdictLog) -> None:
    codes = reviewer_codes(log.out, ["Anna", "anna", "Ma\u00df", "MASS"])
    assert codes == {"Anna": "r1", "Ma\u00df": "r2"}
    assert reviewer_codes(log.out, ["ANNA", "Zo\u00eb"]) == {"Anna": "r1", "Zo\u00eb": "r3"}
    assert reviewer_codes(log.out, ["Zoe\u0308"]) == {"Zo\u00eb": "r3"}


def test_verdicts_are_not_given_to_another_when_the_names_are_lost(log: VerdictLog) -> None:
    log.append(verdict(reviewer=reviewer_codes(log.out, ["anna", "ben"])["ben"]))
    (log.out / "private" / "reviewers.json").unlink()

    assert reviewer_codes(log.out, ["cleo"]) == {"cleo": "r3"}


@pytest.mark.parametrize("content", ["[]", "{", '{"r1": 3}', '{"anna": "r1"}', '{"r0": "a"}'])
def test_damaged_names_are_refused(log: VerdictLog, content: str) -> None:
    (log.out / "private" / "reviewers.json").write_text(content)
    with pytest.raises(ScanError) as caught:
        reviewer_codes(log.out, ["anna"])
    assert caught.value.reason is Reason.REVIEW_DAMAGED


def test_comment_of_a_verdict_that_was_not_kept_is_not_taken_for_the_next(log: VerdictLog) -> None:
    file_of(log.out).mkdir()  # the verdict can't be written, its comment can
    with pytest.raises(ScanError):
        log.append(verdict(), "lost")
    file_of(log.out).rmdir()

    kept = log.append(verdict())
    commented = log.append(verdict(), "kept")

    assert log.comment_of(kept) == ""
    assert log.comment_of(commented) == "kept"


def test_a_second_process_is_refused(log: VerdictLog) -> None:
    with pytest.raises(ScanError) as caught:
        VerdictLog(log.out)
    assert caught.value.reason is Reason.REVIEW_OPEN


def test_half_a_line_at_the_end_is_cut_off(tmp_path: Path) -> None:
    with closing(VerdictLog(tmp_path)) as log:
        log.append(verdict())
    whole = file_of(tmp_path).read_bytes()
    file_of(tmp_path).write_bytes(whole + b'{"number":2,"sch')
    assert len(read_verdicts(tmp_path)) == 1

    with closing(VerdictLog(tmp_path)) as log:
        assert file_of(tmp_path).read_bytes() == whole
        assert log.append(verdict("b")).number == 2


def flip(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b"accept", b"reject"), *lines[2:]]


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "changed": (flip, "line 2 was changed"),
    "removed": (lambda lines: [lines[0], *lines[2:]], "line 2 is missing: line 3 is in its place"),
    "doubled": (lambda lines: [*lines[:2], *lines[1:]], "line 3 is missing: line 2 is in its"),
    "swapped": (
        lambda lines: [lines[0], lines[2], lines[1], lines[3]],
        "line 2 is missing: line 3 is in its place",
    ),
    "no JSON": (lambda lines: [lines[0], b"{", *lines[2:]], "line 2 was changed"),
    "empty": (lambda lines: [lines[0], b"", *lines[2:]], "line 2 was changed"),
    "first removed": (lambda lines: lines[1:], "line 1 is missing: line 2 is in its place"),
    "all removed": (lambda _: [b""], "line 1 was changed"),
}


def written(out: Path) -> list[bytes]:
    with closing(VerdictLog(out)) as log:
        for case in "abcd":
            log.append(verdict(case), "why")
    return file_of(out).read_bytes().splitlines()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    change, text = DAMAGE[damage]
    lines = written(tmp_path)
    file_of(tmp_path).write_bytes(b"\n".join(change(lines)) + b"\n")

    for use in (read_verdicts, VerdictLog):
        with pytest.raises(ScanError, match=text) as caught:
            use(tmp_path)
        assert caught.value.reason is Reason.REVIEW_DAMAGED
    (tmp_path / "cases").mkdir(exist_ok=True)
    assert any(text in each.file for each in verify(tmp_path))


def test_a_flipped_bit_anywhere_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    for name in ("review/verdicts.jsonl", "private/review.jsonl"):
        file = tmp_path / name
        whole = file.read_bytes()
        for n in range(0, len(whole), 7 if len(whole) > 100 else 1):
            file.write_bytes(whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :])
            with pytest.raises(ScanError, match=name):
                VerdictLog(tmp_path)
        file.write_bytes(whole)
    VerdictLog(tmp_path).close()


def test_a_log_without_its_last_line_feed_is_whole(tmp_path: Path) -> None:
    """As an editor may save it: no verdict is lost."""
    written(tmp_path)
    whole = file_of(tmp_path).read_bytes()
    file_of(tmp_path).write_bytes(whole[:-1])

    assert len(read_verdicts(tmp_path)) == 4
    with closing(VerdictLog(tmp_path)) as log:
        assert file_of(tmp_path).read_bytes() == whole
        assert log.append(verdict("e")).number == 5
    assert len(read_verdicts(tmp_path)) == 5


def test_who_can_write_the_log_can_rewrite_it_as_the_docs_say(tmp_path: Path) -> None:
    """Numbers and sums have no key, and nothing holds the count: docs/review.md says so."""
    lines = written(tmp_path)
    body = lines[1].replace(b"accept", b"reject")[: -len(',"sha256":""}') - 64] + b"}"
    forged = body[:-1] + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    file_of(tmp_path).write_bytes(b"\n".join([lines[0], forged, lines[2]]) + b"\n")

    assert [each.decision for each in read_verdicts(tmp_path)] == ["accept", "reject", "accept"]
    docs = (Path(__file__).parents[4] / "docs" / "review.md").read_text()
    assert "lines cut off at the end" in docs
    assert "can change a verdict" in docs


def linked(kind: str, target: Path, link: Path) -> None:
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.hardlink_to(target) if kind == "hard link" else link.symlink_to(target)


@pytest.mark.parametrize("kind", ["link", "hard link"])
@pytest.mark.parametrize("content", [b"a secret", b"two\nlines of another\nprogram", b"{"])
@pytest.mark.parametrize("name", ["review/verdicts.jsonl", "private/review.jsonl", "review/.lock"])
def test_no_file_is_touched_through_a_link(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    """Somebody who may write to OUT lays the link; who starts the review owns the file."""
    target, out = tmp_path / "hers", tmp_path / "out"
    out.mkdir()
    target.write_bytes(content)
    linked(kind, target, out / name)

    with pytest.raises(ScanError) as caught:
        VerdictLog(out)
    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE
    assert target.read_bytes() == content


@pytest.mark.parametrize("content", [b"a secret", b"{}", b'{"number":2,"ca'])
def test_a_file_that_is_no_log_is_not_emptied(tmp_path: Path, content: bytes) -> None:
    file_of(tmp_path).parent.mkdir()
    file_of(tmp_path).write_bytes(content)

    with pytest.raises(ScanError) as caught:
        VerdictLog(tmp_path)
    assert caught.value.reason is Reason.REVIEW_DAMAGED
    assert file_of(tmp_path).read_bytes() == content


@pytest.mark.parametrize("half", [b"\0" * 40, b"{", b'{"number":1', b'{"number":1,"case":"\xc3'])
def test_half_of_the_first_line_is_cut_off(tmp_path: Path, half: bytes) -> None:
    file_of(tmp_path).parent.mkdir()
    file_of(tmp_path).write_bytes(half)

    with closing(VerdictLog(tmp_path)) as log:
        assert log.append(verdict()).number == 1
    assert len(read_verdicts(tmp_path)) == 1


def test_nothing_is_written_after_lines_of_another_program(log: VerdictLog) -> None:
    log.append(verdict())
    with file_of(log.out).open("ab") as file:
        file.write(b"{}\n")
    before = file_of(log.out).read_bytes()

    with pytest.raises(ScanError, match="another program changed the file"):
        log.append(verdict("b"))
    assert file_of(log.out).read_bytes() == before


def test_a_full_disk_leaves_the_log_as_it_was(log: VerdictLog) -> None:
    log.append(verdict())
    before = file_of(log.out).read_bytes()
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, hard))
    try:
        with pytest.raises(ScanError) as caught:
            log.append(verdict("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.reason in (Reason.DISK_FULL, Reason.OUTPUT_UNWRITABLE)
    assert file_of(log.out).read_bytes() == before
    assert log.append(verdict("c")).number == 2


FILLER = """
import sys
from pathlib import Path
from scanloom.core import ScanError
from scanloom.review.verdicts.log import VerdictLog, read_verdicts
from scanloom.review.verdicts.verdict import Seen, Verdict
out, answered = Path(sys.argv[1]), 0
log = VerdictLog(out)
try:
    while answered < 10**4:
        log.append(Verdict("a", "r1", Seen("r" * 64, {}), "accept"), "why" * (answered % 40))
        answered += 1
except ScanError as error:
    print(error.code)
log.close()
print(answered > 10, answered == len(read_verdicts(out)) == VerdictLog(out).count)
"""


def test_a_full_file_system_keeps_what_was_answered(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=64k none "$1"; {sys.executable} -c \'{FILLER}\' "$1"'
    output = on_small_disk(script, [tmp_path / "disk"])
    assert output.split() == ["DISK_FULL", "True", "True"]


WRITER = """
import os, sys, threading
from pathlib import Path
from scanloom.review.verdicts.log import VerdictLog
from scanloom.review.verdicts.verdict import Seen, Verdict
log = VerdictLog(Path(sys.argv[1]))
def write(reviewer):
    for n in range(10**6):
        verdict = Verdict(f"c{n}", reviewer, Seen("r", {}), "accept")
        kept = log.append(verdict, "why" if n % 3 else "")
        os.write(1, f"{kept.number} {kept.case} {kept.reviewer}\\n".encode())
for reviewer in ("r1", "r2"):
    threading.Thread(target=write, args=(reviewer,)).start()
"""


@pytest.mark.slow
def test_answered_verdicts_survive_kills(tmp_path: Path) -> None:
    """40 SIGKILLs: each verdict that was answered is there once, no half line."""
    answered: list[tuple[int, str, str]] = []
    for n in range(40):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            try:
                lines = [next_line(child) for _ in range(1 + n % 7)]
                time.sleep(0.001 * (n % 5))
            finally:
                child.kill()
            lines += child.stdout.readlines()
        answered += [
            (int(number), case, reader)
            for line in lines
            if line.endswith("\n")
            for number, case, reader in [line.split()]
        ]
        kept = read_verdicts(tmp_path)
        assert [each.number for each in kept] == list(range(1, len(kept) + 1))
    by_number = {each.number: (each.case, each.reviewer) for each in read_verdicts(tmp_path)}
    assert len(answered) > 100
    assert all(by_number[number] == (case, reader) for number, case, reader in answered)
    last = json.loads(file_of(tmp_path).read_bytes().splitlines()[-1])
    assert last["number"] >= max(number for number, _, _ in answered)
