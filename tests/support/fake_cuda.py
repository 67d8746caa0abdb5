"""A stand-in for CUDA devices: tensors that say they are on cuda:0, and calculate on the CPU.

It refuses what CUDA refuses, such as operations on tensors of two devices, and counts what costs
time on a real device, with file and line: each copy over the bus and each wait of the host for the
device. Memory is limited, operations can be made to fail, and a graph replays its operations on the
tensors with which it was captured. Speed, races and the results of real libraries are not shown.

Copies to a device are true copies, as on CUDA: on a CPU, `.to` returns the same tensor.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST = torch.device("cpu")
TO_DEVICE, TO_HOST, WAIT = "copy to the device", "copy to the host", "wait of the host"
BESIDE = "wait of a thread that launches nothing"

_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
    "repeat_interleave",
}
"""Operations whose result, or its shape, the host needs."""
CONVOLUTIONS = {"convolution", "conv3d", "conv_transpose3d"}
_COPIES = {"_to_copy", "to", "cpu", "cuda"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that take indices from the host too; a mask makes them wait for its sum."""
_FROM_TEMPLATE = ("empty_like", "zeros_like", "ones_like", "full_like", "new_", "rand")
"""Operations that take shape and type, not values, from their argument."""
_CAPTURED = "operation not permitted when stream is capturing"
"""CUDA's message for a copy or a wait during the capture of a graph."""


def memory_faults() -> dict[str, Callable[[], Exception]]:
    """Return the messages of lacking device memory, as CUDA and its libraries raise them."""
    accelerator: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
    runtime_exception = type("RuntimeException", (Exception,), {"__module__": "onnxruntime.capi"})
    faults: dict[str, tuple[Callable[[str], Exception], str]] = {
        "driver": (accelerator, "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        "cudnn alloc": (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        "cudnn internal": (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        "cublas": (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `create`"),
        "engine": (RuntimeError, "GET was unable to find an engine to execute this computation"),
        "algorithm": (RuntimeError, "Unable to find a valid cuDNN algorithm to run convolution"),
        "triton": (RuntimeError, "Triton Error [CUDA]: out of memory"),
        "onnxruntime": (
            runtime_exception,
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested "
            "buffer of size 1073741824",
        ),
        "torch": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB."),
    }
    return {name: lambda kind=kind, text=text: kind(text) for name, (kind, text) in faults.items()}


@dataclass
class Ledger:
    """Copies, waits and operations of the stand-in, with the caller of each in the package."""

    calls: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    sites: Counter[tuple[str, str]] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    floats_to_host: int = 0
    """Bytes of floating-point tensors of more than one value that were copied to the host."""
    operations: int = 0

    def note(self, kind: str, size: int = 0, what: str = "") -> None:
        """Count an event."""
        self.calls[kind] += 1
        self.sizes[kind] += size
        self.largest[kind] = max(self.largest[kind], size)
        self.sites[kind, f"{_caller()} {what}".strip()] += 1

    @property
    def waits(self) -> int:
        """Number of waits of the host: explicit ones, and results that the host reads."""
        return self.calls[WAIT]

    def __str__(self) -> str:
        lines = [f"{self.operations} operations on the device"]
        for kind, count in self.calls.items():
            lines.append(f"{kind}: {count} times, {self.sizes[kind]:,} bytes")
            sites = ((n, site) for (each, site), n in self.sites.items() if each == kind)
            lines += [f"  {n:5d}  {site}" for n, site in sorted(sites, reverse=True)]
        return "\n".join(lines)


