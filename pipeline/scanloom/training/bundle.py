"""Write a recipe as a MONAI bundle that trains, evaluates and segments by MONAI's own commands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scanloom.convert.monai.config import MIRRORED_MEAN
from scanloom.training.cases import Split
from scanloom.training.recipe import TrainingRecipe

TRANSFORMS: Final = "scanloom.training.transforms"
HANDLERS: Final = "scanloom.training.handlers"
AXES: Final = ("left-right", "anterior-posterior", "superior-inferior")
"""Axes of the network grid, RAS."""
CENTRES: Final = 10_000
"""Voxels of each class, evenly spread, around which patches may lie: eight bytes each in memory."""
BOTH: Final = ["image", "label"]
Json = dict[str, Any]


def write_bundle(
    recipe: TrainingRecipe,
    cases: Mapping[Split, Sequence[Mapping[str, str]]],
    root: Path,
    folder: Path,
    content: str = "",
) -> None:
    """Write the configs of a bundle.

    Parameters
    ----------
    cases : mapping
        `training`, `validation` and `testing`: pairs of `image` and `label`, relative to `root`.
    root : Path
        Folder of the data.
    folder : Path
        The bundle; files that it has are replaced.
    content : str
        SHA-256 of the data, if it is known; it stands in the list of the cases.
    """
    configs = folder / "configs"
    configs.mkdir(parents=True, exist_ok=True)
    datalist: Json = dict(cases.items())
    # as nnU-Net has them in `dataset.json`: an evaluation compares by these names
    datalist["labels"] = {each.label: list(each.values) for each in recipe.structures}
    if content:
        datalist["content"] = content
    documents = {
        "train.json": train_config(recipe, root, len(cases["training"])),
        "multi_gpu_train.json": multi_gpu_config(),
        "evaluate.json": evaluate_config(),
        "inference.json": inference_config(recipe),
        "metadata.json": metadata(recipe),
        "datalist.json": datalist,
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=4) + "\n"
        draft = configs / f".{name}.part"
        draft.write_text(text, encoding="utf-8")
        draft.replace(configs / name)


def _step(name: str, keys: str | list[str], **args: Any) -> Json:
    return {"_target_": name, "keys": keys, **args}


def network_def(recipe: TrainingRecipe) -> Json:
    """Return the network's part of a config."""
    strides = [list(stride) for stride in recipe.strides]
    network = {
        "_target_": "DynUNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": len(recipe.structures) + 1,
        "kernel_size": [3] * len(strides),
        "strides": strides,
        "upsample_kernel_size": strides[1:],
        "filters": list(recipe.network.filters),
        "norm_name": ["INSTANCE", {"affine": True}],
        "act_name": ["LEAKYRELU", {"inplace": True, "negative_slope": 0.01}],
    }
    if recipe.network.dropout:
        network["dropout"] = recipe.network.dropout
    return network


def preprocessing(recipe: TrainingRecipe, keys: str | list[str]) -> list[Json]:
    """Return the transforms that training and inference share, of the image or of both."""
    both = isinstance(keys, list)
    # MONAI's reader takes NIfTI files without its optional packages, scanloom's all formats; but
    # inference must not need scanloom
    loading = (
        [_step(f"{TRANSFORMS}.LoadVolumed", keys, modality=recipe.modality)]
        if both
        else [_step("LoadImaged", keys), _step("EnsureChannelFirstd", keys)]
    )
    return [
        *loading,
        _step("Orientationd", keys, axcodes="RAS", labels=[["L", "R"], ["P", "A"], ["I", "S"]]),
        _step(
            "Spacingd",
            keys,
            pixdim=list(recipe.spacing),
            mode=["bilinear", "nearest"] if both else "bilinear",
        ),
        _intensity(recipe),
    ]


def _intensity(recipe: TrainingRecipe) -> Json:
    if isinstance(recipe.intensity, str):
        return _step("NormalizeIntensityd", "image")
    low, high = recipe.intensity
    limits = {"a_min": low, "a_max": high, "b_min": -1.0, "b_max": 1.0}
    return _step("ScaleIntensityRanged", "image", **limits, clip=True)


