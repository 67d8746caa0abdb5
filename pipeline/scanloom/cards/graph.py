"""Graphs of models: nodes that see a scan, a crop of it, or the structures of another node.

There are two of them, run in the same way by `scanloom.inference.graph`: the models of a workflow
with its relations (`graph_of`), and a model with a previous stage (`stage_graph`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import UNCROPPED, ModelCard
from scanloom.cards.codes import LEFT, RIGHT, sided
from scanloom.core import Relations, Structure, WorkflowError, did_you_mean
from scanloom.core.relations import NO_RELATIONS, CropBy, StructuresOf, Unite

MAX_NUMBER = 65535
"""Largest structure number of a label map."""
FIRST_STAGE: Final = "first stage"
"""Name of a previous stage's node; no model has it, since its name has no spaces."""


@dataclass(frozen=True)
class Node:
    """A model of a graph, or several whose scores are averaged.

    Parameters
    ----------
    name : str
        Name of its result.
    members : tuple of int
        Positions of its models among those of the graph.
    crop : CropBy or None
        Structures of another node around which it sees the scan; None for the whole scan.
    inside : StructuresOf or None
        Structures of another node outside of which its labels become background.
    channels_of : str or None
        Node whose structures are further input channels.
    side : "left", "right" or None
        Side of the body of its structures.
    by_card : bool
        Whether its crop is that of a card (TotalSegmentator): the margin is rounded down to voxels,
        with the spacing of a NIfTI header, and any extent will do. Else it is rounded up.
    has_result : bool
        Whether it is more than a step to another node's result.
    """

    name: str
    members: tuple[int, ...]
    crop: CropBy | None = None
    inside: StructuresOf | None = None
    channels_of: str | None = None
    side: Literal["left", "right"] | None = None
    by_card: bool = False
    has_result: bool = True

    @property
    def needs(self) -> frozenset[str]:
        """Names of the nodes that run before it."""
        needed = {each.model for each in (self.crop, self.inside) if each is not None}
        return frozenset(needed if self.channels_of is None else {*needed, self.channels_of})

    def structures(self, cards: Sequence[ModelCard]) -> tuple[Structure, ...]:
        """Return the structures of its result; `cards` are those of the graph's models."""
        own = cards[self.members[0]].structures
        return own if self.side is None else tuple(sided(each, self.side) for each in own)

    def on_request(self, cards: Sequence[ModelCard]) -> frozenset[str]:
        """Return the labels of its result that are written on request only."""
        own = cards[self.members[0]]
        pairs = zip(own.structures, self.structures(cards), strict=True)
        return frozenset(result.label for each, result in pairs if each.label in own.on_request)


def graph_of(names: Sequence[str], relations: Relations = NO_RELATIONS) -> tuple[Node, ...]:
    """Return the nodes of a workflow's models, by name, in the order of the workflow."""
    models_of = {**relations.ensembles, **{n: (r.model,) for n, r in relations.results.items()}}
    nodes: dict[str, Node] = {}
    for model in names:
        for name in [name for name, models in models_of.items() if model in models] or [model]:
            members = tuple(names.index(each) for each in models_of.get(name, (model,)))
            crop, inside = relations.crop_by.get(name), relations.restrict_to.get(name)
            side = relations.results[name].side if name in relations.results else None
            nodes.setdefault(name, Node(name, members, crop, inside, side=side))
    return tuple(nodes.values())


def stage_graph(card: ModelCard) -> tuple[tuple[Node, Node], tuple[ModelCard, ModelCard]]:
    """Return the two nodes of a model with a previous stage, and the models that run in them.

    Raises
    ------
    ValueError
        If it has none.
    """
    stage = card.stage
    if stage is None:
        raise ValueError("the model has no previous stage")
    first, own = Node(FIRST_STAGE, (0,), has_result=False), Node(card.name, (1,))
    if stage.use == "channels":
        return (first, replace(own, channels_of=FIRST_STAGE)), (stage.card, card)
    crop = CropBy(FIRST_STAGE, stage.labels, stage.margin)
    cropped = replace(card, stage=None, before=(*stage.steps, *card.before))
    return (first, replace(own, crop=crop, by_card=True)), (stage.card, cropped)