def _caller() -> str:
    """Return the place in the package from which the current operation was called."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/scanloom/" in path and "/tests/" not in path.rpartition("/scanloom/")[2]:
            module = path.rpartition("/scanloom/")[2]
            return f"{module}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class DeviceTensor(torch.Tensor):
    """A tensor of a stand-in device; `inner` holds its values on the CPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=False,
        )
        tensor.inner = inner
        return tensor

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def numpy(self, *_: object, **__: object) -> None:
        """Refuse, as CUDA does."""
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    __array__ = numpy

    def data_ptr(self) -> int:
        """Refuse: a foreign library would read the host's memory."""
        raise RuntimeError("a tensor of the stand-in has no address on a device")

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        with torch.no_grad():
            copy = memo[id(self)] = self.clone()
        return copy

    def get_device(self) -> int:
        """Return the number of the device."""
        return self.device.index

    def record_stream(self, stream: Stream) -> None:
        """Do nothing: memory that is freed is not used by a stream any more."""

    # torch's own methods set CUDA's current device first, which a build for CPUs can't
    def contiguous(
        self, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        """Return the tensor, or a copy in an order of memory."""
        if self.inner.is_contiguous(memory_format=memory_format):
            return self
        return self.clone(memory_format=memory_format)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Overwrite the tensor."""
        return torch.ops.aten.copy_.default(self, source, non_blocking)

    def item(self) -> Any:
        """Return the only value, for which the host waits."""
        return torch.ops.aten._local_scalar_dense.default(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        """Return the indices of values that are not 0, for whose number the host waits."""
        found = torch.ops.aten.nonzero.default(self)
        return tuple(found.unbind(1)) if as_tuple else found

    def tolist(self) -> Any:
        """Return the values, for which the host waits."""
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        with _current().stopped():
            view, tensors = _basic_index(self, index)
            return torch.ops.aten.index.Tensor(view, tensors) if tensors else view

    def __setitem__(self, index: Any, value: Any) -> None:
        with _current().stopped():
            self._set(index, value)

    def _set(self, index: Any, value: Any) -> None:
        view, tensors = _basic_index(self, index)
        if not isinstance(value, torch.Tensor):
            value = torch.ops.aten.full.default(
                [], value, dtype=self.dtype, device=self.device, pin_memory=False
            )
        if tensors:
            torch.ops.aten.index_put_.default(view, tensors, value)
        else:
            view.copy_(value)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _current().run(func, args, kwargs or {})


class TimedTensor(DeviceTensor):
    """A tensor of a stand-in with a clock, which stops for all that the stand-in adds to a call."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with _current().stopped(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _basic_index(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[Any]]:
    """Return the view that integers, slices, None and an ellipsis select, and further tensors."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(
        entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype is torch.bool else 1
        for entry in entries
        if entry is not None and entry is not Ellipsis
    )
    rest = [slice(None)] * (tensor.dim() - taken)
    if Ellipsis in [entry for entry in entries if not isinstance(entry, torch.Tensor)]:
        at = next(n for n, entry in enumerate(entries) if entry is Ellipsis)
        entries[at : at + 1] = rest
    aten, dim, tensors = torch.ops.aten, 0, list[Any]()
    for entry in entries:
        if entry is None:
            tensor = aten.unsqueeze.default(tensor, dim)
        elif isinstance(entry, slice):
            if entry != slice(None):
                step = 1 if entry.step is None else entry.step
                tensor = aten.slice.Tensor(tensor, dim, entry.start, entry.stop, step)
        elif isinstance(entry, torch.Tensor | list | np.ndarray):
            values = entry if isinstance(entry, torch.Tensor) else torch.as_tensor(entry)
            tensors += [None] * (dim - len(tensors)) + [values]
            dim += values.dim() - 1 if values.dtype is torch.bool else 0
        else:
            tensor = aten.select.int(tensor, dim, int(entry))
            dim -= 1
        dim += 1
    return tensor, tensors


class _Dispatch(TorchDispatchMode):
    """Passes all operations to the stand-in: those that make a tensor on its devices too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _current().run(func, args, kwargs or {})


class Stream:
    """A stream, which knows its device; all work is done at once, but for its time."""

    def __init__(self, device: Any = None, **_: object) -> None:
        self.device = _current().device(device)
        self.device_index, self.cuda_stream = self.device.index, 0
        self.free_at = 0.0

    def synchronize(self) -> None:
        """Count a wait."""
        _current().wait("stream", self.free_at)

    def wait_stream(self, stream: Stream) -> None:
        """Let work that follows begin after that of another stream."""
        self.free_at = max(self.free_at, stream.free_at)

    def wait_event(self, event: Event) -> None:
        """Let work that follows begin after an event."""
        self.free_at = max(self.free_at, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event after all work until now."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return that all work is done."""
        return True


class Event:
    """An event of a stream."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Take the time at which the work of a stream until now is done."""
        self.at = (stream or torch.cuda.current_stream()).free_at

    def synchronize(self) -> None:
        """Count a wait."""
        _current().wait("event", self.at)

    def wait(self, stream: Stream | None = None) -> None:
        """Let work of a stream that follows begin after the event."""
        (stream or torch.cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return that the event has happened."""
        return True


class CUDAGraph:
    """Operations recorded on a stream, replayed on the same tensors."""

    def __init__(self, *_: object, **__: object) -> None:
        self.recorded: list[tuple[Any, Any, Any, Any]] = []
        self.device: torch.device | None = None
        self.replays = 0

    def replay(self) -> None:
        """Repeat the operations; results are written where they were at the capture."""
        stand_in = _current()
        stand_in.count_operation()
        self.replays += 1
        for func, args, kwargs, results in self.recorded:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if _is_tensor(old) and not _same_memory(old, new):
                    old.copy_(new)

    def reset(self) -> None:
        """Forget the operations."""
        self.recorded.clear()


@contextlib.contextmanager
def _graph(graph: CUDAGraph, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
    """Capture the operations of a block, as `torch.cuda.graph`: of the stream's device only."""
    stand_in = _current()
    # torch keeps one stream for all captures, of the device that is current at the first
    if stream is None:
        stand_in.capture_stream = stand_in.capture_stream or Stream()
        stream = stand_in.capture_stream
    graph.device = stream.device
    stand_in.capturing.append((graph, stream))
    try:
        with _on_stream(stream):
            yield
    finally:
        stand_in.capturing.pop()
    # CUDA runs nothing during a capture: there are no results yet
    for _, args, kwargs, results in graph.recorded:
        known = [each for each in tree_leaves((args, kwargs)) if _is_tensor(each)]
        for result in tree_leaves(results):
            own = _is_tensor(result) and not any(_same_memory(result, each) for each in known)
            if own and result.is_floating_point():
                result.fill_(torch.nan)


@contextlib.contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    stand_in = _current()
    before = stand_in.streams.copy(), stand_in.number
    if stream is not None:
        stand_in.streams[stream.device_index], stand_in.number = stream, stream.device_index
    try:
        yield
    finally:
        stand_in.streams, stand_in.number = before


class _OnDevice:
    """The context manager `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self._number = _current().device(device).index

    def __enter__(self) -> None:
        stand_in = _current()
        self._before, stand_in.number = stand_in.number, self._number

    def __exit__(self, *_: object) -> None:
        _current().number = self._before


@dataclass(frozen=True)
class Properties:
    """Properties of a stand-in device, as torch reports them."""

    total_memory: int
    name: str = "stand-in"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    L2_cache_size: int = 50 << 20
    uuid: str = "00000000-0000-0000-0000-000000000000"


class Timeline:
    """A clock that counts the time of a device in place of the stand-in's own.

    Operations queue on their stream, the host needs `LAUNCH` for each, and a wait of the host lasts
    until the stream has done all. What the host does beside that takes the processor time that it
    takes here, so that other programs do not count. One thread may use the clock.
    Convolutions and kernels return zeros, since large ones would take the stand-in hours.

    Parameters
    ----------
    seconds : callable
        Seconds of an operation of the device, by its name and the bytes that it reads and writes.

    Attributes
    ----------
    busy : float
        Seconds of all operations of the device.
    """

    LAUNCH, VIEW = 6e-6, 1.5e-6
    """Seconds that the host needs to launch an operation on a real device, and for a view."""
    entry = 0.0
    """Seconds that the stand-in adds to each call before it can stop the clock."""

    def __init__(self, seconds: Callable[[str, int], float]) -> None:
        self._seconds, self._hidden, self._depth = seconds, 0.0, 0
        self._stopped_at, self._begins = 0.0, list[float]()
        self.busy = self.done_at = 0.0

    def now(self) -> float:
        """Return the seconds of this clock, from any start."""
        return self._stopped_at if self._depth else time.thread_time() - self._hidden

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock for a block in which the stand-in works."""
        self._stopped_at = self.now() - (0.0 if self._depth else self.entry)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._hidden = time.thread_time() - self._stopped_at

    def spend(self, seconds: float) -> None:
        """Let the host need seconds, within a block in which the clock is stopped."""
        self._stopped_at += seconds

    def charge(self, name: str, size: int, stream: Stream) -> None:
        """Let a stream take an operation that is launched now."""
        seconds = self._seconds(name, size)
        stream.free_at = max(stream.free_at, self.now()) + seconds
        self.done_at = max(self.done_at, stream.free_at)
        self.busy += seconds

    def wait(self, until: float | None = None) -> None:
        """Let the host, or the task of its thread, wait until a time; until all work is done."""
        until = self.done_at if until is None else until
        if self._begins:
            self._begins[-1] = max(self._begins[-1], until)
        elif self._depth:
            self._stopped_at = max(self._stopped_at, until)
        else:
            self._hidden -= max(0.0, until - self.now())

    def beside(self, work: Callable[[], Any], begins: float, pace: float) -> tuple[Any, float]:
        """Return the result of a task of another thread, and the time at which it ends.

        It begins when the thread is free, and when what it waits for is done. It is run at once,
        and takes `pace` times the seconds that it takes alone, none of them of the caller.
        """
        before = self.now()
        self._begins.append(max(before, begins))
        result = work()
        took = self.now() - before
        self._hidden += took
        return result, self._begins.pop() + pace * took


class HostThreads:
    """Threads on a timeline, in the place of a `ThreadPoolExecutor` that copies in memory.

    Together they are as fast as one thread that needs `pace` times the time of a thread here.
    """

    def __init__(self, timeline: Timeline, pace: float) -> None:
        self._timeline, self._pace, self._free_at = timeline, pace, 0.0

    def submit(self, work: Callable[..., Any], *args: Any) -> HostFuture:
        """Run a task, and return its result, which is there when the threads have come to it."""
        task = partial(work, *args)
        result, self._free_at = self._timeline.beside(task, self._free_at, self._pace)
        return HostFuture(self._timeline, result, self._free_at)

    def shutdown(self, **_: object) -> None:
        """Do nothing: all tasks are done."""


@dataclass(frozen=True)
class HostFuture:
    """A task's result, for which the host waits."""

    timeline: Timeline
    value: Any
    ready_at: float

    def result(self) -> Any:
        """Wait, and return the result."""
        self.timeline.wait(self.ready_at)
        return self.value


class StandIn:
    """One or more stand-in devices.

    Parameters
    ----------
    devices : int
        Number of devices.
    memory : int
        Bytes of each device.

    Attributes
    ----------
    ledger : Ledger
        Copies, waits and operations since the last `clear`.
    others : int
        Bytes that other processes hold on each device, of which this process does not know.
    """

    def __init__(self, devices: int = 1, memory: int = 80 << 30) -> None:
        self.count, self.memory, self.number = devices, memory, 0
        self.others = 0
        self.ledger = Ledger()
        self.share = dict.fromkeys(range(devices), 1.0)
        self.live, self.peak = Counter[int](), Counter[int]()
        self.streams: dict[int, Stream] = {}
        self._default_streams: dict[int, Stream] = {}
        self._launching = set[int]()
        self.capturing: list[tuple[CUDAGraph, Stream]] = []
        self.capture_stream: Stream | None = None
        self._fault: tuple[int, Callable[[], Exception]] | None = None
        self._watched: dict[int, tuple[int, int]] = {}
        self._pinned = weakref.WeakSet[Any]()
        self._lock = threading.RLock()
        self.timeline: Timeline | None = None

    def clear(self) -> None:
        """Forget what was counted, and the peak of memory."""
        self.ledger = Ledger()
        self.peak = Counter(self.live)

    def start(self, timeline: Timeline) -> None:
        """Count time from now on, with a clock that is new."""
        self.timeline = timeline
        self._default_streams.clear()

    def fail(self, error: Callable[[], Exception], after: int = 0, times: int = 1) -> None:
        """Let the operation after `after` more operations fail, and those that follow it."""
        start = self.ledger.operations + after
        self._fault = start, error
        self._fault_end = start + times

    @property
    def allocated(self) -> int:
        """Bytes of all live tensors of the first device."""
        gc.collect()
        return self.live[0]

    def device(self, device: Any = None) -> torch.device:
        """Return a device, by default the current one; refuse one that does not exist."""
        if device is None:
            number = self.number
        elif isinstance(device, int):
            number = device
        else:
            index = torch.device(device).index
            number = self.number if index is None else index
        if not 0 <= number < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", number)

    def wait(self, what: str, until: float | None = None) -> None:
        """Count a wait of the host for a device; on a timeline, until then or all is done."""
        if self.capturing:
            raise RuntimeError(f"CUDA error: {_CAPTURED}")
        self._note_wait(what, until)

    def _note_wait(self, what: str, until: float | None = None) -> None:
        # A thread that launches no operations keeps none from the device while it waits
        launches = threading.get_ident() in self._launching
        self.ledger.note(WAIT if launches else BESIDE, what=f"({what})")
        if self.timeline is not None:
            self.timeline.wait(until)

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a clock, if there is one, does not count the stand-in's work."""
        return contextlib.nullcontext() if self.timeline is None else self.timeline.stopped()

    def stream(self, device: Any = None) -> Stream:
        """Return the current stream of a device."""
        number = self.device(device).index
        if number in self.streams:
            return self.streams[number]
        return self._default_streams.setdefault(number, Stream(number))

    def count_operation(self) -> None:
        """Count an operation; raise the fault that is due."""
        self._launching.add(threading.get_ident())
        number = self.ledger.operations
        self.ledger.operations += 1
        if self._fault is not None and self._fault[0] <= number < self._fault_end:
            raise self._fault[1]()

    def wrap(self, inner: torch.Tensor, device: torch.device) -> DeviceTensor:
        """Return a tensor of a device; its memory is counted as long as it lives."""
        storage = inner.untyped_storage()
        key, size, number = id(storage), storage.nbytes(), device.index or 0
        with self._lock:
            if key not in self._watched:
                limit = min(int(self.memory * self.share[number]), self.memory - self.others)
                if self.live[number] + size > limit:
                    gc.collect()
                if self.live[number] + size > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate.")
                self._watched[key] = number, size
                self.live[number] += size
                self.peak[number] = max(self.peak[number], self.live[number])
                weakref.finalize(storage, self._forget, key)
        with torch.inference_mode(False):  # views of a tensor of either mode are made in both
            return (DeviceTensor if self.timeline is None else TimedTensor)(inner, device)

    def _forget(self, key: int) -> None:
        with self._lock:
            number, size = self._watched.pop(key)
            self.live[number] -= size

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor in memory that counts as page-locked."""
        copy = tensor.clone()
        self._pinned.add(copy.untyped_storage())
        return copy

    @property
    def pinned_bytes(self) -> int:
        """Bytes of live tensors in page-locked memory."""
        return sum(storage.nbytes() for storage in list(self._pinned))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in page-locked memory."""
        return not isinstance(tensor, DeviceTensor) and tensor.untyped_storage() in self._pinned

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch as CUDA would."""
        if self.timeline is None:
            return self._run(func, args, kwargs)
        with self.timeline.stopped():
            before = self.ledger.operations
            result = self._run(func, args, kwargs)
            if self.ledger.operations > before:
                self._charge(func._schema.name.split("::")[-1], args, kwargs, result)
            return result

    def _charge(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Let the device take an operation; a copy over the bus is taken where it is counted."""
        assert self.timeline is not None
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        read = [x for x in operands if isinstance(x, DeviceTensor)]
        new = [x for x in tree_leaves(result) if isinstance(x, DeviceTensor)]
        over_the_bus = name in {*_COPIES, "copy_"} and (len(read) < len(operands) or not new)
        views = any(_same_memory(x.inner, y.inner) for x in new for y in read)
        # Memory is there already: neither it nor a view takes time of the device
        no_work = name.startswith(("empty", "new_empty")) or (views and not name.endswith("_"))
        self.timeline.spend(self.timeline.VIEW if no_work else self.timeline.LAUNCH)
        tensors = [*read, *new]
        if tensors and not (over_the_bus or no_work):
            size = sum(x.nbytes for x in tensors)
            self.timeline.charge(name, size, self.stream(tensors[0].device))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[-1]
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if isinstance(x, DeviceTensor)]
        named = [x for x in leaves if isinstance(x, torch.device)]
        target = named[0] if named else None
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if not ours and (target is None or target.type != "cuda"):
            began = time.thread_time()
            result = func(*args, **kwargs)
            if self.timeline is not None:  # what the host computes, it computes
                self.timeline.spend(time.thread_time() - began)
            if pinned:
                self._pinned.add(result.untyped_storage())
            return result
        if target is not None and target.type == "cuda":
            target = self.device(target)
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs), is_leaf=_is_tensor)
        if name in _COPIES and tensors:
            return self._copied(func, tensors, target, plain_args, plain_kwargs)
        if name == "copy_":
            return self._copy_into(args, plain_args, plain_kwargs)
        self._check(name, args, ours, tensors, target)
        device = target if target is not None else ours[0].device
        if device.type == "cuda":
            self.count_operation()
        compute = func
        if name in CONVOLUTIONS and self.timeline is not None:
            compute = partial(_no_convolution, func)
        elif name in CONVOLUTIONS and plain_args[0].dtype is torch.float16:
            compute = partial(_half_convolution, func)
        elif device.type == "cuda" and _divides_by_number(name, plain_args, plain_kwargs):
            compute = partial(_by_reciprocal, name)
        result = compute(*plain_args, **plain_kwargs)
        if device.type != "cuda":
            if pinned:
                self._pinned.add(result.untyped_storage())
            return result
        self._record(func, plain_args, plain_kwargs, result, device)
        known = {id(tensor.inner): tensor for tensor in ours}

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor):
                return value
            same = known.get(id(value))
            return self.wrap(value, device) if same is None else same

        return tree_map(wrap, result)

    def _check(
        self,
        name: str,
        args: tuple[Any, ...],
        ours: Sequence[DeviceTensor],
        tensors: Sequence[torch.Tensor],
        target: torch.device | None,
    ) -> None:
        """Refuse tensors of several devices, and count waits."""
        host = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim() > 0]
        if host and name in _INDEXED:
            self._transfer(TO_DEVICE, sum(x.nbytes for x in host), f"(operand of {name})")
        elif host and target is None and not name.startswith(_FROM_TEMPLATE):
            shapes = [tuple(x.shape) for x in host]
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda and cpu: {name} of {shapes}"
            )
        if len({x.device for x in ours if x.dim() > 0}) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cuda:1: {name}"
            )
        masks = tree_leaves(args[1]) if name in _INDEXED else []
        if name in _WAITS or any(_is_tensor(x) and x.dtype is torch.bool for x in masks):
            self.wait(name)

    def _transfer(self, kind: str, size: int, what: str = "") -> None:
        if self.capturing:
            raise RuntimeError(f"CUDA error: {_CAPTURED}")
        self.ledger.note(kind, size, what)

    def _copied(
        self,
        func: Any,
        tensors: Sequence[torch.Tensor],
        target: torch.device | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return a copy of a tensor in another type, or on another device."""
        source = tensors[0]
        here = source.device
        there = here if target is None else target
        if "cuda" in (here.type, there.type):
            self.count_operation()
        inner = _plain(source)
        free = bool(kwargs.pop("non_blocking", False))
        kwargs.pop("device", None)
        result = func(*args, **kwargs)
        if result is inner or _same_memory(result, inner):
            if here == there:
                return source
            result = result.clone(memory_format=torch.preserve_format)
        if here.type != there.type:
            kind = TO_HOST if here.type == "cuda" else TO_DEVICE
            self._note_copy(kind, source, result, there if kind is TO_DEVICE else here, free)
        elif here.type == "cuda":
            self._record(func, args, kwargs, result, here)
        return self.wrap(result, there) if there.type == "cuda" else result

    def _copy_into(self, args: Any, plain_args: Any, kwargs: dict[str, Any]) -> Any:
        """Copy the values of a tensor into another one."""
        into, source = args[0], args[1]
        self.count_operation()
        if into.device.type != source.device.type:
            kind = TO_HOST if source.device.type == "cuda" else TO_DEVICE
            free = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            device = into.device if kind is TO_DEVICE else source.device
            self._note_copy(kind, source, into, device, free)
        result = torch.ops.aten.copy_.default(*plain_args[:2])
        if into.device.type == source.device.type == "cuda":
            self._record(torch.ops.aten.copy_.default, plain_args[:2], {}, result, into.device)
        return into

    def _note_copy(
        self,
        kind: str,
        source: torch.Tensor,
        into: torch.Tensor,
        device: torch.device,
        free: bool,
    ) -> None:
        """Count a copy over the bus of a device, of `source` into memory of its type there.

        `free` is whether the host need not wait. A copy to pageable memory is over when CUDA
        returns, whatever was asked for.
        """
        free &= kind is TO_DEVICE or self.is_pinned(into)
        size = _plain(into).nbytes
        self._transfer(kind, size, "" if self.is_pinned(source) or not free else "(pageable)")
        if self.timeline is not None:
            stream = self.stream(device)
            self.timeline.charge(kind, size, stream)
            if not free:
                self._note_wait(kind, stream.free_at)
        elif not free:
            self._note_wait(kind)
        if kind is TO_HOST and source.is_floating_point() and source.numel() > 1:
            self.ledger.floats_to_host += size

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, device: torch.device) -> None:
        """Record an operation of the graph that is captured, if it is on the graph's device.

        Operations on another device run at once, as on CUDA: their stream is not captured.
        """
        for graph, _ in self.capturing[-1:]:
            if graph.device == device:
                graph.recorded.append((func, args, kwargs, result))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _plain(value: Any) -> Any:
    """Return the values of a tensor of a device, and the CPU for a device."""
    if isinstance(value, DeviceTensor):
        return value.inner
    return HOST if isinstance(value, torch.device) else value


def _same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _half_convolution(func: Any, *args: Any) -> torch.Tensor:
    """Convolve in half precision as tensor cores do: products are summed in float32."""
    wide = tree_map(lambda x: x.float() if _is_tensor(x) else x, args)
    return func(*wide).to(torch.float16)


def _no_convolution(func: Any, *args: Any) -> torch.Tensor:
    """Return zeros of the shape that a convolution gives."""
    on_meta = tree_map(lambda x: x.to("meta") if _is_tensor(x) else x, args)
    return torch.zeros_like(func(*on_meta), device="cpu")


def _divides_by_number(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operation divides a tensor of floats by one number."""
    return (
        name in ("div", "div_")
        and not kwargs
        and isinstance(args[0], torch.Tensor)
        and args[0].is_floating_point()
        and (isinstance(args[1], (int, float)) or args[1].dim() == 0)
    )


def _by_reciprocal(name: str, values: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Multiply by the reciprocal of a number, as CUDA divides: the last bit is another."""
    return values.mul_(1 / float(divisor)) if name == "div_" else values * (1 / float(divisor))


_STAND_IN: list[StandIn] = []


def _current() -> StandIn:
    return _STAND_IN[-1]


@contextlib.contextmanager
def stand_in(devices: int = 1, memory: int = 80 << 30) -> Iterator[StandIn]:
    """Let torch see stand-in devices within the block; all threads that start in it see them."""
    fake = StandIn(devices, memory)
    _STAND_IN.append(fake)
    with pytest.MonkeyPatch.context() as patch:
        _patch_torch(patch, fake)
        _patch_kernels(patch)
        run = threading.Thread.run

        def run_thread(thread: threading.Thread) -> None:
            with _Dispatch():
                run(thread)

        patch.setattr(threading.Thread, "run", run_thread)
        try:
            with _Dispatch():
                yield fake
        finally:
            gc.collect()
            _STAND_IN.pop()


def _patch_torch(patch: pytest.MonkeyPatch, fake: StandIn) -> None:
    """Replace what torch asks CUDA's libraries."""
    torch._C._ensureCUDADeviceGuardSet()

    def number(device: Any = None) -> int:
        return fake.device(device).index

    def limit(fraction: float, device: Any = None) -> None:
        fake.share[number(device)] = fraction

    def properties(_: Any = None) -> Properties:
        return Properties(fake.memory)

    def reset_peak(device: Any = None) -> None:
        fake.peak[number(device)] = fake.live[number(device)]

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: fake.count,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: fake.number,
        "set_device": lambda device: setattr(fake, "number", number(device)),
        "get_device_properties": properties,
        "get_device_name": lambda _=None: Properties.name,
        "get_device_capability": lambda _=None: (Properties.major, Properties.minor),
        "memory_allocated": lambda device=None: fake.live[number(device)],
        "memory_reserved": lambda device=None: fake.live[number(device)],
        "max_memory_allocated": lambda device=None: fake.peak[number(device)],
        "max_memory_reserved": lambda device=None: fake.peak[number(device)],
        "reset_peak_memory_stats": reset_peak,
        "get_per_process_memory_fraction": lambda device=None: fake.share[number(device)],
        "set_per_process_memory_fraction": limit,
        "empty_cache": gc.collect,
        "synchronize": lambda _=None: fake.wait("synchronize"),
        "current_stream": fake.stream,
        "default_stream": fake.stream,
        "Stream": Stream,
        "Event": Event,
        "stream": _on_stream,
        "device": _OnDevice,
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = make(data, **kwargs)
        return made if device is None or torch.device(device).type == "cpu" else made.to(device)

    move = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)

        def values() -> Iterator[torch.Tensor]:
            return itertools.chain(module.parameters(), module.buffers())

        if all(v.is_cpu for v in values()) and (device is None or device.type == "cpu"):
            return move(module, *args, **kwargs)
        # A tensor of another class replaces the parameter, which torch's own method refuses
        for each in module.modules():
            for tensors in (each._parameters, each._buffers):
                for name, value in tensors.items():
                    if value is not None:
                        own = dtype if value.is_floating_point() else None
                        with torch.no_grad():
                            tensors[name] = value.to(device or value.device, own)
        return module

    patch.setattr(torch, "tensor", tensor)
    patch.setattr(torch.nn.Module, "to", to)
    patch.setattr(
        torch.nn.Module, "cuda", lambda module, device=None: module.to(fake.device(device))
    )
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: fake.pin(tensor))
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: fake.is_pinned(tensor))


