"""An nnU-Net folder becomes a card with nnU-Net's own processing, as its files say."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scanloom.cards.card import Argmax, Clip, KeepLargest, ModelCard, Normalize, Paint
from scanloom.convert.readers import read_model
from scanloom.convert.store import is_model
from scanloom.convert.weights import NNUNET_KEY, convert_weights
from scanloom.core import ScanError
from scanloom.inference.network.loading import load_network, read_weights
from support.nnunet_folders import (
    ARCHITECTURE,
    CONFIGURATION,
    DATASET,
    PLANS,
    REGIONS,
    plans,
    write_model,
)


def read(folder: Path, *args: Any, **kwargs: Any) -> ModelCard:
    return read_model(write_model(folder, *args, **kwargs))


def test_a_ct_model_has_nnunets_processing(tmp_path: Path) -> None:
    card = read(tmp_path)

    assert card.name == "dataset042_organs_3d_fullres"
    assert card.channels[0].modality == "CT"
    assert card.channels[0].steps == (Clip(-500.0, 600.0), Normalize(40.0, 180.0))
    grid, window = card.grid, card.window
    assert (grid.orientation, grid.spacing, grid.order) == (None, (1.0, 1.0, 2.0), (2, 1, 0))
    assert (grid.mode, grid.alignment, grid.separate_above) == ("cubic", "edges", 3.0)
    assert grid.as_nifti
    assert grid.crop is not None
    assert grid.crop.foreground == "nonzero"
    assert (window.size, window.overlap, window.mirror) == ((8, 16, 16), 0.5, (0, 1, 2))
    assert (window.blending, window.starts, window.sums) == ("gaussian_filter", "even", "float16")
    assert isinstance(card.decision, Argmax)
    assert card.n_outputs == 3
    assert [s.label for s in card.structures] == ["liver", "left_kidney"]
    assert card.structures[1].type.meaning == "Kidney"
    assert card.structures[1].laterality


def test_the_folder_of_a_dataset_stands_for_its_only_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "Dataset042_Organs")

    assert is_model(folder.parent)
    assert read_model(folder.parent) == read_model(folder)


def test_a_folder_stands_for_its_only_dataset(tmp_path: Path) -> None:
    """As other programs ship theirs; with options, too."""
    folder = write_model(tmp_path / "Dataset042_Organs", folds=("0", "1"))

    assert read_model(tmp_path) == read_model(folder)
    assert read_model(tmp_path, {"folds": "1"}).weights.file.parent.name == "fold_1"


def several(folder: Path) -> Path:
    """Write two datasets, one of them with two trainers and two configurations; return `folder`."""
    organs, vessels = folder / "Dataset042_Organs", folder / "Dataset043_Vessels"
    write_model(vessels, dataset={**DATASET, "labels": {"background": 0, "artery": 1}})
    low = {**PLANS, "configurations": {"3d_lowres": CONFIGURATION}}
    write_model(organs, low, configuration="3d_lowres")
    short = "nnUNetTrainer_100epochs__nnUNetResEncUNetLPlans__3d_fullres"
    write_model(organs).rename(organs / short)
    write_model(organs)
    return folder


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"dataset": "Dataset043_Vessels"}, "Dataset043_Vessels"),
        ({"dataset": "43"}, "Dataset043_Vessels"),
        ({"configuration": "3d_lowres"}, "nnUNetTrainer__nnUNetPlans__3d_lowres"),
        ({"trainer": "nnUNetTrainer_100epochs"}, "nnUNetResEncUNetLPlans"),
        ({"plans": "nnUNetResEncUNetLPlans", "dataset": "042"}, "nnUNetResEncUNetLPlans"),
    ],
)
def test_options_choose_one_of_several_models(
    options: dict[str, str], path: str, tmp_path: Path
) -> None:
    assert path in str(read_model(several(tmp_path), options).weights.file)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            {},
            "MODEL_UNKNOWN",
            "4 models: choose one by NAME:dataset=Dataset042_Organs,"
            "trainer=nnUNetTrainer_100epochs,plans=nnUNetResEncUNetLPlans,configuration=3d_fullres "
            "(dataset: Dataset042_Organs, Dataset043_Vessels; trainer: nnUNetTrainer, "
            "nnUNetTrainer_100epochs; plans: nnUNetPlans, nnUNetResEncUNetLPlans; configuration: ",
        ),
        (
            {"dataset": "42", "trainer": "nnUNetTrainer"},
            "MODEL_UNKNOWN",
            "2 models: choose one by NAME:configuration=3d_fullres "
            "(configuration: 3d_fullres, 3d_lowres)",
        ),
        ({"dataset": "44"}, "MODEL_UNKNOWN", "dataset=44, but Dataset042_Organs, Dataset043_V"),
        ({"dataset": "43", "configuration": "2d"}, "MODEL_UNKNOWN", "2d, but 3d_fullres"),
        ({"plans": "a", "configuration": "b", "dataset": "44"}, "MODEL_UNKNOWN", "dataset=44, but"),
        ({"dataset": "9" * 5000}, "MODEL_UNKNOWN", "no model with dataset=999"),
        ({"fold": "0"}, "MODEL_UNKNOWN", "are dataset, trainer, plans, configuration, folds"),
    ],
)
def test_options_that_choose_no_model_are_refused_with_those_that_do(
    options: dict[str, str], code: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ScanError) as caught:
        read_model(several(tmp_path), options)

    assert caught.value.code == code
    assert message in caught.value.detail


def test_a_model_by_its_own_folder_is_chosen_already(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "Dataset042_Organs")

    with pytest.raises(ScanError, match="this is one"):
        read_model(folder, {"dataset": "42"})
    assert read_model(folder, {"configuration": "3d_fullres"})


def test_texts_that_nnunet_never_reads_may_be_numbers_or_missing(tmp_path: Path) -> None:
    texts = {"release": 1.0, "licence": None, "reference": ["A", "B"]}

    card = read(tmp_path, PLANS, {**DATASET, **texts})

    assert (card.version, card.license, card.attribution) == ("1.0", "unknown", "A, B")


def test_a_tensor_of_several_names_is_stored_once(tmp_path: Path) -> None:
    card = read(tmp_path)
    stored = convert_weights(card.weights, tmp_path)

    network = load_network(replace(card, weights=stored), torch.float32).network

    state = torch.load(card.weights.file, weights_only=False)[NNUNET_KEY]
    assert len(read_weights(stored)) == len(list(network.parameters())) < len(state) / 2
    assert all(torch.equal(values, state[name]) for name, values in network.state_dict().items())


def test_all_folds_are_used_or_that_of_all_data(tmp_path: Path) -> None:
    folds = read(tmp_path / "a", folds=("0", "1", "3", "0_old"))
    everything = read(tmp_path / "b", folds=("all",))

    networks = (folds.weights, *folds.folds)
    assert [w.file.parent.name for w in networks] == ["fold_0", "fold_1", "fold_3"]
    assert len({w.sha256 for w in networks}) == 3
    assert everything.folds == ()
    assert everything.weights.file.parent.name == "fold_all"


def test_regions_are_painted_in_their_order(tmp_path: Path) -> None:
    card = read(tmp_path, PLANS, {**DATASET, **REGIONS})

    assert card.decision == Paint(((0, 1), (1, 2), (2, 3)), 2.0**-23, inclusive=False)
    assert card.n_outputs == 3
    names = [s.label for s in card.structures]
    assert names == ["whole_tumor_remainder", "core_remainder", "enhancing_tumor"]


def test_the_ignore_label_is_no_class(tmp_path: Path) -> None:
    labels = {**DATASET["labels"], "ignore": 3}

    card = read(tmp_path, PLANS, {**DATASET, "labels": labels})

    assert card.n_outputs == 3
    assert [s.number for s in card.structures] == [1, 2]


def test_transposed_axes_follow_arrays_with_the_last_axis_first(tmp_path: Path) -> None:
    changed = plans(spacing=[1.5, 1.0, 2.0])
    changed.update(transpose_forward=[2, 0, 1], transpose_backward=[1, 2, 0])

    card = read(tmp_path, changed)

    assert card.grid.order == (0, 2, 1)  # x, z, y
    assert card.grid.spacing == (1.5, 2.0, 1.0)


def test_a_two_dimensional_model_keeps_the_distance_of_slices(tmp_path: Path) -> None:
    architecture = copy.deepcopy(ARCHITECTURE)
    architecture["arch_kwargs"].update(
        conv_op="torch.nn.modules.conv.Conv2d",
        norm_op="torch.nn.modules.instancenorm.InstanceNorm2d",
        kernel_sizes=[[3, 3], [3, 3]],
        strides=[[1, 1], [2, 2]],
    )
    flat = plans(spacing=[1.0, 0.8], patch_size=[16, 24], architecture=architecture)

    card = read(tmp_path, flat, inference_allowed_mirroring_axes=(0, 1))

    assert card.grid.spacing == (0.8, 1.0, None)
    assert (card.window.size, card.window.plane) == ((1, 16, 24), 0)
    assert card.window.mirror == (1, 2)
    assert card.network.args["spatial_dims"] == 2


def test_mirroring_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    assert read(tmp_path / "a", inference_allowed_mirroring_axes=(0, 2)).window.mirror == (0, 2)
    assert read(tmp_path / "b", inference_allowed_mirroring_axes=None).window.mirror == ()


def test_a_reader_that_reorients_gives_ras(tmp_path: Path) -> None:
    card = read(tmp_path, {**PLANS, "image_reader_writer": "NibabelIOWithReorient"})

    assert card.grid.orientation == "RAS"
    assert not card.grid.as_nifti


def test_z_scores_are_of_the_scan_or_of_its_foreground(tmp_path: Path) -> None:
    dataset = {**DATASET, "channel_names": {"0": "T1w", "1": "FLAIR"}}
    schemes = ["ZScoreNormalization", "ZScoreNormalization"]
    changed = plans(normalization_schemes=schemes, use_mask_for_norm=[True, False])
    # of scans without foreground
    changed["foreground_intensity_properties_per_channel"]["0"]["mean"] = math.nan

    card = read(tmp_path, changed, dataset)

    assert [c.modality for c in card.channels] == ["MR", "MR"]
    assert card.channels[0].steps == (Normalize(filled=True, smallest_divisor=1e-8),)
    assert card.channels[1].steps == (Normalize(smallest_divisor=1e-8),)


def test_a_configuration_inherits(tmp_path: Path) -> None:
    changed = copy.deepcopy(PLANS)
    changed["configurations"]["large"] = {"inherits_from": "3d_fullres", "patch_size": [8, 32, 32]}

    card = read(tmp_path, changed, configuration="large")

    assert card.window.size == (8, 32, 32)
    assert card.grid.spacing == (1.0, 1.0, 2.0)


def test_plans_of_the_first_releases_describe_the_same_network(tmp_path: Path) -> None:
    old = plans(
        architecture=None,
        UNet_class_name="PlainConvUNet",
        UNet_base_num_features=4,
        unet_max_num_features=320,
        n_conv_per_stage_encoder=[2, 2],
        n_conv_per_stage_decoder=[1],
        conv_kernel_sizes=[[1, 3, 3], [3, 3, 3]],
        pool_op_kernel_sizes=[[1, 1, 1], [1, 2, 2]],
        num_pool_per_axis=[0, 1, 1],
    )

    assert read(tmp_path / "old", old).network == read(tmp_path / "new").network


def test_a_cascade_has_its_first_stage(tmp_path: Path) -> None:
    changed = copy.deepcopy(PLANS)
    changed["configurations"] = {
        "3d_lowres": {**CONFIGURATION, "spacing": [4.0, 2.0, 2.0]},
        "3d_cascade_fullres": {**CONFIGURATION, "previous_stage": "3d_lowres"},
    }
    write_model(tmp_path, changed, configuration="3d_lowres")
    last = write_model(tmp_path, changed, configuration="3d_cascade_fullres")

    card = read_model(last)

    assert card.stage is not None
    assert card.stage.use == "channels"
    assert card.stage.card.grid.spacing == (2.0, 2.0, 4.0)
    assert card.network.args["in_channels"] == 3
    assert read_model(tmp_path) == card


@pytest.mark.parametrize("count", [300])
def test_hundreds_of_classes_are_read(tmp_path: Path, count: int) -> None:
    labels = {"background": 0, **{f"part {n}": n for n in range(1, count)}}

    card = read(tmp_path, PLANS, {**DATASET, "labels": labels})

    assert card.n_outputs == count
    assert card.label_bytes == 2


def test_the_trainer_stands_in_the_checkpoint_not_in_the_folders_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path, trainer_name="nnUNetTrainer_4000epochs_NoMirroring")
    renamed = folder.rename(tmp_path / "my organs")

    assert read_model(renamed).name == "my_organs"
    assert json.loads((renamed / "plans.json").read_text())["plans_name"] == "nnUNetPlans"


def _nnunets_function() -> None:
    """Stand for nnU-Net's function; only its name is pickled."""