def running_order(nodes: Sequence[Node], group_of: Mapping[str, Hashable]) -> tuple[Node, ...]:
    """Return an order in which each node comes after those that it needs.

    Of several possible ones, a node of the same group as its predecessor comes next, so that an
    image that a group shares is freed early. `group_of` has the group of each node, by name.

    Raises
    ------
    WorkflowError
        If nodes need each other.
    """
    remaining, ordered = list(nodes), list[Node]()
    while remaining:
        waiting = {node.name for node in remaining}
        possible = [node for node in remaining if waiting.isdisjoint(node.needs)]
        if not possible:
            raise _cycle(remaining)
        last = group_of[ordered[-1].name] if ordered else None
        following = next((n for n in possible if ordered and group_of[n.name] == last), possible[0])
        ordered.append(following)
        remaining.remove(following)
    return tuple(ordered)


def _cycle(nodes: Sequence[Node]) -> WorkflowError:
    """Return the error of nodes none of which can be the first."""
    named = {node.name: node for node in nodes}
    try:
        TopologicalSorter({name: sorted(node.needs) for name, node in named.items()}).prepare()
    except CycleError as exc:
        [first, *rest] = sorted(set(exc.args[1]))
        key = "crop_by" if named[first].crop is not None else "restrict_to"
        problem = f"and {' and '.join(rest)} need each other" if rest else "needs itself"
        return WorkflowError((key, first), f"{first} {problem}")
    raise ValueError("each of the nodes needs only those before it")


def stages(card: ModelCard) -> Iterator[ModelCard]:
    """Yield the models that run one after another on a scan: previous stages, then the model."""
    own = card
    if card.stage is not None:
        _, (first, own) = stage_graph(card)
        yield from stages(first)
    yield own


def networks(card: ModelCard) -> Iterator[ModelCard]:
    """Yield the cards of all networks of a model in the order in which they run."""
    for stage in stages(card):
        yield from stage.parts or (stage,)