def _patch_kernels(patch: pytest.MonkeyPatch) -> None:
    """Compute what the restore's Triton kernels compute; without those of fused networks.

    A CPU can't run Triton's kernels, though Triton may be installed.
    """
    from scanloom.inference.engines.fused_engine import Fused
    from scanloom.inference.restore import cuda
    from scanloom.inference.restore.restorers import restore_torch

    def launch(scores: Any, where: Any, decision: Any, out: Sequence[Any], rounded: bool) -> None:
        fake = _current()
        fake.count_operation()
        fake.count_operation()
        if fake.timeline is None:
            compute(scores, where, decision, out, rounded)
            return
        size = scores.nbytes + sum(each.nbytes for each in out)
        with fake.timeline.stopped():
            fake.timeline.spend(2 * fake.timeline.LAUNCH)
            fake.timeline.charge("restore", size, fake.stream(scores.device))

    def compute(scores: Any, where: Any, decision: Any, out: Sequence[Any], rounded: bool) -> None:
        at = []
        for taps in where:
            lines = taps.index.inner.numpy() + taps.weight.inner.numpy().astype(np.float64)
            at.append(lines if at and len(lines) > 1 else lines[0])
        labels = [each.inner.numpy() for each in out]
        plain = scores.inner.float()
        restore_torch(plain, (at[0], at[1], at[2]), decision, labels, rounded=rounded)

    patch.setattr(cuda, "_launch", launch)
    patch.setattr(cuda, "_tested", lambda _: cuda.KernelChoice(True, "the stand-in's kernels"))
    patch.setattr(Fused, "version", lambda _: None)
