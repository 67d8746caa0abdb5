"""Keeps exported networks and trials of engines in the user's cache folder.

An export is a folder that is named by the hash of all that it depends on. It is written under
another name and renamed, and its files are compared with their hashes whenever it is read. A lock
makes processes that prepare the same network wait for the first of them. An export that was
changed is removed and made again. A trial is a measurement with a model on this machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scanloom.cards.graph import networks
from scanloom.core import counted, user_cache_folder
from scanloom.core.process import lock_file
from scanloom.own_python import is_ours, make_private_folder

if TYPE_CHECKING:
    import torch

    from scanloom.cards.card import ModelCard
    from scanloom.inference.engines.protocol import Engine, NetworkRequest


logger = logging.getLogger(__name__)

HASHES = "sha256.json"
"""File with the hashes of the others; an export without it is not complete."""
LARGEST_BYTES = 8 * 1024**3
"""Limit of all exports together: those not used for longest are removed first."""

_SCHEMA = 2
LEAST_EQUAL = 0.9999
"""Fraction of voxels in which an engine in float32 has torch's labels, at least."""
LEAST_DICE = 0.998
"""Dice of each structure above 1 ml with torch in float32, at least, in half precision."""
MOST_BELOW_TORCH = 0.002
"""Dice by which an engine in half precision may be below torch in half precision, if requested."""
LEAST_GAIN = 0.1
"""Fraction of torch's time that an engine must save."""
_LONGEST_MEASUREMENT_S = 900.0
"""Time to wait for another process that measures the same engine."""


def exports_folder() -> Path:
    """Return the folder of the exports."""
    return user_cache_folder() / "engines"


def export_key(subject: Mapping[str, object]) -> str:
    """Return the key (64 hex digits) of an export from all that it depends on."""
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()


