"""Choices of device and precision come with a reason; absent devices are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scanloom.core import Reason, ScanError
from scanloom.inference import device
from scanloom.inference.device import (
    bfloat16_units,
    choose_batch,
    choose_device,
    choose_precision,
    device_count,
    is_out_of_memory,
    own_settings,
    set_thread_count,
)

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_cuda_the_cpu_is_taken_and_the_reason_said() -> None:
    choice = choose_device()
    assert choice.device == CPU
    assert "CUDA" in choice.why
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ScanError) as error:
            choose_device(name)
        assert error.value.reason is Reason.DEVICE_UNAVAILABLE


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "cuda:99", "mps:0", ""])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(ScanError) as error:
        choose_device(name)

    assert error.value.reason is Reason.DEVICE_UNAVAILABLE


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:1"])
def test_other_devices_are_used_if_requested_by_name_and_there(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "device_count", lambda _: 0)
    with pytest.raises(ScanError, match="devices is 0") as error:
        choose_device(name)
    assert error.value.reason is Reason.DEVICE_UNAVAILABLE

    monkeypatch.setattr(device, "device_count", lambda _: 2)
    kind, _, number = name.partition(":")
    assert choose_device(name).device == torch.device(kind, int(number or 0))
    assert f"no model was run on {kind} yet" in caplog.text
    assert choose_device().device.type in ("cpu", "cuda")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_devices_are_counted_by_every_build_of_torch(kind: str) -> None:
    assert device_count(kind) >= 0


def test_other_devices_run_float32_only() -> None:
    mps = torch.device("mps", 0)
    assert choose_precision("auto", mps, ("float16", "bfloat16")).name == "float32"
    assert choose_precision("float32", mps).name == "float32"
    with pytest.raises(ScanError, match="half precision") as error:
        choose_precision("half", mps)
    assert error.value.reason is Reason.DEVICE_UNAVAILABLE


FLAGS = {"amx_bf16 avx512_bf16": "AVX512-BF16", "avx512_bf16": "AVX512-BF16", "avx2 amx_bf16": None}


@pytest.mark.parametrize("flags", FLAGS)
def test_units_for_bfloat16_are_read_from_linux(flags: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n\nprocessor\t: 1\n")

    assert bfloat16_units(info) == FLAGS[flags]
    assert bfloat16_units(tmp_path / "nothing") is None


@pytest.mark.parametrize("units", ["AVX512-BF16", None])
def test_precision_on_a_cpu(units: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 where the CPU gains by it and the card lists it; asked for, without the card."""
    monkeypatch.setattr(device, "bfloat16_units", lambda: units)

    assert choose_precision("auto", CPU).name == "float32"
    assert choose_precision("auto", CPU, ("float16",)).name == "float32"
    expected = "float32" if units is None else "bfloat16"
    assert choose_precision("auto", CPU, ("float32", "bfloat16")).name == expected
    assert choose_precision("float32", CPU, ("bfloat16",)).dtype is torch.float32
    if units is None:
        with pytest.raises(ScanError) as error:
            choose_precision("half", CPU)
        assert error.value.reason is Reason.DEVICE_UNAVAILABLE
    else:
        assert choose_precision("half", CPU).dtype is torch.bfloat16
    with pytest.raises(ScanError) as error:
        choose_precision("double", CPU)
    assert error.value.reason is Reason.DEVICE_UNAVAILABLE


