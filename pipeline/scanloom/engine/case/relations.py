"""Relations between the models of a case: checked against their cards, and put into an order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scanloom.cards.card import ModelCard
from scanloom.core import Reason, Relations, ScanError, Structure, did_you_mean
from scanloom.core.relations import CropBy, Ensemble, StructuresOf, Unite

MAX_NUMBER = 65535
"""Largest structure number of a label map."""


@dataclass(frozen=True)
class Prediction:
    """A model that runs, or the models of an ensemble.

    Parameters
    ----------
    name : str
        Name of its result.
    members : tuple of int
        Positions of the models in the workflow.
    crop : CropBy or None
        The crop that it sees.
    """

    name: str
    members: tuple[int, ...]
    crop: CropBy | None = None

    @property
    def sees(self) -> Hashable:
        """Key of the part of the scan that it sees: equal for equal crops."""
        return None if self.crop is None else (self.crop.around, self.crop.margin_mm)


def predictions_of(names: Sequence[str], relations: Relations) -> tuple[Prediction, ...]:
    """Return the models and ensembles that run, in the order of the workflow."""
    ensembles = {model: each for each in relations.ensembles for model in each.models}
    predictions: dict[str, Prediction] = {}
    for model in names:
        ensemble = ensembles.get(model)
        name = model if ensemble is None else ensemble.name
        models = [model] if ensemble is None else ensemble.models
        members = tuple(names.index(each) for each in models)
        predictions.setdefault(name, Prediction(name, members, relations.crop_of(name)))
    return tuple(predictions.values())


def running_order(
    predictions: Sequence[Prediction],
    relations: Relations,
    group_of: Mapping[str, Hashable],
) -> tuple[Prediction, ...]:
    """Return an order in which each prediction comes after those that it needs.

    Of several possible ones, a prediction of the same group as its predecessor comes next, so that
    an image that a group shares is freed early.

    Parameters
    ----------
    predictions : sequence of Prediction
        In the order of the workflow.
    relations : Relations
        Their relations.
    group_of : mapping of str to hashable
        Group of each prediction, by name.

    Raises
    ------
    ScanError
        WORKFLOW if predictions need each other.
    """
    remaining, ordered = list(predictions), list[Prediction]()
    while remaining:
        waiting = {each.name for each in remaining}
        blocked = {name for name, needed in relations.references if needed.model in waiting}
        possible = [each for each in remaining if each.name not in blocked]
        if not possible:
            detail = f"crop_by, restrict_to: {' and '.join(sorted(waiting))} need each other"
            raise ScanError(Reason.WORKFLOW, detail)
        last = group_of[ordered[-1].name] if ordered else None
        following = next((e for e in possible if ordered and group_of[e.name] == last), possible[0])
        ordered.append(following)
        remaining.remove(following)
    return tuple(ordered)


def sharing_groups(
    predictions: Sequence[Prediction], cards: Sequence[ModelCard]
) -> dict[str, Hashable]:
    """Return, by name, a key that is equal for predictions that need the same resampled scan."""
    if len(predictions) == 1:
        return {predictions[0].name: None}
    from scanloom.inference.resampling.image import sharing_key  # torch comes in here

    return {
        each.name: (each.sees, sharing_key(cards[each.members[0]]) or each.name)
        for each in predictions
    }


def check_relations(cards: Sequence[ModelCard], relations: Relations) -> None:
    """Refuse relations that do not fit the models.

    Raises
    ------
    ScanError
        WORKFLOW, with key, expected value and nearest valid word.
    """
    if not relations:
        return
    names = [card.name for card in cards]
    _check_names(names, relations)
    for ensemble in relations.ensembles:
        _check_ensemble(ensemble, cards)
    structures = structures_of_predictions(cards, relations)
    targets = (
        *(("crop_by", crop.name) for crop in relations.crop_by),
        *(("restrict_to", rule.name) for rule in relations.restrict_to),
    )
    for key, target in targets:
        if target not in structures:
            detail = f"{key}.{target}: {did_you_mean(target, structures)}"
            raise ScanError(Reason.WORKFLOW, detail)
    for name, needed in relations.references:
        _check_reference(f"{name}.model", needed, structures)
    for unite in relations.unite:
        for source in unite.priority:
            _check_reference(f"unite.{unite.name}", source, structures)
        if len(united_structures(unite, structures)) > MAX_NUMBER:
            raise ScanError(Reason.WORKFLOW, f"unite.{unite.name}: too many structures")
    predictions = predictions_of(names, relations)
    running_order(predictions, relations, {each.name: each.name for each in predictions})


def structures_of_predictions(
    cards: Sequence[ModelCard], relations: Relations
) -> dict[str, tuple[Structure, ...]]:
    """Return the structures of each model and ensemble that runs, by name."""
    names = [card.name for card in cards]
    return {
        each.name: cards[each.members[0]].structures for each in predictions_of(names, relations)
    }


def structures_of_results(
    cards: Sequence[ModelCard], relations: Relations
) -> dict[str, tuple[Structure, ...]]:
    """Return the structures of each result that is written, by name: models, then unions."""
    structures = structures_of_predictions(cards, relations)
    united = {unite.name: united_structures(unite, structures) for unite in relations.unite}
    own = {name: each for name, each in structures.items() if name not in relations.united}
    return {**own, **united}


def united_structures(
    unite: Unite, structures: Mapping[str, Sequence[Structure]]
) -> tuple[Structure, ...]:
    """Return the structures of a union, numbered from 1 in their order; equal labels are one."""
    by_label: dict[str, Structure] = {}
    for source in unite.priority:
        for structure in chosen(source, structures[source.model]):
            by_label.setdefault(structure.label, structure)
    return tuple(_numbered(by_label.values()))


def chosen(reference: StructuresOf, structures: Iterable[Structure]) -> list[Structure]:
    """Return the structures that are selected: all of them, or those named."""
    return [s for s in structures if not reference.structures or s.label in reference.structures]


def _numbered(structures: Iterable[Structure]) -> Iterator[Structure]:
    for number, structure in enumerate(structures, 1):
        yield replace(structure, number=number)


def _check_names(models: Sequence[str], relations: Relations) -> None:
    """Refuse names of results that are taken, and ensembles of unknown models."""
    taken = set(models)
    for key, entries in (("ensembles", relations.ensembles), ("unite", relations.unite)):
        for entry in entries:
            if entry.name in taken:
                detail = f"{key}.{entry.name}: a model or another result has this name"
                raise ScanError(Reason.WORKFLOW, detail)
            taken.add(entry.name)
    members: set[str] = set()
    for ensemble in relations.ensembles:
        for model in ensemble.models:
            if model not in models:
                detail = f"ensembles.{ensemble.name}: {did_you_mean(model, models)}"
                raise ScanError(Reason.WORKFLOW, detail)
            if model in members:
                detail = f"ensembles.{ensemble.name}: {model} is in an ensemble already"
                raise ScanError(Reason.WORKFLOW, detail)
            members.add(model)


def _check_reference(
    key: str, needed: StructuresOf, structures: Mapping[str, Sequence[Structure]]
) -> None:
    """Refuse a reference to an unknown model, or to structures that it does not have."""
    if needed.model not in structures:
        raise ScanError(Reason.WORKFLOW, f"{key}: {did_you_mean(needed.model, structures)}")
    labels = [structure.label for structure in structures[needed.model]]
    for label in needed.structures:
        if label not in labels:
            detail = f"{needed.model} has no {label}; {did_you_mean(label, labels)}"
            raise ScanError(Reason.WORKFLOW, f"{key}: {detail}")


def _check_ensemble(ensemble: Ensemble, cards: Sequence[ModelCard]) -> None:
    """Refuse to average scores that do not mean the same."""
    by_name = {card.name: card for card in cards}
    first, *further = (by_name[model] for model in ensemble.models)
    for card in further:
        for subject, ours, theirs in zip(
            ENSEMBLE_SUBJECTS, _comparable(first), _comparable(card), strict=True
        ):
            if ours != theirs:
                detail = f"{first.name} and {card.name} differ in their {subject}"
                raise ScanError(Reason.WORKFLOW, f"ensembles.{ensemble.name}: {detail}")
    if first.parts or first.stage:
        detail = f"{first.name} consists of several models itself"
        raise ScanError(Reason.WORKFLOW, f"ensembles.{ensemble.name}: {detail}")


ENSEMBLE_SUBJECTS = ("structures", "network grid", "input channels", "scores", "way back", "parts")
"""Subjects in which the models of an ensemble must agree, as `_comparable` returns them."""


def _comparable(card: ModelCard) -> tuple[Hashable, ...]:
    return (
        tuple((s.label, s.number) for s in card.structures),
        card.grid,
        tuple((channel.name, channel.modality) for channel in card.channels),
        (card.n_outputs, card.activation, card.decision),
        (card.restore, card.cleaning, card.window.sums),
        (bool(card.parts), card.stage is not None),
    )
