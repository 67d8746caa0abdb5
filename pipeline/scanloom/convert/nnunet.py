"""Read a model folder of nnU-Net v2 as a `ModelCard`: its files are data."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from scanloom.cards import card
from scanloom.cards.codes import coded_structure, color_by_code
from scanloom.convert.files import (
    NO_OPTIONS,
    damaged,
    find_file,
    read_bytes,
    read_json,
    truncate,
    unsafe,
    unsupported,
)
from scanloom.convert.monai.metadata import Text, modality_of, parse
from scanloom.convert.weights import NNUNET_KEY, find_weights, load_torch
from scanloom.core import Flag, Reason, ScanError, Structure, counted, slug

MAX_CHAIN: Final = 20
"""Most configurations of which one inherits; nnU-Net's have one or two."""
_DEFAULT_RESAMPLING: Final = "resample_data_or_seg_to_shape"
_NO_RESAMPLING: Final = "no_resampling_hack"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=65535)]
Axis = Annotated[int, Field(ge=0, le=2)]

_NETWORKS: Final = ("PlainConvUNet", "ResidualEncoderUNet")
_ACTIVATIONS: Final = {"LeakyReLU": 0.01, "ReLU": 0.0}
"""Activations, with their default negative slope."""
_NORMS: Final = {"InstanceNorm": "instance", "BatchNorm": "batch"}
MAX_STAGES: Final = 12
"""Most stages of a network; nnU-Net plans at most 8."""
Sizes = Count | tuple[Count, ...]
PerStage = Annotated[tuple[Sizes, ...], Field(max_length=MAX_STAGES)]


class Fields(BaseModel):
    """Entries of a JSON file of nnU-Net; further ones are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Intensity(Fields):
    """Intensities of a channel in the foreground of the training data."""

    mean: Finite
    std: Finite
    percentile_00_5: Finite
    percentile_99_5: Finite


class Resampling(Fields):
    """Arguments of nnU-Net's resampling."""

    is_seg: bool = False
    order: Annotated[int, Field(ge=0, le=5)] = 3
    order_z: Annotated[int, Field(ge=0, le=5)] = 0
    force_separate_z: bool | None = False
    separate_z_anisotropy_threshold: Positive = 3.0

    @property
    def separate_above(self) -> float | None:
        """Anisotropy above which slices are resampled one by one; None for never."""
        return self.separate_z_anisotropy_threshold if self.force_separate_z is None else None


class Architecture(Fields):
    """Network class and its arguments."""

    network_class_name: str
    arch_kwargs: dict[str, Any]


class Configuration(Fields):
    """A configuration: "2d", "3d_fullres", "3d_lowres", "3d_cascade_fullres" or another name."""

    spacing: Annotated[tuple[Positive, ...], Field(min_length=2, max_length=3)]
    patch_size: Annotated[tuple[Count, ...], Field(min_length=2, max_length=3)]
    normalization_schemes: tuple[str, ...]
    use_mask_for_norm: tuple[bool, ...]
    preprocessor_name: str = "DefaultPreprocessor"
    resampling_fn_data: str = _DEFAULT_RESAMPLING
    resampling_fn_data_kwargs: Resampling = Resampling()
    resampling_fn_seg: str = _DEFAULT_RESAMPLING
    resampling_fn_seg_kwargs: Resampling = Resampling(is_seg=True)
    resampling_fn_probabilities: str = _DEFAULT_RESAMPLING
    resampling_fn_probabilities_kwargs: Resampling = Resampling()
    architecture: Architecture | None = None
    previous_stage: str | None = None
    # Plans of the first releases, which have no `architecture`
    UNet_class_name: str | None = None
    UNet_base_num_features: Count = 32
    unet_max_num_features: Count = 320
    n_conv_per_stage_encoder: tuple[Count, ...] = ()
    n_conv_per_stage_decoder: tuple[Count, ...] = ()
    conv_kernel_sizes: tuple[tuple[Count, ...], ...] = ()
    pool_op_kernel_sizes: tuple[tuple[Count, ...], ...] = ()

    @property
    def resampled(self) -> bool:
        """Whether scans are resampled to `spacing`."""
        return self.resampling_fn_data != _NO_RESAMPLING


class Plans(Fields):
    """`plans.json`."""

    dataset_name: str = ""
    plans_name: str = ""
    image_reader_writer: str
    transpose_forward: tuple[Axis, Axis, Axis]
    transpose_backward: tuple[Axis, Axis, Axis]
    label_manager: str = "LabelManager"
    # as `Intensity`; of channels without foreground they are NaN, and then seldom needed
    foreground_intensity_properties_per_channel: dict[str, Any] = {}
    foreground_intensity_properties_by_modality: dict[str, Any] = {}
    configurations: dict[str, dict[str, Any]]

    @property
    def intensities(self) -> Mapping[str, Any]:
        """Intensities of each channel, by its index as text."""
        return (
            self.foreground_intensity_properties_per_channel
            or self.foreground_intensity_properties_by_modality
        )


def read_plans(folder: Path) -> Plans:
    """Read `plans.json` of a model.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is missing or an entry is missing or invalid; MODEL_UNSUPPORTED if
        labels are handled by a class other than nnU-Net's own.
    """
    plans = parse(Plans, read_json(folder, "plans.json"), "plans.json")
    for order in (plans.transpose_forward, plans.transpose_backward):
        if sorted(order) != [0, 1, 2]:
            raise damaged("plans.json: transposition is not an order")
    # nnU-Net transposes labels back by the second: one that is no inverse would turn them
    if any(plans.transpose_backward[plans.transpose_forward[n]] != n for n in range(3)):
        raise damaged("plans.json: transpose_backward does not invert transpose_forward")
    if plans.label_manager != "LabelManager":
        raise unsupported(f"the label manager {truncate(plans.label_manager)!r}")
    return plans


