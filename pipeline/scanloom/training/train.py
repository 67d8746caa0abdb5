"""Train a recipe: check its data, write the bundle, run it with MONAI's engine."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from scanloom.core import Reason, ScanError
from scanloom.io.output.json_file import write_json
from scanloom.io.system.atomic_write import atomic_write
from scanloom.training.bundle import write_bundle
from scanloom.training.cases import (
    PARTS,
    LeftOut,
    Pair,
    Part,
    cases_document,
    check_cases,
    common_folder,
    find_cases,
    relative_pairs,
)
from scanloom.training.recipe import TrainingRecipe

COMPARED: Final = ("train.json", "datalist.json")
"""Configs that must be equal for a training to go on: weights of another one would be mixed in."""
MEASURED_STEPS: Final = 8
"""Steps of a measurement; the first ones, in which libraries choose kernels, do not count."""
WARM_UP_STEPS: Final = 3


@dataclass(frozen=True)
class Prepared:
    """Cases of a recipe, checked.

    Parameters
    ----------
    recipe : TrainingRecipe
        The recipe.
    cases : mapping
        Cases to use, by their part in the training.
    left_out : sequence of LeftOut
        Cases with problems.
    """

    recipe: TrainingRecipe
    cases: dict[Part, list[Pair]]
    left_out: list[LeftOut]


@dataclass(frozen=True)
class Measured:
    """Cost of a training on this device.

    Parameters
    ----------
    device : str
        Type of the device.
    steps, epochs : int
        Steps in all, and epochs.
    step_s, validation_s : float
        Seconds of a step, and of a validation.
    memory : int
        Largest memory of the process, or of the GPU, in bytes, with all cases cached.
    """

    device: str
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

    Cases are left out after the split, so that the others keep their part.

    Parameters
    ----------
    recipe : TrainingRecipe
        The recipe.
    folder : Path
        Folder that its paths are relative to.
    fold : int
        Part of the cases that validates, if the recipe has folds.
    progress : function
        Called with the number of cases that were checked, and of all.

    Raises
    ------
    ScanError
        TRAINING_DATA, as `find_cases`, or if all cases for training are left out.
    """
    cases = find_cases(recipe.data, folder, fold)
    pairs = [pair for part in PARTS for pair in cases[part]]
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(done, len(pairs))

    good, left_out = check_cases(recipe, pairs, count)
    kept = set(good)
    used = {part: [pair for pair in cases[part] if pair in kept] for part in PARTS}
    if not used["training"]:
        first = left_out[0]
        detail = f"no case can be trained on; the first of {len(left_out)}: {first.problem}"
        raise ScanError(Reason.TRAINING_DATA, detail)
    return Prepared(recipe, used, left_out)


def write_training(prepared: Prepared, bundle: Path) -> None:
    """Write the bundle of a training, or find that it is there already.

    Raises
    ------
    ScanError
        RECIPE if the folder holds another training or other files; OUTPUT_UNWRITABLE or DISK_FULL.
    """
    from scanloom.io.system.disk_errors import output_error

    root = common_folder([pair for part in PARTS for pair in prepared.cases[part]])
    pairs = {part: relative_pairs(prepared.cases[part], root) for part in PARTS}
    try:
        if bundle.exists() and any(bundle.iterdir()):
            _refuse_another(prepared, bundle, root, pairs)
        write_bundle(prepared.recipe, pairs, root, bundle)
        (bundle / "docs").mkdir(exist_ok=True)
        document = cases_document(prepared.cases, prepared.left_out)
        atomic_write(bundle / "docs" / "data.json", lambda file: write_json(file, document))
    except OSError as exc:
        raise output_error(exc, "the bundle") from exc


