"""OpenVINO: runs a network on CPUs in about half of torch's time.

The network is traced by torch, converted by OpenVINO's reader for PyTorch, and cached as OpenVINO's
own file format. `openvino.convert_model` is not used, since it reports its use over the network.

In bfloat16, OpenVINO rounds all layers. The layers that `find_exact_layers` names are marked in the
file to stay float32, as they do in torch: attribute `precise` of their operations.

Two parts of a converted network are written anew. OpenVINO keeps the channels of a voxel together
while a network runs. Scores leave it channel by channel; as a step of its own, rearranging them
takes as long as a layer. The product of the final layer's weights with the transposed features has
that order already. And its own normalisations add the values of a channel one after another in
float32. In a window of 128^3 voxels, this loses so many digits that more than 1 % of the voxels
change their labels. Means of means, along an axis each, keep them, and take no more time.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from scanloom.cards.networks import Layout
from scanloom.core import Reason, ScanError, printable
from scanloom.core.packages import package_version
from scanloom.inference.device import drop_file_pages, is_out_of_memory, return_free_memory
from scanloom.inference.engines.cache import cached_export, export_key
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest, Run
from scanloom.inference.network.layers import PlaneNetwork, find_exact_layers

_FORM = 5
"""Version of this module's exports: to be raised when they change."""
_GRAPH, _WEIGHTS = "network.xml", "network.bin"
_TRACED_SIZE = 48
"""Length of an input, in voxels, above which half of it is traced if possible."""
_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}

FEW_CLASSES = 8
"""Classes below which rearranging scores takes no longer than the product."""
LARGE = 1 << 15
"""Voxels of a channel above which its mean is taken by pooling."""


class OpenVino:
    """OpenVINO on a CPU."""

    name: ClassVar[str] = "openvino"
    package: ClassVar[str] = "openvino"
    automatic: ClassVar[bool] = True

    def version(self) -> str | None:
        """Return the version of OpenVINO; None if it is not installed."""
        return package_version(self.package)

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CPU and the type float32 or bfloat16."""
        return device.type == "cpu" and dtype in _HINTS

    def prepare(self, request: NetworkRequest) -> Run:
        """Prepare a network: read it from the cache or export it, and compile it."""
        subject = {
            "engine": [self.name, self.version(), _FORM],
            **request.cache_subject,
        }
        try:
            key = export_key(subject)
            with cached_export(key, lambda folder: _export(request, folder)) as (folder, cached):
                if not cached:  # torch's trace refers to itself, and to the network
                    gc.collect()
                    return_free_memory()
                return _compile(folder, request)
        except (RuntimeError, TypeError, ValueError, OSError, ImportError, AttributeError) as exc:
            # ImportError, AttributeError: a part of the library is missing
            if is_out_of_memory(exc):  # no fault of the engine, which would be remembered
                raise
            raise EngineUnfitError(f"{type(exc).__name__} while the network was prepared") from exc


def _export(request: NetworkRequest, folder: Path) -> None:
    """Write a network in OpenVINO's file format, its exact layers marked."""
    import openvino

    network = request.build()
    exact: Collection[str] = ()
    if request.dtype is torch.bfloat16:
        network = copy.deepcopy(network)
        exact = _exact_layers(network, request.shape)
        _keep_activations_exact(network, exact)
    model = _convert(network, request.shape)
    pool_norms(model)
    multiply_final_layer(model)
    openvino.save_model(model, folder / _GRAPH, compress_to_fp16=False)
    if exact:
        _mark(folder / _GRAPH, [f"__module.{name}/" for name in exact])


