"""Runs the nodes of a graph of models on one scan; torch is imported by the models only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from scanloom.cards.card import ModelCard, Threshold
from scanloom.cards.check import check_extent
from scanloom.cards.codes import sided
from scanloom.cards.graph import Node, running_order, united_structures
from scanloom.core import Flag, Layer, ScanError, Segmentation, StepTimer, Volume
from scanloom.core.engines import EngineChoice, all_engines
from scanloom.core.grid import Box
from scanloom.core.relations import CropBy, Unite
from scanloom.inference.geometry import nifti_spacing
from scanloom.ops.label_maps import (
    box_of_labels,
    box_of_largest,
    crop_volume,
    enlarge_box,
    margin_voxels,
    paste_segmentation,
    restrict_segmentation,
    union_of_boxes,
    unite_layers,
)
from scanloom.ops.uncertainty import largest_uncertainty

if TYPE_CHECKING:
    from scanloom.inference.resampling.image import SharedScan

NO_ENGINE = EngineChoice("none", "", "the crop is empty: the network was not run")
"""Of a model that was not run: the engine of earlier cases would make equal cases differ."""


class Predictor(Protocol):
    """Protocol of a model that labels a volume on the volume's own grid."""

    @property
    def card(self) -> ModelCard:
        """Card of the model."""

    @property
    def device_name(self) -> str:
        """Device: "cpu", "cuda:0"."""

    @property
    def precision_name(self) -> str:
        """Floating-point type of the network: "float32", "float16"."""

    @property
    def engine(self) -> EngineChoice:
        """Library that runs the network, and the reason for its choice."""

    @property
    def changes(self) -> str:
        """Changes to the way a model says its network is run; else ""."""

    def predict(
        self,
        volume: Volume,
        clock: StepTimer | None = None,
        *,
        further_channels: Sequence[Volume] = (),
        previous: Segmentation | None = None,
        shared: SharedScan | None = None,
        uncertainty: bool = False,
    ) -> Segmentation:
        """Return the structures of a scan, which models of equal network grids may share.

        `previous` is the result of a stage before, for a model that takes its structures as input.
        """


@dataclass(frozen=True, eq=False)
class _View:
    """The part of a scan that a node sees: its input channels in a box; None for all of it."""

    volumes: Sequence[Volume]
    box: Box | None = None
    cut: bool = False
    """Whether the margin around structures reaches beyond the scan."""


def sharing_groups(nodes: Sequence[Node], cards: Sequence[ModelCard]) -> dict[str, Hashable]:
    """Return, by name, a key that is equal for nodes that need the same resampled scan."""
    if len(nodes) == 1:
        return {nodes[0].name: None}
    from scanloom.inference.resampling.image import sharing_key  # torch comes in here

    return {
        node.name: (node.crop, sharing_key(cards[node.members[0]]) or node.name) for node in nodes
    }