def read_configuration(plans: Plans, name: str) -> Configuration:
    """Return a configuration with the entries that it inherits.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it does not exist, inherits in a circle, or an entry is missing or invalid;
        MODEL_UNSUPPORTED for preprocessing or resampling by other functions than nnU-Net's own.
    """
    chain, entries = [name], dict[str, Any]()
    while True:
        if chain[-1] not in plans.configurations:
            raise damaged(f"plans.json has no configuration {truncate(chain[-1])!r}")
        # entries of a configuration win over those that it inherits
        entries = {**plans.configurations[chain[-1]], **entries}
        parent = plans.configurations[chain[-1]].get("inherits_from")
        if parent is None:
            break
        if parent in chain:
            circle = " -> ".join(truncate(str(link)) for link in (*chain, parent))
            raise damaged(f"configurations inherit in a circle: {circle}")
        chain.append(str(parent))
        if len(chain) > MAX_CHAIN:
            raise damaged(f"a configuration inherits over {MAX_CHAIN} others")
    configuration = parse(Configuration, entries, f"plans.json: {truncate(name)}")
    _check(configuration)
    return configuration


def _check(configuration: Configuration) -> None:
    """Refuse configurations that other functions process than nnU-Net's own."""
    if configuration.preprocessor_name != "DefaultPreprocessor":
        raise unsupported(f"the preprocessor {truncate(configuration.preprocessor_name)!r}")
    if len(configuration.patch_size) != len(configuration.spacing):
        raise damaged("plans.json: patch size and spacing have different dimensions")
    functions = (configuration.resampling_fn_data, configuration.resampling_fn_probabilities)
    for function in (*functions, configuration.resampling_fn_seg):
        if function not in (_DEFAULT_RESAMPLING, _NO_RESAMPLING):
            raise unsupported(f"resampling by {truncate(function)!r}")
    # then scores would have another grid than the labels that nnU-Net writes
    if len(set(functions)) > 1:
        raise unsupported("resampling of scans but not of scores, or the reverse")
    if configuration.resampling_fn_data == _NO_RESAMPLING:
        return  # its arguments are ignored
    data = configuration.resampling_fn_data_kwargs
    scores = configuration.resampling_fn_probabilities_kwargs
    if data.order not in (1, 3) or scores.order != 1:
        detail = f"resampling of scans by order {data.order} and of scores by {scores.order}"
        raise unsupported(detail)
    for kind in (data, scores):
        if kind.is_seg or kind.order_z != 0 or kind.force_separate_z is True:
            raise unsupported("is_seg, order_z or force_separate_z of resampling")
    if data.separate_above != scores.separate_above:
        detail = "separate resampling of slices for scans but not for scores, or the reverse"
        raise unsupported(detail)