def _foreground() -> list[Json]:
    """Return the crop to what is above the mean, which is 0 after z-score, and its own z-score."""
    crop = {"source_key": "image", "margin": 0, "allow_smaller": True}
    return [_step("CropForegroundd", "image", **crop), _step("NormalizeIntensityd", "image")]


def _labels(recipe: TrainingRecipe) -> Json:
    """Return the transform of the numbers in label maps to the channels of the network."""
    pairs = [
        (value, number)
        for number, structure in enumerate(recipe.structures, 1)
        for value in structure.values
    ]
    return _step(
        "MapLabelValued",
        "label",
        orig_labels=[value for value, _ in pairs],
        target_labels=[number for _, number in pairs],
        dtype="$np.uint8",
    )


def augmentation(recipe: TrainingRecipe) -> list[Json]:
    """Return the random transforms, which begin with that of the geometry."""
    chosen = recipe.augmentation
    steps = [
        _step(
            f"{TRANSFORMS}.RandDeformedPatchd",
            BOTH,
            modes=["bilinear", "nearest"],
            size=list(recipe.patch),
            spacing=list(recipe.spacing),
            prob=chosen.deform,
            rotate=chosen.rotate,
            scale=chosen.scale,
            elastic=chosen.elastic,
            centre_key="label_cls_indices",
        )
    ]
    steps += _mirroring(recipe)
    # sizes as nnU-Net draws them
    image: list[tuple[str, float, Json]] = [
        ("RandGaussianNoised", chosen.noise, {"std": 0.1}),
        (
            "RandGaussianSmoothd",
            chosen.blur,
            {f"sigma_{axis}": [0.5, 1.0] for axis in "xyz"},
        ),
        ("RandScaleIntensityd", chosen.brightness, {"factors": 0.25}),
        ("RandShiftIntensityd", chosen.brightness, {"offsets": 0.1}),
        ("RandBiasFieldd", chosen.bias, {"coeff_range": [-0.1, 0.1]}),
        (
            "RandSimulateLowResolutiond",
            chosen.low_resolution,
            {"zoom_range": [0.5, 1.0], "align_corners": None},
        ),
        ("RandAdjustContrastd", chosen.gamma, {"gamma": [0.7, 1.5], "retain_stats": True}),
    ]
    steps += [_step(name, "image", prob=prob, **args) for name, prob, args in image if prob]
    return steps


def _mirroring(recipe: TrainingRecipe) -> list[Json]:
    numbers = {structure.label: n for n, structure in enumerate(recipe.structures, 1)}
    pairs = [[numbers[left], numbers[right]] for left, right in recipe.sides]
    axes = [AXES.index(axis) for axis in recipe.augmentation.mirror]
    return [_step(f"{TRANSFORMS}.RandMirrord", BOTH, axes=axes, pairs=pairs)] if axes else []


def drawing(recipe: TrainingRecipe) -> tuple[list[Json], list[Json]]:
    """Return the transforms of label maps alone: those whose results are kept, and random ones."""
    numbers = {value: n for n, each in enumerate(recipe.structures, 1) for value in each.values}
    structures = [numbers.get(value, 0) for value in recipe.drawn_values]
    return _map_loading(recipe, structures), _image_drawing(recipe, structures)


