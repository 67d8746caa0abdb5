"""Forms of the Model Zoo's bundles: twins by hand, each gives the card of its original."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import ANY_MODALITY, Argmax, Crop, NetworkGrid, Paint, ScaleRange, Window
from scanloom.convert.monai import allow_list
from scanloom.convert.monai.allow_list import KnownClass
from scanloom.convert.monai.bundle import read_bundle
from scanloom.convert.monai.metadata import modality_of
from scanloom.core import Flag, ScanError
from support.bundles import spleen_config, spleen_metadata, transform, write_bundle

Entries = dict[str, Any]


def output(metadata: Entries, *names: str, kind: str = "channel_def") -> None:
    pred = metadata["network_data_format"]["outputs"]["pred"]
    pred.pop("channel_def", None)
    pred[kind] = {str(n): name for n, name in enumerate(names)}
    pred["num_channels"] = len(names)


def inputs(metadata: Entries) -> Entries:
    image: Entries = metadata["network_data_format"]["inputs"]["image"]
    return image


def steps(config: Entries, section: str = "preprocessing") -> list[Entries]:
    transforms: list[Entries] = config[section]["transforms"]
    return transforms


def drop(config: Entries, name: str) -> None:
    for section in ("preprocessing", "postprocessing"):
        config[section]["transforms"] = [s for s in steps(config, section) if s["_target_"] != name]


@pytest.mark.parametrize("modality", ["none", "any", "Any"])
def test_model_without_modality_takes_any(modality: str, tmp_path: Path) -> None:
    metadata = spleen_metadata()
    inputs(metadata)["modality"] = modality

    card = read_bundle(write_bundle(tmp_path / "template", metadata=metadata))

    assert [c.modality for c in card.channels] == [ANY_MODALITY]


def test_words_of_a_channel_state_its_modality() -> None:
    stated = {
        "MRI (T1)": "MR",
        "T2-FLAIR": "MR",
        "SUV": "PT",
        "cbct": "CT",
        "PET/CT": None,
        "": None,
    }

    assert {text: modality_of(text) for text in stated} == stated


def test_plane_by_plane(tmp_path: Path) -> None:
    """Ventricles in short-axis slices: a two-dimensional network across the third axis."""
    config = spleen_config()
    config["network_def"]["spatial_dims"] = 2
    config["inferer"] = {"_target_": "SliceInferer", "roi_size": [256, 192], "spatial_dim": 2}
    for name in ("Orientationd", "Spacingd"):
        drop(config, name)

    card = read_bundle(write_bundle(tmp_path / "ventricles", config))

    assert card.window == Window((256, 192, 1), plane=2)
    assert card.network.args["spatial_dims"] == 2


@pytest.mark.parametrize(
    ("roi", "axis", "size"), [([9, 8], 0, (1, 9, 8)), (7, 1, (7, 1, 7)), ([9, 8], 2, (9, 8, 1))]
)
def test_window_has_one_voxel_across_the_planes(
    roi: Any, axis: int, size: tuple[int, int, int], tmp_path: Path
) -> None:
    config = spleen_config()
    config["network_def"]["spatial_dims"] = 2
    config["inferer"] = {"_target_": "SliceInferer", "roi_size": roi, "spatial_dim": axis}

    assert read_bundle(write_bundle(tmp_path / "b", config)).window.size == size


def test_regions_are_painted_by_priority(tmp_path: Path) -> None:
    """Tumours: nested torch.where, of which the first region wins; painted last to first."""
    config, metadata = spleen_config(), spleen_metadata()
    config["network_def"].update(out_channels=3, in_channels=4)
    inputs(metadata).update(num_channels=4, channel_def={str(n): f"MR {n}" for n in range(4)})
    output(metadata, "core", "whole", "enhancing")
    for name in ("Orientationd", "Spacingd", "Invertd"):
        drop(config, name)
    transform(config, "Activationsd").update(softmax=False, sigmoid=True)
    transform(config, "AsDiscreted").update(argmax=False, threshold=0.5)
    nested = "torch.where(x[[0]] > 0, 1, torch.where(x[[1]] > 0, 2, 0))"
    function = f"$lambda x: torch.where(x[[2]] > 0, 4, {nested})"
    steps(config, "postprocessing").insert(
        -1, {"_target_": "Lambdad", "keys": "pred", "func": function}
    )

    card = read_bundle(write_bundle(tmp_path / "tumours", config, metadata))

    assert card.decision == Paint(((1, 2), (0, 1), (2, 4)), 0.5)
    assert [(s.number, s.label) for s in card.structures] == [
        (1, "core_rest"),
        (2, "whole_rest"),
        (4, "enhancing"),
    ]
    assert len(card.channels) == 4


@pytest.mark.parametrize(
    "function",
    [
        "$lambda x: x",
        "$lambda x: torch.where(x[[0]] > 0, 1, x)",
        "$lambda x: torch.where(x[[0]] >= 0, 1, 0)",
        "$lambda x: torch.where(x[[0]] > 0, os.system('x'), 0)",
        "$lambda x, y=1: torch.where(x[[0]] > 0, 1, 0)",
        "$lambda x: torch.where(x[0] > 0, 1, 0)",
        "$lambda x: torch.where(y[[0]] > 0, 1, 0)",
        "$lambda x: os.system('x') or torch.where(x[[0]] > 0, 1, 0)",
        "$lambda x: torch.where(x[[0]] > 0, 1, 0, out=x)",
    ],
)
def test_other_functions_are_code(function: str, tmp_path: Path) -> None:
    config = spleen_config()
    step = {"_target_": "Lambdad", "keys": "pred", "func": function}
    steps(config, "postprocessing").append(step)

    with pytest.raises(ScanError) as caught:
        read_bundle(write_bundle(tmp_path / "b", config))
    assert caught.value.code == "MODEL_UNSAFE"


def test_crop_to_the_foreground_after_an_intensity_step(tmp_path: Path) -> None:
    """A child's abdomen: labels named in label_def, weights named among the handlers."""
    config, metadata = spleen_config(), spleen_metadata()
    output(metadata, "background", "liver", kind="label_def")
    crop = {"_target_": "CropForegroundd", "keys": ["image"], "source_key": "image"}
    steps(config).insert(5, {**crop, "mode": ["minimum"]})
    transform(config, "LoadImaged")["reader"] = "ITKReader"
    config["handlers"] = [{**config.pop("checkpointloader"), "load_path": "models/fine_tuned.pt"}]
    config["evaluator"]["val_handlers"] = "@handlers"
    del config["initialize"]
    folder = write_bundle(tmp_path / "child", config, metadata)
    (folder / "models" / "model.pt").rename(folder / "models" / "fine_tuned.pt")

    card = read_bundle(folder)

    assert card.grid.crop == Crop("positive", "network")
    assert card.weights.file.name == "fine_tuned.pt"
    assert [s.label for s in card.structures] == ["liver"]


