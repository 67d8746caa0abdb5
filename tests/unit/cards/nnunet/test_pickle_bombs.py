"""Pickles that would take all time or memory are refused within a bounded number of steps."""

import struct
from collections.abc import Callable
from typing import Any

import pytest

from scanloom.cards.nnunet import inert_pickle
from scanloom.cards.nnunet.checkpoint import KNOWN, Storage
from scanloom.cards.nnunet.inert_pickle import (
    MAX_COPIED_BYTES,
    MAX_DEPTH,
    encode_bytes,
    read_pickle,
)
from scanloom.core import Reason, ScanError


def text(value: str) -> bytes:
    """Return the instruction that pushes a text."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(value: str) -> bytes:
    """Return the instruction that pushes a name."""
    module, _, function = value.rpartition(".")
    return f"c{module}\n{function}\n".encode()


def doubled(levels: int) -> bytes:
    """Return instructions for a tuple that holds the previous one twice: 2**levels to visit."""
    return b")" + b"".join(b"r" + at + b"j" + at + b"\x86" for at in map(number, range(levels)))


def number(value: int) -> bytes:
    """Return four bytes of an index."""
    return struct.pack("<I", value)


def refusal(content: bytes) -> ScanError:
    """Return the error with which a pickle is refused."""
    with pytest.raises(ScanError) as caught:
        read_pickle(
            content + b".", KNOWN, lambda _: Storage("a", "float32", 1), name="the checkpoint"
        )
    return caught.value


NESTED = doubled(100)
NO_KEYS = {
    "item": b"}" + NESTED + b"Ns",
    "items": b"}(" + NESTED + b"Nu",
    "dictionary": b"(" + NESTED + b"Nd",
    "element": b"\x8f(" + NESTED + b"\x90",
    "frozen set": b"(" + NESTED + b"\x91",
    "deep": b"}" + b")" + b"\x85" * 200_000 + b"Ns",
    "module": NESTED + text("a") + b"\x93",
    "function": text("a") + NESTED + b"\x93",
    "encoded": name("_codecs.encode") + NESTED + text("latin1") + b"\x86R",
    "pairs": name("collections.OrderedDict") + b"(" + NESTED + b"N\x86l\x85R",
}


@pytest.mark.parametrize("content", NO_KEYS.values(), ids=NO_KEYS)
def test_nested_tuples_are_neither_hashed_nor_printed(content: bytes) -> None:
    error = refusal(content)

    assert error.reason is Reason.MODEL_DAMAGED
    assert "not a valid pickle" in str(error)


def test_flat_tuples_are_keys() -> None:
    assert read_pickle(b"}(K\x01K\x02\x86Nu.", {}, name="the file") == {(1, 2): None}


def test_the_number_of_instructions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert_pickle, "MAX_INSTRUCTIONS", 1000)

    assert "far more values" in str(refusal(b"]0" * 500))


TENSOR = name("torch._utils._rebuild_tensor_v2") + b"(NQK\x00"
LARGE = {
    "many values": b"]" * (MAX_DEPTH + 1),
    "many marks": b"(" * (MAX_DEPTH + 1),
    "long integer": b"\x8b" + number(1000) + bytes(1000),
    "integer of 10 bytes": b"\x8a\x0a" + bytes(10),
}


@pytest.mark.parametrize("content", LARGE.values(), ids=LARGE)
def test_more_than_a_model_has_is_refused(content: bytes) -> None:
    error = refusal(content)

    assert error.reason is Reason.MODEL_DAMAGED
    assert "far more values" in str(error)


@pytest.mark.parametrize("shape", [b"(" + b"K\x02" * 9 + b"t", text("222"), b"(Gtttttttttt"])
def test_shapes_have_few_whole_numbers(shape: bytes) -> None:
    assert refusal(TENSOR + shape + shape + b"tR").reason is Reason.MODEL_DAMAGED


def test_the_memo_is_not_copied_without_end() -> None:
    copies: list[int] = []
    known: dict[str, Callable[..., Any]] = {
        "_codecs.encode": lambda *a: copies.append(len(encode_bytes(*a)))
    }
    letters = 1 << 20
    once = b"h\x00h\x01h\x02\x86R0"
    start = name("_codecs.encode") + b"q\x00" + text("x" * letters) + b"q\x01"
    content = start + text("latin1") + b"q\x02" + once * 1000

    with pytest.raises(ScanError, match="far more values"):
        read_pickle(content + b".", known, name="the file")
    assert 8 * sum(copies) <= MAX_COPIED_BYTES