def _map_loading(recipe: TrainingRecipe, structures: Sequence[int]) -> list[Json]:
    """Return the transforms of a map to drawn values from 0, and to voxels for patches' centres.

    `structures` are the network's channels of the drawn values.
    """
    spacing, places = [recipe.drawing.map_spacing] * 3, list(range(len(structures)))
    return [
        _step(f"{TRANSFORMS}.LoadVolumed", "label", modality=recipe.modality),
        _step("Orientationd", "label", axcodes="RAS", labels=[["L", "R"], ["P", "A"], ["I", "S"]]),
        _step("Spacingd", "label", pixdim=spacing, mode="nearest"),
        _step(
            "MapLabelValued",
            "label",
            orig_labels=list(recipe.drawn_values),
            target_labels=places,
            dtype="$np.uint8",
        ),
        _step("CropForegroundd", "label", source_key="label", allow_smaller=False),
        # processes that draw for this one have no device of their own
        _step(
            "EnsureTyped",
            "label",
            track_meta=False,
            device="@device" if recipe.schedule.workers == 0 else None,
        ),
        _step("CopyItemsd", "label", names="structure"),
        _step(
            "MapLabelValued",
            "structure",
            orig_labels=places,
            target_labels=list(structures),
            dtype="$np.uint8",
        ),
        _step(
            "ClassesToIndicesd",
            "structure",
            num_classes=len(recipe.structures) + 1,
            max_samples_per_class=CENTRES,
        ),
        _step("SelectItemsd", ["label", "structure_cls_indices"]),
    ]


def _image_drawing(recipe: TrainingRecipe, structures: Sequence[int]) -> list[Json]:
    """Return the random transforms of such a map to a patch of an image and of its labels."""
    page, chosen = recipe.drawing, recipe.augmentation
    # values of one group look alike: each group is a class with intensities of its own
    groups = {value: group for group in page.alike for value in group}
    group_of = [groups.get(value, (value,)) for value in recipe.drawn_values]
    classes = list(dict.fromkeys(group_of))
    tissues = {value: n for n, group in enumerate(page.tissues) for value in group}
    return [
        _step(
            f"{TRANSFORMS}.RandDrawnPatchd",
            "label",
            structures=list(structures),
            classes=[classes.index(group) for group in group_of],
            tissues=[tissues.get(group[0], -1) for group in classes],
            strip=page.strip,
            size=list(recipe.patch),
            spacing=list(recipe.spacing),
            scan_spacing=[page.map_spacing] * 3,
            prob=chosen.deform,
            rotate=chosen.rotate,
            scale=chosen.scale,
            elastic=chosen.elastic,
            centre_key="structure_cls_indices",
            centred=page.centred,
        ),
        _step(f"{TRANSFORMS}.RandBiasd", "image", largest=page.bias),
        _step(
            f"{TRANSFORMS}.RandAcquisitiond",
            "image",
            spacing=list(recipe.spacing),
            largest_voxel=page.largest_voxel,
            largest_slice=page.largest_slice,
            noise=page.noise,
        ),
        _step(f"{TRANSFORMS}.RandGammad", "image", prob=chosen.gamma, gamma=[0.6, 1.6]),
        *_mirroring(recipe),
        # the same as in inference, but that the host does not wait for a device
        (
            _step(f"{TRANSFORMS}.ZScored", "image")
            if isinstance(recipe.intensity, str)
            else _intensity(recipe)
        ),
        _step(f"{TRANSFORMS}.RandFieldOfViewd", BOTH, prob=page.partial, smallest=0.6),
    ]


def _weights(recipe: TrainingRecipe) -> Json:
    """Return the loss's weights of Dice, background and structures, unless all are 1."""
    plan = recipe.schedule
    chosen: Json = {} if plan.dice == 1.0 else {"lambda_dice": plan.dice}
    weights = [plan.background, *(each.weight for each in recipe.structures)]
    if any(weight != 1.0 for weight in weights):
        chosen["weight"] = f"$torch.tensor({weights}, device=@device)"
    return chosen


def epoch_length(recipe: TrainingRecipe, count: int) -> int:
    """Return the steps of an epoch with a number of cases.

    Checkpoints are written at its end: not after fewer than 50 steps, which may last seconds.
    """
    plan = recipe.schedule
    return min(plan.steps, plan.epoch or max(50, math.ceil(count / plan.batch)))


