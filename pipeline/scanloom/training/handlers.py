"""Handlers of Ignite's engines that a training bundle names and MONAI lacks."""

from __future__ import annotations

import csv
import math
import re
import resource
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ignite.distributed as idist
import numpy as np
import torch
from ignite.engine import Events
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from scanloom.core import format_duration
from scanloom.io.system.atomic_write import atomic_write
from scanloom.training.transforms import SeededDataset


class EpochSeed:
    """Handler that tells the dataset and torch the epoch that begins.

    Attach it before all others: Ignite iterates the loader anew after this event.
    """

    def __init__(self, dataset: SeededDataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def attach(self, engine: Any) -> None:
        """Attach the handler to a trainer."""
        engine.add_event_handler(Events.EPOCH_STARTED, self)

    def __call__(self, engine: Any) -> None:
        """Set the epoch."""
        self.dataset.epoch = int(engine.state.epoch)
        torch.manual_seed(self.seed + self.dataset.epoch)  # dropout, and seeds of the workers


def last_checkpoint(folder: str) -> str | None:
    """Return the complete checkpoint of the last epoch in a folder, None if there is none.

    MONAI's CheckpointSaver writes in place. A file that a killed process left half-written has no
    directory at its end, so it is no ZIP file.
    """
    return next((str(file) for file in _checkpoints(folder) if zipfile.is_zipfile(file)), None)


def _checkpoints(folder: str) -> list[Path]:
    """Return the files of checkpoints in a folder, the last epoch first."""
    numbered = [
        (re.fullmatch(r".*_epoch=(\d+)", file.stem), file) for file in Path(folder).glob("*.pt")
    ]
    epochs = {int(match[1]): file for match, file in numbered if match}
    return [epochs[n] for n in sorted(epochs, reverse=True)]


class OldCheckpoints:
    """Handler that removes all checkpoints but those of the last two epochs.

    MONAI's CheckpointSaver knows only those of its own process: each restart would leave two more.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def attach(self, engine: Any) -> None:
        """Attach the handler to a trainer, after the one that saves."""
        engine.add_event_handler(Events.EPOCH_COMPLETED, self)

    def __call__(self, engine: Any) -> None:
        """Remove older checkpoints."""
        for file in _checkpoints(self.folder)[2:]:
            file.unlink(missing_ok=True)


COLUMNS: Final = (
    *("epoch", "step", "loss", "learning_rate", "mean_dice"),
    *("seconds", "validation_seconds", "memory_bytes"),
)
"""Columns of the table; those of validation are empty in epochs without one. `seconds` are those of
the epoch's steps; `memory_bytes` is the largest of the process so far, or of its GPU."""
PICTURED: Final = 4
"""Cases of the validation in the picture."""
COLORS: Final = ((255, 190, 60), (70, 180, 255), (120, 220, 120), (240, 110, 200), (255, 255, 130))
"""Colours of outlines, by structure; white where the reference is."""


class LossNotFiniteError(ArithmeticError):
    """The loss is NaN or infinite: so are the weights, and no further step changes that."""


class TrainingRecord:
    """Handler that prints progress, and keeps table, curves and a picture in a folder.

    Of several processes, the first one writes; all of them average the loss.

    Parameters
    ----------
    folder : str
        Folder of the files, such as the bundle's `docs`. A table of an earlier process is
        continued.
    evaluator : ignite.engine.Engine
        The validation, whose key metric goes into the table.
    spacing : sequence of three floats
        Voxel spacing of the network grid, mm, for the picture.
    """

    def __init__(
        self,
        folder: str,
        epochs: int,
        evaluator: Any,
        optimizer: Any,
        spacing: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        self.folder, self.epochs, self.spacing = Path(folder), epochs, spacing
        self.evaluator, self.optimizer = evaluator, optimizer
        self.rows: list[dict[str, float | None]] = []
        self.total: torch.Tensor | None = None
        self.loss = math.nan
        self.began: tuple[float, int] | None = None
        self.epoch_began = self.stepped = self.validation_began = 0.0
        self.validation_s: float | None = None
        self.pictures: list[NDArray[np.uint8]] = []

    def attach(self, engine: Any) -> None:
        """Attach the handler to a trainer, after the handlers of validation and checkpoints."""
        engine.add_event_handler(Events.EPOCH_STARTED, self._begin)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._note)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._write)
        self.evaluator.add_event_handler(Events.STARTED, self._begin_validation)
        self.evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._picture)
        self.evaluator.add_event_handler(Events.COMPLETED, self._end_validation)

    def _begin(self, engine: Any) -> None:
        self.epoch_began = time.monotonic()
        if self.began is not None:
            return
        done = engine.state.epoch - 1
        self.began = (time.monotonic(), done)
        # rows after the last checkpoint, whose epochs are trained again
        self.rows = [
            row for row in read_table(self.folder / "training.csv") if row["epoch"] <= done
        ]

    def _note(self, engine: Any) -> None:
        loss = engine.state.output["loss"].detach().double()
        self.total = loss if self.total is None else self.total + loss
        steps = engine.state.epoch_length
        if engine.state.iteration % steps:
            return
        # once in an epoch: here the host waits for all steps of a device, the clock after it
        total = float(idist.all_reduce(self.total, "SUM"))
        self.loss, self.total = total / steps / idist.get_world_size(), None
        if not math.isfinite(self.loss):  # before a checkpoint: the last good one stays
            raise LossNotFiniteError(f"epoch {engine.state.epoch}: use a lower learning rate")
        self.stepped = time.monotonic()

    def _begin_validation(self, _: Any) -> None:
        self.validation_began, self.pictures = time.monotonic(), []

    def _end_validation(self, _: Any) -> None:
        self.validation_s = time.monotonic() - self.validation_began

    def _picture(self, engine: Any) -> None:
        if len(self.pictures) < PICTURED:
            first = engine.state.output[0]
            image, label, pred = (first[key] for key in ("image", "label", "pred"))
            self.pictures.append(draw_case(image, label, pred, self.spacing))

    def _write(self, engine: Any) -> None:
        state = engine.state
        validated = self.validation_s is not None
        dice = self.evaluator.state.metrics.get("val_mean_dice") if validated else None
        row = {
            "epoch": state.epoch,
            "step": state.iteration,
            "loss": self.loss,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "mean_dice": None if dice is None else float(dice),
            "seconds": self.stepped - self.epoch_began,
            "validation_seconds": self.validation_s,
            "memory_bytes": _largest_memory(),
        }
        self.rows.append(row)
        self.validation_s = None
        if idist.get_rank() > 0:
            return
        self.folder.mkdir(exist_ok=True)
        atomic_write(self.folder / "training.csv", self._write_table)
        curves = draw_curves(self.rows)
        atomic_write(self.folder / "training.png", lambda file: curves.save(file, "PNG"))
        if dice is not None and self.pictures:
            page = Image.fromarray(np.concatenate(self.pictures, 0))
            atomic_write(self.folder / "validation.png", lambda file: page.save(file, "PNG"))
        self._print(row)

    def _write_table(self, file: Path) -> None:
        with file.open("w", encoding="utf-8", newline="") as stream:
            table = csv.DictWriter(stream, COLUMNS)
            table.writeheader()
            table.writerows(self.rows)

    def _print(self, row: dict[str, Any]) -> None:
        began, done = self.began or (time.monotonic(), 0)
        seconds = (time.monotonic() - began) / max(1, row["epoch"] - done)
        left = format_duration(seconds * (self.epochs - row["epoch"]))
        dice = "" if row["mean_dice"] is None else f", mean Dice {row['mean_dice']:.4f}"
        line = f"epoch {row['epoch']} of {self.epochs}: loss {row['loss']:.4f}{dice}, {left} left"
        print(line, file=sys.stderr, flush=True)


