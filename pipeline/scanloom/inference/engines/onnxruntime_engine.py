"""ONNX Runtime: runs a network on CPUs, and with its execution providers on other devices."""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from scanloom.cards.networks import ONNX_GRAPH
from scanloom.core.packages import UNKNOWN, package_version
from scanloom.inference.device import is_out_of_memory
from scanloom.inference.engines.cache import cached_export, export_key
from scanloom.inference.engines.protocol import EngineUnfitError, NetworkRequest, Run
from scanloom.inference.nets.onnx_graph import OnnxGraph
from scanloom.inference.network.layers import PlaneNetwork

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_FORM = 2
"""Version of this module's exports: to be raised when they change."""
_GRAPH = "network.onnx"
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-rocm", "onnxruntime-migraphx")
_EXPORTERS = ("onnx", "onnxscript")
"""Libraries with which torch writes ONNX files."""

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, MIGRAPHX = "TensorrtExecutionProvider", "MIGraphXExecutionProvider"
_BOUND = {CPU: "cpu", CUDA: "cuda", TENSORRT: "cuda"}
"""Providers that read and write torch's memory, and their name of the device. Others get copies."""
_TYPES = {torch.float32: "tensor(float)", torch.float16: "tensor(float16)"}


class OnnxRuntime:
    """ONNX Runtime on CPU, CUDA, and ROCm (MIGraphX)."""

    name: ClassVar[str] = "onnxruntime"
    package: ClassVar[str] = "onnxruntime onnx onnxscript"
    automatic: ClassVar[bool] = True

    def version(self) -> str | None:
        """Return the version of ONNX Runtime; None if it or a library to export is missing."""
        if any(package_version(name) is None for name in _EXPORTERS):
            return None
        return first_version(_DISTRIBUTIONS, "onnxruntime")

    def provider(self, device: torch.device) -> str | None:
        """Return the name of the execution provider for a device, or None."""
        on_cuda = MIGRAPHX if torch.version.hip else CUDA  # torch calls both devices "cuda"
        return {"cpu": CPU, "cuda": on_cuda}.get(device.type)

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether a provider for the device is installed that calculates in the type.

        All calculate in float32; CUDA, TensorRT and MIGraphX also in float16.
        """
        provider = self.provider(device)
        if provider == CPU:
            return dtype is torch.float32
        return dtype in _TYPES and provider in _installed_providers(self.version())

    def prepare(self, request: NetworkRequest) -> Run:
        """Prepare a network: read it from the cache or export it, and load it."""
        provider = self.provider(request.device)
        if provider is None:
            raise EngineUnfitError(f"ONNX Runtime has no provider for {request.device.type}")
        device = []  # of TensorRT's plan; a graph for CPUs fits all
        if request.device.type == "cuda":
            properties = torch.cuda.get_device_properties(request.device)
            device = [properties.name, f"{properties.major}.{properties.minor}"]
        subject = {
            "engine": [self.name, self.version(), _FORM, provider, *device],
            **request.cache_subject,
        }

        network = request.build() if request.identity[0] == ONNX_GRAPH else None
        plane = network.dim if isinstance(network, PlaneNetwork) else None
        network = network.network if isinstance(network, PlaneNetwork) else network

        def write(folder: Path) -> None:
            if isinstance(network, OnnxGraph):
                (folder / _GRAPH).write_bytes(network.content())
            else:
                _export(request, folder)
            if provider == TENSORRT:  # builds the plan and leaves it in the folder
                _session(folder, request, provider)

        try:
            with cached_export(export_key(subject), write) as (folder, _):
                session = _session(folder, request, provider)
            if isinstance(network, OnnxGraph):
                return _graph_runner(session, network, plane)
            return _runner(session, request, provider)
        except EngineUnfitError:
            raise
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            raise EngineUnfitError(f"{type(exc).__name__} while the network was prepared") from exc


def first_version(distributions: Sequence[str], module: str) -> str | None:
    """Return the version of a module that several distributions provide; None without it."""
    versions = [package_version(name, module) for name in distributions]
    known = [version for version in versions if version != UNKNOWN]
    return known[0] if known else versions[0]


def provider_options(provider: str, request: NetworkRequest, folder: Path) -> dict[str, str]:
    """Return the options of an execution provider.

    Parameters
    ----------
    folder : Path
        Folder of the exported network, in which TensorRT keeps its plan.
    """
    device = {"device_id": str(request.device.index or 0)}
    if provider == CUDA:
        return {**device, "use_tf32": "0"}  # float32 with all its digits
    if provider == TENSORRT:
        return {
            **device,
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(folder),
            "trt_fp16_enable": str(int(request.dtype is torch.float16)),
        }
    if provider == MIGRAPHX:
        return {**device, "migraphx_fp16_enable": "0"}  # the graph has its types
    return {}


def _installed_providers(version: str | None) -> list[str]:
    if version is None:
        return []
    import onnxruntime

    return list(onnxruntime.get_available_providers())


def _export(request: NetworkRequest, folder: Path) -> None:
    """Write a network as an ONNX file, in the type in which it calculates."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(request.build()).to(request.dtype),
            (torch.zeros(request.shape, dtype=request.dtype),),
            folder / _GRAPH,
            dynamo=True,
            verbose=False,
            external_data=True,  # a file of more than 2 GB can't be read
        )