def train_config(recipe: TrainingRecipe, root: Path, count: int) -> Json:
    """Return `train.json`, for `count` cases for training in the folder `root`."""
    return {
        **_run_values(recipe, root, count),
        **_learning(recipe),
        **_data(recipe),
        "evaluator": _evaluator(recipe),
        **_trainer(recipe),
        "initialize": [
            "$monai.utils.set_determinism(seed=@seed)",
            "$os.makedirs(@bundle_root + '/models', exist_ok=True)",
        ],
        # checkpoints after all else at the end of an epoch, so that they hold its whole effect
        "run": [
            "$@loader and @loader.attach(@trainer)",
            "$@saver and @saver.attach(@trainer)",
            "$@old_checkpoints and @old_checkpoints.attach(@trainer)",
            "$@record.attach(@trainer)",
            "$@trainer.run()",
            # half a file must not look like a model
            "$@first and monai.networks.save_state(@averaged_network, @model + '.part')",
            "$@first and os.replace(@model + '.part', @model)",
        ],
    }


def _run_values(recipe: TrainingRecipe, root: Path, count: int) -> Json:
    """Return what a run may be given on its command line, and the paths that follow from it."""
    plan = recipe.schedule
    return {
        "imports": [
            "$import json",
            "$import os",
            "$import pathlib",
            f"$from {HANDLERS} import last_checkpoint",
            "$from scanloom.training.network import prepare_network",
        ],
        "bundle_root": ".",
        "data_root": str(root),
        "datalist": "$json.loads(pathlib.Path(@bundle_root, 'configs/datalist.json').read_text())",
        **{
            f"{split}_cases": "$[{k: str(pathlib.Path(@data_root, v)) for k, v in case.items()}"
            f" for case in @datalist['{split}']]"
            for split in ("training", "validation")
        },
        "checkpoints": "$@bundle_root + '/checkpoints'",
        "log_dir": "$@bundle_root + '/logs'",
        "model": "$@bundle_root + '/models/model.pt'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "first": True,
        "seed": plan.seed,
        "steps": plan.steps,
        "batch": plan.batch,
        "epoch_length": epoch_length(recipe, count),
        "epochs": "$-(-@steps // @epoch_length)",
        "precision": plan.precision,
    }