def _largest_memory() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # of KiB on Linux


def read_table(file: Path) -> list[dict[str, float | None]]:
    """Return the rows of a table of a training; none if there is no table that can be read."""
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return [
                {name: float(row[name]) if row[name] else None for name in COLUMNS}
                for row in csv.DictReader(stream)
            ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def draw_case(
    image: torch.Tensor, label: torch.Tensor, pred: torch.Tensor, spacing: Sequence[float]
) -> NDArray[np.uint8]:
    """Return a strip of a case: three planes, without and with outlines.

    Parameters
    ----------
    image : Tensor
        Image (1, i, j, k), RAS.
    label, pred : Tensor
        Reference and prediction, one-hot (structure, i, j, k), the background first. The outline of
        the reference is white, that of the prediction has the structure's colour.
    spacing : sequence of three floats
        Voxel spacing, mm.

    Returns
    -------
    array of uint8
        The strip (PANEL, 6 x PANEL, 3).
    """
    values = image[0].float().cpu().numpy()
    reference, predicted = (each.argmax(0).cpu().numpy() for each in (label, pred))
    low, high = np.percentile(values, (0.5, 99.5))
    gray = np.clip((values - low) / max(high - low, 1e-6) * 255, 0, 255).astype(np.uint8)
    panels = []
    for axis in range(3):
        axes = tuple(a for a in range(3) if a != axis)
        areas = (reference > 0).sum(axes)
        index = int(areas.argmax()) if areas.any() else values.shape[axis] // 2
        plane = np.repeat(np.take(gray, index, axis)[..., None], 3, -1)
        drawn = plane.copy()
        layers = [np.take(each, index, axis) for each in (reference, predicted)]
        for number in range(1, label.shape[0]):
            color = COLORS[(number - 1) % len(COLORS)]
            drawn[_edge(layers[0] == number)] = (255, 255, 255)
            drawn[_edge(layers[1] == number)] = color
        lengths = [values.shape[a] * spacing[a] for a in axes]
        panels += [_panel(plane, lengths), _panel(drawn, lengths)]
    return np.concatenate(panels, 1)


PANEL: Final = 224
"""Width and height of a panel, pixels."""


def _edge(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the pixels of a mask that have a neighbour outside."""
    padded = np.pad(mask, 1)
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inside


def _panel(plane: NDArray[np.uint8], lengths: Sequence[float]) -> NDArray[np.uint8]:
    """Return a plane of lengths in mm with the second axis up, fitted into a square."""
    picture = Image.fromarray(np.ascontiguousarray(plane.transpose(1, 0, 2)[::-1]))
    scale = (PANEL - 8) / max(lengths)
    size = [max(1, round(length * scale)) for length in lengths]
    page = Image.new("RGB", (PANEL, PANEL))
    fitted = picture.resize((size[0], size[1]), Image.Resampling.NEAREST)
    page.paste(fitted, ((PANEL - size[0]) // 2, (PANEL - size[1]) // 2))
    return np.asarray(page)


def draw_curves(rows: Sequence[dict[str, Any]]) -> Image.Image:
    """Return the curves of loss and mean Dice over steps."""
    width, height, margin = 900, 420, 60
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    box = (margin, 30, width - margin, height - 40)
    draw.rectangle(box, outline="gray")
    last = max(float(rows[-1]["step"]), 1.0)
    # logarithms, since the first losses are many times the last ones; positive, as Dice and CE are
    losses = [max(float(row["loss"]), 1e-6) for row in rows]
    low, high = min(losses), max(max(losses), 1.001 * min(losses))

    def point(step: float, share: float) -> tuple[float, float]:
        x = box[0] + (box[2] - box[0]) * step / last
        return x, box[3] - (box[3] - box[1]) * share

    blue, orange = (40, 90, 200), (210, 110, 0)
    shares = np.log(np.array(losses) / low) / np.log(high / low)
    line = [point(r["step"], share) for r, share in zip(rows, shares, strict=True)]
    draw.line(line, fill=blue, width=2)
    dice = [row for row in rows if row["mean_dice"] is not None]
    draw.line([point(r["step"], r["mean_dice"]) for r in dice], fill=orange, width=2)
    for row in dice:
        x, y = point(row["step"], row["mean_dice"])
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=orange)
    draw.text((box[0], 10), f"loss {low:.3f} to {high:.3f}, log", fill=blue)
    if dice:
        best = max(float(row["mean_dice"]) for row in dice)
        last_dice = float(dice[-1]["mean_dice"])
        text = f"mean Dice of the validation, 0 to 1; last {last_dice:.4f}, best {best:.4f}"
        draw.text((box[0] + 220, 10), text, fill=orange)
    draw.text((box[0], box[3] + 10), "0", fill="black")
    draw.text((box[2] - 60, box[3] + 10), f"step {last:.0f}", fill="black")
    return page
