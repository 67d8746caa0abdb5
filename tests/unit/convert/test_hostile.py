"""A model that would take all time or memory, or run code, is refused in its own process."""

from __future__ import annotations

import pickle
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from scanloom.convert import conversion
from scanloom.convert.conversion import load_card
from scanloom.convert.weights import load_torch
from scanloom.core import Reason, ScanError
from support.nnunet_folders import write_model


def text(value: str) -> bytes:
    """Return the instruction that pushes a text."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def doubled(levels: int) -> bytes:
    """Return instructions for a tuple that holds the previous one twice: 2**levels to visit."""
    numbers = (struct.pack("<I", n) for n in range(levels))
    return b")" + b"".join(b"r" + at + b"j" + at + b"\x86" for at in numbers)


def checkpoint(folder: Path, content: bytes) -> Path:
    """Write an nnU-Net model whose checkpoint has a pickle of these instructions."""
    model = write_model(folder)
    with zipfile.ZipFile(model / "fold_0" / "checkpoint_final.pth", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("x/version", b"3\n")
    return model


def refusal(folder: Path, **options: str) -> ScanError:
    """Return the error with which a model is refused; this process takes no memory for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ScanError) as caught:
        load_card(folder, options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
    assert str(folder.parent) not in str(caught.value)
    return caught.value


@pytest.mark.thorough
def test_endless_work_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuple of tuples is hashed for ever as the key of a dictionary."""
    monkeypatch.setattr(conversion, "SILENCE_S", 8.0)

    error = refusal(checkpoint(tmp_path, b"}" + doubled(100) + b"Ns"))

    assert error.reason is Reason.MODEL_UNSAFE
    assert "more work" in error.detail


def test_endless_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 1 MiB is encoded 4,000 times: 4 GiB from 60 kB, once it is packed."""
    monkeypatch.setattr(conversion, "MEMORY_BYTES", 300 << 20)
    once = b"c_codecs\nencode\nh\x00h\x01\x86R"
    start = text("x" * (1 << 20)) + b"q\x00" + text("latin1") + b"q\x01"

    error = refusal(checkpoint(tmp_path, b"(" + start + once * 4000 + b"t"))

    assert error.reason is Reason.MODEL_UNSAFE
    assert "more memory" in error.detail


HOSTILE = {
    "a call": b"cposix\nsystem\n" + text("true") + b"\x85R",
    "an import": b"cantigravity\nfly\n",
    "a class": b"cscanloom.core.process\nlock_file\n",
    "attributes": b"cbuiltins\ngetattr\n",
    "an old instance": b"(" + text("true") + b"iposix\nsystem\n",
    "a reference outside": text("a") + b"Q",
    "an extension": b"\x82\x01",
    "a long integer": b"\x8b" + struct.pack("<I", 1 << 30),
    "too many bytes": b"T" + struct.pack("<I", 1 << 31),
    "an absent memo": b"j" + struct.pack("<I", 7),
    "nothing": b"",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_data_is_refused(content: bytes, tmp_path: Path) -> None:
    error = refusal(checkpoint(tmp_path, content))

    assert error.reason in (Reason.MODEL_UNSAFE, Reason.MODEL_DAMAGED)


class Touch:
    """An object whose pickle would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_postprocessing_runs_no_code(protocol: int, tmp_path: Path) -> None:
    model, touched = write_model(tmp_path), tmp_path / "touched"
    content = pickle.dumps(([Touch(touched)], [{}]), protocol)
    (model / "postprocessing.pkl").write_bytes(content)

    error = refusal(model, postprocessing="yes")

    assert error.reason is Reason.MODEL_UNSAFE
    assert not touched.exists()


def test_a_network_that_was_saved_whole_is_told_how_to_be_saved(tmp_path: Path) -> None:
    torch.save(torch.nn.Conv3d(1, 2, 1), tmp_path / "model.pt")

    with pytest.raises(ScanError, match=r"of a whole network: save its `state_dict\(\)` instead"):
        load_torch(tmp_path / "model.pt", "the file of weights")
