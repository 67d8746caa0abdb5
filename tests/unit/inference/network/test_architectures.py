"""Networks come from the list, weights are data, and both fit or are refused by name."""

from __future__ import annotations

import hashlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scanloom.cards.card import NetworkSpec, Weights
from scanloom.cards.networks import NETWORKS
from scanloom.core import Reason, ScanError
from scanloom.inference.network.architectures import build_network
from scanloom.inference.network.loading import load_weights, read_weights
from support import model_cards
from support.model_cards import SMALL_UNET, small_weights

UNET_STAGES = {
    "plan": {
        "features": [4, 8],
        "kernels": [[3, 3, 3], [3, 3, 3]],
        "strides": [[1, 1, 1], [2, 2, 2]],
        "encoder": [1, 2],
        "decoder": [1],
    },
    "layers": {"bias": True, "norm": "instance", "norm_args": {"affine": True}, "slope": 0.01},
}
ARGS: dict[str, dict[str, Any]] = {
    "AttentionUnet": {"spatial_dims": 3, "channels": (4, 8), "strides": (2,)},
    "BasicUNet": {"features": (4, 4, 8, 8, 8, 4)},
    "DynUNet": {
        "spatial_dims": 3,
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
    },
    "PlainConvUNet": UNET_STAGES,
    "ResidualEncoderUNet": UNET_STAGES,
    "SegResNet": {"init_filters": 8},
    "SegResNetDS": {"spatial_dims": 3, "init_filters": 8},
    "SwinUNETR": {"feature_size": 12, "img_size": [32, 32, 32]},
    "UNETR": {"img_size": (32, 32, 32), "hidden_size": 24, "mlp_dim": 24, "num_heads": 4},
    "UNet": {"spatial_dims": 3, "channels": [4, 8], "strides": [2]},
    "VNet": {},
}


def of(path: Path) -> Weights:
    return Weights(path, hashlib.sha256(path.read_bytes()).hexdigest())


def unet() -> torch.nn.Module:
    return build_network(NetworkSpec("UNet", SMALL_UNET))


TESTED_APART = {"DiNTS", "DynUNetWithoutClicks", "MeshNet", "OnnxGraph", "UNesT", "Vista3d"}
"""Networks whose arguments or inputs are of other kinds: see `tests/unit/inference/nets`, and for
ONNX `tests/unit/convert/test_onnx_model.py`."""


def test_every_listed_network_is_tested() -> None:
    assert set(ARGS) | TESTED_APART == set(NETWORKS)


@pytest.mark.parametrize("name", ARGS)
def test_every_listed_network_can_be_built_and_run(name: str) -> None:
    args = {"in_channels": 1, "out_channels": 2, **ARGS[name]}

    network = build_network(NetworkSpec(name, args))

    assert not network.training
    with torch.inference_mode():
        size = (64, 64, 64) if name == "SwinUNETR" else (32, 32, 32)  # it halves six times
        assert network(torch.zeros(1, 1, *size)).shape == (1, 2, *size)


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("os.system", {}, Reason.MODEL_NETWORK),
        ("VISTA3D", {}, Reason.MODEL_NETWORK),
        ("UNet", {"spatial_dims": 3}, Reason.MODEL_NETWORK),
        ("UNet", {**SMALL_UNET, "colour": "red"}, Reason.MODEL_NETWORK),
        ("UNet", {**SMALL_UNET, "norm": "no such"}, Reason.MODEL_NETWORK),
        ("UNet", {**SMALL_UNET, "strides": []}, Reason.MODEL_NETWORK),
        ("UNet", {**SMALL_UNET, "spatial_dims": 1}, Reason.MODEL_UNSUPPORTED),
        ("UNet", {**SMALL_UNET, "spatial_dims": "2"}, Reason.MODEL_UNSUPPORTED),
    ],
)
def test_other_networks_are_refused(name: str, args: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(ScanError) as error:
        build_network(NetworkSpec(name, args))

    assert error.value.reason is reason


@pytest.mark.parametrize("form", ["pt", "safetensors", "keyed", "keyed but plain"])
def test_weights_are_loaded(form: str, tmp_path: Path) -> None:
    """Weights may be a torch file, safetensors, or under a key (which ignite lets be absent)."""
    path = small_weights(tmp_path, seed=4)
    state = load_file(path)
    key = "model" if form.startswith("keyed") else None
    if form != "safetensors":
        path = tmp_path / "model.pt"
        torch.save(state, path)
    if form == "keyed":
        torch.save({"model": state, "epoch": 3}, path)
    network = unet()

    load_weights(network, read_weights(model_cards.converted(path, key)))

    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name]), name