def _learning(recipe: TrainingRecipe) -> Json:
    """Return network, loss, and how weights change and are averaged."""
    plan = recipe.schedule
    return {
        "network_def": network_def(recipe),
        "start": recipe.network.start,
        "plain_network": "$prepare_network(@network_def, @device, @start)",
        "network": "@plain_network",
        "loss": {
            "_target_": "DiceCELoss",
            "include_background": False,
            "to_onehot_y": True,
            "softmax": True,
            "smooth_nr": 1e-5,
            "smooth_dr": 1e-5,
            **_weights(recipe),
        },
        "optimizer": {
            "_target_": "torch.optim.AdamW",
            "params": "$@plain_network.parameters()",
            "lr": plan.learning_rate,
            "weight_decay": plan.weight_decay,
        },
        "lr_scheduler": {
            "_target_": "monai.optimizers.WarmupCosineSchedule",
            "optimizer": "@optimizer",
            "warmup_steps": min(plan.warm_up, plan.steps // 2),
            "t_total": "$@epochs * @epoch_length",
            "warmup_multiplier": 0.01,
        },
        "average": {
            "_target_": "ignite.handlers.EMAHandler",
            "model": "@plain_network",
            # so that the random weights of the start leave the average of a short training too
            "momentum": max(plan.average, min(0.5, 10 / plan.steps)),
        },
        "averaged_network": "$@average.ema_model",
    }


def _data(recipe: TrainingRecipe) -> Json:
    """Return transforms, datasets and loaders."""
    if recipe.data.label_maps is None:
        loading = [*preprocessing(recipe, BOTH), _labels(recipe)]
        validation = [*loading, _step("EnsureTyped", BOTH)]
        validation_dataset: Json = {
            "_target_": "CacheDataset",
            "data": "@validation_cases",
            "transform": "@validation_preprocessing",
        }
        training = [
            *loading,
            _step("EnsureTyped", BOTH, track_meta=False),
            _step(
                "ClassesToIndicesd",
                "label",
                num_classes=len(recipe.structures) + 1,
                max_samples_per_class=CENTRES,
            ),
            *augmentation(recipe),
            _step("SelectItemsd", BOTH),
        ]
    else:
        kept, random = drawing(recipe)
        training = validation = [*kept, *random, _step("SelectItemsd", BOTH)]
        # its epoch stays 1, so that its images are the same ones in every validation
        validation_dataset = {
            "_target_": f"{TRANSFORMS}.SeededDataset",
            "data": "@validation_cases",
            "transform": "@validation_preprocessing",
            "seed": "$@seed + 1",
            "patches": f"${recipe.drawing.validation_images} if @validation_cases else 0",
            "copy_cache": False,
        }
    return {
        "train_preprocessing": {"_target_": "Compose", "transforms": training},
        "train_dataset": {
            "_target_": f"{TRANSFORMS}.SeededDataset",
            "data": "@training_cases",
            "transform": "@train_preprocessing",
            "seed": "@seed",
            "patches": "$@epoch_length * @batch * @processes",
            "num_workers": 1,
            "copy_cache": False,
            "progress": False,
        },
        "processes": 1,
        "train_sampler": {
            "_target_": "torch.utils.data.distributed.DistributedSampler",
            "dataset": "@train_dataset",
            "num_replicas": "@processes",
            "rank": 0,
            "shuffle": False,
        },
        "train_loader": {
            "_target_": "DataLoader",
            "dataset": "@train_dataset",
            "batch_size": "@batch",
            "sampler": "@train_sampler",
            "num_workers": recipe.schedule.workers,
        },
        "validation_preprocessing": {"_target_": "Compose", "transforms": validation},
        "validation_dataset": {**validation_dataset, "num_workers": 1, "progress": False},
        "validation_loader": {
            "_target_": "DataLoader",
            "dataset": "@validation_dataset",
            "batch_size": 1,
            "num_workers": 0,
        },
    }


def _evaluator(recipe: TrainingRecipe) -> Json:
    """Return the engine that validates."""
    return {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@validation_loader",
        "network": "@averaged_network",
        "inferer": inferer(recipe),
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                _step(
                    "AsDiscreted",
                    ["pred", "label"],
                    argmax=[True, False],
                    to_onehot=len(recipe.structures) + 1,
                )
            ],
        },
        "key_val_metric": {
            "val_mean_dice": {
                "_target_": "MeanDice",
                "include_background": False,
                "output_transform": "$monai.handlers.from_engine(['pred', 'label'])",
            }
        },
        "val_handlers": [
            {
                "_target_": "TensorBoardStatsHandler",
                "log_dir": "@log_dir",
                "iteration_log": False,
            },
        ],
    }


