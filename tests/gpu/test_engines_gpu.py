"""On CUDA: scores of each installed engine, beside torch in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks.nets import DynUNet
from torch import nn

from scanloom.inference.engines import cache
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest
from scanloom.inference.engines.selection import ENGINES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]
CUDA = torch.device("cuda", 0)
SHAPE = (2, 1, 64, 64, 64)


def build() -> nn.Module:
    torch.manual_seed(0)
    norm = ("INSTANCE", {"affine": True})
    return DynUNet(3, 1, 8, [3] * 4, [1, 2, 2, 2], [2] * 3, norm_name=norm).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["compile", "cudagraphs", "fused", "onnxruntime", "tensorrt"])
def test_an_engine_computes_what_torch_computes(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "user_cache_folder", lambda: tmp_path)
    engine = ENGINES[name]
    if engine.version() is None or not engine.supports(CUDA, dtype):
        pytest.skip(f"{name} is not installed for CUDA")
    request = NetworkRequest(build, (name,), SHAPE, dtype, CUDA, 1)
    windows = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(CUDA)
    with torch.inference_mode():
        try:
            run = engine.prepare(request)
        except EngineUnfitError as exc:
            pytest.skip(f"{name}: {exc}")
        expected = build().to(CUDA)(windows)
        scores = run(windows.to(dtype)).float()
        fewer = run(windows[:1].to(dtype)).float()
    least = 0.9999 if dtype is torch.float32 else 0.99
    same = float((scores.argmax(1) == expected.argmax(1)).float().mean())
    print(f"{name}, {dtype}: {same:.5%} of labels equal")
    assert same >= least
    # Not all: the last bits of scores depend on the number of windows
    assert float((fewer.argmax(1) == scores[:1].argmax(1)).float().mean()) >= least