@contextmanager
def cached_export(key: str, write: Callable[[Path], None]) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of an export, and whether it was there; `write` fills it if necessary.

    Without a writable cache folder the export is made in a temporary folder, which is removed at
    the end of the block.

    Parameters
    ----------
    key : str
        From `export_key`.
    write : callable
        Writes the files into an empty folder. Its errors are passed on, and nothing is kept.
    """
    try:
        make_private_folder(exports_folder())
        if not is_ours(exports_folder()):
            raise PermissionError("another user can write to the cache folder")
        # Exporting takes long and much memory: processes on a machine wait for the first
        with (exports_folder() / f"{key}.lock").open("ab") as lock:
            if lock_file(lock.fileno()):
                _remove_abandoned(key)
            folder = exports_folder() / key
            cached = is_complete(folder)
            if not cached:
                _publish(folder, write)
        # Exports that were not used for longest are removed first
        os.utime(folder)
    except OSError:
        logger.debug("exported networks can't be cached", exc_info=True)
    else:
        yield folder, cached
        return
    with tempfile.TemporaryDirectory(prefix="scanloom-engine-") as temporary:
        write(Path(temporary))
        yield Path(temporary), False


def is_complete(folder: Path) -> bool:
    """Return whether an export's files are those that were written."""
    try:
        hashes = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        present = {path.name for path in folder.iterdir()}
        return present == {HASHES, *hashes} and all(
            _sha256(folder / name) == digest for name, digest in hashes.items()
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _remove_abandoned(key: str) -> None:
    """Remove drafts whose writers are gone: they held the lock of the draft's key, as now of `key`.

    A process number would not tell: other machines and containers may have the same cache folder.
    """
    for draft in exports_folder().glob(".*.*"):
        drafted = draft.name.split(".")[1]
        with suppress(OSError), (exports_folder() / f"{drafted}.lock").open("ab") as lock:
            if drafted == key or lock_file(lock.fileno(), 0):
                shutil.rmtree(draft, ignore_errors=True)


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Write an export under another name, then rename it; a damaged one is removed before."""
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write(draft)
        names = sorted(path.name for path in draft.iterdir())
        hashes = {name: _sha256(draft / name) for name in names}
        # Flushed before the rename: a crash leaves a complete folder or none
        (draft / HASHES).write_text(json.dumps(hashes), encoding="utf-8")
        for path in draft.iterdir():
            _sync(path)
        if not is_complete(folder):  # by another process, where the file system has no locks
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _sync(folder.parent)
    _remove_old(keep=folder)


def _remove_old(keep: Path) -> None:
    """Remove the exports that were not used for longest, beyond the limit of all together."""
    folders = [path for path in exports_folder().iterdir() if len(path.name) == len(keep.name)]
    remaining = LARGEST_BYTES
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError):
            remaining -= sum(path.stat().st_size for path in folder.iterdir())
            if remaining < 0 and folder != keep:
                shutil.rmtree(folder, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class EngineTrial:
    """Measurement of an engine with a model's network on this machine.

    Parameters
    ----------
    model, engine, version, precision : str
        Names, and the version of the engine's library.
    windows : int
        Windows of a real scan that were compared.
    equal : float
        Fraction of their voxels with the labels of torch in float32.
    dice : float or None
        Smallest Dice of a structure above 1 ml with torch in float32; None without such structure.
    torch_dice : float or None
        The same for torch in half precision; None in float32.
    torch_s, engine_s : float
        Seconds a window, of torch in the same precision and of the engine.
    prepare_s : float
        Seconds of the preparation.
    failed : str
        Why the engine can't run the network; empty if it can.
    weights : str
        SHA-256 of the network's weights: another version of the model has other trials.
    place : str
        Of one network there is a trial for each of these: see `place_of`.
    """

    model: str
    engine: str
    version: str
    precision: str
    windows: int = 0
    equal: float = 0.0
    dice: float | None = None
    torch_dice: float | None = None
    torch_s: float = 0.0
    engine_s: float = 0.0
    prepare_s: float = 0.0
    failed: str = ""
    _: KW_ONLY
    weights: str
    place: str

    @property
    def alike(self) -> bool:
        """Whether the labels are those of torch, within the limits."""
        if self.failed:
            return False
        if self.precision == "float32":
            return self.equal >= LEAST_EQUAL
        return self.dice is not None and self.dice >= LEAST_DICE

    @property
    def as_torch(self) -> bool:
        """Whether a request for the engine is followed: half precision costs no more than torch's.

        Whoever requests half precision gets its labels from torch too, so that they are compared.
        """
        # Compared with torch in half precision only where that was measured
        if self.failed or self.dice is None or self.torch_dice is None:
            return self.alike
        return self.alike or self.dice >= self.torch_dice - MOST_BELOW_TORCH

    @property
    def faster(self) -> bool:
        """Whether the engine saves enough of torch's time."""
        return 0.0 < self.engine_s <= (1 - LEAST_GAIN) * self.torch_s

    @property
    def used(self) -> bool:
        """Whether "auto" uses the engine."""
        return self.alike and self.faster

    @property
    def why(self) -> str:
        """The trial in words."""
        if self.failed:
            return self.failed
        compared = f"{100 * self.equal:.4f} % of voxels equal in {self.windows} windows"
        if self.dice is not None and self.precision != "float32":
            compared += f", Dice at least {self.dice:.4f}"
            if self.torch_dice is not None:
                compared += f" (torch {self.torch_dice:.4f})"
        if not self.alike:
            return f"labels differ: {compared}"
        speed = self.torch_s / self.engine_s if self.engine_s else 0.0
        return f"{speed:.2f} times as fast as torch, {compared}"

    def __str__(self) -> str:
        used = "used" if self.used else "not used"
        return f"{self.engine} {self.version}, {self.precision}: {used}, {self.why}"


def trial_file(engine: Engine, request: NetworkRequest, card: ModelCard) -> Path:
    """Return the path of a trial: it depends on network, library, torch, machine and threads.

    And on how a card decides: labels are compared, which other decisions make of other scores.
    """
    subject = {
        "form": _SCHEMA,
        "engine": [engine.name, engine.version()],
        **request.cache_subject,
        "threads": request.threads,
        "device": device_model(request.device),
        "decided": [card.activation, str(card.decision), card.n_outputs],
    }
    return exports_folder() / "verdicts" / f"{export_key(subject)}.json"


def place_of(request: NetworkRequest) -> str:
    """Return in words where a trial is made: device, threads, windows of a batch, and torch."""
    count, _, *size = request.shape
    threads = f", {counted(request.threads, 'thread')}" if request.device.type == "cpu" else ""
    windows = f"{counted(count, 'window')} of {' x '.join(map(str, size))}"
    version = request.cache_subject["torch"]
    return f"{device_model(request.device)}{threads}, {windows} at once, torch {version}"


def device_model(device: torch.device) -> str:
    """Return the name of a device's hardware."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_trial(path: Path) -> EngineTrial | None:
    """Return a trial; None if it is missing or damaged."""
    try:
        trial = EngineTrial(**json.loads(path.read_text(encoding="utf-8")))
        numbers = [trial.equal, trial.torch_s, trial.engine_s, trial.prepare_s]
        numbers += [trial.dice or 0.0, trial.torch_dice or 0.0, float(trial.windows)]
        return trial if all(math.isfinite(n) and n >= 0 for n in numbers) else None
    except (OSError, ValueError, TypeError):
        return None


def save_measurement(path: Path, document: Mapping[str, object]) -> None:
    """Keep a measurement as JSON; without a writable cache folder it is measured again."""
    try:
        make_private_folder(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:
            json.dump(document, draft)
        Path(draft.name).replace(path)
    except OSError:
        logger.debug("a measurement can't be saved", exc_info=True)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process measures for the same trial."""
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock, several may measure
            make_private_folder(path.parent)
            file = stack.enter_context(path.with_suffix(".lock").open("ab"))
            lock_file(file.fileno(), _LONGEST_MEASUREMENT_S)
        yield


def trials_of(card: ModelCard) -> list[EngineTrial]:
    """Return the trials of the networks of a model, with their weights of now."""
    hashes = {
        weights.sha256
        for network in networks(card)
        for weights in (network.weights, *network.folds)
    }
    return [trial for trial in all_trials() if trial.weights in hashes]


def all_trials() -> list[EngineTrial]:
    """Return all trials of this user on this machine, by model and engine."""
    paths = (exports_folder() / "verdicts").glob("*.json")
    trials = [trial for path in paths if (trial := read_trial(path)) is not None]
    return sorted(trials, key=lambda t: (t.model, t.engine, t.precision, t.place))
