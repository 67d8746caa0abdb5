"""`Relations` between the models of a workflow, and between their structures, as data.

Names of models are those of their cards. An ensemble has a name too: other relations refer to the
ensemble, not to its models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class StructuresOf:
    """Structures of a model or ensemble; all of them if `structures` is empty."""

    model: str
    structures: tuple[str, ...] = ()


@dataclass(frozen=True)
class CropBy:
    """Crop of the scan that the model `name` sees.

    Parameters
    ----------
    name : str
        The model or ensemble that sees the crop.
    around : StructuresOf
        Structures whose box it sees.
    margin_mm : float
        Distance around the box.
    """

    name: str
    around: StructuresOf
    margin_mm: float = 0.0


@dataclass(frozen=True)
class RestrictTo:
    """Restriction of the model or ensemble `name`: its labels outside `inside` are background."""

    name: str
    inside: StructuresOf


@dataclass(frozen=True)
class Ensemble:
    """Models whose scores are averaged: one result, `name`, instead of those of the models."""

    name: str
    models: tuple[str, ...]


@dataclass(frozen=True)
class Unite:
    """One label map, `name`, of structures of several models, instead of those of the models.

    A voxel has the structure of the first entry of `priority` that labels it.
    """

    name: str
    priority: tuple[StructuresOf, ...]


@dataclass(frozen=True)
class Share:
    """Volumes to be measured as shares of the volume of other structures.

    Parameters
    ----------
    of : tuple of str
        Structures whose volumes are added: the whole.
    structures : tuple of str
        Structures whose shares are measured; empty for all others.

    Notes
    -----
    A structure is named by its label, or as MODEL/LABEL if several results have the label.
    """

    of: tuple[str, ...]
    structures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Relations:
    """All relations of a workflow; by default none: every model sees the scan and has a result."""

    crop_by: tuple[CropBy, ...] = ()
    restrict_to: tuple[RestrictTo, ...] = ()
    ensembles: tuple[Ensemble, ...] = ()
    unite: tuple[Unite, ...] = ()
    shares: tuple[Share, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def crop_of(self, name: str) -> CropBy | None:
        """Return the crop that a model or ensemble sees; None for the whole scan."""
        return next((crop for crop in self.crop_by if crop.name == name), None)

    def restriction_of(self, name: str) -> RestrictTo | None:
        """Return the restriction of a model or ensemble; None for no restriction."""
        return next((rule for rule in self.restrict_to if rule.name == name), None)

    @property
    def references(self) -> tuple[tuple[str, StructuresOf], ...]:
        """Each model or ensemble that needs structures of another one, with these structures."""
        return (
            *((crop.name, crop.around) for crop in self.crop_by),
            *((rule.name, rule.inside) for rule in self.restrict_to),
        )

    def labels_to_compute(self, requested: Sequence[str]) -> tuple[str, ...]:
        """Return the labels that models must find for requested ones; empty for all.

        Other results depend on structures that are not requested themselves: then all are found.
        """
        depends = self.references or self.unite or self.shares
        return () if depends else tuple(requested)

    @property
    def united(self) -> frozenset[str]:
        """Models and ensembles whose structures are united with those of others."""
        return frozenset(source.model for unite in self.unite for source in unite.priority)


NO_RELATIONS = Relations()