class _Known(Fields):
    """Arguments of a network: others are refused, since they may change it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _NormArguments(_Known):
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    affine: bool | None = None
    momentum: float | None = 0.1  # of training
    track_running_stats: bool | None = None


class _ActivationArguments(_Known):
    negative_slope: Finite | None = None
    inplace: bool = False


class _DropoutArguments(_Known):
    p: float = 0.5  # of training
    inplace: bool = False


class _Arguments(_Known):
    """Arguments of both networks, as in dynamic_network_architectures."""

    n_stages: Annotated[int, Field(ge=2, le=MAX_STAGES)]
    features_per_stage: Sizes
    conv_op: str
    kernel_sizes: Count | PerStage
    strides: Count | PerStage
    n_conv_per_stage: Sizes = 0
    n_blocks_per_stage: Sizes = 0
    n_conv_per_stage_decoder: Sizes
    conv_bias: bool = False
    norm_op: str | None = None
    norm_op_kwargs: _NormArguments | None = None
    dropout_op: str | None = None
    dropout_op_kwargs: _DropoutArguments | None = None
    nonlin: str | None = None
    nonlin_kwargs: _ActivationArguments | None = None
    nonlin_first: bool = False
    stem_channels: Count | None = None
    block: None = None
    bottleneck_channels: None = None
    deep_supervision: bool = False  # further outputs, in training only


def describe_network(configuration: Configuration, inputs: int, outputs: int) -> card.NetworkSpec:
    """Return the network of a configuration.

    Parameters
    ----------
    configuration : Configuration
        With `architecture`, or with the entries of plans before it was introduced.

    Raises
    ------
    ScanError
        MODEL_NETWORK if the network, or a layer, is not one of nnU-Net's; MODEL_DAMAGED if an
        argument is missing or invalid.
    """
    architecture = configuration.architecture or _of_old_plans(configuration)
    name = architecture.network_class_name.rpartition(".")[2]
    if name not in _NETWORKS:
        detail = f"the network {truncate(architecture.network_class_name)!r}"
        raise ScanError(Reason.MODEL_NETWORK, f"{detail} is not one of {', '.join(_NETWORKS)}")
    arguments, where = architecture.arch_kwargs, "plans.json: architecture"
    options = parse(_Arguments, arguments, where, Reason.MODEL_NETWORK)
    dimensions: Literal[2, 3] = 3 if len(configuration.patch_size) == 3 else 2
    if options.conv_op.rpartition(".")[2] != f"Conv{dimensions}d":
        detail = f"the convolution {truncate(options.conv_op)!r} of a {dimensions}-D model"
        raise ScanError(Reason.MODEL_NETWORK, detail)
    residual = name == "ResidualEncoderUNet"
    blocks = options.n_blocks_per_stage if residual else options.n_conv_per_stage
    count, norm = options.n_stages, _norm(options.norm_op, dimensions)
    args: dict[str, Any] = {
        "spatial_dims": dimensions,
        "in_channels": inputs,
        "out_channels": outputs,
        "plan": {
            "features": _each(options.features_per_stage, count),
            "kernels": _each_size(options.kernel_sizes, count, dimensions),
            "strides": _each_size(options.strides, count, dimensions),
            "encoder": _each(blocks, count),
            "decoder": _each(options.n_conv_per_stage_decoder, count - 1),
        },
        "layers": {
            "bias": options.conv_bias,
            "norm": norm,
            "norm_args": _norm_arguments(norm, options.norm_op_kwargs or _NormArguments()),
            "slope": _slope(options),
            "dropout": options.dropout_op is not None,
            "activation_first": options.nonlin_first,
        },
    }
    return card.NetworkSpec(name, {**args, "stem": options.stem_channels} if residual else args)


def _of_old_plans(configuration: Configuration) -> Architecture:
    """Return the architecture as plans before `architecture` describe it."""
    name = configuration.UNet_class_name
    if name is None:
        raise damaged("plans.json: architecture is missing")
    stages, dimensions = len(configuration.n_conv_per_stage_encoder), len(configuration.patch_size)
    blocks = "n_conv_per_stage" if name == "PlainConvUNet" else "n_blocks_per_stage"
    first, most = configuration.UNet_base_num_features, configuration.unet_max_num_features
    arguments = {
        "n_stages": stages,
        "features_per_stage": [min(first * 2**n, most) for n in range(stages)],
        "conv_op": f"Conv{dimensions}d",
        "kernel_sizes": configuration.conv_kernel_sizes,
        "strides": configuration.pool_op_kernel_sizes,
        blocks: configuration.n_conv_per_stage_encoder,
        "n_conv_per_stage_decoder": configuration.n_conv_per_stage_decoder,
        "conv_bias": True,
        "norm_op": f"InstanceNorm{dimensions}d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "nonlin": "LeakyReLU",
    }
    return Architecture(network_class_name=name, arch_kwargs=arguments)


def _each(value: Sizes, count: int) -> list[int]:
    """Return a number for each stage; one number stands for all."""
    values = list(value) if isinstance(value, tuple) else [value] * count
    if len(values) != count or not all(values):
        raise damaged(f"plans.json: architecture has {len(values)} numbers for {count} stages")
    return values


def _each_size(value: Count | PerStage, count: int, dimensions: int) -> list[list[int]]:
    """Return a size along each axis for each stage."""
    values = list(value) if isinstance(value, tuple) else [value] * count
    sizes = [list(v) if isinstance(v, tuple) else [v] * dimensions for v in values]
    if len(sizes) != count or any(len(size) != dimensions for size in sizes):
        raise damaged(f"plans.json: kernels or strides are not those of {count} stages")
    return sizes


def _norm(name: str | None, dimensions: int) -> str | None:
    if name is None:
        return None
    last = name.rpartition(".")[2]
    for start, norm in _NORMS.items():
        if last == f"{start}{dimensions}d":
            return norm
    raise ScanError(Reason.MODEL_NETWORK, f"normalisation by {truncate(name)!r} in the network")


def _norm_arguments(norm: str | None, arguments: _NormArguments) -> dict[str, Any]:
    """Return the arguments of a normalisation that matter after training, with torch's defaults."""
    batch = norm == "batch"
    if arguments.track_running_stats not in (None, batch):
        detail = "track_running_stats of the normalisation in the network"
        raise ScanError(Reason.MODEL_NETWORK, detail)
    affine = batch if arguments.affine is None else arguments.affine
    return {"eps": arguments.eps, "affine": affine}


def _slope(options: _Arguments) -> float | None:
    """Return the negative slope of the activation; None without one."""
    if options.nonlin is None:
        return None
    name = options.nonlin.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        detail = f"the activation {truncate(options.nonlin)!r} in the network"
        raise ScanError(Reason.MODEL_NETWORK, detail)
    slope = options.nonlin_kwargs.negative_slope if options.nonlin_kwargs else None
    return _ACTIVATIONS[name] if slope is None or name == "ReLU" else slope


_BEST: Final = "checkpoint_best.pth"
CHECKPOINTS: Final = ("checkpoint_final.pth", _BEST)
_FOLD: Final = re.compile(r"fold_\d+", re.ASCII)
_DATASET: Final = re.compile(r"Dataset\d{3,}_.+")
_CHOICES: Final = ("dataset", "trainer", "plans", "configuration")
"""Options that choose a model, and parts of the names of its folders."""
_LAST_STAGE: Final = "__3d_cascade_fullres"
_CLEANED: Final = ("yes", "no")
_SHOWN_NAMES: Final = 8
_SCORES: Final = re.compile(r"decoder\.seg_layers\.\d+\.bias$", re.ASCII)
"""Names of the layers of nnU-Net's networks that give scores."""
MAX_FOLDS: Final = 100
"""Most folds of a model; nnU-Net trains five."""
_AS_STORED: Final = ("SimpleITKIO", "NibabelIO")
"""Readers that take voxels as a file stores them, whatever their direction."""
_REORIENTED: Final = ("NibabelIOWithReorient", "SimpleITKIOWithReorient")
"""Readers that turn voxels to RAS."""
# of nnU-Net, by which a constant channel is divided
SMALLEST_DIVISOR: Final = 1e-8