def _trainer(recipe: TrainingRecipe) -> Json:
    """Return the engine that trains, with its checkpoints and records."""
    state = {
        "network": "@plain_network",
        "average": "@averaged_network",
        "optimizer": "@optimizer",
        "lr_scheduler": "@lr_scheduler",
        "trainer": "@trainer",
    }
    every = recipe.schedule.validate_every
    handlers: list[Any] = [
        {
            "_target_": f"{HANDLERS}.EpochSeed",
            "dataset": "@train_dataset",
            "seed": "@seed",
        },
        {
            "_target_": "LrScheduleHandler",
            "lr_scheduler": "@lr_scheduler",
            "print_lr": False,
            "epoch_level": False,
        },
        "@average",
        {
            "_target_": "ValidationHandler",
            "validator": "@evaluator",
            "interval": every,
            "_disabled_": "$not @validation_cases",
        },
        {  # the weights that are kept
            "_target_": "ValidationHandler",
            "validator": "@evaluator",
            "interval": "@epochs",
            "_disabled_": f"$not @validation_cases or @epochs % {every} == 0",
        },
        {
            "_target_": "TensorBoardStatsHandler",
            "log_dir": "@log_dir",
            "tag_name": "train_loss",
            # of each tenth step, since the host waits for the device's loss
            "iteration_log": "$lambda engine, step: step % 10 == 1",
            "output_transform": "$lambda output: output['loss'].item()",
            "_disabled_": "$not @first",
        },
    ]
    return {
        "trainer": {
            "_target_": "SupervisedTrainer",
            "max_epochs": "@epochs",
            "device": "@device",
            "train_data_loader": "@train_loader",
            "network": "@network",
            "optimizer": "@optimizer",
            "loss_function": "@loss",
            "inferer": {"_target_": f"{TRANSFORMS}.AutocastInferer", "precision": "@precision"},
            "decollate": False,
            "train_handlers": handlers,
        },
        "saver": {
            "_target_": "CheckpointSaver",
            "save_dir": "@checkpoints",
            "save_dict": state,
            "save_interval": 1,
            "n_saved": 2,
            "_disabled_": "$not @first",
        },
        "old_checkpoints": {
            "_target_": f"{HANDLERS}.OldCheckpoints",
            "folder": "@checkpoints",
            "_disabled_": "$not @first",
        },
        "checkpoint": "$last_checkpoint(@checkpoints)",
        "loader": {
            "_target_": "CheckpointLoader",
            "load_path": "@checkpoint",
            "load_dict": state,
            "map_location": "@device",
            "_disabled_": "$@checkpoint is None",
        },
        "record": {
            "_target_": f"{HANDLERS}.TrainingRecord",
            "folder": "$@bundle_root + '/docs'",
            "epochs": "@epochs",
            "evaluator": "@evaluator",
            "optimizer": "@optimizer",
            "spacing": list(recipe.spacing),
        },
    }


def multi_gpu_config() -> Json:
    """Return `multi_gpu_train.json`, which is merged into `train.json` under torchrun."""
    return {
        "+imports": ["$import ignite.distributed as idist"],
        "device": "$torch.device('cuda:' + os.environ['LOCAL_RANK']"
        " if torch.cuda.is_available() else 'cpu')",
        "first": "$torch.distributed.get_rank() == 0",
        "processes": "$torch.distributed.get_world_size()",
        "network": {
            "_target_": "torch.nn.parallel.DistributedDataParallel",
            "module": "@plain_network",
            "device_ids": "$[@device] if @device.type == 'cuda' else None",
        },
        "train_sampler#rank": "$torch.distributed.get_rank()",
        "initialize": [
            "$torch.distributed.init_process_group("
            "'nccl' if torch.cuda.is_available() else 'gloo')",
            # else Ignite makes a group of its own when a process first asks it for its rank, which
            # the first one does earlier than the others: both would wait for ever
            "$idist.sync()",
            "$torch.cuda.set_device(@device) if @device.type == 'cuda' else None",
            "$monai.utils.set_determinism(seed=@seed)",
            "$os.makedirs(@bundle_root + '/models', exist_ok=True)",
        ],
        "finalize": ["$torch.distributed.destroy_process_group()"],
    }


def inferer(recipe: TrainingRecipe) -> Json:
    """Return the sliding window of inference and validation."""
    return {
        "_target_": "SlidingWindowInferer",
        "roi_size": list(recipe.patch),
        "sw_batch_size": 1,
        "overlap": 0.5,
        "mode": "gaussian",
    }


def _inference_inferer(recipe: TrainingRecipe) -> Json:
    """Return the entries of the inferer of `inference.json`."""
    if not recipe.mirrored_mean:
        return {"inferer": inferer(recipe)}
    labels = ["", *(structure.label for structure in recipe.structures)]
    other = dict(recipe.sides) | {right: left for left, right in recipe.sides}
    return {
        "sliding_window": inferer(recipe),
        "mirrored_channels": [labels.index(other.get(label, label)) for label in labels],
        "inferer": f"${MIRRORED_MEAN}(@sliding_window, @mirrored_channels)",
    }


