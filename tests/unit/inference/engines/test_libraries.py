"""Each engine computes torch's scores, or states the reason why it can't."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from monai.networks.nets import DynUNet, SegResNet, UNet
from torch import nn

from scanloom.inference.device import bfloat16_units
from scanloom.inference.engines import cache, openvino_engine
from scanloom.inference.engines import onnxruntime_engine as ort
from scanloom.inference.engines.compile_engine import TorchCompile
from scanloom.inference.engines.cudagraphs_engine import CudaGraphs
from scanloom.inference.engines.onnxruntime_engine import OnnxRuntime
from scanloom.inference.engines.openvino_engine import OpenVino
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest
from scanloom.inference.engines.tensorrt_engine import TensorRt
from scanloom.inference.network.layers import MixedBfloat16, PlaneNetwork

CPU = torch.device("cpu")
INSTANCE = ("INSTANCE", {"affine": True})

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "UNet": lambda: UNet(3, 1, 4, (8, 16, 32), (2, 2), num_res_units=1, act="LEAKYRELU"),
    "DynUNet": lambda: DynUNet(3, 1, 4, [3] * 3, [1, 2, 2], [2, 2], norm_name=INSTANCE),
    "SegResNet": lambda: SegResNet(3, 16, 1, 4, blocks_down=(1, 1), blocks_up=(1,)),
    "planes": lambda: PlaneNetwork(UNet(2, 1, 4, (8, 16), (2,)), 2),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "user_cache_folder", lambda: tmp_path / "cache")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().eval()


def request(name: str, dtype: torch.dtype = torch.float32) -> NetworkRequest:
    shape = (1, 1, 32, 32, 1) if name == "planes" else (1, 1, 32, 32, 32)
    return NetworkRequest(lambda: build(name), (name,), shape, dtype, CPU, 1)


def windows(network_request: NetworkRequest, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(network_request.shape, generator=generator)


@pytest.mark.parametrize("name", NETWORKS)
def test_openvino_is_exact_in_float32(name: str) -> None:
    network_request = request(name)
    run, network = OpenVino().prepare(network_request), build(name)
    with torch.inference_mode():
        for seed in (1, 2):
            image = windows(network_request, seed)
            torch.testing.assert_close(run(image), network(image), rtol=1e-3, atol=1e-4)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "instance": lambda: nn.InstanceNorm3d(4),
    "instance, affine": lambda: nn.InstanceNorm3d(4, affine=True),
    "group": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("name", NORMS)
def test_large_windows_are_normalised_without_loss_of_digits(name: str) -> None:
    """OpenVINO's own operation for instances misses the limit four times over."""
    norm = NORMS[name]()
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0, generator=generator)
    shape = (1, 4, 96, 96, 96)
    image = torch.randn(shape, generator=generator) + torch.tensor([1, 10, -5, 20]).view(4, 1, 1, 1)
    norm_request = NetworkRequest(lambda: norm, (name,), shape, torch.float32, CPU, 1)
    scores = OpenVino().prepare(norm_request)(image)
    with torch.inference_mode():
        exact = norm.double()(image.double()).float()
    torch.testing.assert_close(scores, exact, rtol=0, atol=1e-5)


FINAL_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "many classes": lambda: nn.Conv3d(16, 26, 1),
    "no bias": lambda: nn.Conv3d(16, 26, 1, bias=False),
    "few classes": lambda: nn.Conv3d(16, 2, 1),
    "neighbours": lambda: nn.Conv3d(16, 26, 3, padding=1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FINAL_LAYERS)
