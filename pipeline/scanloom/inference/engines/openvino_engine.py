"""OpenVINO: runs a network on CPUs in about half of torch's time.

The network is traced by torch, converted by OpenVINO's reader for PyTorch, and cached as OpenVINO's
own file format. `openvino.convert_model` is not used, since it reports its use over the network.

In bfloat16, OpenVINO rounds all layers. The layers that `find_exact_layers` names are marked in the
file to stay float32, as they do in torch: attribute `precise` of their operations.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from scanloom.core.packages import package_version
from scanloom.inference.engines.export_cache import cached_export, export_key
from scanloom.inference.engines.openvino_head import multiply_final_layer
from scanloom.inference.engines.openvino_norms import pool_norms
from scanloom.inference.engines.protocol import (
    EngineUnfitError,
    NetworkRequest,
    PreparedNetwork,
    Run,
)
from scanloom.inference.network.exact_layers import find_exact_layers
from scanloom.inference.network.free_memory import drop_file_pages, return_free_memory
from scanloom.inference.network.planes import PlaneNetwork

_FORM = 5
"""Version of this module's exports: to be raised when they change."""
_GRAPH, _WEIGHTS = "network.xml", "network.bin"
_TRACED_SIZE = 48
"""Length of an input, in voxels, above which half of it is traced if possible."""
_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class OpenVino:
    """OpenVINO on a CPU."""

    name: ClassVar[str] = "openvino"
    package: ClassVar[str] = "openvino"

    def version(self) -> str | None:
        """Return the version of OpenVINO; None if it is not installed."""
        return package_version(self.package)

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CPU and the type float32 or bfloat16."""
        return device.type == "cpu" and dtype in _HINTS

    def prepare(self, request: NetworkRequest) -> PreparedNetwork:
        """Prepare a network: read it from the cache or export it, and compile it."""
        began = time.perf_counter()
        subject = {
            "engine": [self.name, self.version(), _FORM],
            "torch": torch.__version__,
            "network": list(request.identity),
            "shape": list(request.shape),
            "precision": request.precision,
        }
        try:
            with cached_export(export_key(subject), lambda f: _export(request, f)) as (folder, old):
                if not old:  # torch's trace refers to itself, and to the network
                    gc.collect()
                    return_free_memory()
                run = _compile(folder, request)
        except (
            *(RuntimeError, TypeError, ValueError, NotImplementedError, OSError),
            *(ImportError, AttributeError),  # a part of the library is missing
        ) as exc:
            raise EngineUnfitError(f"{type(exc).__name__} while the network was prepared") from exc
        return PreparedNetwork(run, time.perf_counter() - began, cached=old)


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
        # torch's function has no types
        script = torch.jit.trace(network, torch.zeros(traced), check_trace=False)  # type: ignore[no-untyped-call]
        decoder = TorchScriptPythonDecoder(script)  # not owned by what is loaded from it
        reader = FrontEndManager().load_by_framework("pytorch")
        model = reader.convert(reader.load(decoder))
    if len(model.outputs) != 1:
        raise EngineUnfitError(f"the network has {len(model.outputs)} outputs")
    parameter = model.inputs[0].get_node()
    parameter.set_element_type(openvino.Type.f32)
    parameter.set_partial_shape(openvino.PartialShape(list(shape)))
    model.validate_nodes_and_infer_types()
    found = model.outputs[0].get_partial_shape()
    if found.is_dynamic or tuple(found.to_shape())[2:] != shape[2:]:
        raise EngineUnfitError("its output has another size than its input")
    return model


def _exact_layers(network: nn.Module, shape: tuple[int, ...]) -> set[str]:
    """Return all names of the layers that stay float32, those that take the image too."""
    inner, size, prefix = network, shape, ""
    if isinstance(network, PlaneNetwork):
        inner, prefix = network.network, "network."
        size = shape[: network.dim] + shape[network.dim + 1 :]
    found = find_exact_layers(inner, size)
    layers = [network.get_submodule(prefix + name) for name in found.first | found.exact]
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
    import openvino

    options = {
        "INFERENCE_PRECISION_HINT": _HINTS[request.dtype],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": request.threads,
        "ENABLE_CPU_PINNING": False,  # several workers would share the same cores
    }
    compiled = _core().compile_model(folder / _GRAPH, "CPU", options)
    inference = compiled.create_infer_request()
    drop_file_pages(folder / _WEIGHTS)  # it has copied most of them in another order
    shape = tuple(compiled.output(0).get_shape())

    def run(windows: torch.Tensor) -> torch.Tensor:
        scores = torch.empty(shape)
        inference.set_input_tensor(openvino.Tensor(windows.contiguous().numpy(), True))
        inference.set_output_tensor(openvino.Tensor(scores.numpy(), True))
        inference.infer()
        return scores

    return run
