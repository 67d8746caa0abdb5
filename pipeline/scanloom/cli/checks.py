"""Checks of the installation and the machine: libraries, decoders, devices, disk, key, models.

A check of a decoder encodes a small frame in a transfer syntax, and reads it as scans are read.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import ScanError, counted, format_bytes
from scanloom.core.process import core_count, cpu_flags, memory_limits
from scanloom.engine.machine.devices import (
    NEVER_RUN,
    amd_gpu_count,
    describe_energy,
    nvml_handles,
)
from scanloom.io.system.atomic_write import fsync_path
from scanloom.version import __version__

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from pydicom import Dataset

    from scanloom.inference.torch_devices import CudaDevice, FurtherDevice

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class CheckResult:
    """A line of the doctor's output, under the heading `topic`.

    Parameters
    ----------
    level : "ok", "warn" or "bad"
        No action; works, but read the note; must be fixed.
    seen, advice : str
        Observation, and action to take; it is required unless `level` is "ok".
    """

    topic: str
    name: str
    level: Level
    seen: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.level != "ok" and not self.advice:
            raise ValueError(f"{self.name}: advice is required")


SOFTWARE = "software"
NOT_INSTALLED = "not installed"


def check_software() -> Iterator[CheckResult]:
    """Check Python, the platform and every required library."""
    yield CheckResult(SOFTWARE, "Python", "ok", platform.python_version())
    seen = f"{platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        yield CheckResult(SOFTWARE, "platform", "ok", seen)
    else:
        yield CheckResult(SOFTWARE, "platform", "warn", seen, "scanloom is tested on Linux only")
    known = requirements()
    if not known:
        seen = f"{__version__}, not installed: which libraries it needs is not known here"
        yield CheckResult(SOFTWARE, "scanloom", "warn", seen, "pip install scanloom")
    for requirement in sorted(known, key=lambda r: r.name.lower()):
        yield _library(requirement)


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements in scanloom's metadata: those of an extra, or without extras."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("scanloom") or []
    except metadata.PackageNotFoundError:  # on Python's path without being installed
        return []
    parsed = [Requirement(line) for line in lines]
    if extra:
        marked = [r for r in parsed if r.marker is not None and "extra" in str(r.marker)]
        return [r for r in marked if r.marker and r.marker.evaluate({"extra": extra})]
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _library(requirement: Requirement) -> CheckResult:
    name, specifier = requirement.name, requirement.specifier
    advice = f"pip install --upgrade '{name}{specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return CheckResult(SOFTWARE, name, "bad", NOT_INSTALLED, advice)
    if not specifier.contains(version, prereleases=True):
        return CheckResult(SOFTWARE, name, "bad", f"{version}, not {specifier}", advice)
    return CheckResult(SOFTWARE, name, "ok", version)


OPTIONAL = "optional parts"
EXTRAS = {
    "review": "`review`, results in a browser",
    "hospital": "`listen`, studies from a PACS",
    "train": "`train`, networks of your own",
    "surface": "`segment --also surface`",
    "radiomics": "`segment --also radiomics`, 1.5 GB",
    "pandas": "`scanloom.measurements` in Python",
    "onnxruntime": "`segment --engine onnxruntime` on CPUs",
    "onnxruntime-gpu": "`segment --engine onnxruntime` on NVIDIA's GPUs",
    "tensorrt": "`segment --engine tensorrt`",
}
"""Extras of the distribution for users, and what they are for."""


def check_extras() -> Iterator[CheckResult]:
    """Check the libraries of each extra; one that is not installed is no fault."""
    for extra, use in EXTRAS.items():
        libraries = [_library(requirement) for requirement in requirements(extra)]
        if not libraries:  # not installed, as `check_software` says
            continue
        absent = [each.name for each in libraries if each.seen == NOT_INSTALLED]
        wrong = [f"{each.name} {each.seen}" for each in libraries if each.level == "bad"]
        distribution = f"'scanloom[{extra}]'"
        if not wrong:
            versions = ", ".join(f"{each.name} {each.seen}" for each in libraries)
            yield CheckResult(OPTIONAL, extra, "ok", f"{versions}; for {use}")
        elif len(absent) == len(wrong):
            seen = f"{NOT_INSTALLED} ({', '.join(absent)}); for {use}"
            yield CheckResult(OPTIONAL, extra, "ok", seen, f"pip install {distribution}")
        else:
            seen = f"{', '.join(wrong)}; for {use}"
            yield CheckResult(
                OPTIONAL, extra, "warn", seen, f"pip install --upgrade {distribution}"
            )


DEVICES = "devices"
GIB = 1 << 30
LITTLE_MEMORY = 6 * GIB
"""Enough for a CT of 512x512x600 and a network of 25 classes."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver; `cuda` is the newest CUDA (major, minor) that it can run."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[str, ...]


