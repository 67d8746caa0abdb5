"""What an unforeseen error blames: memory, the machine that all scans share, or scanloom."""

from __future__ import annotations

import errno
import traceback

from scanloom.core.errors import ScanError
from scanloom.core.limits import FILE_SIZE, is_limited
from scanloom.core.reasons import Reason

_NO_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a memory",
    "out_of_memory",
    "bad_alloc",
    "failed to map segment",  # the system's loader: of a library
)
"""In the words of errors without a type of their own: torch's, oneDNN's and the loader's."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
_ASKED = {
    "tempfile": "there is no folder for temporary files (TMPDIR)",
    "getpass": "the user has no name (USER)",
    "pathlib": "the user has no home folder (HOME)",
    "threading": "no thread can be started",
    "subprocess": "no process can be started",
}
"""Modules of Python that ask the system for something: an error of theirs says it has none."""


def blame(error: BaseException) -> ScanError:
    """Return what may be said of an error: our own words, or else no more than whose fault it is.

    OUT_OF_MEMORY, DEVICE_UNAVAILABLE and ENVIRONMENT say nothing of the scan, INTERNAL nothing at
    all.
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
    lacking = _lacking(error)
    if lacking:
        return ScanError(Reason.ENVIRONMENT, lacking)
    return ScanError(Reason.INTERNAL, kind)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error means that there was no memory in the machine, or no more may be had."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    words = str(error) if isinstance(error, RuntimeError | ImportError | OSError) else ""
    return any(word in words for word in _NO_MEMORY)


def _lacking(error: BaseException) -> str:
    """Return what the machine lacks by an error that says so, else nothing."""
    if isinstance(error, ImportError):
        name = error.name or ""
        which = f" ({name})" if name.replace(".", "").isidentifier() else ""
        return f"a library is missing or can't be loaded{which}"
    number = getattr(error, "errno", None)
    if number == errno.EFBIG and is_limited("FSIZE"):
        return f"the system limits {FILE_SIZE}"
    if number in _EXHAUSTED:
        return f"the system gives no more files or processes ({errno.errorcode[number]})"
    if not isinstance(error, OSError | RuntimeError | KeyError):
        return ""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error, OSError) and place and _is_of(place[0].filename, "pathlib"):
        return ""  # of any path
    modules = [module for frame in place for module in _ASKED if _is_of(frame.filename, module)]
    return _ASKED[modules[0]] if modules else ""


def _is_of(file: str, module: str) -> bool:
    return file == f"<frozen {module}>" or file.rpartition("/")[2] == f"{module}.py"
