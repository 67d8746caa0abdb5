"""`TrainingRecipe`: the description of a training, read from a YAML or JSON file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from scanloom.cards.codes import SIDES, coding
from scanloom.convert.monai.metadata import (
    CheckFields,
    CodeFields,
    DirectionFields,
    LimitationFields,
    ReferenceFields,
    Sentence,
)
from scanloom.core import Reason
from scanloom.engine.workflow.schema import Page, Section, read_page
from scanloom.options import Modality

MAX_DRAWN = 255
"""Values of label maps beside 0: they are kept as bytes."""

_SIDE = re.compile(r"(?:^|[_-])[lr](?:[_-]|$)")
"""A side in a name such as `lung_l`, of which codes know nothing."""

Slug = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


class Data(Section, frozen=True):
    """Labelled scans, `msd`, `datalist` or `images` with `labels`; or `label_maps` alone.

    Paths are relative to the recipe.
    """

    msd: str | None = Field(
        default=None,
        description="Folder with dataset.json, as of the Medical Segmentation Decathlon",
    )
    datalist: str | None = Field(
        default=None,
        description="MONAI's JSON of cases: `training`, and `validation` if it is split already",
    )
    images: str | None = Field(default=None, description="Folder of images")
    labels: str | None = Field(
        default=None, description="Folder of label maps with the file names of their images"
    )
    label_maps: str | None = Field(
        default=None, description="Folder of label maps alone, of which images are drawn"
    )
    hold_out: int = Field(
        default=0,
        ge=0,
        description="Cases that neither training nor validation sees, by the hash of their names",
    )
    validation: int = Field(
        default=0, ge=0, description="Cases for validation, chosen likewise, without `folds`"
    )
    folds: int | None = Field(
        default=None, ge=2, le=20, description="Number of parts of the cases, for --fold"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        sources = (self.msd, self.datalist, self.images, self.label_maps)
        if sum(each is not None for each in sources) != 1 or (self.images is None) != (
            self.labels is None
        ):
            raise ValueError("one of msd, datalist, label_maps, or images with labels")
        if self.folds is not None and self.validation:
            raise ValueError("validation or folds, not both")
        return self


class TrainedStructure(Section, frozen=True):
    """A structure that the model learns. Codes are looked up by its name, unless given."""

    label: str = Field(
        pattern="^[a-z0-9]+(_[a-z0-9]+)*$",
        max_length=64,
        description="A slug",
        examples=["lung_left"],
    )
    values: Annotated[
        tuple[int, ...],
        BeforeValidator(_one_or_many, json_schema_input_type=int | list[int]),
        Field(min_length=1),
    ] = Field(description="Its number in the label maps, or several that are one structure")
    name: str | None = Field(default=None, max_length=64, description="Its name in results")
    category: CodeFields | None = Field(default=None, description="Its category, coded")
    type: CodeFields | None = Field(default=None, description="Its type, coded")
    laterality: CodeFields | None = Field(default=None, description="Its side, coded")
    color: tuple[int, int, int] | None = Field(default=None, description="R, G, B, 0 to 255")
    experimental: bool = Field(default=False, description="Whether results call it experimental")
    on_request: bool = Field(
        default=False, description="Whether results have it only if `segment --structures` names it"
    )
    weight: Positive = Field(
        default=1.0, description="Weight in the loss: above 1 for small ones among many"
    )

    @property
    def sided(self) -> bool:
        """Whether it lies on one side of the body, by its code, or else by its name."""
        if self.laterality is not None:
            return self.laterality.value in SIDES
        if self.type:
            return False
        side = coding(self.label).laterality  # as the card's
        return (side is not None and side.value in SIDES) or bool(_SIDE.search(self.label))


class Augmentation(Section, frozen=True):
    """Random changes of a case: probabilities and largest sizes."""

    deform: Share = Field(default=0.7, description="Probability of rotation, scale and elastic")
    rotate: float = Field(default=15.0, ge=0, le=180, description="Largest rotation, degrees")
    scale: float = Field(default=0.15, ge=0, lt=1, description="Largest change of size, a share")
    elastic: float = Field(
        default=1.0, ge=0, description="Displacement, mm, of points a quarter patch apart: SD"
    )
    mirror: tuple[Literal["left-right", "anterior-posterior", "superior-inferior"], ...] = Field(
        default=(), description="Axes of mirroring; `sides` change places with left and right"
    )
    noise: Share = Field(default=0.15, description="Probability of Gaussian noise")
    blur: Share = Field(default=0.15, description="Probability of a Gaussian blur")
    low_resolution: Share = Field(default=0.15, description="Probability of coarser voxels")
    brightness: Share = Field(default=0.15, description="Probability of another mean and contrast")
    gamma: Share = Field(default=0.3, description="Probability of another gamma")
    bias: Share = Field(default=0.15, description="Probability of a smooth bias field")


class Drawing(Section, frozen=True):
    """Images of label maps alone, in the manner of SynthSeg (Billot et al. 2023).

    Of `augmentation`, `deform`, `rotate`, `scale`, `elastic`, `mirror` and `gamma` apply to them.
    """

    others: tuple[int, ...] = Field(
        default=(), description="Values of the maps that are drawn, but are no structure"
    )
    alike: tuple[tuple[int, ...], ...] = Field(
        default=(), description="Values with one mean and deviation, such as left and right"
    )
    tissues: tuple[tuple[int, ...], ...] = Field(
        default=(), description="Values whose means are near each other in half of the images"
    )
    map_spacing: Positive = Field(
        default=1.0, description="Voxel spacing at which the maps are kept, mm"
    )
    centred: Share = Field(
        default=0.8, description="Share of the patches around a voxel of a structure"
    )
    strip: Share = Field(
        default=0.1, description="Probability that only structures are drawn, as of a brain alone"
    )
    largest_voxel: Positive = Field(
        default=4.0, description="Largest voxel spacing of a drawn acquisition, mm"
    )
    largest_slice: Positive = Field(
        default=7.0, description="Largest spacing of its slices, along a random axis, mm"
    )
    noise: float = Field(default=0.06, ge=0, description="Largest SD of noise; white is 1")
    bias: float = Field(default=0.4, ge=0, description="Largest SD of a bias field's logarithm")
    partial: Share = Field(default=0.2, description="Probability of a partial field of view")
    validation_images: int = Field(
        default=16, ge=1, description="Images that validate, drawn once of the validation's maps"
    )


class Network(Section, frozen=True):
    """MONAI's DynUNet with instance norm: a U-Net in the form of nnU-Net."""

    filters: Annotated[tuple[int, ...], Field(min_length=3, max_length=7)] = Field(
        default=(32, 64, 128, 256),
        description="Channels of each level, 3 to 7; a level halves the grid",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout, a share")
    start: str | None = Field(
        default=None,
        description="Weights (model.pt of the same network) to start from, relative to the recipe",
    )


class Schedule(Section, frozen=True):
    """Optimizer and its course: AdamW, warm-up and cosine, averaged weights."""

    steps: int = Field(default=10_000, ge=1, description="Steps of the optimizer")
    batch: int = Field(default=2, ge=1, description="Patches in a step and process")
    learning_rate: Positive = Field(default=1e-3, description="Largest learning rate")
    weight_decay: float = Field(default=1e-2, ge=0, description="AdamW's weight decay")
    warm_up: int = Field(default=200, ge=0, description="Steps to the largest learning rate")
    average: float = Field(
        default=0.005, gt=0, lt=1, description="Share of new weights in their average, per step"
    )
    epoch: int | None = Field(
        default=None,
        ge=1,
        description="Steps of an epoch, after which a checkpoint is written; by default a pass "
        "over the cases, or 50 steps if that is more",
    )
    validate_every: int = Field(
        default=5, ge=1, description="Epochs between validations; the last one is at the end"
    )
    background: Positive = Field(default=1.0, description="Weight of the background in the loss")
    dice: Positive = Field(
        default=1.0,
        description="Weight of Dice beside cross entropy; less of it keeps volumes right",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Precision of the network; weights stay float32. `auto` is bfloat16 where the "
        "device has units for it, else float32",
    )
    workers: int = Field(default=0, ge=0, description="Processes that read and augment; 0: none")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of everything random")


class TrainingRecipe(Page, frozen=True):
    """A training: data, grid, network, augmentation and steps; what a bundle says of itself."""

    name: Slug = Field(description="A slug, the model's name")
    version: str = Field(default="0.1.0", description="Version of the model")
    title: str = Field(default="", description="Name in listings")
    description: str = Field(default="", description="A sentence about the model")
    intended_use: str = Field(default="Research only.", description="Use that it was made for")
    authors: str = Field(default="", description="Who trained it")
    license: str = Field(default="unknown", description="Licence of the weights, SPDX")
    attribution: str = Field(default="", description="Origin of the data")
    limitations: tuple[Sentence | LimitationFields, ...] = Field(
        default=(), description="Known errors: sentences, or `text` with `where` (docs/models.md)"
    )
    reference_ranges: tuple[ReferenceFields, ...] = Field(
        default=(), description="Usual ranges of measurements"
    )
    reference_directions: tuple[DirectionFields, ...] = Field(
        default=(), description="Usual directions between structures, which tell a tilted scan"
    )
    checks: CheckFields = Field(default=CheckFields(), description=CheckFields.__doc__)
    modality: Modality = Field(description="Modality of the scans")
    data: Data = Field(description=Data.__doc__)
    structures: Annotated[tuple[TrainedStructure, ...], Field(min_length=1)] = Field(
        description=TrainedStructure.__doc__
    )
    sides: tuple[tuple[Slug, Slug], ...] = Field(
        default=(), description="Left and right structures that change places when mirrored"
    )
    spacing: tuple[Positive, Positive, Positive] = Field(
        description="Voxel spacing of the network grid, mm, in RAS"
    )
    intensity: Literal["z-score"] | tuple[float, float] = Field(
        default="z-score",
        description="z-score of each scan, or two values of the scan that become -1 and 1",
    )
    patch: tuple[int, int, int] = Field(description="Voxels of a window on the network grid")
    mirrored_mean: bool = Field(
        default=False,
        description="Scores of the trained model are the mean of those of the scan and of the scan "
        "mirrored left to right: sides become more even, the network takes twice the time",
    )
    foreground: bool = Field(
        default=False,
        description="The trained model sees the box around what is brighter than a scan's mean, "
        "with the intensities of that box: air around a head changes nothing. With z-score only",
    )
    largest_component: bool = Field(
        default=False,
        description="What the trained model finds apart from the largest component of all "
        "structures together becomes background",
    )
    drawing: Drawing = Field(default=Drawing(), description=Drawing.__doc__)
    network: Network = Field(default=Network(), description=Network.__doc__)
    augmentation: Augmentation = Field(default=Augmentation(), description=Augmentation.__doc__)
    schedule: Schedule = Field(default=Schedule(), description=Schedule.__doc__)

    @model_validator(mode="after")
    def _check(self) -> Self:
        labels = [structure.label for structure in self.structures]
        values = [value for structure in self.structures for value in structure.values]
        if len(set(labels)) < len(labels) or len(set(values)) < len(values) or min(values) < 1:
            raise ValueError("structures with different labels and values, from 1")
        self._check_drawing(values)
        if min(self.network.filters) < 1:
            raise ValueError("filters of the network of at least 1")
        sides = [side for pair in self.sides for side in pair]
        if unknown := set(sides) - set(labels):
            raise ValueError(f"sides of structures, which {sorted(unknown)[0]} is not")
        if len(set(sides)) < len(sides):  # not all of them would change places
            raise ValueError("sides with each structure once")
        if "left-right" in self.augmentation.mirror:
            # a left one in a mirrored case lies on the right: the network would mix them up
            lone = [
                each.label for each in self.structures if each.sided and each.label not in sides
            ]
            if lone:
                raise ValueError(f"sides of all left and right structures to mirror, {lone[0]} too")
        elif self.mirrored_mean:
            raise ValueError("left-right in mirror of the augmentation for a mirrored_mean")
        if not isinstance(self.intensity, str):
            if not self.intensity[0] < self.intensity[1]:
                raise ValueError("an intensity range with the lower value first")
            if self.foreground:
                raise ValueError("an intensity of z-score for a foreground")
        ranges = {name: getattr(self.checks, name) for name in ("low", "high", "spacing", "extent")}
        for name, pair in ranges.items():
            if pair is not None and not pair[0] < pair[1]:
                raise ValueError(f"a range {name} of checks with the lower value first")
        strides = [math.prod(each) for each in zip(*self.strides, strict=True)]
        for size, stride in zip(self.patch, strides, strict=True):
            if size < 4 or size % stride:
                raise ValueError(f"patch lengths of at least 4 that {stride} divides, not {size}")
        return self

    def _check_drawing(self, values: list[int]) -> None:
        drawn = [*values, *self.drawing.others]
        if len(set(drawn)) < len(drawn) or min(drawn) < 1 or len(drawn) > MAX_DRAWN:
            raise ValueError(f"others of the drawing from 1, no structure's, {MAX_DRAWN} in all")
        for name in ("alike", "tissues"):
            grouped = [value for group in getattr(self.drawing, name) for value in group]
            if len(set(grouped)) < len(grouped) or not set(grouped) <= set(drawn):
                raise ValueError(f"{name} of the drawing: its values, each once")

    @property
    def drawn_values(self) -> tuple[int, ...]:
        """Values of the label maps of which images are drawn, in order; the first is 0, air."""
        values = [value for structure in self.structures for value in structure.values]
        return (0, *sorted([*values, *self.drawing.others]))

    @property
    def strides(self) -> tuple[tuple[int, int, int], ...]:
        """Strides of each level of the network.

        An axis whose voxels are twice as long as the finest ones is not halved until the others
        have caught up, nor an axis of fewer than 8 voxels (as nnU-Net does).
        """
        spacing, size = list(self.spacing), list(self.patch)
        strides = [(1, 1, 1)]
        for _ in self.network.filters[1:]:
            finest = min(spacing)
            step = tuple(2 if spacing[a] < 2 * finest and size[a] >= 8 else 1 for a in range(3))
            spacing = [spacing[a] * step[a] for a in range(3)]
            size = [size[a] // step[a] for a in range(3)]
            strides.append((step[0], step[1], step[2]))
        return tuple(strides)


def read_recipe(path: Path) -> TrainingRecipe:
    """Read a recipe from a YAML or JSON file.

    Raises
    ------
    ScanError
        RECIPE, with line, key, expected value and nearest valid word for each mistake.
    """
    return read_page(path, TrainingRecipe, Reason.RECIPE)