MAX_LABELS: Final = 1000
"""Most labels of a model; TotalSegmentator's largest has 118."""
Label = Annotated[int, Field(ge=0, le=65535)]
FILE: Final = "postprocessing.pkl"
_LARGEST: Final = (
    "nnunetv2.postprocessing.remove_connected_components."
    "remove_all_but_largest_component_from_segmentation"
)
_TRAINER: Final = re.compile(
    r"""nnUNetTrainer(_?(
    \d+ep(ochs?)? | Benchmark | noDataLoading
    | NoMirroring | onlyMirror01 | DASegOrd0 | DAOrd0 | DA5((Seg)?ord0)? | NoDA | noDummy2DDA
    | CELoss | DiceLoss | DiceCELoss_noSmooth | DiceTopK10Loss | Topk10Loss(LS01)?
    | SkeletonRecall  # of TotalSegmentator
    | (Vanilla)?Adam | Adan | [13]en[134] | CosAnneal | warmup | NoDeepSupervision
    | MOSAIC_1k_QuarterLR  # of TotalSegmentator: a quarter of the learning rate on other data
    | probabilisticOversampling(_\d+)?
    ))*""",
    re.VERBOSE,
)
"""Trainers that change nothing but length, augmentation, loss, optimiser and sampling."""


def is_nnunet(folder: Path) -> bool:
    """Return whether a folder is a model of nnU-Net v2, or one of datasets with such models."""
    return bool(_models_in(folder))


