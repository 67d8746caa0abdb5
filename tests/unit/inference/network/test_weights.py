"""Weights and networks of a broken or hostile bundle are refused by name, and take no memory."""

from __future__ import annotations

import io
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scanloom.cards.card import NetworkSpec, Weights
from scanloom.core import Reason, ScanError
from scanloom.inference.network.architectures import build_network
from scanloom.inference.network.loading import load_weights, read_weights
from support import model_cards
from support.model_cards import SMALL_UNET, small_weights

State = dict[str, torch.Tensor]
WEIGHT = "model.2.conv.weight"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    loaded: State = load_file(small_weights(tmp_path_factory.mktemp("m")))
    return loaded


def load(path: Path) -> torch.nn.Module:
    network = build_network(NetworkSpec("UNet", SMALL_UNET))
    load_weights(network, read_weights(model_cards.converted(path)))
    return network


def refusal(path: Path) -> ScanError:
    with pytest.raises(ScanError) as error:
        load(path)
    assert str(path.parent) not in str(error.value)
    return error.value


TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], Reason]] = {
    "nan": (lambda v: v * float("nan"), Reason.NOT_FINITE),
    "infinite": (lambda v: v / 0.0, Reason.NOT_FINITE),
    "double that no float32 holds": (lambda v: v.double() * 1e300, Reason.NOT_FINITE),
    "whole numbers": (lambda v: v.to(torch.int8), Reason.MODEL_WEIGHTS),
    "complex": (lambda v: v.to(torch.complex64), Reason.MODEL_WEIGHTS),
    "sparse": (lambda v: v.to_sparse(), Reason.MODEL_WEIGHTS),
    "quantised": (
        lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8),
        Reason.MODEL_WEIGHTS,
    ),
    "without numbers": (lambda v: v.to("meta"), Reason.MODEL_WEIGHTS),
    "none": (lambda v: None, Reason.MODEL_WEIGHTS),
    "another shape": (lambda v: v[:1], Reason.MODEL_WEIGHTS),
}


def test_a_file_may_hold_layers_with_two_names_once() -> None:
    """DynUNet lists its layers again under `skip_layers`; a name of no layer is still missing."""
    args = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "filters": [4, 4, 8]}
    lengths = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    spec = NetworkSpec("DynUNet", {**args, **lengths})
    whole = build_network(spec).state_dict()
    once = {name: v for name, v in whole.items() if not name.startswith("skip_layers.")}
    assert len(once) < len(whole)
    network = build_network(spec)
    load_weights(network, once)
    assert all(torch.equal(v, whole[name]) for name, v in network.state_dict().items())
    once.pop("output_block.conv.conv.bias")
    with pytest.raises(ScanError, match=r"MODEL_WEIGHTS.* 1 missing"):
        load_weights(build_network(spec), once)


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_plain_numbers(state: State, kind: str, tmp_path: Path) -> None:
    make, reason = TENSORS[kind]
    torch.save({**state, WEIGHT: make(state[WEIGHT])}, tmp_path / "model.pt")

    assert refusal(tmp_path / "model.pt").reason is reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_kept_in_another_floating_type(
    state: State, dtype: torch.dtype, tmp_path: Path
) -> None:
    kept = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    torch.save(kept, tmp_path / "model.pt")

    values = load(tmp_path / "model.pt").state_dict()[WEIGHT]

    assert values.dtype is torch.float32
    torch.testing.assert_close(values, state[WEIGHT], rtol=0.01, atol=0.01)


