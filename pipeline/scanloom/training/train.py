"""Train a recipe: check its data, write the bundle, run it with MONAI's engine."""

from __future__ import annotations

import csv
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scanloom.convert.readers import read_model
from scanloom.core import Reason, ScanError
from scanloom.io.output.json_file import write_json
from scanloom.io.read import load_volume
from scanloom.io.system.atomic_write import atomic_write
from scanloom.io.system.disk_errors import output_error
from scanloom.own_python import own_environment, own_python
from scanloom.training.bundle import epoch_length, network_def, write_bundle
from scanloom.training.cases import (
    SPLITS,
    LeftOut,
    Pair,
    Split,
    check_cases,
    check_values,
    find_cases,
    without_partner,
)
from scanloom.training.recipe import TrainingRecipe

COMPARED: Final = ("train.json", "datalist.json")
"""Configs that must be equal for a training to go on: weights of another one would be mixed in."""
PLACES: Final = ("data_root", "start")
"""Values of `train.json` that may change: the same data and weights may lie in another folder."""
LOCK: Final = ".lock"
"""The file that a training holds a lock of."""
FULL_BYTES: Final = 1 << 20
"""Space below which a disk is full: no checkpoint is smaller."""
MEASURED_STEPS: Final = 10
"""Steps of a measurement, after as many that don't count: libraries choose kernels in the first
ones. They are one epoch, since the first step of an epoch takes longer than the others."""


@dataclass(frozen=True)
class Prepared:
    """Cases of a recipe, checked.

    Parameters
    ----------
    cases : mapping
        Cases to use, by their part in the training.
    left_out : sequence of LeftOut
        Cases with problems.
    content : str
        SHA-256 of all that is trained on: voxels and grids of the cases, weights to start from.
    not_validated : sequence of str
        Structures that no case for validation has, if there are such cases.
    """

    recipe: TrainingRecipe
    cases: dict[Split, list[Pair]]
    left_out: list[LeftOut]
    content: str = ""
    not_validated: Sequence[str] = ()


