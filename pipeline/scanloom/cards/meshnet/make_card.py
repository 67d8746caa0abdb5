"""Make the card of a MeshNet, from the properties that all of them share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from scanloom.cards.card import Channel, KeepLargest, ModelCard, NetworkSpec, Weights, Window
from scanloom.cards.meshnet.recipes import BEFORE, Recipe, name_of_weights
from scanloom.cards.monai.files import find_file, read_text
from scanloom.core import Reason, ScanError, Structure, format_bytes, slug

_MAX_WEIGHTS: Final = 64 << 20
"""Largest file of weights; brainchop's largest has 800 kB."""
_LICENSES: Final = (("MIT License", "MIT"), ("Apache License", "Apache-2.0"))


def make_card(
    folder: Path,
    network: NetworkSpec,
    weights: Weights,
    recipe: Recipe,
    structures: tuple[Structure, ...],
) -> ModelCard:
    """Return the card of a MeshNet.

    Parameters
    ----------
    folder : Path
        The model, which has the folder's name.
    network : NetworkSpec
        Class and arguments.
    weights : Weights
        File of the weights.
    recipe : Recipe
        Intensity steps, crop and modality.
    structures : tuple of Structure
        Structures of classes 1 and above.
    """
    known = name_of_weights(weights.sha256) is not None
    try:
        channel = Channel("image", recipe.modality)
    except ValueError as exc:
        raise ScanError(Reason.MODEL_UNSUPPORTED, "the model's modality is unknown") from exc
    return ModelCard(
        name=slug(folder.resolve().name) or "meshnet",
        version=weights.sha256[:8],
        title=recipe.title,
        description="A MeshNet on FreeSurfer's grid of 256 x 256 x 256 voxels of 1 mm.",
        intended_use="Research",
        license="MIT" if known else read_license(folder),
        attribution="neuroneural/brainchop" if known else "",
        channels=(channel,),
        network=network,
        weights=weights,
        grid=recipe.grid,
        window=Window(None),
        structures=structures,
        before=BEFORE,
        after=recipe.after,
        restore="labels",
        cleaning=(KeepLargest(together=True, when="before"),),
    )


def find_weights(folder: Path, name: str, key: str | None) -> Weights:
    """Return the weights of a folder with their hash."""
    file = find_file(folder, name)
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is missing")
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_WEIGHTS + 1)
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} can't be read") from exc
    if len(content) > _MAX_WEIGHTS:
        detail = f"the weights are larger than {format_bytes(_MAX_WEIGHTS)}"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    return Weights(file, hashlib.sha256(content).hexdigest(), key)


def read_license(folder: Path) -> str:
    """Return the licence (SPDX) of a folder's LICENSE file, else "unknown"."""
    text = read_text(folder, "LICENSE") if find_file(folder, "LICENSE") is not None else ""
    return next((spdx for phrase, spdx in _LICENSES if phrase in text), "unknown")
