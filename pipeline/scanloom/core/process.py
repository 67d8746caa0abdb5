"""The process: its cores, limits and locks, the privacy of its memory, the causes of its failures.

Locks are those of flock(2), which the system releases when their process ends.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from scanloom.core.errors import ScanError
from scanloom.core.reasons import Reason

CGROUPS = Path("/sys/fs/cgroup")
"""Limits of control groups, of which a container, a service and a job of a cluster are some."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""The control groups of this process."""


def core_count() -> int:
    """Return the number of cores that this process may use.

    On Linux, these are the cores of its CPU set, and at most as many as a container's limit of
    processor time allows: more threads would wait for each other.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
        return min(usable, container_limit() or usable)
    return os.cpu_count() or 1


def container_limit(folder: Path = CGROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Return the cores that a container's limit allows, rounded up; None without a limit.

    Parameters as of `control_groups`.
    """
    cores = []
    for group in control_groups("cpu", folder, own):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                texts = [(group / name).read_text(encoding="ascii") for name in names]
                quota, period = (float(number) for number in " ".join(texts).split())
            except (OSError, ValueError):  # "max" in version 2
                continue
            if quota > 0 and period > 0:
                cores.append(math.ceil(quota / period))
    return min(cores, default=None)


def control_groups(
    controller: str, folder: Path = CGROUPS, own: Path = OWN_GROUPS
) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all above it: each may have limits.

    In a container its own group is the mount itself. A job of a cluster is a group within.

    Parameters
    ----------
    controller : str
        What is limited: "cpu" or "memory".
    folder : Path
        Mount of the control groups: version 1 has a folder in it for each controller.
    own : Path
        File with the groups of the process. Those that a container does not show are left out.
    """
    paths = {"": "/", controller: "/"}
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            paths.update({name: path for name in names.split(",") if name in paths})
    for name, path in paths.items():
        group = PurePosixPath(path.lstrip("/"))
        yield from (folder / name / each for each in (group, *group.parents))


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's instruction sets by Linux's names; empty if unknown."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(flags.partition(":")[2].split())


def memory_limits(folder: Path = CGROUPS, own: Path = OWN_GROUPS) -> Iterator[tuple[int, int]]:
    """Yield the limit of memory of each control group that has one, and its use of it, in bytes.

    Version 1 states a limit beyond any memory for none. Parameters as of `control_groups`.
    """
    for group in control_groups("memory", folder, own):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with suppress(OSError, ValueError):  # "max" in version 2
                texts = ((group / name).read_text(encoding="ascii") for name in (limit, used))
                most, present = map(int, texts)
                yield most, present


SHARED_DEVICES = "SCANLOOM_SHARED_DEVICES"
"""Environment variable: how many workers of a run, itself included, use the kinds of devices that a
worker shares, such as `cpu:4 gpu:2`."""


def worker_count(kind: str) -> int:
    """Return the number of workers that use this process's device of a kind, "cpu" or "gpu"."""
    entries = (entry.partition(":") for entry in os.environ.get(SHARED_DEVICES, "").split())
    counts = {name: int(count) for name, _, count in entries if count.isdecimal()}
    return max(1, counts.get(kind, 1))


PROCESSOR_TIME = "the processor time of a process (ulimit -t)"
FILE_SIZE = "the size of files of a process (ulimit -f)"


def is_limited(resource_name: str) -> bool:
    """Return whether this process and its children have a limit: AS, CPU or FSIZE (RLIMIT_*)."""
    if sys.platform != "linux":
        return False
    import resource

    limit: int = getattr(resource, f"RLIMIT_{resource_name}")
    return resource.getrlimit(limit)[0] != resource.RLIM_INFINITY


def limit_met(code: int) -> ScanError | None:
    """Return the error for a process that a limit may have ended; None if no limit did.

    `code` is its exit code, negative for a signal. The hard limit of processor time sends SIGKILL,
    as the out-of-memory killer does.
    """
    if code == -signal.SIGXFSZ:
        return ScanError(Reason.ENVIRONMENT, f"the system limits {FILE_SIZE}")
    if code == -signal.SIGXCPU:
        return ScanError(Reason.ENVIRONMENT, f"the system limits {PROCESSOR_TIME}")
    if code == -signal.SIGKILL and is_limited("CPU"):
        detail = f"the process was killed: the system limits {PROCESSOR_TIME}, or memory ran out"
        return ScanError(Reason.ENVIRONMENT, detail)
    return None