class Evil:
    """Unpickled without care, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def refused(path: Path) -> Reason:
    with pytest.raises(ScanError) as error:
        load_weights(unet(), read_weights(model_cards.converted(path)))
    return error.value.reason


def test_code_among_the_weights_is_refused_and_not_run(tmp_path: Path) -> None:
    path, touched = tmp_path / "model.pt", tmp_path / "touched"
    torch.save({"a": Evil(touched)}, path)
    assert refused(path) is Reason.MODEL_UNSAFE
    torch.save({"a": Evil(touched)}, path, _use_new_zipfile_serialization=False)
    assert refused(path) is Reason.MODEL_UNSAFE
    path.write_bytes(pickle.dumps(Evil(touched), protocol=2))
    assert refused(path) in (Reason.MODEL_UNSAFE, Reason.MODEL_DAMAGED)
    assert not touched.exists()


def test_a_program_is_refused(tmp_path: Path) -> None:
    """TorchScript holds code; its weights may be had another way, but never by running it."""
    import zipfile

    path = tmp_path / "model.pt"
    torch.save(unet().state_dict(), path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/code/__torch__.py", "print('here')")

    assert refused(path) is Reason.MODEL_UNSAFE


@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\x03\x04 torn"])
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_files_that_are_no_weights_are_damaged(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)

    assert refused(tmp_path / name) is Reason.MODEL_DAMAGED


def test_half_a_file_is_damaged(tmp_path: Path) -> None:
    path = small_weights(tmp_path)
    path.write_bytes(path.read_bytes()[:-900])

    assert refused(path) is Reason.MODEL_DAMAGED


def test_another_file_than_the_cards_is_refused(tmp_path: Path) -> None:
    path = small_weights(tmp_path)
    weights = of(path)
    small_weights(tmp_path, seed=1)

    with pytest.raises(ScanError) as error:
        load_weights(unet(), read_weights(weights))

    assert error.value.reason is Reason.MODEL_HASH


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    weights = replace(of(small_weights(tmp_path)), file=tmp_path / "gone.pt")

    with pytest.raises(ScanError) as error:
        load_weights(unet(), read_weights(weights))

    assert error.value.reason is Reason.MODEL_DAMAGED
    assert str(tmp_path) not in str(error.value)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    larger = {**SMALL_UNET, "channels": [4, 8, 16], "strides": [2, 2]}
    assert refused(small_weights(tmp_path, larger)) is Reason.MODEL_WEIGHTS
    wider = {**SMALL_UNET, "out_channels": 5}
    assert refused(small_weights(tmp_path, wider)) is Reason.MODEL_WEIGHTS
    torch.save([torch.zeros(2)], tmp_path / "model.pt")
    assert refused(tmp_path / "model.pt") is Reason.MODEL_WEIGHTS
    torch.save({"epoch": 3}, tmp_path / "model.pt")
    assert refused(tmp_path / "model.pt") is Reason.MODEL_WEIGHTS


def test_nothing_outside_the_list_is_imported() -> None:
    before = set(sys.modules)
    with pytest.raises(ScanError):
        build_network(NetworkSpec("antigravity", {}))
    assert "antigravity" not in set(sys.modules) - before
