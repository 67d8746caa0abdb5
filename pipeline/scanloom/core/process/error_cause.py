"""Classify an unforeseen error: out of memory, a fault of the machine, or a bug in scanloom."""

from __future__ import annotations

import errno
import traceback

from scanloom.core.errors import ScanError
from scanloom.core.process.resource_limits import FILE_SIZE, is_limited
from scanloom.core.reasons import Reason

_NO_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a memory",
    "out_of_memory",
    "bad_alloc",
    "failed to map segment",  # the dynamic loader, for a shared library
)
"""Fragments of out-of-memory messages of torch, oneDNN and the loader."""
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
    kind = type(error).__name__
    if kind == "OutOfMemoryError":  # torch's, which is not imported here
        detail = "the device has too little memory for the models or this scan"
        return ScanError(Reason.OUT_OF_MEMORY, detail)
    if kind == "AcceleratorError":  # nothing runs on the device in this process
        return ScanError(Reason.DEVICE_UNAVAILABLE, "the device reported a fault")
    if lacks_memory(error):
        detail = "the models, the scan and its result do not fit into memory"
        return ScanError(Reason.OUT_OF_MEMORY, detail)
    missing = _missing_resource(error)
    if missing:
        return ScanError(Reason.ENVIRONMENT, missing)
    return ScanError(Reason.INTERNAL, kind)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out or a memory limit was reached."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    message = str(error) if isinstance(error, RuntimeError | ImportError | OSError) else ""
    return any(fragment in message for fragment in _NO_MEMORY)


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
    modules = [
        module
        for frame in last_frame
        for module in _MISSING_RESOURCES
        if _is_in(frame.filename, module)
    ]
    return _MISSING_RESOURCES[modules[0]] if modules else ""


def _is_in(filename: str, module: str) -> bool:
    """Return whether a traceback's file name is that of a standard-library module."""
    return filename == f"<frozen {module}>" or filename.rpartition("/")[2] == f"{module}.py"