class GraphRun:
    """A run of all nodes of a graph on a scan, each after those that it needs.

    Nodes that see the same part of the scan on the same network grid share one resampling.

    Parameters
    ----------
    nodes, predictors
        The graph, and the models to which its nodes refer.
    volumes : sequence of Volume
        The scan: its input channels.
    clock, uncertainty
        As in `Predictor.predict`.
    shared : SharedScan, optional
        Scan that models outside of the graph share with its last node, unless that is cropped.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        predictors: Sequence[Predictor],
        volumes: Sequence[Volume],
        clock: StepTimer,
        *,
        uncertainty: bool = False,
        shared: SharedScan | None = None,
    ) -> None:
        self._nodes, self._predictors = nodes, predictors
        self._volumes, self._grid = volumes, volumes[0].grid
        self._clock, self._uncertainty = clock, uncertainty
        # The part of the scan that nodes see, by their crop; None if they see nothing
        self._views: dict[CropBy | None, _View | None] = {None: _View(volumes)}
        # Models outside of the graph see the whole scan
        outer = shared if nodes[-1].crop is None else None
        self._shared = self._shared_scans() if outer is None else {nodes[-1].name: outer}
        self._results: dict[str, Segmentation] = {}

    def run(self) -> dict[str, Segmentation]:
        """Return the result of each node by name, in the order in which they ran.

        Raises
        ------
        ScanError
            As the models.
        """
        groups = sharing_groups(self._nodes, [predictor.card for predictor in self._predictors])
        for node in running_order(self._nodes, groups):
            view = self._view(node)
            result = self._empty(node) if view is None else self._predict(node, view)
            if node.has_result:
                result = self._named(node, result)
            if node.inside is not None:
                with self._clock.step("relate"):
                    limits = self._results[node.inside.model]
                    result = restrict_segmentation(result, limits, node.inside.structures)
            self._results[node.name] = result
        return self._results

    def _shared_scans(self) -> dict[str, SharedScan]:
        """Return the scan that a node shares, if several models see that part of it."""
        users: dict[CropBy | None, list[tuple[ModelCard, str]]] = {}
        for node in self._nodes:
            members = (self._predictors[n] for n in node.members)
            models = users.setdefault(node.crop, [])
            models += [(predictor.card, predictor.device_name) for predictor in members]
        if all(len(models) == 1 for models in users.values()):
            return {}
        from scanloom.inference.resampling.image import SharedScan  # torch comes in here

        shared = {crop: SharedScan(models) for crop, models in users.items()}
        return {node.name: shared[node.crop] for node in self._nodes}

    def _predict(self, node: Node, view: _View) -> Segmentation:
        """Return the structures of a node in the part of the scan that it sees."""
        flags = self._check_crop(node, view)
        members = [self._predictors[n] for n in node.members]
        predictor, shared = members[0], self._shared.get(node.name)
        if len(members) > 1:
            from scanloom.inference.ensemble import Ensemble  # torch comes in here
            from scanloom.inference.predictor import TorchPredictor

            single = [each for each in members if isinstance(each, TorchPredictor)]
            predictor = Ensemble(node.name, single)
        result = predictor.predict(
            view.volumes[0],
            self._clock,
            further_channels=view.volumes[1:],
            previous=None if node.channels_of is None else self._results[node.channels_of],
            shared=shared,
            uncertainty=self._uncertainty and node.has_result,
        )
        if shared is not None:
            for member in members:
                shared.finish(member.card, member.device_name)
        if len(members) > 1:
            result = replace(result, sources=tuple(member.card.name for member in members))
        result = replace(result, flags=(*result.flags, *flags))
        return result if view.box is None else paste_segmentation(result, view.box, self._grid)

    def _check_crop(self, node: Node, view: _View) -> list[Flag]:
        """Return the flags of the crop that a workflow gives a node, or refuse its extent."""
        crop, grid = node.crop, view.volumes[0].grid
        if crop is None or node.by_card:
            return []
        flags = [Flag.CROP_CUT] if view.cut else []
        for n in node.members:
            try:
                flags += check_extent(grid, self._predictors[n].card)
            except ScanError as exc:
                around = f"{node.name}, the crop around {', '.join(crop.structures) or crop.model}"
                raise ScanError(exc.reason, f"{around}: {exc.detail}") from exc
        return flags

    def _view(self, node: Node) -> _View | None:
        """Return the part of the scan that a node sees; None if it sees nothing."""
        crop, grid = node.crop, self._grid
        if crop is None or crop in self._views:
            return self._views[crop]
        with self._clock.step("relate"):
            layers = [
                (layer.labels, numbers)
                for layer in self._results[crop.model].layers
                if (numbers := [s.number for s in layer.structures if crop.includes(s.label)])
            ]
            box = union_of_boxes(box_of_labels(*each) for each in layers)
            self._views[crop] = None
            if box is not None:
                if crop.largest:
                    box = box_of_largest(layers, box)
                margin = margin_voxels(grid, crop.margin_mm)
                if node.by_card:
                    x, y, z = (int(n) for n in crop.margin_mm / nifti_spacing(grid))
                    margin = (x, y, z)
                requested = tuple(n + 2 * m for n, m in zip(box.shape, margin, strict=True))
                box = enlarge_box(box, margin, grid.shape)
                volumes = [crop_volume(v, box) for v in self._volumes]
                self._views[crop] = _View(volumes, box, cut=box.shape != requested)
        return self._views[crop]

    def _named(self, node: Node, result: Segmentation) -> Segmentation:
        """Return a result under the name of its node, with the structures of its side."""
        if node.side is not None:
            by_number = {s.number: sided(s, node.side) for s in result.structures}
            layers = (
                Layer(layer.labels, tuple(by_number[s.number] for s in layer.structures))
                for layer in result.layers
            )
            result = replace(result, layers=tuple(layers))
        if result.model != node.name:
            version = f"{result.model} {result.version}"
            result = replace(result, model=node.name, version=version, sources=(result.model,))
        return result

    def _empty(self, node: Node) -> Segmentation:
        """Return the segmentation of a node that saw nothing."""
        card = self._predictors[node.members[0]].card
        dtype = np.uint8 if card.label_bytes == 1 else np.uint16
        labels = np.zeros(self._grid.shape, dtype, order="F")
        overlap = isinstance(card.decision, Threshold)  # a layer for each structure
        layers = [(s,) for s in card.structures] if overlap else [card.structures]
        return Segmentation(
            card.name,
            tuple(Layer(labels, structures) for structures in layers),
            self._grid,
            card.version,
            engine=NO_ENGINE,
            flags=(Flag.CROP_EMPTY,),
        )


def unite(name: str, union: Unite, results: Mapping[str, Segmentation]) -> Segmentation:
    """Return one label map of structures of several results, by their names."""
    structures = united_structures(union, {key: each.structures for key, each in results.items()})
    number_of = {structure.label: structure.number for structure in structures}
    layers = [
        (
            layer.labels,
            {s.number: number_of[s.label] for s in layer.structures if source.includes(s.label)},
        )
        for source in union.priority
        for layer in results[source.model].layers
    ]
    sources = [results[source.model] for source in union.priority]
    return Segmentation(
        name,
        (Layer(unite_layers(layers, len(structures)), structures),),
        sources[0].grid,
        version=", ".join(dict.fromkeys(f"{each.model} {each.version}" for each in sources)),
        flags=tuple(dict.fromkeys(flag for each in sources for flag in each.flags)),
        flags_by_label={
            label: tuple(
                dict.fromkeys(
                    flag
                    for source, each in zip(union.priority, sources, strict=True)
                    if label in each.labels and source.includes(label)
                    for flag in each.flags
                )
            )
            for label in number_of
        },
        uncertainty=largest_uncertainty([each.uncertainty for each in sources]),
        sources=tuple(
            dict.fromkeys(used for each in sources for used in each.sources or (each.model,))
        ),
    )


def made_after(first: Segmentation, result: Segmentation) -> Segmentation:
    """Return a result with the flags and the engine of another model whose result it used."""
    engines = [e for e in (result.engine, first.engine) if e is not None and e != NO_ENGINE]
    return replace(
        result,
        device=result.device or first.device,
        precision=result.precision or first.precision,
        flags=tuple(dict.fromkeys((*result.flags, *first.flags))),
        engine=all_engines(engines) if engines else result.engine,
    )
