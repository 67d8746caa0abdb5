"""Copies of scans to a CUDA device and of labels back, beside the work of host and device.

From or to other memory than page-locked, a copy over the bus is several times slower, and the host
waits for it. So arrays pass through page-locked memory, which torch keeps for later copies, slab by
slab: threads copy between it and the arrays, and the bus has a stream of its own. Who waits for the
device sleeps (`blocking` events): one that spins takes a core from readers and writers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scanloom.core.process import core_count

SLAB_BYTES = 8 * 1024**2
"""Bytes that are copied at once: a bus needs 0.2 ms for them."""
_MOST_THREADS = 4
"""Threads that copy in memory: one uses a part of its speed, and more of it than the bus has."""
_MOST_WAITING_BYTES = 64 * 1024**2
"""Bytes of labels on their way to the host: page-locked memory is scarce."""


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, core_count()), "copies")


class StagedArray:
    """An array that threads copy to page-locked memory from now on, for a CUDA device.

    So much is done before the device's turn, or while the device computes with what it has.

    Parameters
    ----------
    array : (N, ., .) array
        Any strides and order of bytes; not to be changed until it is sent.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self._native = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
        self._slabs = deque[Future[torch.Tensor]]()
        self._stage()

    @property
    def shape(self) -> torch.Size:
        """Shape of the array."""
        return torch.Size(self._array.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the array."""
        return self._native.dtype

    def _stage(self) -> None:
        """Start the copies to page-locked memory."""
        self._taken = False
        step = max(1, SLAB_BYTES // max(1, self._array[0].nbytes))
        threads = _threads()
        self._slabs.clear()
        for start in range(0, len(self._array), step):
            self._slabs.append(threads.submit(self._lock, self._array[start : start + step]))
        threads.shutdown(wait=False)  # they end after the last copy

    def _lock(self, slab: NDArray[Any]) -> torch.Tensor:
        """Return a copy in page-locked memory."""
        locked = self._native.new_empty(slab.shape, pin_memory=True)
        locked.numpy()[...] = slab
        return locked

    def slabs(self) -> Iterator[torch.Tensor]:
        """Yield the array in parts (n, ., .), which are not kept: later it is copied again."""
        if self._taken:
            self._stage()
        self._taken = True
        while self._slabs:
            yield self._slabs.popleft().result()


class ArrivingTensor:
    """An array on a CUDA device, of which the first part may be used while others follow."""

    def __init__(self, staged: StagedArray, device: torch.device) -> None:
        self._slabs, self._sent, self._device = staged.slabs(), 0, device
        self._values = torch.empty(staged.shape, dtype=staged.dtype, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        # Its memory may have been that of tensors with which the device still computes
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._values.record_stream(self._stream)

    def until(self, count: int | None = None) -> torch.Tensor:
        """Return the tensor; work that is launched from now on may use the first `count`, or all.

        The host waits for the copies to page-locked memory, not for the device.
        """
        count = len(self._values) if count is None else count
        if self._sent < count:
            with torch.cuda.stream(self._stream):
                while self._sent < count:
                    slab = next(self._slabs)
                    stop = self._sent + len(slab)
                    self._values[self._sent : stop].copy_(slab, non_blocking=True)
                    self._sent = stop
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._values


class LateAnswer:
    """A yes or no of a device, for which the host waits when it asks, not for what follows it.

    Parameters
    ----------
    answer : () bool tensor
        On any device.
    """

    def __init__(self, answer: torch.Tensor) -> None:
        self._answer, self._copied = answer, None
        if answer.device.type == "cuda":
            self._answer = torch.empty_like(answer, device="cpu", pin_memory=True)
            self._answer.copy_(answer, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch
            self._copied.record(torch.cuda.current_stream(answer.device))

    def __bool__(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._answer)


class LabelCopies:
    """Copies of labels from a CUDA device to arrays, while the device and the host go on."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._zeroed = list[Future[None]]()
        self._waiting = deque[tuple[Future[None], int]]()
        self._bytes = 0

    def prepare(self, labels: NDArray[Any]) -> None:
        """Start to write zeros to a new array, to which labels will be copied.

        The system makes a page when it is first written to, which takes longer than the copy.
        """
        planes = np.moveaxis(labels, int(np.argmax(labels.strides)), 0)  # as they lie in memory
        step = max(1, SLAB_BYTES // max(1, planes[0].nbytes))
        for start in range(0, len(planes), step):
            self._zeroed.append(self._pool().submit(planes[start : start + step].fill, 0))

    def add(self, target: NDArray[Any], labels: torch.Tensor) -> None:
        """Start the copy of `labels` on a device to `target`, which has them after `wait`.

        If much is on its way, the host waits for a part of it first.
        """
        while self._zeroed:  # zeros come before labels
            self._zeroed.pop().result()
        device = labels.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch
        self._stream.wait_stream(torch.cuda.current_stream(device))
        labels.record_stream(self._stream)
        # Parts that lie together in memory, whatever the order of the axes is
        slowest = max(range(labels.ndim), key=labels.stride)
        target, labels = np.moveaxis(target, slowest, 0), labels.movedim(slowest, 0)
        step = max(1, SLAB_BYTES // max(1, labels[0].nbytes))
        for start in range(0, len(target), step):
            self._add_slab(target[start : start + step], labels[start : start + step])

    def _add_slab(self, target: NDArray[Any], labels: torch.Tensor) -> None:
        """Start the copy of a part of the labels: each part has a thread of its own."""
        while self._waiting and self._bytes + labels.nbytes > _MOST_WAITING_BYTES:
            self._finish_first()
        with torch.cuda.stream(self._stream):
            locked = torch.empty_like(labels, device="cpu", pin_memory=True)
            locked.copy_(labels, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch
            copied.record(self._stream)

        def write() -> None:
            copied.synchronize()
            target[...] = locked.numpy()

        self._waiting.append((self._pool().submit(write), labels.nbytes))
        self._bytes += labels.nbytes

    def wait(self) -> None:
        """Wait until all arrays have their labels."""
        while self._zeroed:  # without a copy, too: the array is its caller's from now on
            self._zeroed.pop().result()
        while self._waiting:
            self._finish_first()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    def _finish_first(self) -> None:
        copied, size = self._waiting.popleft()
        copied.result()
        self._bytes -= size

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = _threads()
        return self._threads
