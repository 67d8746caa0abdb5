"""Models that are recognized and not read are called by their names; wrapped weights are read."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_safetensors

from scanloom.convert.conversion import load_card
from scanloom.convert.download.add import AddOptions, add_model
from scanloom.convert.store import find_model
from scanloom.core import Reason, ScanError
from support.bundles import write_bundle
from support.nnunet_folders import write_model

NETWORK = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 1))


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def touch(*names: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"content")
        return folder

    return write


def torchscript(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(NETWORK, torch.zeros(1, 1, 4, 4, 4)).save(file)
        return file

    return write


def weights(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(NETWORK.state_dict(), folder / name)
        return folder / name

    return write


def keras_without_its_suffix(folder: Path) -> Path:
    (folder / "model.bin").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    return folder


def fold_of_a_whole_model(folder: Path) -> Path:
    touch("plans.json", "dataset.json", "fold_0/checkpoint_final.pth")(folder)
    return folder / "fold_0"


CASES: Mapping[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "TorchScript, a file": (torchscript("model.ts"), ("as a program", "torch.jit.load")),
    "TorchScript, as weights": (torchscript("model.pt"), ("a program", "torch.jit.load")),
    "TorchScript, a folder": (
        lambda folder: torchscript("models/model.ts")(folder).parents[1],
        ("as a program", "torch.jit.load"),
    ),
    "ONNX": (touch("model.onnx"), ("in ONNX", "spacing", "scanloom models new")),
    "nnU-Net v1": (
        touch("plans.pkl", "fold_0/model_final_checkpoint.model"),
        ("nnU-Net v1", "nnU-Net v2 trained"),
    ),
    "Auto3DSeg": (
        touch("configs/hyper_parameters.yaml", "scripts/segmenter.py", "model/model.pt"),
        ("Auto3DSeg", "configs/metadata.json"),
    ),
    "Keras": (touch("model.h5"), ("Keras", "tf2onnx", "scanloom models new")),
    "Keras, SavedModel": (touch("saved_model.pb", "variables/variables.index"), ("Keras",)),
    "Keras, by its content": (keras_without_its_suffix, ("Keras",)),
    "TensorRT": (touch("model.engine"), ("TensorRT", "built from")),
    "weights, a file": (weights("model.pt"), ("weights alone", "configs/inference.json")),
    "weights, a folder": (lambda folder: weights("model.pth")(folder).parent, ("weights alone",)),
    "folds without plans": (
        touch("fold_0/checkpoint_final.pth"),
        ("nnU-Net v2 without plans.json and dataset.json", "next to its folds"),
    ),
    "folds without plans.json": (
        touch("fold_all/checkpoint_best.pth", "dataset.json"),
        ("nnU-Net v2 without plans.json.",),
    ),
    "a fold": (touch("checkpoint_final.pth"), ("fold of nnU-Net v2", "no plans.json and dataset")),
    "a fold of a model": (fold_of_a_whole_model, ("give the folder above it", "FOLDER:folds=0")),
}


@pytest.mark.parametrize("name", CASES)
def test_format_is_named_with_what_it_lacks_and_what_to_do(name: str, tmp_path: Path) -> None:
    write, expected = CASES[name]
    (tmp_path / "theirs").mkdir()
    path = write(tmp_path / "theirs")
    options = AddOptions(lambda model, licence: True, name="theirs")
    for use in (lambda: find_model(str(path)), lambda: add_model(str(path), options)):
        with pytest.raises(ScanError) as refused:
            use()

        assert refused.value.reason is Reason.MODEL_FORMAT
        for text in expected:
            assert text in refused.value.detail
        assert "opy the bundle again" not in str(refused.value)


def test_a_folder_of_models_asks_for_one_of_them(tmp_path: Path) -> None:
    for name, said in (
        ("one", "the model is in its folder one; give that"),
        ("two", "2 models are in folders of this one"),
    ):
        write_bundle(tmp_path / name)

        with pytest.raises(ScanError, match=said) as refused:
            find_model(str(tmp_path))
        assert refused.value.reason is Reason.MODEL_UNKNOWN


def test_a_bundle_without_weights_but_torchscript_says_so(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    (bundle / "models" / "model.pt").unlink()
    torchscript("models/model.ts")(bundle)

    with pytest.raises(ScanError, match=r"model.pt are missing, but for model.ts: TorchScript"):
        load_card(bundle)


def test_a_whole_model_of_nnunet_is_still_read(tmp_path: Path) -> None:
    assert load_card(write_model(tmp_path)).structures


def saved(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


@pytest.mark.thorough
def test_weights_that_training_programs_wrap_are_those_without_it(tmp_path: Path) -> None:
    plain = NETWORK.state_dict()
    parallel = torch.nn.DataParallel(NETWORK).state_dict()
    compiled = {f"_orig_mod.{name}": value for name, value in plain.items()}
    files = {
        "plain": saved(plain),
        "for ignite": saved({"model": plain}),
        "lightning": saved({"epoch": 3, "state_dict": plain, "optimizer": {"lr": 0.1}}),
        "tutorial": saved({"model_state_dict": plain, "epoch": 3}),
        "twice": saved({"model": {"state_dict": plain}}),
        "parallel": saved(parallel),
        "parallel, lightning": saved({"state_dict": parallel}),
        "compiled": saved(compiled),
        "compiled, parallel": saved({f"module.{k}": v for k, v in compiled.items()}),
        "parallel, safetensors": save_safetensors({k: v.clone() for k, v in parallel.items()}),
    }
    assert set(parallel) == {"module.0.weight", "module.0.bias"}
    cards = {}
    for name, content in files.items():
        cards[name] = load_card(write_bundle(tmp_path / name, weights=content))

    assert {name: card.weights.sha256 for name, card in cards.items()} == dict.fromkeys(
        files, cards["plain"].weights.sha256
    )