def test_steps_after_the_crop_are_counted(tmp_path: Path) -> None:
    config = spleen_config()
    crop = {"_target_": "CropForegroundd", "keys": "image", "source_key": "image"}
    steps(config).insert(4, {**crop, "margin": 10, "allow_smaller": True})

    card = read_bundle(write_bundle(tmp_path / "b", config))

    assert card.grid.crop == Crop("positive", "network", 10, steps=0)
    assert card.after == (ScaleRange(-57, 164, 0, 1, clip=True),)


def dints(tmp_path: Path, arrays: Entries) -> Path:
    config = spleen_config()
    config["arch_ckpt_path"] = "$@bundle_root + '/models/search_code.pt'"
    config["arch_ckpt"] = "$torch.load(@arch_ckpt_path, map_location=torch.device('cuda'))"
    config["dints_space"] = {
        "_target_": "monai.networks.nets.TopologyInstance",
        "num_blocks": 2,
        "num_depths": 2,
        "arch_code": ["$@arch_ckpt['arch_code_a']", "$@arch_ckpt['arch_code_c']"],
        "device": "$torch.device('cuda')",
    }
    config["network_def"] = {
        "_target_": "monai.networks.nets.DiNTS",
        "dints_space": "@dints_space",
        "in_channels": 1,
        "num_classes": 2,
        "node_a": "$torch.from_numpy(@arch_ckpt['node_a'])",
    }
    folder = write_bundle(tmp_path / "dints", config)
    torch.save(arrays, folder / "models" / "search_code.pt")
    return folder


ARCHITECTURE = {
    "node_a": np.ones((3, 2)),
    "arch_code_a": np.array([[1, 0, 1, 1], [0, 1, 1, 0]], np.float32),
    "arch_code_c": np.asfortranarray([[0, 1, 2, 3], [4, 0, 1, 2]]),
    "best_dsc": np.float64(0.7),
}


def test_searched_architecture_is_read_as_numbers(tmp_path: Path) -> None:
    args = read_bundle(dints(tmp_path, ARCHITECTURE)).network.args

    assert args["dints_space"] == {
        "num_blocks": 2,
        "num_depths": 2,
        "arch_code": [[[1, 0, 1, 1], [0, 1, 1, 0]], [[0, 1, 2, 3], [4, 0, 1, 2]]],
    }
    assert args["node_a"] == [[1, 1], [1, 1], [1, 1]]


