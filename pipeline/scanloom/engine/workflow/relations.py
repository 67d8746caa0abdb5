"""Sections of a workflow that relate its models, and structures, to each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from scanloom.core import is_slug
from scanloom.core import relations as core
from scanloom.engine.workflow.section import Section, WordList


def _slug(value: str) -> str:
    if not is_slug(value):
        raise ValueError("a name of a-z, 0-9, _ and -")
    return value


Name = Annotated[str, AfterValidator(_slug)]


class StructuresOf(Section, frozen=True):
    """Structures of another model."""

    model: str = Field(description="Name of the other model, or of an ensemble")
    structures: WordList = Field(default=(), description="Labels of that model; by default, all")

    @property
    def reference(self) -> core.StructuresOf:
        """The structures."""
        return core.StructuresOf(self.model, self.structures)


class CropBy(StructuresOf, frozen=True):
    """Structures of another model, around which the scan is cropped."""

    margin_mm: float = Field(default=0.0, ge=0, description="Distance around them, mm")


class Unite(Section, frozen=True):
    """One label map of structures of several models, instead of those of the models."""

    priority: tuple[StructuresOf, ...] = Field(
        min_length=1,
        description="Models with their structures: where several label a voxel, the first has it",
    )


class Share(Section, frozen=True):
    """Volumes measured as shares of a whole; structures by LABEL, or MODEL/LABEL if ambiguous."""

    of: Annotated[WordList, Field(min_length=1)] = Field(
        description="The whole: a structure, or several whose volumes are added"
    )
    structures: WordList = Field(
        default=(), description="Structures whose share is measured; by default, all others"
    )


Crops = Annotated[
    dict[Name, CropBy],
    Field(description="Models that run on the box around structures of another model, by name"),
]
Restrictions = Annotated[
    dict[Name, StructuresOf],
    Field(
        description="Models whose labels outside structures of another model become background, "
        "by name"
    ),
]
Ensembles = Annotated[
    dict[Name, Annotated[WordList, Field(min_length=2)]],
    Field(
        description="Models of equal structures and grid whose scores are averaged, by the name of "
        "their result"
    ),
]
Unions = Annotated[
    dict[Name, Unite],
    Field(
        description="Label maps of structures of several models, by name; they take the place of "
        "the models' own results"
    ),
]
Shares = Annotated[
    tuple[Share, ...], Field(description="Volumes to measure as shares of other volumes")
]


def make_relations(
    crop_by: Crops,
    restrict_to: Restrictions,
    ensembles: Ensembles,
    unite: Unions,
    shares: Shares,
) -> core.Relations:
    """Return the relations of a workflow as cases have them."""
    return core.Relations(
        crop_by=tuple(
            core.CropBy(name, crop.reference, crop.margin_mm) for name, crop in crop_by.items()
        ),
        restrict_to=tuple(
            core.RestrictTo(name, rule.reference) for name, rule in restrict_to.items()
        ),
        ensembles=tuple(core.Ensemble(*entry) for entry in ensembles.items()),
        unite=tuple(
            core.Unite(name, tuple(source.reference for source in union.priority))
            for name, union in unite.items()
        ),
        shares=tuple(core.Share(share.of, share.structures) for share in shares),
    )
