"""The network of a training: weights to start from, gradients slice by slice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks.nets import DynUNet

from scanloom.training.network import SlicedConv3d, prepare_network

CPU = torch.device("cpu")


def network(seed: int = 0, filters: tuple[int, ...] = (8, 8, 16)) -> DynUNet:
    torch.manual_seed(seed)
    kernels = [3] * len(filters)
    strides = [1] + [2] * (len(filters) - 1)
    return DynUNet(3, 1, 3, kernels, strides, strides[1:], filters=list(filters))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_sliced_convolution_has_the_gradients_of_a_plain_one(batch: int) -> None:
    torch.manual_seed(batch)
    plain = torch.nn.Conv3d(8, 5, 3, padding=1, bias=False).double()
    assert SlicedConv3d.fits(plain)
    inputs = torch.randn(batch, 8, 6, 7, 4, dtype=torch.double, requires_grad=True)
    gradients = []
    for kind in (torch.nn.Conv3d, SlicedConv3d):
        plain.__class__ = kind
        found = torch.autograd.grad(plain(inputs).sin().sum(), (inputs, plain.weight))
        gradients.append(found)
    for expected, sliced in zip(*gradients, strict=True):
        assert torch.allclose(expected, sliced, rtol=1e-10, atol=1e-10)


def test_other_convolutions_stay_as_they_are() -> None:
    def fits(*args: int, **changes: object) -> bool:
        return SlicedConv3d.fits(torch.nn.Conv3d(*args, **{"bias": False, **changes}))

    assert fits(8, 8, 3, padding=1)
    assert not fits(8, 8, 3)
    assert not fits(8, 8, 1)
    assert not fits(8, 8, 3, padding=1, stride=2)
    assert not fits(8, 8, 3, padding=1, bias=True)
    assert not fits(8, 8, 3, padding=1, groups=2)
    assert not fits(1, 8, 3, padding=1)


def test_the_network_has_the_same_weights_and_scores_whatever_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = network()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    sliced = prepare_network(network(), CPU)
    assert any(isinstance(module, SlicedConv3d) for module in sliced.modules())
    assert list(sliced.state_dict()) == list(plain.state_dict())
    inputs = torch.randn(1, 1, 8, 8, 8)
    assert torch.equal(plain(inputs), sliced(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(inputs), sliced(inputs))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not any(isinstance(m, SlicedConv3d) for m in prepare_network(network(), CPU).modules())


def test_a_training_starts_from_weights_in_half_precision_stored_once(tmp_path: Path) -> None:
    trained = network(seed=1)
    state = {k: v.half() for k, v in trained.state_dict().items() if "skip_layers" not in k}
    torch.save(state, tmp_path / "model.pt")
    started = prepare_network(network(), CPU, str(tmp_path / "model.pt"))
    for name, value in trained.state_dict().items():
        assert torch.allclose(started.state_dict()[name], value, rtol=1e-3, atol=1e-6)
    del state["input_block.conv1.conv.weight"]
    torch.save(state, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="of another network"):
        prepare_network(network(), CPU, str(tmp_path / "part.pt"))
    (tmp_path / "text.pt").write_text("weights")
    for name in ("text.pt", "empty.pt"):
        (tmp_path / "empty.pt").touch()
        with pytest.raises(ValueError, match="damaged"):
            prepare_network(network(), CPU, str(tmp_path / name))
    with pytest.raises(ValueError, match="of another network"):
        prepare_network(network(filters=(4, 8, 16)), CPU, str(tmp_path / "model.pt"))