def check_devices() -> Iterator[CheckResult]:
    """Check processor, memory, torch, driver and GPUs."""
    sets = cpu_flags()
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in sets]
    seen = f"{platform.machine()}, {core_count()} cores, {' '.join(wide) or 'no wide instructions'}"
    yield CheckResult(DEVICES, "processor", "ok", seen)
    yield _memory()
    driver = find_driver()
    try:
        # torch comes in here
        from scanloom.inference.torch_devices import onnxruntime_cuda, take_inventory

        inventory, their_cuda = take_inventory(), onnxruntime_cuda()
    except Exception as exc:  # noqa: BLE001 - any failure to load torch is a finding
        advice = "pip install --force-reinstall torch"
        yield CheckResult(DEVICES, "torch", "bad", f"does not load ({type(exc).__name__})", advice)
        return
    yield _engines()
    if inventory.hip or (driver is None and amd_gpu_count()):
        yield judge_rocm(inventory.version, inventory.hip, amd_gpu_count(), len(inventory.devices))
    else:
        yield judge_torch(inventory.version, inventory.cuda, driver, len(inventory.devices))
    if their_cuda:
        yield judge_onnxruntime(their_cuda, inventory.cuda)
    seen = f"{inventory.threads} threads, {inventory.cpu_capability}"
    yield CheckResult(DEVICES, "torch on the CPU", "ok", seen)
    for number, device in enumerate(inventory.devices):
        yield _judge_gpu(f"cuda:{number}", device, f"; {UNTRIED}" if inventory.hip else "")
    for gpu in inventory.further:
        yield _judge_further_gpu(gpu)
    yield CheckResult(DEVICES, "energy", "ok", describe_energy())
    seen = f"{', '.join(NEVER_RUN)}, OpenVINO on GPUs: see docs/gpu.md"
    yield CheckResult(DEVICES, "never run on", "ok", seen)


UNTRIED = "scanloom was never run on such a device"


def _judge_gpu(name: str, device: CudaDevice, known: str) -> CheckResult:
    """Return a finding on a GPU that "auto" may choose; `known` stands behind a good one."""
    seen = f"{device.name}, {format_bytes(device.memory)}, capability {device.capability}"
    if device.fault:
        advice = "install a torch built for this GPU (pytorch.org), or use `segment --device cpu`"
        return CheckResult(DEVICES, name, "bad", f"{seen}: {device.fault}", advice)
    if device.half_fault:
        advice = "float32 is used, which takes longer: install a newer torch with its own cuDNN"
        return CheckResult(DEVICES, name, "warn", f"{seen}: {device.half_fault}", advice)
    return CheckResult(DEVICES, name, "ok", f"{seen}: computes correctly{known}")


def _judge_further_gpu(gpu: FurtherDevice) -> CheckResult:
    """Return a finding on a GPU that runs cases only if it is named, or not at all."""
    seen, name = gpu.hardware, gpu.name or "GPU"
    if gpu.fault:
        advice = f"do not use `segment --device {name}`"
        return CheckResult(DEVICES, name, "warn", f"{seen}: {gpu.fault}", advice)
    if gpu.name:
        used = f"computes correctly; used by `segment --device {name}` only; {UNTRIED}"
        return CheckResult(DEVICES, name, "ok", f"{seen}: {used}")
    return CheckResult(DEVICES, name, "ok", f"{seen}: not used; {UNTRIED}")


def _engines() -> CheckResult:
    """Return a finding on the engines that are installed, and those that "auto" uses here."""
    from scanloom.inference.engines.cache import all_trials
    from scanloom.inference.engines.selection import ENGINES

    versions = {name: engine.version() for name, engine in ENGINES.items()}
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    trials = all_trials()
    used = sum(trial.used for trial in trials)
    measured = f"measured {counted(len(trials), 'time')} here, faster and alike in {used}"
    return CheckResult(DEVICES, "engines", "ok", f"{present}; {measured}")