def evaluate_config() -> Json:
    """Return `evaluate.json`, merged into `train.json`: the trained model on the validation."""
    return {
        "averaged_network": "@plain_network",
        "evaluation_loader": {
            "_target_": "CheckpointLoader",
            "load_path": "@model",
            "load_dict": {"model": "@plain_network"},
            "map_location": "@device",
        },
        "initialize": ["$monai.utils.set_determinism(seed=@seed)"],
        "run": ["$@evaluation_loader.attach(@evaluator)", "$@evaluator.run()"],
    }


def inference_config(recipe: TrainingRecipe) -> Json:
    """Return `inference.json`, which scanloom reads and MONAI runs."""
    largest = _step("KeepLargestConnectedComponentd", "pred", independent=False)
    return {
        "bundle_root": ".",
        "output_dir": "$@bundle_root + '/output'",
        "datalist": [],
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": network_def(recipe),
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                *preprocessing(recipe, "image"),
                *(_foreground() if recipe.foreground else []),
                _step("EnsureTyped", "image"),
            ],
        },
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': i} for i in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {
            "_target_": "DataLoader",
            "dataset": "@dataset",
            "batch_size": 1,
            "shuffle": False,
            "num_workers": 0,
        },
        **_inference_inferer(recipe),
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                _step("Activationsd", "pred", softmax=True),
                _step(
                    "Invertd",
                    "pred",
                    transform="@preprocessing",
                    orig_keys="image",
                    nearest_interp=False,
                    to_tensor=True,
                ),
                _step("AsDiscreted", "pred", argmax=True),
                *([largest] if recipe.largest_component else []),
                _step(
                    "SaveImaged",
                    "pred",
                    output_dir="@output_dir",
                    output_postfix="seg",
                    output_dtype="$np.uint8",
                    separate_folder=False,
                    resample=False,
                ),
            ],
        },
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
                "map_location": "@device",
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "run": ["$@evaluator.run()"],
    }


def metadata(recipe: TrainingRecipe) -> Json:
    """Return `metadata.json` with MONAI's fields and the entry of scanloom."""
    import monai
    import numpy as np
    import torch

    channels = {"0": "background"} | {
        str(n): structure.label for n, structure in enumerate(recipe.structures, 1)
    }
    tensor = {
        "type": "image",
        "spatial_shape": list(recipe.patch),
        "dtype": "float32",
        "is_patch_data": True,
    }
    said = ("limitations", "reference_ranges", "reference_directions")
    page = recipe.model_dump(mode="json", include={*said})
    structures = {
        structure.label: structure.model_dump(
            exclude={"label", "values", "weight"}, exclude_none=True
        )
        for structure in recipe.structures
    }
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
        "meta_schema_20220324.json",
        "version": recipe.version,
        "changelog": {recipe.version: "Trained by scanloom train"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {
            "nibabel": "5.3.0",
            "pytorch-ignite": "0.5.0",
            # with which MONAI finds components
            **({"scikit-image": "0.24.0"} if recipe.largest_component else {}),
        },
        "name": recipe.title or recipe.name,
        "task": "Segmentation",
        "description": recipe.description,
        "intended_use": recipe.intended_use,
        "authors": recipe.authors,
        "copyright": recipe.attribution,
        "license": recipe.license,
        "data_type": "nifti",
        "network_data_format": {
            "inputs": {
                "image": {
                    **tensor,
                    "format": "hounsfield" if recipe.modality == "CT" else "magnitude",
                    "modality": recipe.modality,
                    "num_channels": 1,
                    "value_range": [],
                    "channel_def": {"0": "image"},
                }
            },
            "outputs": {
                "pred": {
                    **tensor,
                    "format": "segmentation",
                    "num_channels": len(channels),
                    "value_range": [0, 1],
                    "channel_def": channels,
                }
            },
        },
        "scanloom": {
            **{key: page[key] for key in said},
            "license": recipe.license,
            "attribution": recipe.attribution,
            "precisions": ["float32"],  # labels of others were not compared
            "checks": recipe.checks.model_dump(mode="json", exclude_none=True),
            "structures": structures,
        },
    }
