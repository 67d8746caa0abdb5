"""Reads nnU-Net's `plans.json`: one configuration with all that it inherits, and its network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scanloom.cards.card import NetworkSpec
from scanloom.convert.files import read_json
from scanloom.convert.monai.config import truncate
from scanloom.core import Reason, ScanError

MAX_CHAIN: Final = 20
"""Most configurations of which one inherits; nnU-Net's have one or two."""
_DEFAULT_RESAMPLING: Final = "resample_data_or_seg_to_shape"
_NO_RESAMPLING: Final = "no_resampling_hack"
_RESAMPLINGS: Final = (_DEFAULT_RESAMPLING, _NO_RESAMPLING)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=65535)]
Axis = Annotated[int, Field(ge=0, le=2)]
T = TypeVar("T", bound=BaseModel)

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
    foreground_intensity_properties_per_channel: dict[str, Intensity] = {}
    foreground_intensity_properties_by_modality: dict[str, Intensity] = {}
    configurations: dict[str, dict[str, Any]]

    @property
    def intensities(self) -> Mapping[str, Intensity]:
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
            raise ScanError(Reason.MODEL_DAMAGED, "plans.json: transposition is not an order")
    if any(plans.transpose_backward[plans.transpose_forward[n]] != n for n in range(3)):
        detail = "plans.json: transpose_backward does not invert transpose_forward"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    if plans.label_manager != "LabelManager":
        detail = f"the label manager {truncate(plans.label_manager)!r}"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
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
            detail = f"plans.json has no configuration {truncate(chain[-1])!r}"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
        entries = {**plans.configurations[chain[-1]], **entries}
        parent = plans.configurations[chain[-1]].get("inherits_from")
        if parent is None:
            break
        if parent in chain:
            circle = " -> ".join(truncate(str(link)) for link in (*chain, parent))
            raise ScanError(Reason.MODEL_DAMAGED, f"configurations inherit in a circle: {circle}")
        chain.append(str(parent))
        if len(chain) > MAX_CHAIN:
            raise ScanError(
                Reason.MODEL_DAMAGED, f"a configuration inherits over {MAX_CHAIN} others"
            )
    configuration = parse(Configuration, entries, f"plans.json: {truncate(name)}")
    _check(configuration)
    return configuration


def _check(configuration: Configuration) -> None:
    """Refuse configurations that other functions process than nnU-Net's own."""
    if configuration.preprocessor_name != "DefaultPreprocessor":
        detail = f"the preprocessor {truncate(configuration.preprocessor_name)!r}"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    if len(configuration.patch_size) != len(configuration.spacing):
        detail = "plans.json: patch size and spacing have different dimensions"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    functions = (configuration.resampling_fn_data, configuration.resampling_fn_probabilities)
    for function in (*functions, configuration.resampling_fn_seg):
        if function not in _RESAMPLINGS:
            raise ScanError(Reason.MODEL_UNSUPPORTED, f"resampling by {truncate(function)!r}")
    if len(set(functions)) > 1:
        detail = "resampling of scans but not of scores, or the reverse"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    if configuration.resampling_fn_data == _NO_RESAMPLING:
        return  # its arguments are ignored
    data = configuration.resampling_fn_data_kwargs
    scores = configuration.resampling_fn_probabilities_kwargs
    if data.order not in (1, 3) or scores.order != 1:
        detail = f"resampling of scans by order {data.order} and of scores by {scores.order}"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    for kind in (data, scores):
        if kind.is_seg or kind.order_z != 0 or kind.force_separate_z is True:
            detail = "is_seg, order_z or force_separate_z of resampling"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    if data.separate_above != scores.separate_above:
        detail = "separate resampling of slices for scans but not for scores, or the reverse"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)


def parse(kind: type[T], entries: Any, name: str) -> T:
    """Return entries of a JSON file as an object.

    Raises
    ------
    ScanError
        MODEL_DAMAGED, naming the first entry that is missing or invalid; MODEL_NETWORK for an
        argument that a network does not have here.
    """
    try:
        return kind.model_validate(entries)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        location = ".".join(str(key) for key in first["loc"])
        if first["type"] == "extra_forbidden":
            detail = f"{name}: the argument {truncate(location)} is not supported"
            raise ScanError(Reason.MODEL_NETWORK, detail) from exc
        problem = "is missing" if first["type"] == "missing" else "is invalid"
        detail = f"{name}: {truncate(location)} {problem}"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc


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


def describe_network(configuration: Configuration, inputs: int, outputs: int) -> NetworkSpec:
    """Return the network of a configuration.

    Parameters
    ----------
    configuration : Configuration
        With `architecture`, or with the entries of plans before it was introduced.
    inputs, outputs : int
        Input channels and classes.

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
    options = parse(_Arguments, architecture.arch_kwargs, "plans.json: architecture")
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
    return NetworkSpec(name, {**args, "stem": options.stem_channels} if residual else args)


def _of_old_plans(configuration: Configuration) -> Architecture:
    """Return the architecture as plans before `architecture` describe it."""
    name = configuration.UNet_class_name
    if name is None:
        raise ScanError(Reason.MODEL_DAMAGED, "plans.json: architecture is missing")
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
        detail = f"plans.json: architecture has {len(values)} numbers for {count} stages"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    return values


def _each_size(value: Count | PerStage, count: int, dimensions: int) -> list[list[int]]:
    """Return a size along each axis for each stage."""
    values = list(value) if isinstance(value, tuple) else [value] * count
    sizes = [list(v) if isinstance(v, tuple) else [v] * dimensions for v in values]
    if len(sizes) != count or any(len(size) != dimensions for size in sizes):
        detail = f"plans.json: kernels or strides are not those of {count} stages"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    return sizes


def _norm(name: str | None, dimensions: int) -> str | None:
    if name is None:
        return None
    last = name.rpartition(".")[2]
    for start, norm in _NORMS.items():
        if last == f"{start}{dimensions}d":
            return norm
    raise ScanError(Reason.MODEL_NETWORK, f"normalisation by {truncate(name)!r} in the network")


def _norm_arguments(norm: str | None, given: _NormArguments) -> dict[str, Any]:
    """Return the arguments of a normalisation that matter after training, with torch's defaults."""
    batch = norm == "batch"
    if given.track_running_stats not in (None, batch):
        detail = "track_running_stats of the normalisation in the network"
        raise ScanError(Reason.MODEL_NETWORK, detail)
    return {"eps": given.eps, "affine": batch if given.affine is None else given.affine}


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