def test_tensors_of_monai_are_data(state: State, tmp_path: Path) -> None:
    """Training with MONAI's transforms may leave them; they are read before MONAI is imported."""
    from monai.data.meta_tensor import MetaTensor

    path = tmp_path / "model.pt"
    torch.save({**state, WEIGHT: MetaTensor(state[WEIGHT])}, path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    subprocess.run([sys.executable, "-c", LOADS, str(path)], env=env, check=True)


LOADS = """
import sys
from pathlib import Path
import torch
from scanloom.engine.machine.lean_imports import without_optional_imports
from scanloom.inference.network.loading import load_network
from support import model_cards

assert "monai" not in sys.modules
with without_optional_imports():  # as in a worker
    weights = model_cards.converted(Path(sys.argv[1]))
    load_network(model_cards.card(weights.file), torch.float32)
"""


def as_zip(names: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in names.items():
            archive.writestr(name, content)
    return packed.getvalue()


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"these are no weights\n",
    "a long text": b"cos\nsystem\n(S'x'\ntR." * 1000,
    "a page": b"<!DOCTYPE html><html>404</html>",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    "a pickled number": pickle.dumps(5),
    "a pickled class": pickle.dumps(ValueError("no")),
    "protocol 5": pickle.dumps({"a": bytearray(10)}, protocol=5),
    "an empty zip": as_zip({}),
    "a zip of something": as_zip({"a/b.txt": b"text"}),
    "a zip with text for a pickle": as_zip({"a/data.pkl": b"text", "a/version": b"3"}),
    "a zip with a broken directory": as_zip({"a/data.pkl": b"x"}).replace(
        b"PK\x01\x02", b"PK\x01\x09"
    ),
    "a zip in a zip's comment": b"PK\x05\x06" + bytes(18) + b"PK",
}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("write", [torch.save, save_file])
def test_format_of_weights_follows_from_their_content(
    state: State, write: Callable[[State, Path], None], suffix: str, tmp_path: Path
) -> None:
    """Safetensors named `.pth` are common."""
    path = tmp_path / f"model{suffix}"
    write(state, path)

    torch.testing.assert_close(read_weights(model_cards.converted(path)), state, rtol=0, atol=0)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_files_that_are_no_weights_are_refused(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(CONTENTS[kind])

    reason = refusal(path).reason

    assert reason in (Reason.MODEL_DAMAGED, Reason.MODEL_UNSAFE, Reason.MODEL_WEIGHTS)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("new", [True, False])
def test_a_truncated_file_is_damaged(
    state: State, fraction: float, new: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    torch.save(state, path, _use_new_zipfile_serialization=new)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(fraction * len(whole))])

    assert refusal(path).reason is Reason.MODEL_DAMAGED


def test_pipes_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    for name in ("pipe.pt", "folder.pt"):
        with pytest.raises(ScanError) as error:
            read_weights(Weights(tmp_path / name, "0" * 64))
        assert error.value.reason is Reason.MODEL_DAMAGED


def test_weights_that_grow_are_refused(state: State, tmp_path: Path) -> None:
    """Compression, or one number that stands for many, is refused before it takes memory."""
    path = tmp_path / "model.pt"
    torch.save({**state, WEIGHT: torch.zeros(1 << 24)}, path)  # 64 MiB
    with zipfile.ZipFile(path) as archive:
        path.write_bytes(as_zip({name: archive.read(name) for name in archive.namelist()}))
    assert path.stat().st_size < 1 << 20
    packed = refusal(path)

    torch.save({**state, WEIGHT: torch.zeros(1).expand(1 << 40)}, path)  # 4 TiB
    spread = refusal(path)

    assert packed.reason is spread.reason is Reason.MODEL_UNSAFE
    assert "would expand to 64.01 MiB" in packed.detail
    assert "would expand to 4096 GiB" in spread.detail


def test_tensors_that_share_memory_are_counted_once(state: State, tmp_path: Path) -> None:
    shared = {**state, "model.1.submodule.adn.N.running_var": torch.ones(8)}
    shared["model.1.submodule.adn.N.weight"] = shared["model.1.submodule.adn.N.running_var"]
    torch.save(shared, tmp_path / "model.pt")

    load(tmp_path / "model.pt")


HUGE = 10**9
ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("UNet", {"channels": [HUGE, 2 * HUGE]}),
    ("UNet", {"channels": [60_000, 60_000]}),  # 350 GB
    ("UNet", {"channels": [-4, 8]}),
    ("UNet", {"channels": [0, 0]}),
    ("UNet", {"channels": [4.5, 8]}),
    ("UNet", {"channels": "48"}),
    ("UNet", {"channels": [2] * 5000, "strides": [1] * 4999}),
    ("UNet", {"num_res_units": HUGE}),
    ("UNet", {"num_res_units": 60_000}),
    ("UNet", {"kernel_size": 60_000}),
    ("UNet", {"kernel_size": 0}),
    ("UNet", {"kernel_size": -3}),
    ("UNet", {"kernel_size": [[3]]}),
    ("UNet", {"strides": [0]}),
    ("UNet", {"norm": ["group", {"num_groups": 0}]}),
    ("UNet", {"norm": ["group", {"num_groups": 3}]}),
    ("UNet", {"norm": {}}),
    ("UNet", {"act": ["relu", {"inplace": "no", "more": 1}]}),
    ("UNet", {"dropout": 7.0}),
    ("UNet", {"dropout": float("nan")}),
    ("UNet", {"adn_ordering": "NDAZ"}),
    ("UNet", {"out_channels": None}),
    ("SegResNet", {"init_filters": 0}),
    ("SegResNet", {"blocks_down": [60_000], "blocks_up": []}),
    ("SwinUNETR", {"window_size": 60}),  # an index of 370 GB
    ("SwinUNETR", {"depths": [HUGE, 1, 1, 1]}),
    ("SwinUNETR", {"feature_size": 13}),
    ("UNETR", {"img_size": [0, 0, 0], "num_heads": 0}),
    ("UNETR", {"img_size": [60_000, 60_000, 60_000]}),
    ("DynUNet", {"kernel_size": [3], "strides": [1], "upsample_kernel_size": []}),
    ("VNet", {"act": 7}),
]


@pytest.mark.parametrize(("name", "args"), ARGUMENTS)
@pytest.mark.filterwarnings("ignore")
def test_a_network_that_can_not_be_built(name: str, args: dict[str, Any]) -> None:
    """Any exception of its class is reported, and it is refused before it takes memory."""
    base = dict(SMALL_UNET) if name == "UNet" else {"in_channels": 1, "out_channels": 3}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with pytest.raises(ScanError) as error:  # what can be built does not fit any weights
        load_weights(build_network(NetworkSpec(name, {**base, **args}), 5_000), {})

    assert error.value.reason in (Reason.MODEL_NETWORK, Reason.MODEL_WEIGHTS)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_a_network_is_built_after_a_refusal() -> None:
    """The refusal does not count towards the next network."""
    with pytest.raises(ScanError):
        build_network(NetworkSpec("UNet", SMALL_UNET), 10)
    build_network(NetworkSpec("UNet", SMALL_UNET))