def judge_torch(version: str, cuda: str | None, driver: Driver | None, usable: int) -> CheckResult:
    """Return a finding on torch's build and the driver.

    Parameters
    ----------
    version, cuda : str, str or None
        Version of torch and of the CUDA that it was built for; None for a build without CUDA.
    driver : Driver or None
    usable : int
        Number of CUDA devices that torch sees.
    """
    finding = partial(CheckResult, DEVICES, "torch")
    built = f"{version}, built for CUDA {cuda}" if cuda else f"{version}, built without CUDA"
    if driver is None:
        seen = f"{built}; no NVIDIA driver, the CPU is used"
        advice = "no action without an NVIDIA GPU; otherwise install its driver"
        return finding("ok", seen) if cuda is None else finding("warn", seen, advice)
    known = f"driver {driver.version} for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    seen = f"{built}; {known}, {counted(len(driver.gpus), 'GPU')}"
    if cuda is None and driver.gpus:
        advice = "the GPU stays idle: install a torch built with CUDA (pytorch.org)"
        return finding("warn", seen, advice)
    if cuda is not None and driver.gpus and usable == 0:
        # A driver runs any CUDA of its own major version
        if int(cuda.split(".")[0]) > driver.cuda[0]:
            advice = "update the driver, or install a torch for an older CUDA (pytorch.org)"
            return finding("bad", f"{seen}; the driver is too old for this torch", advice)
        advice = "check CUDA_VISIBLE_DEVICES and the container's access to the GPU"
        return finding("bad", f"{seen}; torch sees no GPU", advice)
    return finding("ok", seen)


def judge_rocm(version: str, hip: str | None, gpus: int, usable: int) -> CheckResult:
    """Return a finding on torch's build and AMD's GPUs.

    Parameters
    ----------
    version, hip : str, str or None
        Version of torch and of the ROCm that it was built for; None for another build.
    gpus, usable : int
        Numbers of AMD GPUs that the driver has, and that torch sees.
    """
    built = f"{version}, built for ROCm {hip}" if hip else f"{version}, built without ROCm"
    seen = f"{built}; {counted(gpus, 'AMD GPU')}"
    if hip is None:
        advice = "the GPU stays idle: install a torch built with ROCm (pytorch.org)"
        return CheckResult(DEVICES, "torch", "warn", seen, advice)
    if gpus and not usable:
        advice = "check the container's access to /dev/kfd and /dev/dri, and HIP_VISIBLE_DEVICES"
        return CheckResult(DEVICES, "torch", "bad", f"{seen}; torch sees no GPU", advice)
    return CheckResult(DEVICES, "torch", "ok", seen)


def judge_onnxruntime(cuda: str, torchs: str | None) -> CheckResult:
    """Return a finding on the CUDA of ONNX Runtime's build: it loads the libraries of torch's."""
    seen = f"built for CUDA {cuda}, torch {f'for CUDA {torchs}' if torchs else 'without CUDA'}"
    if torchs and torchs.split(".")[0] == cuda.split(".")[0]:
        return CheckResult(DEVICES, "onnxruntime", "ok", seen)
    advice = "install an onnxruntime-gpu for torch's CUDA: else its engines are refused"
    return CheckResult(DEVICES, "onnxruntime", "warn", seen, advice)


