"""Read a MeshNet that TensorFlow.js stores as a layer model: `model.json` and a file of numbers.

The layers are data, and so are the weights: float32, little-endian, in the order of the manifest,
kernels with the axes depth, height, width, input, output. Layers that a MeshNet does not have are
refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from scanloom.cards.card import NetworkSpec
from scanloom.cards.monai.files import read_json
from scanloom.core import Reason, ScanError, printable

MODEL_FILE: Final = "model.json"
FLOAT32_KEY: Final = "float32"
"""`Weights.key` of a file of float32 numbers without names, in the order of the network's weights,
kernels with channels last."""
_NORM_SUFFIX: Final = "_gn"
"""End of the name of a convolution that is followed by an instance norm (brainchop)."""
_MAX_LAYERS: Final = 200

Triple = tuple[int, int, int]
Part = TypeVar("Part", bound=BaseModel)


class _Convolution(BaseModel, frozen=True):
    """Configuration of a layer of the class Conv3D; other keys concern training only."""

    name: str
    filters: int = Field(ge=1, le=1024)
    kernel_size: Triple
    dilation_rate: Triple = (1, 1, 1)
    strides: Literal[1] | tuple[Literal[1], Literal[1], Literal[1]] = 1
    groups: Literal[1] = 1
    padding: Literal["same"]
    data_format: Literal["channels_last"] = "channels_last"
    activation: Literal["linear"] = "linear"
    use_bias: bool = True


class _Activation(BaseModel, frozen=True):
    activation: Literal["elu", "relu", "gelu"]


class _Input(BaseModel, frozen=True):
    batch_input_shape: tuple[None, int | None, int | None, int | None, int]


class _Layer(BaseModel, frozen=True):
    class_name: str
    config: dict[str, Any]
    name: str
    inbound_nodes: list[Any] = []


class _Tensor(BaseModel, frozen=True, extra="forbid"):
    """A tensor of the manifest; one that is quantized has a further key."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32"]


class _Group(BaseModel, frozen=True):
    paths: tuple[str]
    weights: list[_Tensor]


def read_layers_model(folder: Path) -> tuple[NetworkSpec, str]:
    """Return the network of a layer model, and the name of the file with its weights.

    Parameters
    ----------
    folder : Path
        Contains `model.json`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if `model.json` is malformed; MODEL_UNSUPPORTED if it is not a MeshNet;
        MODEL_UNSAFE if it names a file outside the folder.
    """
    document = read_json(folder, MODEL_FILE)
    try:
        topology = document["modelTopology"]
        layers = topology.get("model_config", topology)["config"]["layers"]
        groups = document["weightsManifest"]
    except (KeyError, TypeError, AttributeError) as exc:
        detail = f"{MODEL_FILE} has no layers or no weightsManifest"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc
    if not isinstance(layers, list) or not isinstance(groups, list) or len(groups) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{MODEL_FILE} has several groups of weights")
    if not 3 <= len(layers) <= _MAX_LAYERS:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{MODEL_FILE} has {len(layers)} layers")
    chain = [_parse(_Layer, layer, "a layer") for layer in layers]
    group = _parse(_Group, groups[0], "weightsManifest")
    image, convolutions, activation = _read_chain(chain)
    network = _network(image, convolutions, activation)
    _check_manifest(group.weights, convolutions, image)
    network["classifier_bias"] = convolutions[-1].use_bias
    return NetworkSpec("MeshNet", network), _file_name(group.paths[0])


def _parse(model: type[Part], value: object, subject: str) -> Part:
    """Return a part of the document; MODEL_UNSUPPORTED, with the key, if it has another form."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        error = exc.errors()[0]
        key = ".".join(printable(str(part))[:60] for part in error["loc"])
        detail = f"{subject} of {MODEL_FILE} has {key or 'a value'} of another kind"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail) from exc


def _read_chain(chain: Sequence[_Layer]) -> tuple[int, list[_Convolution], str]:
    """Return the image's channels, the convolutions in their order, and their activation."""
    for first, second in pairwise(chain):
        if second.inbound_nodes != [[[first.name, 0, 0, {}]]]:
            detail = f"layer {printable(second.name[:60])!r} does not follow the one before it"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    kinds = [layer.class_name for layer in chain]
    pairs = (len(chain) - 2) // 2
    expected = ["InputLayer", *["Conv3D", "Activation"] * pairs, "Conv3D"]
    if kinds != expected:
        other = sorted({*kinds} - {*expected}) or ["an order of layers"]
        detail = f"{printable(other[0][:60])} is not part of a MeshNet"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    image = _parse(_Input, chain[0].config, "the input").batch_input_shape[-1]
    convolutions = [_parse(_Convolution, layer.config, "a convolution") for layer in chain[1::2]]
    activations = {_parse(_Activation, layer.config, "an activation") for layer in chain[2::2]}
    if len(activations) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, "the layers have different activations")
    return image, convolutions, activations.pop().activation


def _network(image: int, convolutions: Sequence[_Convolution], activation: str) -> dict[str, Any]:
    """Return the arguments of the network."""
    *hidden, last = convolutions
    norms = {layer.name.endswith(_NORM_SUFFIX) for layer in hidden}
    sizes = {(layer.filters, layer.kernel_size, layer.use_bias) for layer in hidden}
    dilated = all(len(set(layer.dilation_rate)) == 1 for layer in hidden)
    regular = len(norms) == len(sizes) == 1 and hidden[0].kernel_size == (3, 3, 3) and dilated
    if not regular or last.kernel_size != (1, 1, 1) or last.name.endswith(_NORM_SUFFIX):
        raise ScanError(Reason.MODEL_UNSUPPORTED, "the convolutions are not those of a MeshNet")
    return {
        "in_channels": image,
        "channels": hidden[0].filters,
        "classes": last.filters,
        "dilations": [layer.dilation_rate[0] for layer in hidden],
        "activation": activation,
        "norm": "instance" if norms == {True} else None,
        "bias": hidden[0].use_bias,
    }


def _check_manifest(
    tensors: Sequence[_Tensor], convolutions: Sequence[_Convolution], image: int
) -> None:
    """Refuse a manifest (MODEL_DAMAGED) whose tensors are not those of the layers, in order."""
    expected: list[tuple[str, tuple[int, ...]]] = []
    channels = image
    for layer in convolutions:
        expected.append((f"{layer.name}/kernel", (*layer.kernel_size, channels, layer.filters)))
        if layer.use_bias:
            expected.append((f"{layer.name}/bias", (layer.filters,)))
        channels = layer.filters
    if [(tensor.name, tensor.shape) for tensor in tensors] != expected:
        detail = "the weightsManifest does not fit the layers"
        raise ScanError(Reason.MODEL_DAMAGED, detail)


def _file_name(path: str) -> str:
    """Return the name of a file in the model's folder; MODEL_UNSAFE for any other path."""
    if PurePosixPath(path).name != path or path in (".", ".."):
        detail = f"{MODEL_FILE} names weights outside its folder"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    return path
