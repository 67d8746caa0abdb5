"""`Relations` between the models of a workflow, and between their structures, as data.

The classes are those of a workflow's file: pydantic reads them with the descriptions and limits in
the metadata of their fields. Names of models are those of their cards. Ensembles and results with
a name of their own have names too: other relations refer to these, not to their models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True)
class StructuresOf:
    """Structures of another model."""

    model: str = field(metadata={"description": "Name of the other model, or of an ensemble"})
    structures: tuple[str, ...] = field(
        default=(), metadata={"description": "Labels of that model; by default, all"}
    )

    def includes(self, label: str) -> bool:
        """Return whether a structure is one of them."""
        return not self.structures or label in self.structures


@dataclass(frozen=True)
class CropBy(StructuresOf):
    """Structures of another model, around which the scan is cropped."""

    margin_mm: float = field(
        default=0.0, metadata={"ge": 0, "description": "Distance around them, mm"}
    )
    largest: bool = field(
        default=False,
        metadata={"description": "Whether only their largest connected component counts"},
    )


@dataclass(frozen=True)
class ResultOf:
    """A model whose result has another name, so that it may run several times on a case."""

    model: str = field(metadata={"description": "Name of the model"})
    side: Literal["left", "right"] | None = field(
        default=None,
        metadata={
            "description": "Side of the body: labels, names and codes of its structures say so"
        },
    )


@dataclass(frozen=True)
class Unite:
    """One label map of structures of several models, instead of those of the models."""

    priority: tuple[StructuresOf, ...] = field(
        metadata={
            "min_length": 1,
            "description": "Models with their structures: where several label a voxel, the first "
            "has it",
        }
    )


@dataclass(frozen=True)
class Share:
    """Volumes measured as shares of a whole; structures by LABEL, or MODEL/LABEL if ambiguous."""

    of: tuple[str, ...] = field(
        metadata={
            "min_length": 1,
            "description": "The whole: a structure, or several whose volumes are added",
        }
    )
    structures: tuple[str, ...] = field(
        default=(),
        metadata={"description": "Structures whose share is measured; by default, all others"},
    )


@dataclass(frozen=True)
class Asymmetry:
    """Asymmetry index of two volumes, L and R, in percent: 100 (L - R) / ((L + R) / 2)."""

    left: tuple[str, ...] = field(
        metadata={
            "min_length": 1,
            "description": "Structures of the left side, whose volumes are added, as in `shares`",
        }
    )
    right: tuple[str, ...] = field(
        metadata={"min_length": 1, "description": "Structures of the right side"}
    )


@dataclass(frozen=True)
class Relations:
    """All relations of a workflow; by default none: every model sees the scan and has a result.

    Parameters
    ----------
    results : mapping of str to ResultOf
        Results of models under names of their own, which replace those of the models.
    crop_by : mapping of str to CropBy
        Crop of the scan that a model, ensemble or named result sees, by its name.
    restrict_to : mapping of str to StructuresOf
        Structures outside of which the labels of a model or ensemble become background.
    ensembles : mapping of str to tuple of str
        Models whose scores are averaged, by the name of the result, which replaces theirs.
    unite : mapping of str to Unite
        Label maps of structures of several models, by name.
    shares : tuple of Share
        Volumes to be measured as shares of others.
    asymmetries : tuple of Asymmetry
        Volumes of which the asymmetry is measured.
    """

    results: Mapping[str, ResultOf] = field(default_factory=dict)
    crop_by: Mapping[str, CropBy] = field(default_factory=dict)
    restrict_to: Mapping[str, StructuresOf] = field(default_factory=dict)
    ensembles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unite: Mapping[str, Unite] = field(default_factory=dict)
    shares: tuple[Share, ...] = ()
    asymmetries: tuple[Asymmetry, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, relation.name) for relation in fields(self))

    @property
    def references(self) -> tuple[tuple[str, StructuresOf], ...]:
        """Each model or ensemble that needs structures of another one, with these structures."""
        return (*self.crop_by.items(), *self.restrict_to.items())

    def labels_to_compute(self, requested: Sequence[str]) -> tuple[str, ...]:
        """Return the labels that models must find for requested ones; empty for all.

        Other results depend on structures that are not requested themselves: then all are found.
        """
        measured = self.shares or self.asymmetries
        depends = self.references or self.unite or measured or self.results
        return () if depends else tuple(requested)

    @property
    def named_labels(self) -> frozenset[str]:
        """Labels of the structures that are measured or united by name."""
        shares = (name for share in self.shares for name in (*share.of, *share.structures))
        sides = (name for each in self.asymmetries for name in (*each.left, *each.right))
        sources = (source for union in self.unite.values() for source in union.priority)
        united = (label for source in sources for label in source.structures)
        return frozenset((*(name.rpartition("/")[2] for name in (*shares, *sides)), *united))

    @property
    def united(self) -> frozenset[str]:
        """Models and ensembles whose structures are united with those of others."""
        return frozenset(source.model for union in self.unite.values() for source in union.priority)


NO_RELATIONS = Relations()
