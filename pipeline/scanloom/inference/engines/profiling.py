"""A trace of torch's operations and of the steps of a case, for a viewer of traces."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its messages are of no use; read at the import

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from scanloom.core import Reason, ScanError
from scanloom.core.timing import MarkStep


@contextmanager
def profiled(path: Path) -> Iterator[MarkStep]:
    """Write a trace of the block, of all threads, by torch.profiler.

    On CUDA devices kernels and copies are traced too, and steps are NVTX ranges, which Nsight
    Systems shows.

    Parameters
    ----------
    path : Path
        A file in the form of Chrome's traces (JSON), which ui.perfetto.dev and chrome://tracing
        open; compressed if its name ends with ".gz". Written at the end, also after an error.

    Yields
    ------
    callable
        Marks a step in the trace.

    Raises
    ------
    ScanError
        OUTPUT_UNWRITABLE if the file can't be written.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ScanError(
            Reason.OUTPUT_UNWRITABLE, "the trace needs a file name in a folder", str(path)
        )
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(record_function(name))
            if torch.cuda.is_available():
                stack.enter_context(torch.cuda.nvtx.range(name))
            yield

    # All threads: scans are read and written beside the network
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    # One cycle only; torch 2.11 warns that it would forget the events of former ones
    trace = profile(activities=activities, experimental_config=threads, acc_events=True)
    trace.start()
    try:
        yield mark
    finally:
        trace.stop()
        _export(trace, path)


def _export(trace: profile, path: Path) -> None:
    """Write a trace by one rename."""
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent) as scratch:
            draft = Path(scratch, path.name)
            trace.export_chrome_trace(str(draft))
            draft.replace(path)
    except OSError as exc:
        raise ScanError(Reason.OUTPUT_UNWRITABLE, "the trace can't be written", str(path)) from exc