def known_errors(
    cards: Sequence[ModelCard], relations: Relations, present: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the known errors to expect of each model of a case, by name.

    `present` has the conditions that the scan meets. Errors of scans that a model sees whole are
    not those of a model that only sees crops of them.
    """
    nodes = graph_of([card.name for card in cards], relations)
    whole = {n for node in nodes if node.crop is None for n in node.members}
    return {
        card.name: card.limitations_in({*present, UNCROPPED} if n in whole else present)
        for n, card in enumerate(cards)
    }


def needed_parts(card: ModelCard, labels: Collection[str] = ()) -> ModelCard:
    """Return a card with only the parts that have a requested structure; all if none is requested.

    The card's own structures remain. Its `subset` crops the scan to the requested structures that
    a rough model finds.
    """
    requested = set(labels)
    parts = tuple(p for p in card.parts if requested & {s.label for s in p.structures})
    if not requested or not parts:
        return card
    stage = card.stage
    if card.subset is not None:
        known = (s.label for s in card.subset.card.structures if s.label in requested)
        stage = replace(card.subset, labels=tuple(known))
    return replace(card, parts=parts, stage=stage)


def numbers_in(card: ModelCard, part: ModelCard) -> NDArray[np.uint16]:
    """Return a table from a part's numbers to the whole model's; 0 for labels that it lacks."""
    whole = {s.label: s.number for s in card.structures}
    table = np.zeros(max(s.number for s in part.structures) + 1, np.uint16)
    for structure in part.structures:
        table[structure.number] = whole.get(structure.label, 0)
    return table


def structures_of_results(
    cards: Sequence[ModelCard], relations: Relations
) -> dict[str, tuple[Structure, ...]]:
    """Return the structures of each result that is written, by name: models, then unions."""
    structures = _structures_of_nodes(cards, relations)
    own = {name: each for name, each in structures.items() if name not in relations.united}
    united = {name: united_structures(each, structures) for name, each in relations.unite.items()}
    return {**own, **united}


def _structures_of_nodes(
    cards: Sequence[ModelCard], relations: Relations
) -> dict[str, tuple[Structure, ...]]:
    nodes = graph_of([card.name for card in cards], relations)
    return {node.name: node.structures(cards) for node in nodes}


def united_structures(
    unite: Unite, structures: Mapping[str, Sequence[Structure]]
) -> tuple[Structure, ...]:
    """Return the structures of a union, numbered from 1 in their order; equal labels are one."""
    by_label: dict[str, Structure] = {}
    for source in unite.priority:
        for structure in structures[source.model]:
            if source.includes(structure.label):
                by_label.setdefault(structure.label, structure)
    return tuple(replace(each, number=number) for number, each in enumerate(by_label.values(), 1))


def check_relations(cards: Sequence[ModelCard], relations: Relations) -> None:
    """Refuse relations that do not fit the models.

    Raises
    ------
    WorkflowError
        With key, expected value and nearest valid word.
    """
    if not relations:
        return
    names = [card.name for card in cards]
    _check_names(names, relations)
    for name, result in relations.results.items():
        if result.side is None:
            continue
        try:
            for structure in cards[names.index(result.model)].structures:
                sided(structure, result.side)
        except ValueError as exc:
            raise WorkflowError(("results", name), str(exc)) from exc
    for name, models in relations.ensembles.items():
        _check_ensemble(name, [cards[names.index(model)] for model in models])
    structures = _structures_of_nodes(cards, relations)
    for key, references in (
        ("crop_by", relations.crop_by),
        ("restrict_to", relations.restrict_to),
    ):
        for name, needed in references.items():
            if name not in structures:
                raise WorkflowError((key, name), did_you_mean(name, structures))
            _check_reference((key, name), needed, structures)
            side = relations.results[name].side if name in relations.results else None
            if side is not None:
                around = [s for s in structures[needed.model] if needed.includes(s.label)]
                check_side((key, name), side, around)
    for name, unite in relations.unite.items():
        for n, source in enumerate(unite.priority):
            _check_reference(("unite", name, "priority", n), source, structures)
        if len(united_structures(unite, structures)) > MAX_NUMBER:
            raise WorkflowError(("unite", name), "too many structures")
    running_order(graph_of(names, relations), dict.fromkeys(structures))


def check_side(
    keys: tuple[str | int, ...], side: Literal["left", "right"], structures: Sequence[Structure]
) -> None:
    """Refuse structures that are all of the other side of the body.

    Raises
    ------
    WorkflowError
        With the keys.
    """
    opposite = RIGHT if side == "left" else LEFT
    if all(each.laterality and each.laterality.value == opposite.value for each in structures):
        names = ", ".join(each.label for each in structures)
        raise WorkflowError(keys, f"not of the {side} side: {names}")


def _check_names(models: Sequence[str], relations: Relations) -> None:
    """Refuse names of results that are taken, and results of unknown models."""
    taken = set(models)
    entries: Collection[str]
    for key, entries in (
        ("results", relations.results),
        ("ensembles", relations.ensembles),
        ("unite", relations.unite),
    ):
        for name in entries:
            if name in taken:
                raise WorkflowError((key, name), "a model or another result has this name")
            taken.add(name)
    sides: dict[tuple[str, str | None], str] = {}
    for name, result in relations.results.items():
        if result.model not in models:
            raise WorkflowError(("results", name, "model"), did_you_mean(result.model, models))
        before = sides.setdefault((result.model, result.side), name)
        if result.side is not None and before != name:
            problem = f"the result {before} is this side of {result.model} already"
            raise WorkflowError(("results", name, "side"), problem)
    members: set[str] = {result.model for result in relations.results.values()}
    for name, ensemble in relations.ensembles.items():
        for n, model in enumerate(ensemble):
            if model not in models:
                raise WorkflowError(("ensembles", name, n), did_you_mean(model, models))
            if model in members:
                raise WorkflowError(("ensembles", name, n), f"{model} has another result already")
            members.add(model)


def _check_reference(
    keys: tuple[str | int, ...],
    needed: StructuresOf,
    structures: Mapping[str, Sequence[Structure]],
) -> None:
    """Refuse a reference to an unknown model, or to structures that it does not have."""
    if needed.model not in structures:
        raise WorkflowError((*keys, "model"), did_you_mean(needed.model, structures))
    labels = [structure.label for structure in structures[needed.model]]
    for n, label in enumerate(needed.structures):
        if label not in labels:
            problem = f"{needed.model} has no {label}; {did_you_mean(label, labels)}"
            raise WorkflowError((*keys, "structures", n), problem)


def _check_ensemble(name: str, cards: Sequence[ModelCard]) -> None:
    """Refuse to average scores that do not mean the same."""
    first, *further = cards
    for n, card in enumerate(further, 1):
        ours = _comparable(first)
        for subject, theirs in _comparable(card).items():
            if ours[subject] != theirs:
                problem = f"{first.name} and {card.name} differ in their {subject}"
                raise WorkflowError(("ensembles", name, n), problem)
    if first.parts or first.stage:
        problem = f"{first.name} consists of several models itself"
        raise WorkflowError(("ensembles", name, 0), problem)


def _comparable(card: ModelCard) -> dict[str, Hashable]:
    """Return, by subject, the values in which the models of an ensemble must agree."""
    return {
        "structures": tuple((s.label, s.number) for s in card.structures),
        "network grid": card.grid,
        "input channels": tuple((channel.name, channel.modality) for channel in card.channels),
        "scores": (card.n_outputs, card.activation, card.decision),
        "way back": (card.restore, card.cleaning, card.window.sums),
        "parts": (bool(card.parts), card.stage is not None),
    }