class _Calls:
    """Touches a file when a pickle of it is loaded by Python."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.zeros((200, 200)), "calls", torch.zeros(3)],
    ids=["objects", "large", "call", "tensor"],
)
def test_architecture_that_is_more_than_numbers_is_refused(value: Any, tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    content = _Calls(owned) if isinstance(value, str) else value
    folder = dints(tmp_path, ARCHITECTURE)
    torch.save({**ARCHITECTURE, "node_a": content}, folder / "models" / "search_code.pt")

    with pytest.raises(ScanError) as caught:
        read_bundle(folder)

    assert caught.value.code in ("MODEL_UNSAFE", "MODEL_DAMAGED")
    assert not owned.exists()


def test_labels_that_the_home_runner_mixes_are_flagged(tmp_path: Path) -> None:
    """Prostate: labels are brought back linearly at home, here by nearest neighbour."""
    config = spleen_config()
    after = steps(config, "postprocessing")
    after[0], after[1], after[2] = after[2], after[1], after[0]
    del after[2]

    card = read_bundle(write_bundle(tmp_path / "prostate", config))

    assert (card.decision, card.restore) == (Argmax(), "labels")
    assert card.flags == (Flag.LABELS_NEAREST,)


def script(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **classes: Any) -> None:
    """Write a script, and make its hash known with the classes in it."""
    text = f"# stands for {name}: never run\nraise RuntimeError\n"
    file = f"scripts/{name}.py"
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / file).write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    known = dict(allow_list.KNOWN)
    for class_name, kind in classes.items():
        known[f"scripts.{name}.{class_name}"] = KnownClass(kind, class_name, {file: (sha256,)})
    monkeypatch.setattr(allow_list, "KNOWN", known)


def kidneys(tmp_path: Path) -> Path:
    config, metadata = spleen_config(), spleen_metadata()
    keys = ["artery", "vein", "excret"]
    config["network_def"].update(in_channels=3, out_channels=4)
    inputs(metadata)["num_channels"] = 3
    output(metadata, "background", "artery", "vein", "ureter")
    for step in steps(config)[:4]:
        step["keys"] = keys
    steps(config)[0]["keys"] = [*keys, "label"]
    merge = {"_target_": "scripts.mine.ConcatImages", "keys_merge": keys, "keys_out": "image"}
    steps(config).insert(4, merge)
    after = steps(config, "postprocessing")
    after[0].update(softmax=False, sigmoid=True)
    after[1]["orig_keys"] = "artery"
    after[2].update(argmax=False, threshold=0.5)
    after[0], after[1] = after[1], after[0]
    after.insert(3, {"_target_": "scripts.mine.MergeClassesd", "keys": "pred"})
    return write_bundle(tmp_path / "kidneys", config, metadata)


def test_known_script_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kidneys in three phases: channels are concatenated, the first class of a voxel wins."""
    folder = kidneys(tmp_path)
    script(folder, "mine", monkeypatch, ConcatImages="transform", MergeClassesd="transform")

    card = read_bundle(folder)

    assert [c.name for c in card.channels] == ["artery", "vein", "excret"]
    assert card.decision == Paint(((3, 3), (2, 2), (1, 1)), 0.0)
    assert (card.activation, card.restore) == (None, "scores")
    assert [s.label for s in card.structures] == ["artery", "vein", "ureter"]


def test_changed_script_is_refused_with_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kidneys(tmp_path)
    script(folder, "mine", monkeypatch, ConcatImages="transform", MergeClassesd="transform")
    changed = b"print('another version')"
    (folder / "scripts" / "mine.py").write_bytes(changed)

    with pytest.raises(ScanError) as caught:
        read_bundle(folder)

    assert caught.value.code == "MODEL_UNSAFE"
    assert "scripts/mine.py" in caught.value.detail
    assert hashlib.sha256(changed).hexdigest() in caught.value.detail