@dataclass(frozen=True)
class Measured:
    """Cost of a training on this device.

    Parameters
    ----------
    steps, epochs, validations : int
        Their numbers in the whole training.
    memory : int
        Largest memory of the process, or of the GPU, in bytes, and of all cases cached.
    """

    steps: int
    epochs: int
    step_s: float
    validation_s: float
    validations: int
    memory: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole training."""
        return self.steps * self.step_s + self.validations * self.validation_s


def prepare(
    recipe: TrainingRecipe,
    folder: Path,
    fold: int = 0,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Prepared:
    """Find, split and check the cases of a recipe.

    Cases are left out after the split, so that the others keep their part. The path of weights to
    start from becomes absolute. `fold` is that of `find_cases`, `progress` that of `check_cases`.

    Parameters
    ----------
    folder : Path
        Folder that the recipe's paths are relative to.

    Raises
    ------
    ScanError
        TRAINING_DATA, as `find_cases` and `check_values`, or if all cases for training are left
        out, or none of them has one of the structures; RECIPE if there are no weights to start
        from, or of another network, or the bundle would be no model.
    """
    content = hashlib.sha256()
    if recipe.network.start is not None:
        start = folder / recipe.network.start
        if not start.is_file():
            raise ScanError(Reason.RECIPE, "there is no file of weights to start from")
        _check_start(recipe, start)
        content.update(start.read_bytes())
        network = recipe.network.model_copy(update={"start": str(start.absolute())})
        recipe = recipe.model_copy(update={"network": network})
    _check_model(recipe)
    cases = find_cases(recipe.data, folder, fold)
    check_values(recipe, folder)
    pairs = [pair for split in SPLITS for pair in cases[split]]
    good, left_out = check_cases(recipe, pairs, progress)
    parts: dict[str, Split] = {}
    for split in reversed(SPLITS):  # what is to judge the training stays
        for pair in cases[split]:
            if pair in good and (part := parts.setdefault(good[pair].scan_sha256, split)) != split:
                del good[pair]
                left_out.append(LeftOut(pair.name, f"its scan is also one for {part}"))
    left_out += without_partner(recipe.data, folder)
    used = {split: [pair for pair in cases[split] if pair in good] for split in SPLITS}
    if not used["training"]:
        first = left_out[0]
        detail = f"no case can be trained on; the first of {len(left_out)}: {first.problem}"
        raise ScanError(Reason.TRAINING_DATA, detail)
    unseen: dict[Split, list[str]] = {}
    for split in SPLITS:
        seen = frozenset[str]().union(*(good[pair].structures for pair in used[split]))
        unseen[split] = [each.label for each in recipe.structures if each.label not in seen]
    if unseen["training"]:
        detail = f"no case for training has the structure {unseen['training'][0]}"
        raise ScanError(Reason.TRAINING_DATA, detail)
    for pair in (*used["training"], *used["validation"]):
        content.update(good[pair].sha256.encode())
    not_validated = unseen["validation"] if used["validation"] else []
    return Prepared(recipe, used, left_out, content.hexdigest(), not_validated)


def _check_model(recipe: TrainingRecipe) -> None:
    """Raise RECIPE if the bundle of a recipe would be no model: hours of training would be lost."""
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch)
        write_bundle(recipe, {split: [] for split in SPLITS}, bundle, bundle)
        (bundle / "models").mkdir()
        (bundle / "models" / "model.pt").touch()
        try:
            read_model(bundle, {})
        except ScanError as exc:
            raise ScanError(Reason.RECIPE, f"the bundle would be no model: {exc.detail}") from exc


def _check_start(recipe: TrainingRecipe, path: Path) -> None:
    """Raise RECIPE if a file does not hold weights of the network."""
    from monai.networks.nets import DynUNet

    from scanloom.training.network import load_start

    arguments = {key: value for key, value in network_def(recipe).items() if key != "_target_"}
    try:
        load_start(DynUNet(**arguments), path)
    except ValueError as exc:
        raise ScanError(Reason.RECIPE, str(exc)) from exc


def write_training(prepared: Prepared, bundle: Path) -> None:
    """Write the bundle of a training, or find that it is there already.

    Raises
    ------
    ScanError
        RECIPE if the folder holds another training or other files; OUTPUT_UNWRITABLE or DISK_FULL.
    """
    check_folder(prepared, bundle)
    try:
        write_bundle(prepared.recipe, *_relative(prepared), bundle, prepared.content)
        (bundle / "docs").mkdir(exist_ok=True)
        document = {
            "cases": {split: len(prepared.cases[split]) for split in SPLITS},
            "left_out": {each.case: each.problem for each in prepared.left_out},
            "not_validated": list(prepared.not_validated),
        }
        atomic_write(bundle / "docs" / "data.json", lambda file: write_json(file, document))
    except OSError as exc:
        raise output_error(exc, "the bundle") from exc


def check_folder(prepared: Prepared, bundle: Path) -> None:
    """Refuse a folder that holds something else than the bundle of this training.

    Raises
    ------
    ScanError
        RECIPE if the folder holds another training or other files; OUTPUT_UNWRITABLE if it can't
        be listed.
    """
    try:
        if not bundle.exists() or not any(bundle.iterdir()):
            return
    except OSError as exc:
        raise output_error(exc, "the bundle") from exc
    if not (bundle / "configs" / "train.json").is_file():
        detail = "the folder holds other files than a bundle: train into another folder"
        raise ScanError(Reason.RECIPE, detail)
    loader = (_config(bundle, "train.json") or {}).get("train_loader")
    workers = loader.get("num_workers") if isinstance(loader, dict) else None
    # their number may change: nothing random depends on it
    plan = prepared.recipe.schedule.model_copy(update={"workers": workers})
    recipe = prepared.recipe.model_copy(update={"schedule": plan})
    with tempfile.TemporaryDirectory() as scratch:
        write_bundle(recipe, *_relative(prepared), Path(scratch))
        for name in COMPARED:
            new, old = (_config(folder, name) or {} for folder in (Path(scratch), bundle))
            content = old.pop("content", prepared.content)
            for document, key in itertools.product((old, new), PLACES):
                document.pop(key, None)
            if changed := [key for key in {**new, **old} if old.get(key) != new.get(key)]:
                detail = "the folder holds the bundle of another recipe, data or version"
                detail += f" ({', '.join(changed[:3])} of {name})"
                raise ScanError(Reason.RECIPE, f"{detail}: train into another folder")
            if content != prepared.content:
                detail = "images, label maps or weights to start from are not those of this bundle"
                raise ScanError(Reason.RECIPE, f"{detail} any more: train into another folder")


def _relative(prepared: Prepared) -> tuple[dict[Split, list[dict[str, str]]], Path]:
    """Return the pairs of each part, relative to a folder that holds all, and that folder."""
    files = {
        split: [
            {key: file.absolute() for key, file in pair.files.items()}
            for pair in prepared.cases[split]
        ]
        for split in SPLITS
    }
    folders = [file.parent for pairs in files.values() for pair in pairs for file in pair.values()]
    root = Path(os.path.commonpath(folders))
    return {
        split: [
            {key: file.relative_to(root).as_posix() for key, file in pair.items()} for pair in pairs
        ]
        for split, pairs in files.items()
    }, root


def _config(bundle: Path, name: str) -> dict[str, object] | None:
    """Return a config of a bundle, None if it is not there or damaged."""
    try:
        document = json.loads((bundle / "configs" / name).read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def run_training(bundle: Path, report: Callable[[str], object] = lambda line: None) -> None:
    """Train a bundle to its end by MONAI's own command, from the last checkpoint if there is one.

    Parameters
    ----------
    report : function
        Called with a line about each epoch.

    Raises
    ------
    ScanError
        LOCKED if another process trains the bundle; TRAINING if the command fails, DISK_FULL if
        there is no space.
    """
    # two processes would write, and remove, each other's checkpoints
    with (bundle / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ScanError(Reason.LOCKED, "another training of this bundle is running") from exc
        except OSError:  # a file system without locks
            pass
        _run_training(bundle, report)


def _run_training(bundle: Path, report: Callable[[str], object]) -> None:
    from scanloom.engine.worker.child_main import die_with_parent

    # large arrays are not given back to the system after each step: a quarter of a step on a CPU
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
    # MONAI's command takes a relative `x#y` for `x`, `a,b` for a list, and `501` for a number
    folder = bundle.absolute()
    command = [
        *own_python("-W", "ignore", "-m", "monai.bundle", "run"),
        *("--config_file", str(folder / "configs" / "train.json"), "--bundle_root", str(folder)),
    ]
    # a process of its own: this one may have imported MONAI without its engines, to start sooner
    with subprocess.Popen(  # noqa: S603 - this Python, and MONAI's module
        command,
        env=kept | own_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # else it goes on beside the next one, that continues the training in the same bundle
        preexec_fn=die_with_parent,
    ) as process:
        cause = ""
        for raw in process.stderr or ():
            line = raw.decode(errors="replace").rstrip()
            if line.startswith("epoch "):
                report(line)
            # its text may hold paths, the class does not; the first of a chain is the cause
            if match := re.match(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))\b", line):
                cause = cause or match[1]
    if process.returncode:
        # PyTorch's error for a checkpoint that has no room does not say so
        if shutil.disk_usage(bundle).free < FULL_BYTES:
            raise ScanError(Reason.DISK_FULL, "no space left for the bundle", str(bundle))
        detail = f"MONAI's command failed ({cause or f'exit {process.returncode}'})"
        raise ScanError(Reason.TRAINING, detail)


def measure(prepared: Prepared) -> Measured:
    """Return the cost of a training, measured by a few steps in a scratch bundle.

    Errors are those of `run_training`.
    """
    plan = prepared.recipe.schedule
    epochs_of_steps = {"steps": 2 * MEASURED_STEPS, "epoch": MEASURED_STEPS, "validate_every": 2}
    schedule = plan.model_copy(update=epochs_of_steps)
    measured = prepared.recipe.model_copy(update={"schedule": schedule})
    cases: dict[Split, list[Pair]] = {
        "training": prepared.cases["training"][: plan.batch],
        "validation": prepared.cases["validation"][:1],
        "testing": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        write_training(Prepared(measured, cases, []), bundle)
        run_training(bundle)
        with (bundle / "docs" / "training.csv").open(newline="") as file:
            _, row = csv.DictReader(file)
    count = len(prepared.cases["validation"])
    length = epoch_length(prepared.recipe, len(prepared.cases["training"]))
    epochs = math.ceil(plan.steps / length)
    return Measured(
        epochs * length,
        epochs,
        float(row["seconds"]) / MEASURED_STEPS,
        float(row["validation_seconds"] or 0) * count,
        math.ceil(epochs / plan.validate_every) if count else 0,
        int(row["memory_bytes"]) + _cached_bytes(prepared),
    )


def _cached_bytes(prepared: Prepared) -> int:
    """Return the memory of the cached cases: a label map of bytes, and an image in float32."""
    recipe = prepared.recipe
    # all cases were read already; a sample says enough of their size
    pairs: Sequence[Pair] = prepared.cases["training"][:10]
    drawn = recipe.data.label_maps is not None
    voxel = recipe.drawing.map_spacing**3 if drawn else math.prod(recipe.spacing)
    sizes = []
    for pair in pairs:
        grid = load_volume(pair.label, modality=recipe.modality).grid
        sizes.append(math.prod(grid.shape) * grid.voxel_volume / voxel)
    count = len(prepared.cases["training"]) + len(prepared.cases["validation"])
    return round(statistics.mean(sizes) * (1 if drawn else 5) * count)
