"""Describes the network of an nnU-Net configuration."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from scanloom.cards.card import NetworkSpec
from scanloom.cards.monai.config import truncate
from scanloom.cards.nnunet.plans import Architecture, Configuration, Count, Fields, Finite, parse
from scanloom.core import Reason, ScanError

_NETWORKS: Final = ("PlainConvUNet", "ResidualEncoderUNet")
_ACTIVATIONS: Final = {"LeakyReLU": 0.01, "ReLU": 0.0}
"""Activations, with their default negative slope."""
_NORMS: Final = {"InstanceNorm": "instance", "BatchNorm": "batch"}
MAX_STAGES: Final = 12
"""Most stages of a network; nnU-Net plans at most 8."""

Sizes = Count | tuple[Count, ...]
PerStage = Annotated[tuple[Sizes, ...], Field(max_length=MAX_STAGES)]


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