def test_interactive_model_without_clicks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepEdit: channels of clicks are empty, the scan is resized by area."""
    config, metadata = spleen_config(), spleen_metadata()
    config["network_def"] = {"_target_": "DynUNet", "in_channels": 3, "out_channels": 2}
    inputs(metadata)["num_channels"] = 3
    drop(config, "Spacingd")
    config["inferer"] = {"_target_": "SimpleInferer"}
    names = {"spleen": 1, "background": 0}
    steps(config)[4:4] = [
        {"_target_": "scripts.mine.Clicksd", "ref_image": "image", "label_names": names},
        {"_target_": "AddGuidanceFromPointsDeepEditd", "ref_image": "image", "label_names": names},
        {"_target_": "Resized", "keys": "image", "spatial_size": [64, 64, 32], "mode": "area"},
        {"_target_": "ResizeGuidanceMultipleLabelDeepEditd", "ref_image": "image"},
        {"_target_": "AddGuidanceSignalDeepEditd", "keys": "image", "number_intensity_ch": 1},
    ]
    folder = write_bundle(tmp_path / "clicks", config, metadata)
    script(folder, "mine", monkeypatch, Clicksd="ignored")

    card = read_bundle(folder)

    assert card.network.name == "DynUNetWithoutClicks"
    assert len(card.channels) == 1
    assert card.grid == NetworkGrid("RAS", None, "area", alignment="edges", shape=(64, 64, 32))
    assert len(card.before) == 1


def prompted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    config, metadata = spleen_config(), spleen_metadata()
    config["network_def"] = "$monai.networks.nets.vista3d132(in_channels=1)"
    config["everything_labels"] = "$list(set([i+1 for i in range(4)]) - set([2]))"
    pre = steps(config)
    transform(config, "Spacingd")["pixdim"] = [1.5, 1.5, 1.5]
    pre.insert(4, pre.pop(2))
    pre.insert(2, {"_target_": "monai.apps.vista3d.transforms.VistaPreTransformd", "keys": "image"})
    config["inferer"] = {
        "_target_": "scripts.mine.Vista3dInferer",
        "roi_size": [128, 128, 128],
        "overlap": 0.3,
    }
    prompts = {"user_prompt": True, "everything_labels": "@everything_labels"}
    config["evaluator"].update(_target_="scripts.mine.Vista3dEvaluator", hyper_kwargs=prompts)
    config["postprocessing"] = {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "monai.apps.vista3d.transforms.VistaPostTransformd", "keys": "pred"},
            {
                "_target_": "Invertd",
                "keys": "pred",
                "transform": "$copy.deepcopy(@preprocessing)",
                "orig_keys": "image",
            },
            {
                "_target_": "Lambdad",
                "keys": "pred",
                "func": "$lambda x: torch.nan_to_num(x, nan=255)",
            },
        ],
    }
    config.update(changes)
    pred = metadata["network_data_format"]["outputs"]["pred"]
    names = ("background", "liver", "kidney", "spleen", "aorta")
    pred.update(num_channels=1, channel_def={str(n): name for n, name in enumerate(names)})
    folder = write_bundle(tmp_path / "vista", config, metadata)
    script(folder, "mine", monkeypatch, Vista3dInferer="inferer", Vista3dEvaluator="evaluator")
    return folder


def test_prompted_model_has_all_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = read_bundle(prompted(tmp_path, monkeypatch))

    assert card.network.args == {"in_channels": 1, "classes": [1, 3, 4]}
    assert [(s.number, s.label) for s in card.structures] == [
        (1, "liver"),
        (2, "spleen"),
        (3, "aorta"),
    ]
    assert card.window == Window((128, 128, 128), 0.25)
    assert (card.decision, card.restore) == (Argmax(), "labels")
    assert card.grid == NetworkGrid("RAS", (1.5, 1.5, 1.5), orient="after")


def test_prompts_are_chosen_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prompted(tmp_path, monkeypatch)

    card = read_bundle(folder, {"structures": "aorta+liver"})

    assert card.network.args["classes"] == [1, 4]
    with pytest.raises(ScanError) as caught:
        read_bundle(folder, {"structures": "livr"})
    assert caught.value.code == "MODEL_UNKNOWN"
    assert "liver" in caught.value.detail


def test_other_lists_of_classes_are_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "$list(set([os.system('x') for i in range(4)]) - set([2]))"

    with pytest.raises(ScanError) as caught:
        read_bundle(prompted(tmp_path, monkeypatch, everything_labels=text))
    assert caught.value.code == "MODEL_UNSAFE"


def test_all_obstacles_are_listed(tmp_path: Path) -> None:
    """A refusal lists every obstacle in a bundle, not only the first one."""
    config, metadata = spleen_config(), spleen_metadata()
    config["network_def"]["_target_"] = "scripts.net.Mine"
    steps(config).insert(2, {"_target_": "RandFlipd", "keys": "image"})
    transform(config, "Spacingd")["padding_mode"] = "zeros"
    config["inferer"]["mode"] = "cosine"
    steps(config, "postprocessing").append({"_target_": "FillHolesd", "keys": "pred"})

    with pytest.raises(ScanError) as caught:
        read_bundle(write_bundle(tmp_path / "b", config, metadata))

    assert caught.value.code == "MODEL_UNSAFE"
    for named in ("scripts/net.py", "RandFlipd", "padding_mode", "cosine", "FillHolesd"):
        assert named in caught.value.detail