@pytest.mark.parametrize("multiplied", [True, False])
def test_the_final_layer_is_exact_however_it_is_written(
    name: str, multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is exact in bfloat16 too, where rounded features would miss the limit."""
    if not multiplied:
        monkeypatch.setattr(openvino_engine, "multiply_final_layer", lambda _: None)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), FINAL_LAYERS[name]()).eval()
    network_request = replace(request("UNet"), build=lambda: network, identity=(name,))
    limits = {torch.float32: 1e-5}
    if bfloat16_units() is not None:
        limits[torch.bfloat16] = 5e-4
    with torch.inference_mode():
        exact = network(windows(network_request))
    for dtype, limit in limits.items():
        scores = OpenVino().prepare(replace(network_request, dtype=dtype))(windows(network_request))
        torch.testing.assert_close(scores, exact, rtol=0, atol=limit)


def test_scores_outlive_the_next_window() -> None:
    unet = request("UNet")
    run = OpenVino().prepare(unet)
    first = run(windows(unet, 1))
    kept = first.clone()
    run(windows(unet, 2))
    assert torch.equal(first, kept)
    assert torch.equal(run(windows(unet, 1)), kept)


def test_an_export_is_read_again() -> None:
    unet = request("UNet")
    first = OpenVino().prepare(unet)

    def again() -> nn.Module:
        raise AssertionError("built again")

    second = OpenVino().prepare(NetworkRequest(again, ("UNet",), unet.shape, unet.dtype, CPU, 1))
    assert torch.equal(first(windows(unet)), second(windows(unet)))


@pytest.mark.skipif(bfloat16_units() is None, reason="the CPU has no bfloat16 units")
@pytest.mark.parametrize("name", NETWORKS)
def test_ends_are_exact_in_bfloat16(name: str) -> None:
    """Errors are about as large as those of torch with exact ends; they are larger without."""
    network_request = request(name, torch.bfloat16)
    run, exact, image = (
        OpenVino().prepare(network_request),
        build(name),
        windows(network_request),
    )
    mixed = build(name)
    if isinstance(mixed, PlaneNetwork):
        mixed = PlaneNetwork(MixedBfloat16(mixed.network, 1, (32, 32)), 2)
    else:
        mixed = MixedBfloat16(mixed, 1, (32, 32, 32))
    with torch.inference_mode():
        expected = exact(image)
        error, of_torch = ((f(image) - expected).abs().mean() for f in (run, mixed))
    assert 0 < error < 2 * of_torch


def test_a_network_that_cannot_be_traced_is_refused() -> None:
    class Twice(nn.Module):
        def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return values, values

    untraceable = NetworkRequest(Twice, ("twice",), (1, 1, 8, 8, 8), torch.float32, CPU, 1)
    with pytest.raises(EngineUnfitError, match="2 outputs"):
        OpenVino().prepare(untraceable)


@pytest.mark.parametrize("engine", [OpenVino(), TorchCompile()])
def test_a_lack_of_memory_is_no_fault_of_an_engine(engine: OpenVino | TorchCompile) -> None:
    """It would be remembered as one: the engine would not be asked again."""

    def fail() -> nn.Module:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    with pytest.raises(RuntimeError, match="can't allocate"):
        engine.prepare(replace(request("UNet"), build=fail))


needs_onnxruntime = pytest.mark.skipif(
    OnnxRuntime().version() is None, reason="ONNX Runtime is not installed"
)


@needs_onnxruntime
@pytest.mark.parametrize("name", NETWORKS)
def test_onnxruntime_is_exact(name: str) -> None:
    network_request = request(name)
    run, image = OnnxRuntime().prepare(network_request), windows(network_request)
    with torch.inference_mode():
        expected = build(name)(image)
    first = run(image)
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-4)
    kept = first.clone()
    run(windows(network_request, 2))
    assert torch.equal(first, kept)


@needs_onnxruntime
def test_onnxruntime_runs_a_last_batch_of_fewer_windows() -> None:
    """It does not keep the request, which may have torch's weights."""
    unet = replace(request("UNet"), shape=(3, 1, 32, 32, 32))
    run, image, kept = OnnxRuntime().prepare(unet), windows(unet), weakref.ref(unet)
    del unet
    assert kept() is None
    assert run(image[:2]).shape == (2, 4, 32, 32, 32)
    torch.testing.assert_close(run(image[:2]), run(image)[:2])


@needs_onnxruntime
def test_onnxruntime_in_half_precision() -> None:
    """The path of CUDA devices, whose input and output are float16."""
    unet = request("UNet", torch.float16)
    run, image = OnnxRuntime().prepare(unet), windows(unet)
    with torch.inference_mode():
        expected = build("UNet")(image)
    scores = run(image.half())
    assert scores.dtype is torch.float16
    assert (scores.float() - expected).abs().mean() < 2e-3 * expected.abs().mean() + 2e-3


@needs_onnxruntime
def test_a_provider_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime itself goes on with the next one."""
    monkeypatch.setattr(OnnxRuntime, "provider", lambda self, device: ort.MIGRAPHX)
    with pytest.raises(EngineUnfitError, match="MIGraphXExecutionProvider can't be loaded"):
        OnnxRuntime().prepare(request("UNet"))


def test_providers_follow_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    assert [OnnxRuntime().provider(each) for each in (CPU, cuda)] == [
        "CPUExecutionProvider",
        "CUDAExecutionProvider",
    ]
    assert [TensorRt().provider(each) for each in (CPU, cuda)] == [None, ort.TENSORRT]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert OnnxRuntime().provider(cuda) == "MIGraphXExecutionProvider"
    assert TensorRt().provider(cuda) is None


def test_providers_are_used_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "_installed_providers", lambda version: [ort.CUDA])
    cuda = torch.device("cuda")
    float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
    supported = {(CPU, float32), (cuda, float32), (cuda, float16)}
    for device in (CPU, cuda, torch.device("mps")):
        for dtype in (float32, float16, bfloat16):
            assert OnnxRuntime().supports(device, dtype) is ((device, dtype) in supported)
            assert not TensorRt().supports(device, dtype)


def test_options_of_providers(tmp_path: Path) -> None:
    unet = replace(request("UNet", torch.float16), device=torch.device("cuda", 1))
    assert ort.provider_options(ort.CUDA, unet, tmp_path) == {"device_id": "1", "use_tf32": "0"}
    options = ort.provider_options(ort.TENSORRT, unet, tmp_path)
    assert options["trt_fp16_enable"] == "1"
    assert options["trt_engine_cache_path"] == str(tmp_path)
    exact = replace(unet, dtype=torch.float32)
    assert ort.provider_options(ort.TENSORRT, exact, tmp_path)["trt_fp16_enable"] == "0"
    assert ort.provider_options(ort.CPU, unet, tmp_path) == {}


@pytest.mark.parametrize("engine", [OpenVino(), OnnxRuntime(), CudaGraphs()])
def test_engines_name_what_they_support(engine: OpenVino | OnnxRuntime | CudaGraphs) -> None:
    cuda = torch.device("cuda", 0)
    assert engine.supports(CPU, torch.float32) is (engine.name != "cudagraphs")
    assert engine.supports(cuda, torch.float16) is (engine.name == "cudagraphs")
    assert not OpenVino().supports(CPU, torch.float16)


@pytest.mark.slow
def test_compiled_by_torch() -> None:
    unet = request("UNet")
    try:
        run = TorchCompile().prepare(unet)
    except EngineUnfitError as exc:
        pytest.skip(str(exc))  # without a C++ compiler
    image = windows(unet)
    with torch.inference_mode():
        expected = build("UNet")(image)
        torch.testing.assert_close(run(image), expected, rtol=1e-3, atol=1e-4)
