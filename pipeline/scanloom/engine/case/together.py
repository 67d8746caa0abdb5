"""All models of a case on one scan, with the relations between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from scanloom.cards.card import ModelCard, Threshold
from scanloom.core import Flag, Layer, Segmentation, Volume
from scanloom.core.engines import EngineChoice
from scanloom.core.grid import Box
from scanloom.core.relations import StructuresOf, Unite
from scanloom.engine.case.relations import (
    Prediction,
    chosen,
    predictions_of,
    running_order,
    sharing_groups,
    united_structures,
)
from scanloom.engine.case.types import LoadedCase, Predictor
from scanloom.ops.label_maps import (
    box_of_labels,
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


@dataclass(frozen=True, eq=False)
class _Crop:
    """The input channels in a box."""

    box: Box
    volumes: tuple[Volume, ...]


class JointPrediction:
    """Runs all models of a case on its scan, and relates their structures.

    Models that see the same part of the scan on the same network grid share one resampling.

    Parameters
    ----------
    loaded : LoadedCase
        The scan, with the relations of the case.
    predictors : sequence of Predictor
        The models, in the order of the workflow.

    Attributes
    ----------
    predicted : dict of str to Segmentation
        Segmentation of each model and ensemble that has run, by name.
    """

    def __init__(self, loaded: LoadedCase, predictors: Sequence[Predictor]) -> None:
        self._loaded, self._predictors = loaded, predictors
        self._relations = loaded.case.relations
        self._cards = [predictor.card for predictor in predictors]
        names = [card.name for card in self._cards]
        self._predictions = predictions_of(names, self._relations)
        self._shared = self._shared_scans()
        self._crops: dict[Hashable, _Crop | None] = {}
        self.predicted: dict[str, Segmentation] = {}

    def run(self) -> tuple[Segmentation, ...]:
        """Return the results: of models and ensembles, then unions.

        Raises
        ------
        ScanError
            As `Predictor.predict`.
        """
        groups = sharing_groups(self._predictions, self._cards)
        for prediction in running_order(self._predictions, self._relations, groups):
            self.predicted[prediction.name] = self._restricted(self._predict(prediction))
        united = self._relations.united
        own = (self.predicted[p.name] for p in self._predictions if p.name not in united)
        with self._loaded.clock.step("relate"):
            return (*own, *(self._unite(unite) for unite in self._relations.unite))

    @property
    def placements(self) -> tuple[tuple[str, str, EngineChoice], ...]:
        """Device, precision and engine of each model, in their order."""
        by_model = {n: self.predicted[p.name] for p in self._predictions for n in p.members}
        return tuple(
            (
                by_model[n].device or p.device_name,
                by_model[n].precision or p.precision_name,
                by_model[n].engine or p.engine,
            )
            for n, p in enumerate(self._predictors)
        )

    def _shared_scans(self) -> dict[Hashable, SharedScan]:
        """Return the scan that models share, for each part of it that several models see."""
        users: dict[Hashable, list[tuple[ModelCard, str]]] = {}
        for prediction in self._predictions:
            members = (self._predictors[n] for n in prediction.members)
            models = users.setdefault(prediction.sees, [])
            models += [(predictor.card, predictor.device_name) for predictor in members]
        if all(len(models) == 1 for models in users.values()):
            return {}
        from scanloom.inference.resampling import image  # torch comes in here

        return {sees: image.SharedScan(models) for sees, models in users.items()}

    def _predict(self, prediction: Prediction) -> Segmentation:
        """Return the structures of a model, from the part of the scan that it sees."""
        loaded, members = self._loaded, [self._predictors[n] for n in prediction.members]
        volumes, box = (loaded.scan.volume, *loaded.further_channels), None
        if prediction.crop is not None:
            crop = self._crop(prediction)
            if crop is None:
                return _empty(prediction.name, members[0], volumes[0])
            volumes, box = crop.volumes, crop.box
        shared = self._shared.get(prediction.sees)
        predictor = members[0] if len(members) == 1 else _ensemble(prediction.name, members)
        segmentation = predictor.predict(
            *(volumes[0], loaded.clock),
            further_channels=volumes[1:],
            shared=shared,
            uncertainty="uncertainty" in loaded.case.outputs.also,
        )
        return (
            segmentation
            if box is None
            else paste_segmentation(segmentation, box, loaded.scan.volume.grid)
        )

    def _crop(self, prediction: Prediction) -> _Crop | None:
        """Return the part of the scan that a model sees; None if it would be empty."""
        crop, sees = prediction.crop, prediction.sees
        if crop is None or sees in self._crops:
            return self._crops.get(sees)
        loaded, layers = self._loaded, self.predicted[crop.around.model].layers
        grid = loaded.scan.volume.grid
        with loaded.clock.step("relate"):
            box = union_of_boxes(
                box_of_labels(layer.labels, numbers)
                for layer in layers
                if (numbers := _numbers(crop.around, layer))
            )
            self._crops[sees] = None
            if box is not None:
                box = enlarge_box(box, margin_voxels(grid, crop.margin_mm), grid.shape)
                volumes = (loaded.scan.volume, *loaded.further_channels)
                self._crops[sees] = _Crop(box, tuple(crop_volume(v, box) for v in volumes))
        return self._crops[sees]

    def _restricted(self, segmentation: Segmentation) -> Segmentation:
        """Return the structures of a model inside those of another one, if so requested."""
        rule = self._relations.restriction_of(segmentation.model)
        if rule is None:
            return segmentation
        with self._loaded.clock.step("relate"):
            limits = self.predicted[rule.inside.model]
            return restrict_segmentation(segmentation, limits, rule.inside.structures)

    def _unite(self, unite: Unite) -> Segmentation:
        """Return one label map of structures of several models."""
        known = {name: result.structures for name, result in self.predicted.items()}
        structures = united_structures(unite, known)
        number_of = {structure.label: structure.number for structure in structures}
        layers = [
            (layer.labels, {s.number: number_of[s.label] for s in chosen(source, layer.structures)})
            for source in unite.priority
            for layer in self.predicted[source.model].layers
        ]
        labels = unite_layers(layers, len(structures))
        sources = [self.predicted[source.model] for source in unite.priority]
        return Segmentation(
            unite.name,
            (Layer(labels, structures),),
            self._loaded.scan.volume.grid,
            version=", ".join(dict.fromkeys(f"{each.model} {each.version}" for each in sources)),
            flags=tuple(dict.fromkeys(flag for each in sources for flag in each.flags)),
            uncertainty=largest_uncertainty([each.uncertainty for each in sources]),
            sources=tuple(
                dict.fromkeys(name for each in sources for name in each.sources or (each.model,))
            ),
        )


def _ensemble(name: str, members: Sequence[Predictor]) -> Predictor:
    from scanloom.inference.combined import Ensemble  # torch comes in here
    from scanloom.inference.predictor import TorchPredictor

    return Ensemble(name, [each for each in members if isinstance(each, TorchPredictor)])


def _numbers(reference: StructuresOf, layer: Layer) -> list[int]:
    return [structure.number for structure in chosen(reference, layer.structures)]


def _empty(name: str, predictor: Predictor, volume: Volume) -> Segmentation:
    """Return the segmentation of a model that saw nothing."""
    return Segmentation(
        name,
        tuple(_empty_layers(predictor.card, volume)),
        volume.grid,
        predictor.card.version,
        flags=(Flag.CROP_EMPTY,),
    )


def _empty_layers(card: ModelCard, volume: Volume) -> Iterator[Layer]:
    """Yield the layers of a model without a voxel."""
    dtype = np.uint8 if card.label_bytes == 1 else np.uint16
    layer = Layer(np.zeros(volume.grid.shape, dtype, order="F"), card.structures)
    if not isinstance(card.decision, Threshold):
        yield layer
        return
    for structure in card.structures:
        yield replace(layer, structures=(structure,))