def find_driver() -> Driver | None:
    """Return the NVIDIA driver, as NVML reports it; None without a driver."""
    import pynvml

    driver = None
    with nvml_handles() as handles:
        if handles is not None:
            number = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 is 12.8
            driver = Driver(
                version=pynvml.nvmlSystemGetDriverVersion(),
                cuda=(number // 1000, number % 1000 // 10),
                gpus=tuple(pynvml.nvmlDeviceGetName(handle) for handle in handles),
            )
    return driver


def _memory() -> CheckResult:
    available = available_memory()
    seen = f"{format_bytes(available)} available"
    if available < LITTLE_MEMORY:
        return CheckResult(DEVICES, "memory", "warn", seen, "a large CT needs about 6 GiB")
    return CheckResult(DEVICES, "memory", "ok", seen)


def available_memory(root: Path = Path("/")) -> int:
    """Return available memory in bytes: the machine's, or less if a container or job limits it."""
    import psutil

    # Within a container, psutil still tells of the whole machine
    limits = memory_limits(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    of_limits = (max(limit - used, 0) for limit, used in limits)
    machine: int = psutil.virtual_memory().available
    return min([machine, *of_limits])


LITTLE_SPACE = 2 * GIB
"""Enough for a few dozen cases with images."""
NO_SPACE = GIB // 10
"""Not enough for one case."""


def check_out(out: Path) -> Iterator[CheckResult]:
    """Check the disk of OUT: free space, and whether results can be published there."""
    name, seen = f"{out}", "a file of this name exists"
    try:
        existing = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
        if existing.is_dir():
            yield judge_space(name, shutil.disk_usage(existing).free)
            yield _publishing(existing, name)
            return
    except OSError as exc:
        seen = f"can't be checked ({type(exc).__name__})"
    yield CheckResult("output", name, "bad", seen, "choose another folder")


def judge_space(name: str, free: int) -> CheckResult:
    """Return a finding for the free bytes of a disk."""
    seen = f"{format_bytes(free)} free"
    if free < NO_SPACE:
        advice = "free space, or choose another disk with --out"
        return CheckResult("output", name, "bad", seen, advice)
    if free < LITTLE_SPACE:
        return CheckResult("output", name, "warn", seen, "a case takes 5 to 200 MB: free space")
    return CheckResult("output", name, "ok", seen)


def _publishing(existing: Path, name: str) -> CheckResult:
    """Try the steps of publishing a case: write, fsync, rename, fsync the folder."""
    work = existing / f".scanloom-doctor-{secrets.token_hex(4)}"
    topic, step = "output", f"write, fsync, rename in {name}"
    try:
        (work / "new").mkdir(parents=True)
        file = work / "new" / "file"
        file.write_bytes(b"scanloom")
        fsync_path(file)
        # The folder is renamed, not the file: so is a case
        (work / "new").rename(work / "done")
        fsync_path(work)
        intact = (work / "done" / "file").read_bytes() == b"scanloom"
    except OSError as exc:
        advice = "check permissions and mount options, or choose another folder with --out"
        return CheckResult(topic, step, "bad", f"fails ({type(exc).__name__})", advice)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not intact:
        advice = "do not use this disk: it returns other bytes than were written"
        return CheckResult(topic, step, "bad", "reads back wrong data", advice)
    return CheckResult(topic, step, "ok", "works")


def check_key() -> Iterator[CheckResult]:
    """Check the key of the case ids, or whether it can be created; does not create it."""
    from scanloom.io.identity import default_key_file, load_key

    file, finding = default_key_file(), partial(CheckResult, "key", "key of the ids")
    try:
        mode = file.stat().st_mode
        load_key()
    except FileNotFoundError:
        yield _key_to_be(file)
    except OSError as exc:
        seen = f"can't be read ({type(exc).__name__})"
        yield finding("bad", seen, "check its permissions, or set SCANLOOM_KEY")
    except ScanError as exc:
        advice = "restore it from a backup: with another key all ids change"
        yield finding("bad", f"{exc.detail} ({exc.code})", advice)
    else:
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            seen = f"present, but readable by others (mode {stat.S_IMODE(mode):04o})"
            yield finding("warn", seen, f"chmod 600 {file}")
        else:
            yield finding("ok", "present, readable by you only")


def _key_to_be(file: Path) -> CheckResult:
    """Check that a key can be created, in the given folder or in the default one."""
    finding, folder = partial(CheckResult, "key", "key of the ids"), file.parent
    if not os.environ.get("SCANLOOM_KEY"):
        folder = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return finding("ok", "missing: created on first use")
    except OSError as exc:
        seen = f"missing and can't be created ({type(exc).__name__})"
        return finding("bad", seen, "set HOME to a writable folder, or SCANLOOM_KEY to a key file")


def check_models() -> Iterator[CheckResult]:
    """Read every model's card and hash its weights."""
    from scanloom.convert.store import list_models

    try:
        entries = list_models()
    except ScanError as exc:
        seen = f"{exc.detail} ({exc.code})"
        yield CheckResult("models", "store", "bad", seen, "reinstall scanloom")
        return
    if not entries:
        yield CheckResult("models", "store", "bad", "there are no models", "reinstall scanloom")
    for entry in entries:
        if entry.card is not None:
            seen = f"{entry.card.version}, weights {entry.card.weights.published[:12]}"
            yield CheckResult("models", entry.name, "ok", seen)
        elif entry.error is not None:
            seen = f"{entry.error.detail} ({entry.error.code})"
            yield CheckResult("models", entry.name, "bad", seen, entry.error.reason.advice)


TOPIC = "decoders"
SHAPE = (24, 32)
LOSSY = 6
"""Largest difference of a lossy frame, in grey levels of 256."""

PYDICOM = "pydicom"
"""Encoder for RLE, which imagecodecs only decodes."""

_PS = "1.2.840.10008.1.2"


@dataclass(frozen=True)
class Syntax:
    """A transfer syntax (DICOM PS3.5 10) with an encoder and its bit depth.

    `encoder` is a function of imagecodecs, PYDICOM, or None for uncompressed samples.
    """

    name: str
    uid: str
    encoder: str | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    bits: int = 16
    tolerance: int = 0


SYNTAXES = (
    Syntax("implicit little endian", _PS),
    Syntax("explicit little endian", f"{_PS}.1"),
    Syntax("deflated", f"{_PS}.1.99"),
    Syntax("RLE", f"{_PS}.5", PYDICOM),
    Syntax("JPEG baseline", f"{_PS}.4.50", "jpeg8_encode", (("level", 95),), 8, LOSSY),
    Syntax("JPEG lossless (57)", f"{_PS}.4.57", "ljpeg_encode"),
    Syntax("JPEG lossless (70)", f"{_PS}.4.70", "ljpeg_encode"),
    Syntax("JPEG-LS", f"{_PS}.4.80", "jpegls_encode"),
    Syntax("JPEG-LS near-lossless", f"{_PS}.4.81", "jpegls_encode", (("level", 2),), 16, 2),
    Syntax("JPEG 2000 lossless", f"{_PS}.4.90", "jpeg2k_encode", (("codecformat", "j2k"),)),
    Syntax("JPEG 2000", f"{_PS}.4.91", "jpeg2k_encode", (("codecformat", "j2k"),)),
    Syntax("HTJ2K lossless", f"{_PS}.4.201", "htj2k_encode"),
)


def check_decoders() -> Iterator[CheckResult]:
    """Decode a frame in each transfer syntax with the reader of scans."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for syntax in SYNTAXES:
            yield _check(syntax, Path(folder) / f"{syntax.uid}.dcm")


def _check(syntax: Syntax, file: Path) -> CheckResult:
    frame, finding = _frame(syntax.bits), partial(CheckResult, TOPIC, syntax.name)
    try:
        _save(frame, syntax, file)
    except Exception as exc:  # noqa: BLE001 - a failing encoder only skips the check
        seen = f"not checked: encoding failed ({type(exc).__name__})"
        return finding("warn", seen, "pip install --upgrade imagecodecs")
    advice = "pip install --upgrade imagecodecs pylibjpeg pyjpegls pylibjpeg-openjpeg"
    try:
        decoded = decode(file)
    except ScanError as exc:
        return finding("bad", f"{exc.detail} ({exc.code})", advice)
    except Exception as exc:  # noqa: BLE001 - the next check must run
        return finding("bad", f"fails ({type(exc).__name__})", advice)
    off = int(np.abs(decoded.astype(np.int64) - frame).max())
    if off > syntax.tolerance:
        return finding("bad", f"wrong values, off by up to {off}", advice)
    return finding("ok", "exact" if off == 0 else f"within {off}")


def decode(file: Path) -> NDArray[Any]:
    """Return the stored samples (rows, columns) of a file, read like a series; errors likewise."""
    from scanloom.core import Reason
    from scanloom.io.dicom.header.header import read_headers
    from scanloom.io.dicom.pixels.voxels import read_stored_frame

    [header] = read_headers([file])
    if isinstance(header, ScanError):
        raise header
    if header is None:
        raise ScanError(Reason.DAMAGED, "not recognised as DICOM")
    return read_stored_frame(header)


def _frame(bits: int) -> NDArray[Any]:
    """Return a frame with gradients and an edge that uses the highest bit."""
    rows, columns = np.indices(SHAPE)
    values = rows * 5 + columns * 2 + 40 * (columns > SHAPE[1] // 2)
    return np.asarray(values if bits == 8 else values * 257 + 3, f"<u{bits // 8}")


def _save(frame: NDArray[Any], syntax: Syntax, file: Path) -> None:
    from pydicom.encaps import encapsulate

    dataset = _header(frame, syntax)
    if syntax.encoder is None:
        dataset.PixelData = frame.tobytes()
    elif syntax.encoder == PYDICOM:
        dataset.compress(syntax.uid, frame)
    else:
        import imagecodecs

        encode: Callable[..., bytes] = getattr(imagecodecs, syntax.encoder)
        dataset.PixelData = encapsulate([encode(frame, **dict(syntax.arguments))])
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = True
    dataset.save_as(file, enforce_file_format=True)


def _header(frame: NDArray[Any], syntax: Syntax) -> Dataset:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage

    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax.uid
    dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, "2.25.1"
    dataset.Modality = "CT"
    dataset.Rows, dataset.Columns = frame.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = syntax.bits
    dataset.HighBit, dataset.PixelRepresentation = syntax.bits - 1, 0
    return dataset
