"""Messages: each value comes back equal, of the same type; nothing else passes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scanloom.core import (
    Case,
    CaseRecord,
    Flag,
    Measurement,
    Outputs,
    Reason,
    ScanError,
    Series,
)
from scanloom.io.system import messages
from scanloom.io.system.messages import Message, receive, register, send
from scanloom.io.system.sandbox import AVAILABLE, shared_empty

SERIES = Series("nifti", (Path("/data/gr\udcfc\u00dfe.nii"), Path("/data/b.nii")), modality="CT")
CASE = Case(
    "a" * 26, SERIES, Outputs(structures=("liver",)), "hash", "recipe", further_channels=(SERIES,)
)
MEASUREMENT = Measurement(
    "model", "liver", 3, 10, 1.5, "HU", 40.25, None, *[None] * 5, ((0, 1, 2), (3, 4, 5)), 1,
    (Flag.TOUCHES_BORDER,),
)  # fmt: skip
RECORD = CaseRecord("a", Reason.CRASHED, "detail", (Flag.SHEARED,), Path("/out"), (MEASUREMENT,))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def there_and_back(ends: tuple[socket.socket, socket.socket], value: Any) -> Any:
    sender = threading.Thread(target=send, args=(ends[0], value))
    sender.start()  # a message may exceed the buffer
    try:
        return receive(ends[1])
    finally:
        sender.join()


@pytest.mark.parametrize(
    "value",
    [
        CASE,
        RECORD,
        [SERIES, (MEASUREMENT, b"", [b"\0\xff", b"b" * 3_000_000]), {"k": [None]}, {3: "three"}],
        list(range(1000)),
        [1.5, float("inf"), -0.0, True],
        ["one", Path("/two"), 3],
        {"Case": 1, "bytes": [0, 1]},
        ("tuple", ["list", ()]),
    ],
)
def test_values_come_back_equal(ends: tuple[socket.socket, socket.socket], value: object) -> None:
    back = there_and_back(ends, value)
    assert back == value
    assert repr(back) == repr(value)  # also the types


def test_an_error_comes_back(ends: tuple[socket.socket, socket.socket]) -> None:
    error = there_and_back(ends, ScanError(Reason.MODEL_HASH, "of weights"))
    assert isinstance(error, ScanError)
    assert (error.reason, error.detail) == (Reason.MODEL_HASH, "of weights")


def test_numbers_of_numpy_become_plain(ends: tuple[socket.socket, socket.socket]) -> None:
    back = there_and_back(ends, [np.float64(0.1), np.float32(0.5), np.int64(-3), np.bool_(1)])
    assert repr(back) == "[0.1, 0.5, -3, True]"


@pytest.mark.skipif(not AVAILABLE, reason="shared memory needs Linux")
def test_arrays_travel_among_other_values(ends: tuple[socket.socket, socket.socket]) -> None:
    array = shared_empty((2, 3), np.int16)
    path, blob, back = there_and_back(ends, [Path("/a"), b"bytes", array])
    back[1, 2] = 7
    assert (path, blob, array[1, 2]) == (Path("/a"), b"bytes", 7)  # it is the same memory


class Case2(Case):
    """A subclass, which may have more fields than the registered type."""


@dataclass(frozen=True)
class Unregistered:
    number: int


@pytest.mark.parametrize("value", [Unregistered(1), Case2("a", SERIES, Outputs(), "", ""), {1, 2}])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="can't be sent"):
        Message([value])


def test_two_types_of_one_name_are_refused() -> None:
    same_name = type("Case", (Unregistered,), {})
    with pytest.raises(ValueError, match="two types are called Case"):
        register(same_name)
    register(Case)  # once more: nothing changes
    with pytest.raises(TypeError, match="can't be sent"):
        Message(same_name(1))


@pytest.mark.parametrize(
    "document",
    [
        {"Unregistered": [1]},
        {"Series": []},
        {"Series": 3},
        {"ScanError": ["not a reason", ""]},
        {"bytes": [0, 1]},
        {"bytes": [-1, 0]},
        {"Reason": ["NO_SUCH_REASON"]},
        {"tuple": 1},
        {"array": [0, {}]},
        {"path": "a", "bytes": "b"},
        {"unknown": None},
        {},
    ],
)
def test_an_improper_message_is_refused(
    ends: tuple[socket.socket, socket.socket], document: object
) -> None:
    data = json.dumps(document).encode()
    ends[0].sendall(messages._HEAD.pack(len(data), 0, 0) + data)
    with pytest.raises(ValueError, match=r"not a|valid Reason|NO_SUCH|unpack"):
        receive(ends[1])


@pytest.mark.parametrize("head", [(1 << 29, 0, 0), (1, 1 << 29, 0), (1, 0, 1)])
def test_an_improper_head_is_refused(
    ends: tuple[socket.socket, socket.socket], head: tuple[int, int, int]
) -> None:
    ends[0].sendall(messages._HEAD.pack(*head) + b"1")
    with pytest.raises(ValueError, match="not a message"):
        receive(ends[1])


@pytest.mark.parametrize("sent", [b"", b"abc", messages._HEAD.pack(10, 0, 0) + b"[1"])
def test_the_end_of_the_other_process_is_seen(
    ends: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    ends[0].sendall(sent)
    ends[0].close()
    with pytest.raises(EOFError):
        receive(ends[1])
