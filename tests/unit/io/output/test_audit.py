"""The audit trail: what was changed, left out or added without the key is noticed."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scanloom.io.output.audit import AUDIT, AuditError, AuditTrail, read_trail

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def out(tmp_path: Path) -> Path:
    trail = AuditTrail(tmp_path, KEY)
    for number in range(5):
        trail.append("segmented", {"case": f"case{number}", "sums": "0" * 64})
    return tmp_path


def events(out: Path, key: bytes = KEY) -> list[str]:
    return [line["case"] for line in read_trail(out, key)]


def lines(out: Path) -> list[bytes]:
    return (out / "private" / AUDIT).read_bytes().splitlines(keepends=True)


def write(out: Path, *content: bytes) -> None:
    (out / "private" / AUDIT).write_bytes(b"".join(content))


def test_lines_are_read_in_their_order(out: Path) -> None:
    assert events(out) == [f"case{number}" for number in range(5)]
    assert (out / "private" / AUDIT).stat().st_mode & 0o777 == 0o600
    assert list(read_trail(out / "nothing", KEY)) == []
    folder = os.fsdecode(b"/copies/M\xfcller")  # not UTF-8
    AuditTrail(out, KEY).append("exported", {"case": "", "to": folder})
    assert list(read_trail(out, KEY))[-1]["to"] == folder


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda at: [*at[:2], at[2].replace(b"case2", b"case9"), *at[3:]], 3),
        (lambda at: [*at[:2], *at[3:]], 3),
        (lambda at: at[1:], 1),
        (lambda at: [at[1], at[0], *at[2:]], 1),
        (lambda at: [*at, at[4]], 6),
        (lambda at: [*at[:4], b"\n", at[4]], 5),
        (lambda at: [b"not a line\n"], 1),
        (lambda at: [*at, b'{"event":"segmented","mac":"' + b"0" * 64 + b'"}\n'], 6),
    ],
)
def test_a_change_is_noticed(out: Path, change: object, line: int) -> None:
    write(out, *change(lines(out)))

    with pytest.raises(AuditError, match=f"line {line} "):
        events(out)


def test_a_chain_that_was_computed_anew_without_the_key_is_noticed(out: Path) -> None:
    before, forged = b"", []
    for line in lines(out):
        plain = json.loads(line)
        del plain["mac"]
        plain["case"] = "other"
        body = json.dumps(plain, separators=(",", ":")).encode()
        for key in (OTHER, b"", hashlib.sha256(b"").digest()):
            code = hmac.digest(key, before + b"\n" + body, "sha256").hex()
        before = body[:-1] + f',"mac":"{code}"}}'.encode()
        forged.append(before + b"\n")
    write(out, *forged)

    with pytest.raises(AuditError, match="line 1 "):
        events(out)
    with pytest.raises(AuditError, match="line 1 "):
        events(out, OTHER)


def test_half_a_line_is_cut_off_by_the_next(out: Path) -> None:
    """A process died while it wrote: nothing that it told was done."""
    *whole, last = lines(out)
    write(out, *whole, last[:-20])

    assert events(out) == ["case0", "case1", "case2", "case3"]
    AuditTrail(out, KEY).append("segmented", {"case": "next"})
    assert events(out)[3:] == ["case3", "next"]


def test_lines_after_a_change_go_on(out: Path) -> None:
    """A damaged trail stops no work, and stays damaged."""
    write(out, *lines(out)[:2], b"damage\n")

    AuditTrail(out, KEY).append("segmented", {"case": "next"})

    with pytest.raises(AuditError, match="line 3 "):
        events(out)
    assert json.loads(lines(out)[3])["case"] == "next"


def test_a_full_disk_leaves_the_trail_as_it_was(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines(out)
    actual = os.write

    def half(descriptor: int, data: bytes) -> int:
        actual(descriptor, bytes(data[: len(data) // 2]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        AuditTrail(out, KEY).append("exported", {})
    assert lines(out) == before


APPEND_MANY = """
import sys
from pathlib import Path
from scanloom.io.output.audit import AuditTrail
out, key, name = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3]
for number in range(20):
    AuditTrail(out, key).append("sent", {"case": f"{name}{number}"})
"""


def test_processes_share_a_trail(tmp_path: Path) -> None:
    # Not forked: a fork of this process would keep locks of its threads, and may never end
    command = [sys.executable, "-c", APPEND_MANY, str(tmp_path), KEY.hex()]
    workers = [subprocess.Popen([*command, name]) for name in "abc"]
    try:
        assert [worker.wait(300) for worker in workers] == [0] * 3
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(60)

    told = events(tmp_path)
    assert sorted(told) == sorted(f"{name}{number}" for name in "abc" for number in range(20))