def _convert(network: nn.Module, shape: tuple[int, int, int, int, int]) -> Any:
    """Return a network as OpenVINO's model for an input of a shape.

    Tracing keeps all values of a pass. Networks of convolutions are traced with a smaller input if
    they accept it; others may contain numbers that follow from the size.
    """
    # A linear layer or a layer norm may fix the number of tokens while it is traced
    convolutional = not any(isinstance(m, nn.Linear | nn.LayerNorm) for m in network.modules())
    smaller = tuple(n // 2 if n > _TRACED_SIZE and n % 2 == 0 else n for n in shape[2:])
    if convolutional and smaller != shape[2:]:
        with suppress(RuntimeError, ValueError, EngineUnfitError):
            return _traced(network, (*shape[:2], *smaller), shape)
    return _traced(network, shape, shape)


def _traced(network: nn.Module, traced: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Return OpenVINO's model of a network, traced with one shape, for another."""
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of conditions on shapes, which are constant here
        image = torch.zeros(traced)
        script = torch.jit.trace(network, image, check_trace=False)  # type: ignore[no-untyped-call]  # torch
        decoder = TorchScriptPythonDecoder(script)  # not owned by what is loaded from it
        reader = FrontEndManager().load_by_framework("pytorch")
        model = reader.convert(reader.load(decoder))
    if len(model.outputs) != 1:
        raise EngineUnfitError(f"the network has {len(model.outputs)} outputs")
    parameter = model.inputs[0].get_node()
    parameter.set_element_type(openvino.Type.f32)
    parameter.set_partial_shape(openvino.PartialShape(list(shape)))
    model.validate_nodes_and_infer_types()
    output_shape = model.outputs[0].get_partial_shape()
    if output_shape.is_dynamic or tuple(output_shape.to_shape())[2:] != shape[2:]:
        raise EngineUnfitError("its output has another size than its input")
    return model


def _exact_layers(network: nn.Module, shape: tuple[int, ...]) -> set[str]:
    """Return all names of the layers that stay float32, those that take the image too."""
    inner, size, prefix = network, shape, ""
    if isinstance(network, PlaneNetwork):
        inner, prefix = network.network, "network."
        size = shape[: network.dim] + shape[network.dim + 1 :]
    layer_names = find_exact_layers(inner, size)
    layers = [
        network.get_submodule(prefix + name) for name in layer_names.first | layer_names.exact
    ]
    names = network.named_modules(remove_duplicate=False)
    return {name for name, module in names if any(module is layer for layer in layers)}


class _ExactLeakyReLU(nn.Module):
    """Leaky ReLU, written so that OpenVINO does not replace it by an operation in bfloat16."""

    def __init__(self, slope: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("slope", slope)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return positive values unchanged, negative values times the slope."""
        slope = self.get_buffer("slope")
        if slope.numel() > 1:
            slope = slope.view(-1, *(1,) * (values.ndim - 2))
        return torch.relu(values) - slope * torch.relu(-values)


def _keep_activations_exact(network: nn.Module, exact: Collection[str]) -> None:
    """Replace leaky ReLUs among the exact layers: OpenVINO forgets their mark."""
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if name not in exact or not isinstance(module, nn.LeakyReLU | nn.PReLU):
            continue
        slope = module.weight.detach() if isinstance(module, nn.PReLU) else module.negative_slope
        parent, _, leaf = name.rpartition(".")
        layer = _ExactLeakyReLU(torch.as_tensor(slope, dtype=torch.float32))
        setattr(network.get_submodule(parent), leaf, layer)


def _mark(graph: Path, prefixes: Collection[str]) -> None:
    """Mark operations to stay float32; they are named by torch's names of their modules.

    A sum with the output of such a convolution is marked too: OpenVINO computes both as one, which
    fails with types that differ.
    """
    tree = ET.parse(graph)  # noqa: S314 -- written by this process
    layers = {layer.get("id"): layer for layer in tree.iterfind("layers/layer")}
    exact = {
        number
        for number, layer in layers.items()
        if layer.get("type") != "Const" and layer.get("name", "").startswith(tuple(prefixes))
    }
    if not exact:
        raise EngineUnfitError("its first and last layers were not found in the exported network")
    for edge in tree.iterfind("edges/edge"):
        source, target = layers[edge.get("from-layer")], layers[edge.get("to-layer")]
        if source.get("id") in exact and target.get("type") == "Add":
            exact.add(target.get("id"))
    for number in exact:
        layer = layers[number]
        info = layer.find("rt_info")
        if info is None:
            info = ET.Element("rt_info")
            layer.insert(0 if layer.find("data") is None else 1, info)
        ET.SubElement(info, "attribute", {"name": "precise", "version": "0"})
    tree.write(graph)


@functools.cache
def _core() -> Any:
    """Return OpenVINO's runtime, which finds its plugins once a process."""
    import openvino

    return openvino.Core()


def _compile(folder: Path, request: NetworkRequest) -> Run:
    """Return a function that runs an exported network."""
    options = _options(_HINTS[request.dtype], request.threads)
    compiled = _core().compile_model(folder / _GRAPH, "CPU", options)
    drop_file_pages(folder / _WEIGHTS)  # it has copied most of them in another order
    return _run_of(compiled)


def _options(precision: str, threads: int) -> dict[str, Any]:
    """Return OpenVINO's options for a network."""
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,  # several workers would share the same cores
    }


def _run_of(compiled: Any) -> Run:
    """Return a function that runs a compiled network; its scores are of no other call."""
    import openvino

    inference = compiled.create_infer_request()
    shape = tuple(compiled.output(0).get_shape())

    def run(windows: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(shape)
        inference.set_input_tensor(openvino.Tensor(windows.contiguous().numpy(), True))
        inference.set_output_tensor(openvino.Tensor(scores.numpy(), True))
        inference.infer()
        return scores

    return run


def compile_onnx(content: bytes, shape: tuple[int, ...], layout: Layout) -> Run:
    """Return a function that runs an ONNX graph on the CPU, in float32.

    Parameters
    ----------
    content : bytes
        The ONNX file.
    shape : (N, channels, ...)
        Shape of the input.
    layout : "channels_first" or "channels_last"
        Order of the axes of the graph's input and output; those of the function are first.

    Raises
    ------
    ScanError
        MODEL_NETWORK if OpenVINO can't run the graph, or not with such an input.
    """
    import openvino
    from openvino.preprocess import PrePostProcessor

    axes = "XYZ"[: len(shape) - 2]
    first = f"NC{axes}"
    own = first if layout == "channels_first" else f"N{axes}C"
    try:
        model = _core().read_model(content, b"")
        lengths = dict(zip(first, shape, strict=True))
        model.reshape([lengths[axis] for axis in own])
        steps = PrePostProcessor(model)
        for port in (steps.input(), steps.output()):
            port.tensor().set_layout(openvino.Layout(first)).set_element_type(openvino.Type.f32)
            port.model().set_layout(openvino.Layout(own))
        built = steps.build()
        pool_norms(built, of_onnx=True)
        compiled = _core().compile_model(built, "CPU", _options("f32", torch.get_num_threads()))
    except RuntimeError as exc:
        # OpenVINO's text begins with lines of its own source files
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
        detail = f"OpenVINO can't run the ONNX graph: {printable(lines[-1][:200] if lines else '')}"
        raise ScanError(Reason.MODEL_NETWORK, detail) from exc
    return _run_of(compiled)


def multiply_final_layer(model: Any) -> None:
    """Replace a convolution of single voxels at a network's end, for many classes.

    Parameters
    ----------
    model : openvino.Model
        A network for inputs of a fixed size, with one output. It is changed if it ends with such
        a convolution, with or without a bias.
    """
    from openvino import opset13 as ops

    result = model.get_results()[0]
    last = result.input_value(0).get_node()
    bias = None
    convolution = last
    if last.get_type_name() == "Add":
        convolution, bias = (last.input_value(n).get_node() for n in (0, 1))
    if convolution.get_type_name() != "Convolution":
        return
    # Weight first: the product then has classes before voxels, as scores are stored
    features, weight = (convolution.input_value(n) for n in (0, 1))
    count, channels, *size = features.get_shape()
    classes, _, *kernel = weight.get_shape()
    if set(kernel) != {1} or size != list(convolution.get_output_shape(0))[2:]:
        return  # neighbours are mixed, or voxels left out
    if classes < FEW_CLASSES or (bias and math.prod(bias.get_output_shape(0)) != classes):
        return
    to_voxels = [0, *range(2, len(size) + 2), 1]
    transposed = ops.transpose(features, to_voxels)
    voxels = ops.reshape(transposed, [count, math.prod(size), channels], special_zero=False)
    matrix = ops.reshape(weight, [classes, channels], special_zero=False)
    scores = ops.matmul(matrix, voxels, transpose_a=False, transpose_b=True)
    new = [transposed, voxels, scores]
    if bias is not None:
        scores = ops.add(scores, ops.reshape(bias, [1, classes, 1], special_zero=False))
        new.append(scores)
    shaped = ops.reshape(scores, [count, classes, *size], special_zero=False)
    for number, node in enumerate((*new, shaped)):  # a layer's precision follows from its name
        node.set_friendly_name(f"{convolution.get_friendly_name()}/Final_{number}")
    result.input(0).replace_source_output(shaped.output(0))
    model.validate_nodes_and_infer_types()


def pool_norms(model: Any, *, of_onnx: bool = False) -> None:
    """Replace the instance and group normalisations of large windows in a network.

    Parameters
    ----------
    model : openvino.Model
        A network for inputs of a fixed size. It is changed.
    of_onnx : bool
        Whether it was read from ONNX, where the name of an operation does not say what it was.
    """
    before = {node.get_friendly_name() for node in model.get_ops()}
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        grouped = kind == "GroupNormalization"
        instance = kind == "MVN" and (
            _is_over_space(node) if of_onnx else "aten::instance_norm" in node.get_friendly_name()
        )
        if not (grouped or instance) or int(np.prod(node.get_output_shape(0)[2:])) <= LARGE:
            continue
        pooled = _group_norm(node) if grouped else _instance_norm(node)
        _name_steps(pooled, node, before)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(pooled.output(0))
    model.validate_nodes_and_infer_types()


def _is_over_space(node: Any) -> bool:
    """Return whether an MVN is one of all axes but batch and channel, which may be groups."""
    attributes, axes = node.get_attributes(), node.input_value(1).get_node()
    last = len(node.get_output_shape(0))
    return (
        axes.get_type_name() == "Constant"
        and sorted(int(axis) % last for axis in axes.get_data()) == list(range(2, last))
        and bool(attributes["normalize_variance"])
        and attributes["eps_mode"].upper() == "INSIDE_SQRT"
    )


def _instance_norm(node: Any) -> Any:
    """Return the values of an MVN: those of each channel with mean 0 and variance 1."""
    from openvino import opset13 as ops

    values = node.input_value(0)
    centred = ops.subtract(values, _pooled_mean(values))
    variance = _pooled_mean(ops.multiply(centred, centred))
    scale = _inverse_root(variance, node.get_attributes()["eps"])
    return ops.multiply(centred, scale)


def _group_norm(node: Any) -> Any:
    """Return the values of a group normalisation, times its weights, plus its bias."""
    from openvino import opset13 as ops

    values, weight, bias = (node.input_value(i) for i in range(3))
    batch, channels, *spatial = node.get_output_shape(0)
    groups = node.get_attributes()["num_groups"]
    ones = [1] * len(spatial)

    def group_mean(of: Any) -> Any:
        """Return the mean of each channel's group (batch, channel, 1, 1, 1)."""
        means = ops.reshape(_pooled_mean(of), [batch, groups, -1], False)
        means = ops.reduce_mean(means, [2], keep_dims=True)
        means = ops.broadcast(means, [batch, groups, channels // groups])
        return ops.reshape(means, [batch, channels, *ones], False)

    centred = ops.subtract(values, group_mean(values))
    variance = group_mean(ops.multiply(centred, centred))
    scale = _inverse_root(variance, node.get_attributes()["epsilon"])
    factors = ops.multiply(scale, ops.reshape(weight, [1, channels, *ones], False))
    shifts = ops.reshape(bias, [1, channels, *ones], False)
    return ops.add(ops.multiply(centred, factors), shifts)


def _pooled_mean(values: Any) -> Any:
    """Return the mean over the spatial axes, which keep the size 1."""
    from openvino import opset13 as ops

    output = values if hasattr(values, "get_target_inputs") else values.output(0)
    batch, channels, *spatial = output.get_shape()
    flat = len(spatial) == 1
    if flat:  # an exported group norm: as three axes of about the same length
        first = _divisor(spatial[0], 3)
        second = _divisor(spatial[0] // first, 2)
        spatial = [first, second, spatial[0] // (first * second)]
        values = ops.reshape(values, [batch, channels, *spatial], special_zero=False)
    # One axis at a time: each mean adds few values, so that float32 keeps their digits
    for axis in reversed(range(len(spatial))):
        kernel = [n if i == axis else 1 for i, n in enumerate(spatial)]
        none = [0] * len(spatial)
        values = ops.avg_pool(values, kernel, none, none, kernel, exclude_pad=True)
        spatial[axis] = 1
    return ops.reshape(values, [batch, channels, 1], special_zero=False) if flat else values


def _divisor(number: int, root: int) -> int:
    """Return the largest divisor of a number that is not above its root."""
    most = round(number ** (1 / root))
    return next(n for n in range(most, 0, -1) if number % n == 0 and n**root <= number)


def _inverse_root(variance: Any, epsilon: float) -> Any:
    """Return 1 / sqrt(variance + epsilon)."""
    from openvino import opset13 as ops

    return ops.power(ops.add(variance, np.float32(epsilon)), np.float32(-0.5))


def _name_steps(operation: Any, node: Any, before: Collection[str]) -> None:
    """Name an operation, and those that lead to it, after the operation that they replace.

    A layer's precision follows from its name: means of a float32 layer are taken in float32.
    `before` are the names of the operations that were there.
    """
    name = node.get_friendly_name()
    operation.set_friendly_name(name)
    steps = [operation]
    while steps:
        for source in (value.get_node() for value in steps.pop().input_values()):
            own = source.get_friendly_name()
            if own not in before and not own.startswith(name):
                source.set_friendly_name(f"{name}/{own}")
                steps.append(source)


ENGINE = OpenVino()
