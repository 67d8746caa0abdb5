"""Agreement of labels with those of another program, and the command line of comparisons."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from meter import parse, unavailable

LEAST_VOXELS = 1000
"""Classes of fewer voxels have no Dice."""
LEAST_EQUAL, LEAST_DICE = 0.9995, 0.999


@dataclass(frozen=True)
class Agreement:
    """Share of equal voxels, and Dice by class, of classes of at least `LEAST_VOXELS` voxels."""

    equal: float
    dice: dict[int, float]

    @property
    def worst_dice(self) -> float:
        """Smallest Dice."""
        return min(self.dice.values())

    @property
    def enough(self) -> bool:
        """Whether labels count as the same."""
        return self.equal >= LEAST_EQUAL and self.worst_dice >= LEAST_DICE

    def __str__(self) -> str:
        return f"{self.equal:9.4%}  Dice {self.worst_dice:.4f}"


def dice(ours: NDArray[Any], theirs: NDArray[Any], number: int) -> float:
    """Return the Dice coefficient of a class that occurs."""
    a, b = ours == number, theirs == number
    return 2 * int((a & b).sum()) / int(a.sum() + b.sum())


def agreement(ours: NDArray[Any], theirs: NDArray[Any]) -> Agreement:
    """Return how well labels agree with those of another program, background included."""
    if theirs.shape != ours.shape:
        raise ValueError(f"shapes {ours.shape} and {theirs.shape}")
    numbers, counts = np.unique(theirs, return_counts=True)
    large = (int(n) for n, count in zip(numbers, counts, strict=True) if count >= LEAST_VOXELS)
    scores = {number: dice(ours, theirs, number) for number in large}
    return Agreement(float(np.mean(ours == theirs)), scores)


def compare_all(
    compare: Callable[[Path, str], bool],
    scripts: dict[str, Path],
    root: str = ".",
    *,
    smallest: str,
) -> int:
    """Compare the models of the command line; return the exit status.

    Parameters
    ----------
    compare : callable
        Takes a folder and the name of a model in it; returns whether all labels agree.
    scripts : mapping
        Script that makes the models with the other program, by the option that chooses it;
        without an option the first.
    root : str
        Place below the folder with a subfolder for each model.
    smallest : str
        Model of the smallest form.
    """
    import torch

    parser = argparse.ArgumentParser(
        description=(sys.modules["__main__"].__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, nargs="?", help="default: a temporary one")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--env", help="Python of the other program's environment")
    parser.add_argument("--threads", type=int, default=1)
    default, *further_names = scripts
    for name in further_names:
        parser.add_argument(f"--{name}", dest="made", action="store_const", const=name)
    parser.set_defaults(made=default)
    arguments = parse(parser, models=[smallest])
    if arguments.folder is None and arguments.env is None:
        unavailable("the Python of the other program's environment: name it with --env")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        return _compare_in(folder, arguments, scripts[arguments.made], compare, root)


def _compare_in(
    folder: Path,
    arguments: argparse.Namespace,
    script: Path,
    compare: Callable[[Path, str], bool],
    root: str,
) -> int:
    """Make the models with the other program, if it is given, and compare them."""
    if arguments.env:
        command = [arguments.env, str(script), str(folder), *arguments.models]
        subprocess.run(command, check=True)
    models = arguments.models or sorted(entry.name for entry in (folder / root).iterdir())
    agreed = [compare(folder, name) for name in models]
    return 0 if all(agreed) else 1