def test_precision_on_cuda_is_half_unless_asked_otherwise() -> None:
    cuda = torch.device("cuda", 0)
    assert choose_precision("auto", cuda).name == "float16"
    assert choose_precision("half", cuda).name == "float16"
    assert choose_precision("float32", cuda).name == "float32"


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        (None, False),
        (90701, False),
        (90800, True),
        (91002, True),  # of torch 2.8's wheels
        (91400, True),
        (91500, False),
        (92000, False),
    ],
)
def test_a_cudnn_that_computes_half_precision_wrong_is_not_used_for_it(
    version: int | None, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch #163539 and #166480: conv3d in float16 and bfloat16, cuDNN 9.8 to 9.14."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.version, "hip", None)
    for requested in ("auto", "half"):
        choice = choose_precision(requested, torch.device("cuda", 0))
        assert choice.name == ("float32" if wrong else "float16")
        assert choice.wrong is wrong
        assert ("computes convolutions in half precision wrong" in choice.why) is wrong
    monkeypatch.setattr(torch.version, "hip", "6.4")  # the version is MIOpen's
    assert choose_precision("auto", torch.device("cuda", 0)).name == "float16"


@pytest.mark.parametrize(
    ("version", "used"),
    [
        ("2.8.0+cu128", False),
        ("2.9.1", False),
        ("2.10.0", True),
        ("2.11.0+cu130", True),
        ("2.13.0a0+git1", True),
        ("3.0.0", True),
    ],
)
def test_cuda_needs_torch_2_10(version: str, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if used:
        assert choose_device().device.type == choose_device("cuda").device.type == "cuda"
        return
    choice = choose_device()
    assert choice.device == CPU
    assert "CUDA needs torch 2.10 or later" in choice.why
    with pytest.raises(ScanError, match="CUDA needs torch") as error:
        choose_device("cuda:0")
    assert error.value.reason is Reason.DEVICE_UNAVAILABLE


def test_one_window_at_once_on_a_cpu() -> None:
    assert choose_batch((96, 96, 96), CPU, torch.float32) == 1


def test_settings_are_put_back() -> None:
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, torch.get_float32_matmul_precision())

    with own_settings():
        assert cudnn.deterministic
        assert not cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "highest"

    assert before == (cudnn.benchmark, cudnn.deterministic, torch.get_float32_matmul_precision())


_PRECISION = """
import sys, torch
from scanloom.inference.device import own_settings
backends = torch.backends
path, value = sys.argv[1:]
*parts, name = path.split(".")
owner = backends
for part in parts:
    owner = getattr(owner, part)
setattr(owner, name, value)
places = (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.conv, backends.mkldnn.matmul)
before = [place.fp32_precision for place in places]
with own_settings():
    during = {place.fp32_precision for place in places}
    torch.nn.functional.conv3d(torch.ones(1, 1, 3, 3, 3), torch.ones(1, 1, 3, 3, 3))
assert during <= {"ieee", "none"}, during
after = [place.fp32_precision for place in places]
assert after == before, (before, after)
assert owner.fp32_precision == value
"""


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9 has no such setting"
)
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fp32_precision", "tf32"),
        ("fp32_precision", "ieee"),
        ("cuda.matmul.fp32_precision", "tf32"),
        ("mkldnn.conv.fp32_precision", "bf16"),
        ("mkldnn.fp32_precision", "bf16"),
    ],
)
def test_precisions_that_a_caller_set_by_backend_are_set_aside(path: str, value: str) -> None:
    """torch forbids its older functions beside them. In a process of its own: they stay."""
    subprocess.run([sys.executable, "-c", _PRECISION, path, value], check=True)


_FROZEN = """
import torch
from scanloom.inference.device import own_settings
torch.backends.disable_global_flags()
with own_settings():
    assert torch.backends.cudnn.deterministic
assert not torch.backends.cudnn.deterministic
assert torch.backends.flags_frozen()
"""


def test_flags_that_a_caller_froze_are_set_and_put_back() -> None:
    """As torch.testing's own programs do. In a process of its own: they stay frozen."""
    subprocess.run([sys.executable, "-c", _FROZEN], check=True)


def test_settings_stay_until_the_last_of_several_threads_ends() -> None:
    """Another thread, whose scan takes longer, still calculates as it began."""
    torch.set_float32_matmul_precision("medium")
    try:
        first, second = own_settings(), own_settings()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        during = (torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic)
        second.__exit__(None, None, None)
        after = (torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic)
    finally:
        torch.set_float32_matmul_precision("highest")

    assert during == ("highest", True)
    assert after == ("medium", False)


def test_a_cpu_without_memory_is_understood() -> None:
    """torch's error when the allocator of the CPU gives up."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)

    assert is_out_of_memory(error.value)
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_threads_keep_to_a_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requested number or one in the environment precedes the limit."""
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "core_count", lambda: 1)
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        set_thread_count("auto")
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        set_thread_count("auto")
        assert torch.get_num_threads() == 1
        set_thread_count(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