def _session(folder: Path, request: NetworkRequest, provider: str) -> InferenceSession:
    """Load an exported network for a provider.

    Raises
    ------
    EngineUnfitError
        If ONNX Runtime loads it for another provider, as it does where libraries are missing.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = request.threads
    options.log_severity_level = 3
    if provider in (CUDA, TENSORRT):
        onnxruntime.preload_dlls()  # CUDA's libraries as torch's wheels have them
    if provider == TENSORRT:
        importlib.import_module("tensorrt")  # loads its libraries
    providers: list[tuple[str, dict[str, str]]] = [
        (name, provider_options(name, request, folder))
        for name in dict.fromkeys((provider, CUDA if provider == TENSORRT else CPU, CPU))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a provider that is passed over: refused here
        session = onnxruntime.InferenceSession(folder / _GRAPH, options, providers=providers)
    if session.get_providers()[0] != provider:
        raise EngineUnfitError(f"{provider} can't be loaded: a library is missing")
    return session


def _runner(session: InferenceSession, request: NetworkRequest, provider: str) -> Run:
    """Return a function that runs a loaded network on a device."""
    in_place = provider in _BOUND
    [parameter], [result] = session.get_inputs(), session.get_outputs()
    dtype = next(each for each, name in _TYPES.items() if name == result.type)
    # not the request itself: it has the weights, which torch need not keep
    most, takes, on = request.shape[0], request.dtype, request.device

    def run(windows: torch.Tensor) -> torch.Tensor:
        count = len(windows)
        if count < most:  # the last batch of a scan
            windows = torch.cat([windows, windows.new_zeros(most - count, *windows.shape[1:])])
        windows = windows.to(takes).contiguous()
        if not in_place:
            [scores] = session.run(None, {parameter.name: windows.cpu().numpy()})
            return torch.from_numpy(scores).to(windows.device)[:count]
        device = _BOUND[provider], on.index or 0
        output = torch.empty(tuple(result.shape), dtype=dtype, device=windows.device)
        binding = session.io_binding()
        for bind, name, tensor in (
            (binding.bind_input, parameter.name, windows),
            (binding.bind_output, result.name, output),
        ):
            kind = "float16" if tensor.dtype is torch.float16 else "float32"
            bind(name, *device, kind, tuple(tensor.shape), tensor.data_ptr())
        if device[0] == "cuda":
            torch.cuda.current_stream(on).synchronize()  # the windows are complete
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return output[:count]

    return run


def _graph_runner(session: InferenceSession, network: OnnxGraph, plane: int | None) -> Run:
    """Return a function that runs an ONNX graph as it is, one window after another.

    `plane` is the axis of the windows across the planes that a two-dimensional graph takes.
    """
    [parameter] = session.get_inputs()
    last = network.layout == "channels_last"
    batch = parameter.shape[0] if parameter.shape else None
    if isinstance(batch, int) and batch > 1:
        raise EngineUnfitError(f"the graph takes {batch} windows at once")

    def run(windows: torch.Tensor) -> torch.Tensor:
        scores = []
        on_host = windows.to("cpu", torch.float32)
        for window in on_host if plane is None else on_host.squeeze(plane):
            values = window[None].movedim(1, -1) if last else window[None]
            [output] = session.run(None, {parameter.name: values.contiguous().numpy()})
            result = torch.from_numpy(output)
            scores.append(result.movedim(-1, 1) if last else result)
        joined = torch.cat(scores).to(windows.device)
        return joined if plane is None else joined.unsqueeze(plane)

    return run


ENGINE = OnnxRuntime()