def _write_postprocessing(folder: Path, numbers: Any) -> None:
    name = "remove_all_but_largest_component_from_segmentation"
    module = "nnunetv2.postprocessing.remove_connected_components"
    _nnunets_function.__module__, _nnunets_function.__qualname__ = module, name
    planted = types.ModuleType(module)
    setattr(planted, name, _nnunets_function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nnunetv2", types.ModuleType("nnunetv2"))
        patch.setitem(
            sys.modules, "nnunetv2.postprocessing", types.ModuleType("nnunetv2.postprocessing")
        )
        patch.setitem(sys.modules, module, planted)
        content = pickle.dumps(([_nnunets_function], [{"labels_or_regions": numbers}]))
    (folder / "crossval_results_folds_0").mkdir()
    (folder / "crossval_results_folds_0" / "postprocessing.pkl").write_bytes(content)


@pytest.mark.parametrize(
    ("numbers", "expected"), [(np.int64(2), (2,)), ((1, 2), (1, 2)), ([1, (2,)], (1, 2))]
)
def test_postprocessing_is_applied_on_request(
    numbers: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_model(tmp_path)
    _write_postprocessing(folder, numbers)

    cleaned = read_model(folder, {"postprocessing": "yes"})

    assert read_model(folder).cleaning == ()
    assert cleaned.cleaning == (KeepLargest(expected, together=True, connectivity=26, ties="all"),)


def test_postprocessing_that_names_code_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "postprocessing.pkl").write_bytes(pickle.dumps(([print], [{}])))

    with pytest.raises(ScanError, match=r"MODEL_UNSAFE.*builtins\.print"):
        read_model(folder, {"postprocessing": "yes"})


def test_folds_and_configurations_can_be_chosen(tmp_path: Path) -> None:
    changed = copy.deepcopy(PLANS)
    changed["configurations"]["coarse"] = {**CONFIGURATION, "spacing": [4.0, 2.0, 2.0]}
    folder = write_model(tmp_path, changed, folds=("0", "1", "2"))
    write_model(tmp_path, changed, configuration="coarse")

    first = read_model(folder, {"folds": "1+2"})
    coarse = read_model(tmp_path, {"configuration": "coarse"})

    assert [w.file.parent.name for w in (first.weights, *first.folds)] == ["fold_1", "fold_2"]
    assert coarse.grid.spacing == (2.0, 2.0, 4.0)
    with pytest.raises(ScanError, match="choose one by NAME:configuration="):
        read_model(tmp_path)
    with pytest.raises(ScanError, match="no fold_7; the model has fold_0, fold_1, fold_2"):
        read_model(folder, {"folds": "7"})
    with pytest.raises(ScanError, match="MODEL_UNKNOWN"):
        read_model(folder, {"colour": "red"})