def read_nnunet(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> card.ModelCard:
    """Read a model of nnU-Net v2.

    Parameters
    ----------
    folder : Path
        Contains `plans.json`, `dataset.json` and `fold_*/checkpoint_final.pth`; or folders with
        these (TRAINER__PLANS__CONFIGURATION); or datasets of such (DatasetNNN_NAME). The first
        stage of a cascade is expected next to it.
    options : mapping
        "dataset" (name or number), "trainer", "plans" and "configuration" choose a model of a
        folder with several; "folds" are numbers of folds, joined by +, or "all" for the one trained
        on all data; "postprocessing=yes" keeps the largest components as nnU-Net's
        `postprocessing.pkl` says.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file or entry is missing or files contradict each other; MODEL_UNSAFE
        if a checkpoint holds more than data, or a file is a link out of the folder; MODEL_NETWORK
        if the network is not one of nnU-Net's; MODEL_UNSUPPORTED if a card can't express the model;
        MODEL_UNKNOWN for another option, or if the folder holds several models.
    """
    folds, cleaned = options.get("folds"), options.get("postprocessing", "no")
    if not {*_CHOICES, "folds", "postprocessing"}.issuperset(options) or cleaned not in _CLEANED:
        listed = ", ".join(_CHOICES)
        detail = f"the options of nnU-Net's models are {listed}, folds, postprocessing=yes"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    if not _is_model(folder):
        folder = _only_model(folder, options)
    elif options.keys() & {"dataset", "trainer", "plans"}:
        detail = "dataset, trainer and plans choose a model of a folder of several; this is one"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    model = _read(folder, (), folds, options.get("configuration"))
    if cleaned == "no":
        return model
    rules = read_cleaning(folder)
    known = {structure.number for structure in model.structures}
    if not all(known.issuperset(rule.numbers) for rule in rules):
        raise damaged("postprocessing.pkl names labels of another model")
    return replace(model, cleaning=rules)


def _is_model(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("plans.json", "dataset.json"))


def _models_in(folder: Path) -> list[Path]:
    """Return the models of a dataset's folder, and of the datasets in a folder; or itself."""
    if _is_model(folder):
        return [folder]
    try:
        datasets = [folder, *datasets_in(folder)]
        return [m for each in datasets for m in sorted(each.glob("*__*__*")) if _is_model(m)]
    except OSError:
        return []


def datasets_in(folder: Path, chosen: str | None = None) -> list[Path]:
    """Return the datasets in a folder; those that an option means, if it is given."""
    entries = sorted(entry for entry in folder.iterdir() if _DATASET.fullmatch(entry.name))
    return [e for e in entries if chosen is None or _is_meant(chosen, e.resolve().name)]


def _only_model(folder: Path, options: Mapping[str, str]) -> Path:
    """Return the model of a folder that the options choose; of a cascade, the last stage."""
    models = {model: _names(model) for model in _models_in(folder)}
    if not models:
        raise damaged(f"{truncate(folder.name)} has no plans.json, or no dataset.json")
    for key in filter(options.__contains__, _CHOICES):
        fitting = {m: names for m, names in models.items() if _is_meant(options[key], names[key])}
        if not fitting:
            detail = f"there is no model with {key}={truncate(options[key])}"
            raise ScanError(Reason.MODEL_UNKNOWN, f"{detail}, but {_listed(models, key)}")
        models = fitting
    chosen, *others = sorted(models, key=lambda model: not model.name.endswith(_LAST_STAGE))
    first_stage = chosen.with_name(chosen.name.removesuffix(_LAST_STAGE) + "__3d_lowres")
    if others in ([], [first_stage]):
        return chosen
    several = [key for key in _CHOICES if len({names[key] for names in models.values()}) > 1]
    example = ",".join(f"{key}={truncate(models[chosen][key])}" for key in several)
    listed = "; ".join(f"{key}: {_listed(models, key)}" for key in several)
    detail = f"there are {len(models)} models: choose one by NAME:{example} ({listed})"
    raise ScanError(Reason.MODEL_UNKNOWN, detail)


def _names(model: Path) -> dict[str, str]:
    """Return the names of a model in its path: DATASET/TRAINER__PLANS__CONFIGURATION."""
    dataset, names = model.resolve().parent.name, model.name.rsplit("__", 2)
    return dict(zip(_CHOICES, (dataset, *names), strict=True))


def _is_meant(chosen: str, name: str) -> bool:
    """Return whether an option means a name; a dataset has a number, too."""
    number = chosen.lstrip("0").zfill(3)
    return chosen == name or (number.isdecimal() and name.startswith(f"Dataset{number}_"))


def _listed(models: Mapping[Path, Mapping[str, str]], key: str) -> str:
    """Return what there is to choose from."""
    names = sorted({truncate(names[key], 60) for names in models.values()})
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"


def _read(
    folder: Path, later: Sequence[str], folds: str | None = None, requested: str | None = None
) -> card.ModelCard:
    """Return the card of a model; `later` are the configurations of the stages after it.

    A model of another configuration than the `requested` one is MODEL_UNKNOWN.
    """
    plans, dataset = read_plans(folder), read_dataset(folder)
    stated = dataset.stated
    weights, checkpoint = _folds(folder, folds)
    if requested not in (None, checkpoint.configuration):
        detail = f"the model's configuration is {truncate(checkpoint.configuration)}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    if len(checkpoint.trainer) > 128 or not _TRAINER.fullmatch(checkpoint.trainer):
        detail = f"the trainer {truncate(checkpoint.trainer)!r}"
        raise unsupported(f"{detail}: its class may change the network or its processing")
    if checkpoint.outputs not in (None, dataset.outputs):
        detail = f"dataset.json describes a network of {counted(dataset.outputs, 'output')}"
        raise damaged(f"{detail}, and that of the checkpoint has {checkpoint.outputs}")
    configuration = read_configuration(plans, checkpoint.configuration)
    stage = _stage(folder, checkpoint, configuration, dataset, later)
    inputs = len(dataset.channels) + (len(dataset.foreground) if stage else 0)
    return card.ModelCard(
        name=_name(folder, plans, checkpoint),
        version=stated.release or weights[0].sha256[:12],
        title=stated.name or plans.dataset_name or truncate(folder.resolve().name),
        description=stated.description,
        intended_use="",
        license=stated.licence or stated.license or "unknown",
        attribution=stated.reference,
        channels=_channels(dataset, plans, configuration),
        network=describe_network(configuration, inputs, dataset.outputs),
        weights=weights[0],
        grid=_grid(plans, configuration),
        window=_window(configuration, checkpoint),
        structures=dataset.structures,
        decision=dataset.decision,
        folds=weights[1:],
        stage=stage,
        flags=(Flag.CHECKPOINT_BEST,) if any(w.file.name == _BEST for w in weights) else (),
    )


def _name(folder: Path, plans: Plans, checkpoint: Checkpoint) -> str:
    """Return the folder's name; dataset and configuration if it is nnU-Net's own kind of name."""
    name = folder.resolve().name
    if name.count("__") == 2 and plans.dataset_name:
        name = f"{plans.dataset_name}_{checkpoint.configuration}"
    return slug(name) or "model"


def _folds(folder: Path, chosen: str | None) -> tuple[tuple[card.Weights, ...], Checkpoint]:
    """Return the weights of the folds, and the description of the first.

    Without a choice, all folds are used; the one trained on all data only if there is no other.
    """
    # not those of copies, such as fold_0_old
    entries = (entry for entry in folder.glob("fold_*") if _FOLD.fullmatch(entry.name))
    folds = sorted(entry.name for entry in entries if entry.is_dir())
    folds = folds or [entry.name for entry in (folder / "fold_all",) if entry.is_dir()]
    if not folds:
        raise damaged("the folder has no fold (fold_0, fold_all)")
    present = ", ".join(folds)
    if chosen is not None:
        folds = [f"fold_{name}" for name in chosen.split("+")]
        if not all(name.isalnum() for name in chosen.split("+")):
            raise ScanError(Reason.MODEL_UNKNOWN, "folds are numbers joined by +, or all")
        if len(set(folds)) < len(folds):
            raise ScanError(Reason.MODEL_UNKNOWN, "a fold is named twice")
    if len(folds) > MAX_FOLDS:
        raise unsupported(f"more than {MAX_FOLDS} folds")
    if lost := [name for name in folds if not (folder / name).is_dir()]:
        detail = f"there is no {truncate(lost[0])}; the model has {present}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    weights, checkpoints = [], []
    for fold in folds:
        files = (find_file(folder, f"{fold}/{name}") for name in CHECKPOINTS)
        file = next((file for file in files if file is not None), None)
        if file is None:
            others = "; NAME:folds=0+1 leaves out folds" if len(folds) > 1 else ""
            raise damaged(f"{truncate(fold)} has no {CHECKPOINTS[0]}{others}")
        checkpoints.append(read_checkpoint(file))  # before its digest, which reads the whole file
        weights.append(find_weights(file, NNUNET_KEY, f"the checkpoint of {fold}"))
    if len({(each.configuration, each.outputs) for each in checkpoints}) > 1:
        raise damaged("the folds are of different configurations, or have different classes")
    return tuple(weights), checkpoints[0]


@dataclass(frozen=True)
class Checkpoint:
    """Description of a model, from an nnU-Net checkpoint.

    Parameters
    ----------
    trainer : str
        Name of the trainer class.
    configuration : str
        Configuration of the plans: "2d", "3d_fullres".
    mirror : tuple of int
        Axes along which mirroring is allowed.
    outputs : int or None
        Channels of the network's output; None for another network than nnU-Net's.
    """

    trainer: str
    configuration: str
    mirror: tuple[int, ...]
    outputs: int | None


def read_checkpoint(file: Path) -> Checkpoint:
    """Return the description of an nnU-Net checkpoint; tensors are not read.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if it contains anything but tensors, numbers, texts and containers;
        MODEL_DAMAGED if it is not a checkpoint of nnU-Net v2.
    """
    content = load_torch(file, "the checkpoint", device="meta")
    if not isinstance(content, dict):
        raise damaged("the checkpoint has no entries")
    trainer, arguments = content.get("trainer_name"), content.get("init_args")
    configuration = arguments.get("configuration") if isinstance(arguments, dict) else None
    mirror = content.get("inference_allowed_mirroring_axes") or ()
    if not isinstance(trainer, str) or not isinstance(configuration, str):
        raise damaged("the checkpoint does not name its trainer and configuration")
    if not isinstance(content.get(NNUNET_KEY), dict):
        raise ScanError(Reason.MODEL_WEIGHTS, f"the checkpoint has no {NNUNET_KEY}")
    axes = tuple(mirror) if isinstance(mirror, tuple | list) else (-1,)
    if not all(type(axis) is int and 0 <= axis <= 2 for axis in axes) or len({*axes}) < len(axes):
        raise damaged("the checkpoint's mirrored axes are not axes")
    layers = (v for name, v in content[NNUNET_KEY].items() if _SCORES.search(str(name)))
    outputs = next((int(v.shape[0]) for v in layers if getattr(v, "shape", ())), None)
    return Checkpoint(trainer, configuration, axes, outputs)


def _stage(
    folder: Path,
    checkpoint: Checkpoint,
    configuration: Configuration,
    dataset: ChannelsAndLabels,
    later: Sequence[str],
) -> card.Stage | None:
    """Return the previous stage of a cascade; None for other models."""
    previous = configuration.previous_stage
    if previous is None:
        return None
    if previous in (*later, checkpoint.configuration):
        raise damaged("the stages of the cascade form a circle")
    if later:
        raise unsupported("a cascade of more than two stages")
    resampling = configuration.resampling_fn_seg_kwargs
    if resampling.order != 1 or not resampling.is_seg:
        raise unsupported("resampling of the previous stage's labels by another order than 1")
    if resampling.order_z != 0 or resampling.force_separate_z is True:
        raise unsupported("order_z or force_separate_z of the previous stage's labels")
    if resampling.separate_above != configuration.resampling_fn_data_kwargs.separate_above:
        detail = "separate resampling of slices for scans but not for labels, or the reverse"
        raise unsupported(detail)
    start = folder.resolve().name.rpartition("__")[0]
    stage = folder.resolve().parent / f"{start}__{previous}"
    if "/" in previous or not start or not _is_model(stage):
        detail = f"the previous stage {truncate(previous)!r} is not next to the model's folder"
        raise damaged(detail)
    model = _read(stage, (*later, checkpoint.configuration))
    if tuple(s.number for s in model.structures) != dataset.foreground:
        raise damaged("the stages of the cascade have different labels")
    return card.Stage(model, "channels")


def previous_stages(folder: Path, configuration: str) -> tuple[Path, ...]:
    """Return the folder of a cascade's first stage, if it is there; nothing for other models.

    What is wrong with the model's files is told by `read_nnunet`.
    """
    try:
        previous = read_configuration(read_plans(folder), configuration).previous_stage
    except ScanError:
        return ()
    stage = folder.parent / f"{folder.name.rpartition('__')[0]}__{previous}"
    return (stage,) if previous and "/" not in previous and _is_model(stage) else ()


def _channels(
    dataset: ChannelsAndLabels, plans: Plans, configuration: Configuration
) -> tuple[card.Channel, ...]:
    """Return the input channels with their normalisation."""
    count = len(dataset.channels)
    schemes, masked = configuration.normalization_schemes, configuration.use_mask_for_norm
    if len(schemes) != count or len(masked) != count:
        normalized = counted(len(schemes), "channel")
        raise damaged(f"plans.json: normalisation of {normalized}, dataset.json has {count}")
    return tuple(
        card.Channel(
            name=name,
            modality=modality_of(name)
            or ("CT" if schemes[n] == "CTNormalization" else card.ANY_MODALITY),
            steps=_normalization(schemes[n], masked[n], plans, n),
        )
        for n, name in enumerate(dataset.channels)
    )


def _normalization(
    scheme: str, masked: bool, plans: Plans, channel: int
) -> tuple[card.IntensityStep, ...]:
    """Return the steps of a normalisation scheme of nnU-Net."""
    match scheme:
        case "CTNormalization":
            where = f"plans.json: foreground intensities of channel {channel}"
            if str(channel) not in plans.intensities:
                raise damaged(f"{where} are missing")
            density = parse(Intensity, plans.intensities[str(channel)], where)
            if density.percentile_00_5 > density.percentile_99_5:
                raise damaged(f"{where} are reversed")
            divisor = max(density.std, SMALLEST_DIVISOR)
            return (
                card.Clip(density.percentile_00_5, density.percentile_99_5),
                card.Normalize(density.mean, divisor),
            )
        case "ZScoreNormalization":
            return (card.Normalize(filled=masked, smallest_divisor=SMALLEST_DIVISOR),)
        case "RescaleTo01Normalization":
            return (card.ScaleMinMax(),)
        case "RGBTo01Normalization":
            return (card.ScaleRange(0.0, 255.0, 0.0, 1.0),)
        case "NoNormalization":
            return ()
    raise unsupported(f"the normalisation {truncate(scheme)!r}")


def _grid(plans: Plans, configuration: Configuration) -> card.NetworkGrid:
    """Return the network grid; nnU-Net's arrays have the file's axes in reverse order."""
    reader = plans.image_reader_writer
    if reader not in (*_AS_STORED, *_REORIENTED):
        raise unsupported(f"the reader of images {truncate(reader)!r}")
    order = [2 - axis for axis in plans.transpose_forward]
    spacing: list[float | None] = [None, None, None]
    # a plane has two spacings: across planes, a scan is not resampled
    planned = [*[None] * (3 - len(configuration.spacing)), *configuration.spacing]
    for axis, value in zip(order, planned, strict=True):
        spacing[axis] = value
    return card.NetworkGrid(
        orientation="RAS" if reader in _REORIENTED else None,
        spacing=(spacing[0], spacing[1], spacing[2]) if configuration.resampled else None,
        mode="cubic" if configuration.resampling_fn_data_kwargs.order == 3 else "linear",
        order=(order[0], order[1], order[2]),
        alignment="edges",
        separate_above=configuration.resampling_fn_data_kwargs.separate_above,
        crop=card.Crop("nonzero"),
        as_nifti=reader in _AS_STORED,
    )


def _window(configuration: Configuration, checkpoint: Checkpoint) -> card.Window:
    """Return the sliding window as nnU-Net's predictor places it by default."""
    flat = len(configuration.patch_size) == 2
    # planes are windows of one voxel along the first axis
    size = (*[1] * flat, *configuration.patch_size)
    if any(axis >= 3 - flat for axis in checkpoint.mirror):
        raise damaged("the checkpoint mirrors an axis that does not exist")
    return card.Window(
        size=(size[0], size[1], size[2]),
        overlap=0.5,
        blending="gaussian_filter",
        starts="even",
        sums="float16",
        mirror=tuple(axis + flat for axis in checkpoint.mirror),
        plane=0 if flat else None,
    )


class DatasetFile(Fields):
    """`dataset.json`; `modality` is the former name of `channel_names`."""

    channel_names: dict[str, Text] = Field(default_factory=dict)
    modality: dict[str, Text] = Field(default_factory=dict)
    labels: dict[str, Label | tuple[Label, ...]] = Field(max_length=MAX_LABELS)
    regions_class_order: tuple[Label, ...] | None = None
    name: Text = ""
    description: Text = ""
    reference: Text = ""
    licence: Text = ""
    license: Text = ""
    release: Text = ""


@dataclass(frozen=True)
class ChannelsAndLabels:
    """Channels and labels of a model.

    Parameters
    ----------
    channels : tuple of str
        Names of the input channels.
    structures : tuple of Structure
        By number.
    decision : Argmax or Paint
        How labels follow from the scores.
    outputs : int
        Channels of the network's output.
    foreground : tuple of int
        Numbers of all labels except background and `ignore`.
    stated : DatasetFile
        The file, with its texts.
    """

    channels: tuple[str, ...]
    structures: tuple[Structure, ...]
    decision: card.Decision
    outputs: int
    foreground: tuple[int, ...]
    stated: DatasetFile


def read_dataset(folder: Path) -> ChannelsAndLabels:
    """Read `dataset.json` of a model.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is missing, an entry is missing or invalid, labels skip numbers, or
        regions have no order.
    """
    content = parse(DatasetFile, read_json(folder, "dataset.json"), "dataset.json")
    labels = {
        name: (value,) if isinstance(value, int) else value
        for name, value in content.labels.items()
        if name != "ignore"
    }
    foreground = _foreground(content, labels)
    classes = {name: values for name, values in labels.items() if set(values) != {0}}
    if any(len(values) > 1 for values in labels.values()):
        # with regions, each class has an output of its own, and the background has none
        structures, decision = _regions(classes, content.regions_class_order)
        outputs = len(classes)
    else:
        numbers = [values[0] for values in classes.values()]
        structures, decision = name_structures(list(classes), numbers), card.Argmax()
        outputs = len(foreground) + 1
    return ChannelsAndLabels(
        channels=_channel_names(content.channel_names or content.modality),
        structures=structures,
        decision=decision,
        outputs=outputs,
        foreground=foreground,
        stated=content,
    )


def _channel_names(names: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the channels in the order of their indices."""
    if not names:
        raise damaged("dataset.json: channel_names is missing")
    if sorted(names) != sorted(str(n) for n in range(len(names))):
        raise damaged("dataset.json: channel_names are not numbered from 0, without gaps")
    return tuple(names[str(n)].strip() or f"channel {n}" for n in range(len(names)))


def _foreground(content: DatasetFile, labels: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the numbers of all labels but the background; refuse an invalid set of labels."""
    if labels.get("background") != (0,):
        raise damaged("dataset.json: label 0 is not the background")
    empty = [name for name, values in labels.items() if not values]
    if empty:
        raise damaged(f"dataset.json: the region {truncate(empty[0])!r} is empty")
    numbers = sorted({number for values in labels.values() for number in values})
    if numbers != list(range(len(numbers))):
        raise damaged("dataset.json: labels skip numbers")
    if len(numbers) < 2:
        raise damaged("dataset.json: there is no label but the background")
    ignored = content.labels.get("ignore")
    if ignored is not None and ignored != len(numbers):
        raise damaged("dataset.json: `ignore` is not the last label")
    return tuple(numbers[1:])


def _regions(
    classes: dict[str, tuple[int, ...]], order: tuple[int, ...] | None
) -> tuple[tuple[Structure, ...], card.Decision]:
    """Return structures of regions: one number each, painted over those of regions before it.

    A structure of which later regions cover a part is named as the remainder.
    """
    if order is None or len(order) != len(classes):
        raise damaged("dataset.json: regions_class_order does not have a number for each region")
    if len(set(order)) != len(order) or not all(order):
        raise damaged("dataset.json: regions_class_order has a number twice, or the background")
    names, values = list(classes), list(classes.values())
    covered = [any(set(v) & set(later) for later in values[n + 1 :]) for n, v in enumerate(values)]
    shown = [
        f"{name} (remainder)" if under else name for name, under in zip(names, covered, strict=True)
    ]
    paint = card.Paint(tuple(enumerate(order)), card.SIGMOID_ABOVE_HALF, inclusive=False)
    return name_structures(shown, list(order)), paint


def name_structures(names: list[str], numbers: list[int]) -> tuple[Structure, ...]:
    """Return structures with codes and colours by name, ordered by number.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if two have the same number.
    """
    if len(set(numbers)) != len(numbers):
        raise damaged("dataset.json: two labels have the same number")
    labels = [slug(name) or f"label_{n}" for name, n in zip(names, numbers, strict=True)]
    if len(set(labels)) != len(labels):
        # a label has 64 characters, of which the number takes up to 6
        labels = [f"{label[:58]}_{n}" for label, n in zip(labels, numbers, strict=True)]
    structures = []
    for name, label, number in zip(names, labels, numbers, strict=True):
        text = truncate(re.sub(r"[_\s]+", " ", name).strip(), 60)
        shown = text[:1].upper() + text[1:] or label
        structures.append(coded_structure(label, number, shown, coded_as=name))
    return color_by_code(sorted(structures, key=lambda structure: structure.number))


def read_cleaning(folder: Path) -> tuple[card.KeepLargest, ...]:
    """Return the cleaning that nnU-Net determined for a model's folds.

    nnU-Net itself applies it only by a separate command.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file is missing or invalid; MODEL_UNSAFE if it names anything but that
        one function of nnU-Net and numbers.
    """
    # the longest name is that of most folds; next to the plans it is nnU-Net's choice of them
    results = sorted((e.name for e in folder.glob("crossval_results*")), key=len, reverse=True)
    files = [find_file(folder, name) for name in (*(f"{each}/{FILE}" for each in results), FILE)]
    file = next((file for file in files if file is not None), None)
    if file is None:
        raise damaged(f"the model has no {FILE}")
    data = read_bytes(file, FILE)
    try:
        functions, arguments = _Functions(io.BytesIO(data)).load()
        return tuple(_rule(*pair) for pair in zip(functions, arguments, strict=True))
    except ScanError:
        raise
    except Exception as exc:  # a damaged pickle raises errors of many types
        raise damaged(f"{FILE} is not a list of functions") from exc


class _Functions(pickle.Unpickler):
    """Reads a pickle of numbers and nnU-Net's one function, in whose place stands `_refuse`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a name of the list; nothing is imported."""
        from numpy._core import multiarray

        match f"{module}.{name}":
            case "numpy.dtype":
                return np.dtype
            case "numpy.core.multiarray.scalar" | "numpy._core.multiarray.scalar":
                return multiarray.scalar
            case "_codecs.encode":  # bytes in protocol 2
                return lambda text, encoding: text.encode("latin1")
            case _ as full if full == _LARGEST:
                return _refuse
            case full:
                raise unsafe(f"{FILE} would run code: it names {truncate(full)!r}")


def _refuse(*_: Any) -> Any:
    raise unsafe(f"{FILE} would run code")


def _rule(function: Any, arguments: Any) -> card.KeepLargest:
    """Return a call of nnU-Net's function as a rule."""
    if function is not _refuse:
        raise TypeError("not the function")
    if not {"background_label", "labels_or_regions"}.issuperset(arguments):
        raise unsupported(f"{FILE}: an unknown argument")
    if arguments.get("background_label", 0) != 0:
        raise unsupported(f"{FILE}: another background than 0")
    chosen = arguments.get("labels_or_regions", ())
    regions = chosen if isinstance(chosen, list) else [chosen]
    numbers = [
        int(number)
        for region in regions
        for number in (region if isinstance(region, tuple | list) else (region,))
    ]
    if not numbers or not all(0 < n <= 65535 for n in numbers):
        raise ValueError("not labels")
    return card.KeepLargest(tuple(sorted(set(numbers))), together=True, connectivity=26, ties="all")
