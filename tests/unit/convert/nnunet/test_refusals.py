"""A faulty or hostile nnU-Net folder is refused by name and quickly; nothing in it runs."""

from __future__ import annotations

import copy
import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.convert.conversion import load_card
from scanloom.convert.readers import read_model
from scanloom.convert.weights import NNUNET_KEY
from scanloom.core import Flag, ScanError
from scanloom.inference.network.loading import load_network
from support import model_cards
from support.nnunet_folders import (
    ARCHITECTURE,
    CONFIGURATION,
    DATASET,
    PLANS,
    REGIONS,
    plans,
    write_model,
)

WITHIN_S = 5.0


def refused(folder: Path) -> str:
    """Return the message with which a folder is refused, and check the time."""
    start = time.process_time()
    with pytest.raises(ScanError) as caught:
        read_model(folder)
    assert time.process_time() - start < WITHIN_S
    return str(caught.value)


class Touch:
    """An object whose pickle would create a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_calls_is_named_and_not_run(tmp_path: Path) -> None:
    planted = tmp_path / "planted"

    message = refused(write_model(tmp_path, logging=Touch(planted)))

    assert message.startswith("MODEL_UNSAFE")
    assert "mkdir" in message
    assert not planted.exists()


def test_a_call_in_the_weights_of_another_fold_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, folds=("0", "1"))
    file = folder / "fold_1" / "checkpoint_final.pth"
    content = torch.load(file, weights_only=False)
    torch.save({**content, NNUNET_KEY: {"x": Touch(tmp_path / "planted")}}, file)

    assert refused(folder).startswith("MODEL_UNSAFE")
    with pytest.raises(ScanError, match="MODEL_UNSAFE"):
        model_cards.converted(file, NNUNET_KEY)
    assert not (tmp_path / "planted").exists()


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    message = refused(write_model(tmp_path, logging=np.array([object, None], dtype=object)))

    assert message.startswith("MODEL_UNSAFE")


def test_a_program_instead_of_weights_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with zipfile.ZipFile(folder / "fold_0" / "checkpoint_final.pth", "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"model/{name}", b"")

    assert "program" in refused(folder)


@pytest.mark.parametrize("cut", [0.0, 0.1, 0.5, 0.99])
def test_a_broken_checkpoint_is_damaged(cut: float, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    file = folder / "fold_0" / "checkpoint_final.pth"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * cut)])

    assert refused(folder).startswith("MODEL_DAMAGED")


def test_a_description_that_expands_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with zipfile.ZipFile(
        folder / "fold_0" / "checkpoint_final.pth", "w", zipfile.ZIP_DEFLATED
    ) as archive:
        archive.writestr("x/data.pkl", b"N" * 50_000_000)

    assert refused(folder).startswith("MODEL_UNSAFE")


def changed_plans(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    entries = copy.deepcopy(PLANS)
    change(entries)
    return entries


def architecture(**arguments: Any) -> dict[str, Any]:
    entries = copy.deepcopy(ARCHITECTURE)
    entries["arch_kwargs"].update(arguments)
    return plans(architecture=entries)


CASES = {
    "circle": (
        changed_plans(
            lambda p: p["configurations"].update(
                {"3d_fullres": {"inherits_from": "b"}, "b": {"inherits_from": "3d_fullres"}}
            )
        ),
        "circle",
    ),
    "parent": (plans(inherits_from="none"), "no configuration 'none'"),
    "configuration": (
        changed_plans(lambda p: p.update(configurations={"2d": CONFIGURATION})),
        "no configuration '3d_fullres'",
    ),
    "normalisation": (plans(normalization_schemes=["HistogramNormalization"]), "Histogram"),
    "resampling": (
        plans(resampling_fn_data="resample_torch_fornnunet"),
        "resample_torch_fornnunet",
    ),
    "preprocessor": (plans(preprocessor_name="MyPreprocessor"), "MyPreprocessor"),
    "reader": ({**PLANS, "image_reader_writer": "Tiff3DIO"}, "Tiff3DIO"),
    "label manager": ({**PLANS, "label_manager": "Mine"}, "Mine"),
    "network": (
        plans(architecture={**ARCHITECTURE, "network_class_name": "my.nets.Primus"}),
        "my.nets.Primus",
    ),
    "convolution": (architecture(conv_op="os.system"), "os.system"),
    "activation": (architecture(nonlin="torch.nn.Mish"), "torch.nn.Mish"),
    "norm": (architecture(norm_op="torch.nn.GroupNorm"), "torch.nn.GroupNorm"),
    "stages": (architecture(n_stages=1000), "n_stages"),
    "features": (architecture(features_per_stage=[4]), "stages"),
    "no intensities": (
        {**PLANS, "foreground_intensity_properties_per_channel": {}},
        "foreground intensities of channel 0 are missing",
    ),
    "channels": (plans(normalization_schemes=["NoNormalization"] * 2), "2 channels"),
    "spacing": (plans(spacing=[0.0, 1.0, 1.0]), "spacing"),
    "transpose": ({**PLANS, "transpose_forward": [0, 0, 1]}, "transposition"),
    "cascade": (plans(previous_stage="3d_lowres"), "3d_lowres"),
    "labels of a cascade": (
        plans(
            previous_stage="3d_lowres",
            resampling_fn_seg_kwargs={"is_seg": True, "order": 1, "force_separate_z": True},
        ),
        "force_separate_z of the previous stage's labels",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_that_a_card_cannot_follow_are_refused_by_name(name: str, tmp_path: Path) -> None:
    entries, expected = CASES[name]
    folder = write_model(tmp_path)
    (folder / "plans.json").write_text(json.dumps(entries))

    assert expected in refused(folder)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"labels": {"background": 0, "a": 1, "b": 3}}, "skip numbers"),
        ({"labels": {"a": 1, "b": 2}}, "background"),
        ({"labels": {"background": 0}}, "no label"),
        ({"labels": {"background": 0, "a": 1, "b": 1}}, "same number"),
        ({"labels": {"background": 0, "a": 1, "ignore": 1}}, "ignore"),
        ({"labels": REGIONS["labels"]}, "regions_class_order"),
        ({**REGIONS, "regions_class_order": [1, 2]}, "regions_class_order"),
        ({**REGIONS, "regions_class_order": [1, 2, 2]}, "twice"),
        ({"channel_names": {}}, "channel_names is missing"),
        ({"channel_names": {"0": "CT", "2": "CT"}}, "channel_names are not numbered from 0"),
    ],
)
def test_labels_and_channels_that_contradict_themselves_are_refused(
    entries: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path)
    (folder / "dataset.json").write_text(json.dumps({**DATASET, **entries}))

    assert expected in refused(folder)


@pytest.mark.parametrize("name", ["nnUNetTrainerBN", "nnUNet_Primus_S_Trainer", "Mine", "x" * 9999])
def test_trainers_that_may_change_the_network_are_refused(name: str, tmp_path: Path) -> None:
    assert name[:20] in refused(write_model(tmp_path, trainer_name=name))


@pytest.mark.parametrize("name", ["nnUNetTrainer", "nnUNetTrainerNoMirroring", "nnUNetTrainerDA5"])
def test_trainers_that_change_training_only_are_taken(name: str, tmp_path: Path) -> None:
    assert read_model(write_model(tmp_path, trainer_name=name)).n_outputs == 3


def test_a_fold_without_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, folds=("0", "1"))
    (folder / "fold_1" / "checkpoint_final.pth").unlink()

    assert "fold_1 has no checkpoint_final.pth; NAME:folds=0+1" in refused(folder)


@pytest.mark.parametrize("labels", [{"background": 0, "a": 1}, {**DATASET["labels"], "b": 3}])
def test_a_checkpoint_of_other_classes_is_refused(labels: dict[str, int], tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "dataset.json").write_text(json.dumps({**DATASET, "labels": labels}))

    assert "that of the checkpoint has 3" in refused(folder)


def test_a_checkpoint_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    file = folder / "fold_0" / "checkpoint_final.pth"
    file.rename(tmp_path / "elsewhere.pth")
    file.symlink_to(tmp_path / "elsewhere.pth")

    assert refused(folder).startswith("MODEL_UNSAFE")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "plans.json").write_text(json.dumps(architecture(features_per_stage=[4, 16])))

    with pytest.raises(ScanError, match="MODEL_WEIGHTS"):
        load_network(load_card(folder), torch.float32)


def test_weights_that_are_nan_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    file = folder / "fold_0" / "checkpoint_final.pth"
    content = torch.load(file, weights_only=False)
    next(iter(content[NNUNET_KEY].values())).fill_(float("nan"))
    torch.save(content, file)

    with pytest.raises(ScanError, match="NOT_FINITE"):
        load_network(load_card(folder), torch.float32)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"pool": "avg"}, "pool"),
        ({"squeeze_excitation": True}, "squeeze_excitation"),
        ({"norm_op_kwargs": {"eps": 1e-5, "affine": True, "num_groups": 2}}, "num_groups"),
        (
            {"norm_op_kwargs": {"eps": 1e-5, "affine": True, "track_running_stats": True}},
            "track_running_stats",
        ),
        ({"nonlin_kwargs": {"inplace": True, "slope": 0.2}}, "slope"),
    ],
)
def test_arguments_that_may_change_the_network_are_refused_by_name(
    arguments: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path)
    architecture = copy.deepcopy(ARCHITECTURE)
    architecture["arch_kwargs"].update(arguments)
    (folder / "plans.json").write_text(json.dumps(plans(architecture=architecture)))
    detail = refused(folder)
    assert named in detail
    assert "MODEL_NETWORK" in detail


def test_arguments_of_training_are_accepted(tmp_path: Path) -> None:
    architecture = copy.deepcopy(ARCHITECTURE)
    architecture["arch_kwargs"].update(
        norm_op_kwargs={"eps": 1e-5, "affine": True, "momentum": 0.1, "track_running_stats": False},
        dropout_op_kwargs={"p": 0.2, "inplace": True},
        deep_supervision=True,
    )
    assert read_model(write_model(tmp_path, plans(architecture=architecture))).name


@pytest.mark.parametrize(("folds", "unfinished"), [(("0",), "0"), (("0", "1"), "1")])
def test_the_best_checkpoint_in_place_of_the_final_one_is_flagged(
    folds: tuple[str, ...], unfinished: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, folds=folds)
    assert read_model(folder).flags == ()
    final = folder / f"fold_{unfinished}" / "checkpoint_final.pth"
    final.rename(final.with_name("checkpoint_best.pth"))
    assert read_model(folder).flags == (Flag.CHECKPOINT_BEST,)