_NO_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a memory",
    "out_of_memory",
    "bad_alloc",
    "failed to map segment",  # the dynamic loader, for a shared library
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "STATUS_ALLOC_FAILED",  # cuDNN and cuBLAS
    # cuDNN without memory for the workspace of any of its kernels, in its own and in torch's words
    "CUDNN_STATUS_INTERNAL_ERROR",
    "unable to find an engine to execute this computation",
    "find a valid cuDNN algorithm",
    "Failed to allocate memory",  # ONNX Runtime
)
"""Fragments of out-of-memory messages of torch, oneDNN, the loader, and CUDA's libraries."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
_MISSING_RESOURCES = {
    "tempfile": "there is no folder for temporary files (TMPDIR)",
    "getpass": "the user has no name (USER)",
    "pathlib": "the user has no home folder (HOME)",
    "threading": "no thread can be started",
    "subprocess": "no process can be started",
}
"""Standard-library modules that request a system resource, and the detail if it is refused."""


def blame(error: BaseException) -> ScanError:
    """Return a ScanError for any exception, without text from foreign exceptions.

    OUT_OF_MEMORY, DEVICE_UNAVAILABLE and ENVIRONMENT are faults of the machine, not of the scan.
    INTERNAL carries only the name of the exception type.
    """
    if isinstance(error, ScanError):
        return error
    # the most specific first: errors of torch are RuntimeErrors, and their text may name memory
    kind = type(error).__name__
    if kind == "OutOfMemoryError":  # torch's, which is not imported here
        detail = "the device has too little memory for the models or this scan"
        return ScanError(Reason.OUT_OF_MEMORY, detail)
    lacking = lacks_memory(error)
    if kind == "AcceleratorError" and not lacking:  # nothing runs on the device in this process
        detail = "the device reported a fault: `segment --device cpu` runs without it"
        return ScanError(Reason.DEVICE_UNAVAILABLE, detail)
    if lacking:
        detail = "the models, the scan and its result do not fit into memory"
        return ScanError(Reason.OUT_OF_MEMORY, detail)
    missing = _missing_resource(error)
    if missing:
        return ScanError(Reason.ENVIRONMENT, missing)
    return ScanError(Reason.INTERNAL, kind)


_OF_THE_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
)
"""Error numbers that tell of a file itself: it is missing, or something else is in its place."""


def is_passing(exc: BaseException) -> bool:
    """Return whether an error tells nothing of a file: it may be there, and be read later.

    Such as too many open files, no memory, a disk or share that fails, a permission that is
    missing.
    """
    return isinstance(exc, OSError) and exc.errno is not None and exc.errno not in _OF_THE_FILE


def read_error(exc: Exception, subject: str, damaged: Reason) -> ScanError:
    """Return the error for a file that can't be read: `damaged` only if it is the file's fault.

    `subject` begins its detail.
    """
    number = getattr(exc, "errno", None) or 0
    cause = errno.errorcode.get(number) if type(exc) is OSError else None
    detail = f"{subject} can't be read ({cause or type(exc).__name__})"
    if not is_passing(exc):
        return ScanError(damaged, detail)
    fault = blame(exc)
    return fault if fault.reason is not Reason.INTERNAL else ScanError(Reason.UNREADABLE, detail)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out or a memory limit was reached."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # ONNX Runtime's errors are derived from Exception, and no class of theirs is imported here
    may_report = isinstance(error, RuntimeError | ImportError | OSError)
    may_report |= type(error).__module__.startswith("onnxruntime")
    return may_report and any(fragment in str(error) for fragment in _NO_MEMORY)


def _missing_resource(error: BaseException) -> str:
    """Return a sentence about the resource that the machine lacks; empty for other errors."""
    if isinstance(error, ImportError):
        name = error.name or ""
        suffix = f" ({name})" if name.replace(".", "").isidentifier() else ""
        return f"a library is missing or can't be loaded{suffix}"
    number = getattr(error, "errno", None)
    if number == errno.EFBIG and is_limited("FSIZE"):
        return f"the system limits {FILE_SIZE}"
    if number in _EXHAUSTED:
        return f"the system allows no more open files or processes ({errno.errorcode[number]})"
    if not isinstance(error, OSError | RuntimeError | KeyError):
        return ""
    last_frame = traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error, OSError) and last_frame and _is_in(last_frame[0].filename, "pathlib"):
        return ""  # pathlib raises OSError for any path, not only for a missing home folder
    details = (
        detail
        for frame in last_frame
        for module, detail in _MISSING_RESOURCES.items()
        if _is_in(frame.filename, module)
    )
    return next(details, "")


def _is_in(filename: str, module: str) -> bool:
    """Return whether a traceback's file name is that of a standard-library module."""
    return filename == f"<frozen {module}>" or filename.rpartition("/")[2] == f"{module}.py"


POLL_INTERVAL_S = 0.05
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def lock_file(descriptor: int, timeout_s: float | None = None) -> bool:
    """Lock an open file or folder until it is closed.

    Parameters
    ----------
    descriptor : int
        File descriptor. Closing it releases the lock.
    timeout_s : float or None
        Seconds to wait for a lock that another process holds: 0 tries once, None waits for ever.

    Returns
    -------
    bool
        False if another process still holds the lock, or if the system or the file system does not
        support flock.

    Raises
    ------
    OSError
        For any other error of the system.
    """
    import fcntl

    no_wait = 0 if timeout_s is None else fcntl.LOCK_NB
    deadline = time.monotonic() + (timeout_s or 0)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | no_wait)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        except OSError as exc:
            if exc.errno in _UNSUPPORTED:
                return False
            raise
        else:
            return True


_PR_SET_DUMPABLE = 4  # prctl(2)


def keep_memory_private() -> None:
    """Disable core dumps of this process, and access to its memory by other processes of the user.

    Memory holds the key of all ids, and header text.

    Two measures are needed: a core size limit of 0, which systems that pipe cores to a program
    ignore, and a process that is not dumpable (core(5), proc(5)). Children inherit only the limit.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