def _refuse_another(
    prepared: Prepared, bundle: Path, root: Path, pairs: dict[Part, list[dict[str, str]]]
) -> None:
    """Refuse a folder whose configs are not those of this training."""
    if not (bundle / "configs" / "train.json").is_file():
        raise ScanError(Reason.RECIPE, "the folder for the bundle holds other files")
    with tempfile.TemporaryDirectory() as scratch:
        write_bundle(prepared.recipe, pairs, root, Path(scratch))
        for name in COMPARED:
            new, old = (folder / "configs" / name for folder in (Path(scratch), bundle))
            if not old.is_file() or new.read_bytes() != old.read_bytes():
                detail = "the folder holds the bundle of another recipe, data or version"
                raise ScanError(Reason.RECIPE, detail)


def run_training(bundle: Path, **overrides: Any) -> None:
    """Train a bundle to its end with MONAI's engine, from the last checkpoint if there is one.

    Parameters
    ----------
    bundle : Path
        The bundle.
    **overrides
        Values that replace those of `train.json`.
    """
    from monai.bundle import ConfigWorkflow

    config = str(bundle / "configs" / "train.json")
    with _quiet_warnings():
        workflow = ConfigWorkflow(
            config, workflow_type="train", logging_file=False, bundle_root=str(bundle), **overrides
        )
        workflow.initialize()
        workflow.run()
        workflow.finalize()


@contextmanager
def _quiet_warnings() -> Iterator[None]:
    """Mute MONAI's warnings: that configs run code, which ours does, and of optional readers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure(prepared: Prepared) -> Measured:
    """Return the cost of a training, measured by a few steps in a scratch bundle."""
    import torch
    from ignite.engine import Events
    from monai.bundle import ConfigParser

    few = max(1, prepared.recipe.schedule.batch)
    cases: dict[Part, list[Pair]] = {
        "training": prepared.cases["training"][:few],
        "validation": prepared.cases["validation"][:1],
        "testing": [],
    }
    with tempfile.TemporaryDirectory() as scratch, _quiet_warnings():
        write_training(Prepared(prepared.recipe, cases, []), Path(scratch))
        parser = ConfigParser()
        parser.read_config(str(Path(scratch) / "configs" / "train.json"))
        parser["bundle_root"] = scratch
        epochs = parser.get_parsed_content("epochs")
        length = parser.get_parsed_content("epoch_length")
        parser.parse(reset=True)
        parser["epoch_length"] = parser["steps"] = MEASURED_STEPS
        trainer = parser.get_parsed_content("trainer")
        times: list[float] = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda _: times.append(time.perf_counter())
        )
        trainer.run()
        validation = 0.0
        if cases["validation"]:
            evaluator = parser.get_parsed_content("evaluator")
            began = time.perf_counter()
            evaluator.run()
            validation = time.perf_counter() - began
        device = parser.get_parsed_content("device").type
    steps = [after - before for before, after in pairwise(times)]
    count = len(prepared.cases["validation"])
    every = prepared.recipe.schedule.validate_every
    return Measured(
        device,
        epochs * length,
        epochs,
        statistics.median(steps[WARM_UP_STEPS - 1 :]),
        validation * count,
        epochs // every if count else 0,
        _memory(torch, device) + _cached_bytes(prepared),
    )


def _memory(torch: Any, device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cached_bytes(prepared: Prepared) -> int:
    """Return the memory of the cached cases: an image in float32 and a label map of bytes."""
    from scanloom.io.read import load_volume

    recipe = prepared.recipe
    # all cases were read already; a sample says enough of their size
    pairs: Sequence[Pair] = prepared.cases["training"][:10]
    voxel = recipe.spacing[0] * recipe.spacing[1] * recipe.spacing[2]
    sizes = []
    for pair in pairs:
        grid = load_volume(pair.image, modality=recipe.modality).grid
        i, j, k = grid.shape
        sizes.append(i * j * k * grid.voxel_volume / voxel)
    count = len(prepared.cases["training"]) + len(prepared.cases["validation"])
    return round(statistics.mean(sizes) * 5 * count)
