"""Cards of MeshNets, and those of published ones: brainchop's, and bundles of MONAI's Model Zoo.

All cards share the properties of MeshNets. The steps of brainchop for each of its networks, which
its files of weights do not contain, are from brainchop-parameters.js of github.com/neuroneural/
brainchop at commit 4c87885 (MIT).

Bundles consist of scripts, which are never run. A bundle is read here if each of its scripts has a
known SHA-256: then it is known what they do, and the network, grid and intensity steps of this
package take their place. A bundle with any other script is left to the reader of MONAI bundles,
which refuses it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from scanloom.cards.card import (
    ANY_MODALITY,
    Channel,
    Crop,
    IntensityStep,
    KeepLargest,
    ModelCard,
    NetworkGrid,
    NetworkSpec,
    Round,
    ScaleHistogram,
    ScaleMinMax,
    ScaleQuantiles,
    Weights,
    Window,
)
from scanloom.cards.codes import coding, color
from scanloom.convert.files import find_file, read_json, read_text
from scanloom.convert.weights import find_weights
from scanloom.core import Reason, ScanError, Structure, printable, slug

BEFORE: Final = (ScaleHistogram(),)
"""Intensity steps before a scan is resampled."""

QUANTILES: Final = ScaleQuantiles(0.05, 0.95)
MINDGRAB_QUANTILES: Final = ScaleQuantiles(0.02, 0.98, added=1e-3, clip=True, interpolated=True)
_PUBLISHED: Final[Mapping[str, tuple[str, str]]] = {
    "mindgrab": (
        "c9a01490fe2d13acc1515fd019b69db176ebe6f40c9b84aeb77f25acbc2ee0f3",
        "9ead2564b7731b585267d11e0df968c9e5a2bd198cbc0c01c8da58319ec0f0cf",
    ),
    "model18cls": (
        "725096439f64ece1ca45ec3c5115c9fa6004f6538cac3032b85966d3772b605e",
        "b872accef8237d2e449b2f0fcc12f05a5b6c5f8adee0636f1a37db229ddc7043",
    ),
    "model20chan3cls": (
        "aecc03e3db596bfffab0ea1143f0848dbf4da4e317e04ef202986c6888cd467f",
        "c60e73aae96e83f3866607c0c222540033769c037078f3b39d5d70e75c1b2d0a",
    ),
    "model21_104class": (
        "8a0aa1e2d94e5edc94c54aed900da978d2a1388bee4621cee05e473db64b84af",
        "a981d13d6baa0256387f14838c0997265a646616957c7e2bf742340a28a826df",
    ),
    "model30chan18cls": (
        "7039651d91c4cee0b7b1ddfe93fe2f5cb9b71d99f5a126fdef407e2a36bb52d4",
        "58441bcc4533346c2dffd4702ba8435a930bdb2e726f0b48f45d544124f75e48",
    ),
    "model30chan50cls": (
        "a7e597568dc7750c64cce8c64c4ca3ec7215716949efd741f19904da1baffa81",
        "d217ed8f675208004081516bac6ca926c61670c8fb5ca44412f8c879ff624d1c",
    ),
    "model5_gw_ae": (
        "ca0d1b8ff72f8719d9525acaf9a1f1cb66dbb173b4ee1d7540f99e022cf4bfd8",
        "262df624dcb0466bd58620d7862d9c3585ad9a4df5499243967435ce5bd0d98f",
    ),
}
"""SHA-256 of the published weights, as a layer model and as safetensors."""
_MAX_WEIGHTS: Final = 64 << 20
"""Largest file of weights; brainchop's largest has 800 kB."""
_LICENSES: Final = (("MIT License", "MIT"), ("Apache License", "Apache-2.0"))
_AS_CODED: Final = {"ventricle": "brain ventricle"}
"""Names that mean a part of the brain here, by the name under which codes are looked up."""
_CONFIG, _METADATA = "configs/inference.json", "configs/metadata.json"
_WEIGHTS: Final = "models/model.pt"
_MAX_SCRIPT: Final = 1 << 18
"""Largest script that is hashed, in bytes."""
_DILATIONS: Final = [16, 8, 4, 2, 1] * 5


@dataclass(frozen=True)
class Recipe:
    """Steps before and after a network.

    Parameters
    ----------
    title : str
        Title of the model.
    normalize : IntensityStep
        Last intensity step on the network grid.
    above : float or None
        Fraction of the largest intensity that the crop exceeds; None for no crop.
    margin : int
        Voxels around the crop.
    modality : str
        Modality of the scans.
    classifier_bias : bool
        Whether the bias of the last convolution is applied.
    """

    title: str
    normalize: IntensityStep = field(default_factory=ScaleMinMax)
    above: float | None = 0.0
    margin: int = 0
    modality: str = "MR"
    classifier_bias: bool = True

    @property
    def after(self) -> tuple[IntensityStep, ...]:
        """Intensity steps on the network grid."""
        return (Round(), self.normalize)

    @property
    def grid(self) -> NetworkGrid:
        """The grid: that of FreeSurfer's conform."""
        crop = None
        if self.above is not None:
            crop = Crop("positive", "network", margin=self.margin, above=self.above)
        return NetworkGrid(
            "LIA",
            (1.0, 1.0, 1.0),
            alignment="centre",
            shape=(256, 256, 256),
            crop=crop,
        )


DEFAULT: Final = Recipe("MeshNet")
"""The application's defaults, for networks that it does not have."""

RECIPES: Final[Mapping[str, Recipe]] = {
    "mindgrab": Recipe(
        "MindGrab: brain in images of any modality",
        MINDGRAB_QUANTILES,
        above=None,
        modality=ANY_MODALITY,
        classifier_bias=False,
    ),
    "model18cls": Recipe("18 classes of brain tissue, small", above=0.2),
    "model20chan3cls": Recipe("White and grey matter", QUANTILES, above=0.2),
    "model21_104class": Recipe("104 classes of the brain, left and right"),
    "model30chan18cls": Recipe("18 classes of brain tissue", above=0.2),
    "model30chan50cls": Recipe("50 classes of the brain", QUANTILES),
    "model5_gw_ae": Recipe("White and grey matter, small", margin=18),
}
"""By the names of brainchop's folders."""


def name_of_weights(sha256: str) -> str | None:
    """Return the name of brainchop's network with these weights, None if it is another network."""
    return next((name for name, known in _PUBLISHED.items() if sha256 in known), None)


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


def weights_of(folder: Path, name: str, key: str | None) -> Weights:
    """Return the weights of a folder with their hash; errors as `find_weights`."""
    file = find_file(folder, name)
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is missing")
    return find_weights(file, key, "the file of weights", _MAX_WEIGHTS)


def read_license(folder: Path) -> str:
    """Return the licence (SPDX) of a folder's LICENSE file, else "unknown"."""
    text = read_text(folder, "LICENSE") if find_file(folder, "LICENSE") is not None else ""
    return next((spdx for phrase, spdx in _LICENSES if phrase in text), "unknown")


class LabelFields(BaseModel, frozen=True):
    """An entry of `labels.json`."""

    number: int = Field(ge=0)
    name: str = Field(min_length=1, max_length=64)
    color: tuple[int, int, int]


class Colormap(BaseModel, frozen=True):
    """`colormap.json` of brainchop: a colour and a name for each class, in their order."""

    red: list[int] = Field(alias="R")
    green: list[int] = Field(alias="G")
    blue: list[int] = Field(alias="B")
    labels: list[str]

    def fields(self) -> list[LabelFields]:
        """Return the entries of the classes."""
        rows = zip(self.labels, self.red, self.green, self.blue, strict=True)
        return [
            LabelFields(number=n, name=name, color=(red, green, blue))
            for n, (name, red, green, blue) in enumerate(rows)
        ]


def make_structures(labels: Sequence[LabelFields], classes: int) -> tuple[Structure, ...]:
    """Return the structures of classes 1 and above; class 0 is the background.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if there is not one name for each class, or a name or colour is invalid.
    """
    ordered = sorted(labels, key=lambda label: label.number)
    if [label.number for label in ordered] != list(range(classes)) or classes < 2:
        detail = f"the labels do not name the network's {classes} classes"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    structures = tuple(_structure(label) for label in ordered[1:])
    if len({structure.label for structure in structures}) < len(structures):
        raise ScanError(Reason.MODEL_DAMAGED, "two structures have the same name")
    return structures


def _structure(label: LabelFields) -> Structure:
    codes = coding(_AS_CODED.get(label.name.lower(), label.name))
    text = re.sub(r"[_\s*]+", " ", label.name).strip()
    try:
        return Structure(
            label=slug(label.name),
            number=label.number,
            name=text[:1].upper() + text[1:],
            category=codes.category,
            type=codes.type,
            color=label.color,
            laterality=codes.laterality,
        )
    except ValueError as exc:
        detail = f"the structure {printable(label.name)!r} has an invalid name or colour"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc


@dataclass(frozen=True)
class KnownBundle:
    """A bundle whose scripts are known.

    Parameters
    ----------
    scripts : mapping
        SHA-256 of all scripts of the bundle, by file.
    classes : tuple of str
        Classes of the network, and of the transforms before and after it, as in the config.
    network : mapping
        Arguments of the network.
    recipe : Recipe
        Effects of the transforms.
    """

    scripts: Mapping[str, str]
    classes: tuple[str, str, str]
    network: Mapping[str, Any]
    recipe: Recipe


KNOWN: Final[tuple[KnownBundle, ...]] = (
    KnownBundle(
        scripts={
            "scripts/checkpoint.py": (
                "d0cdc8a050b739a82190e9fec8fbca44dffcd9ce79dd12ab107f62f4bb3306a8"
            ),
            "scripts/conform.py": (
                "799a8c6ae1849993f780466ce3c1ad12cfe976a63dbd5370fa3a32aa082beae5"
            ),
            "scripts/network.py": (
                "e77fb49541ea07d60ecd3ed41d48b35723152aff1e22e5ed74358a4898eeaab3"
            ),
            "scripts/postprocess.py": (
                "4718d1436684c762c38431de1fda3a8eb591826a337f268543088882ebd5171a"
            ),
            "scripts/transforms.py": (
                "2b45421de253cae2a52cd0f873ba6b0035a1e53e952c51853a1c278929e7bdfd"
            ),
        },
        classes=(
            "scripts.network.MindGrabNet",
            "scripts.transforms.MindGrabPreprocessd",
            "scripts.transforms.MindGrabPostprocessd",
        ),
        network={
            "in_channels": 1,
            "channels": 15,
            "classes": 2,
            "dilations": _DILATIONS,
            "activation": "gelu",
            "norm": "instance",
            "bias": False,
            "classifier_bias": False,
        },
        recipe=Recipe(
            "MindGrab: brain in images of any modality",
            MINDGRAB_QUANTILES,
            above=None,
            modality=ANY_MODALITY,
        ),
    ),
)


def is_known_bundle(folder: Path) -> bool:
    """Return whether a folder is a bundle whose scripts are those of a known one."""
    return _find_known(folder) is not None


def read_known_bundle(folder: Path) -> ModelCard:
    """Read a bundle that `is_known_bundle` accepts.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file is missing or malformed; MODEL_UNSUPPORTED if the config uses other
        classes or arguments; MODEL_HASH if the weights differ from those that the config names.
    """
    known = _find_known(folder)
    if known is None:
        raise ScanError(Reason.MODEL_UNSAFE, "the bundle's scripts are not known")
    config, metadata = read_json(folder, _CONFIG), read_json(folder, _METADATA)
    _check_config(config, known)
    weights = weights_of(folder, _WEIGHTS, None)
    expected = config.get("checkpoint_sha256")
    if expected not in (None, weights.sha256):
        detail = f"the weights' SHA-256 is {weights.sha256[:12]}.., but another in the config"
        raise ScanError(Reason.MODEL_HASH, detail)
    try:
        names = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
        labels = [
            LabelFields(number=int(n), name=name, color=color(max(int(n), 1)))
            for n, name in names.items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{_METADATA} does not name the classes") from exc
    structures = make_structures(labels, known.network["classes"])
    network = NetworkSpec("MeshNet", known.network)
    return make_card(folder, network, weights, known.recipe, structures)


def _find_known(folder: Path) -> KnownBundle | None:
    """Return the known bundle with the scripts of a folder, None if there is none."""
    try:
        present = {
            f"scripts/{file.relative_to(folder / 'scripts').as_posix()}": _sha256(folder, file)
            for file in (folder / "scripts").rglob("*.py")
            if file.name != "__init__.py"
        }
    except (OSError, ScanError, ValueError):
        return None
    return next((known for known in KNOWN if dict(known.scripts) == present), None)


def _sha256(folder: Path, file: Path) -> str:
    inside = find_file(folder, file.relative_to(folder).as_posix())
    if inside is None or inside.stat().st_size > _MAX_SCRIPT:
        return ""
    return hashlib.sha256(inside.read_bytes()).hexdigest()


def _check_config(config: Any, known: KnownBundle) -> None:
    """Refuse a config (MODEL_UNSUPPORTED) that is not made of the known classes alone."""
    network, before, after = known.classes
    try:
        transforms = [config[part]["transforms"] for part in ("preprocessing", "postprocessing")]
        targets = [[step["_target_"] for step in steps] for steps in transforms]
        arguments = [set(step) for steps in transforms for step in steps if "scripts." in str(step)]
        as_known = (
            config["network_def"] == {"_target_": network}
            and config["inferer"] == {"_target_": "SimpleInferer"}
            and targets == [["LoadImaged", before, "EnsureTyped"], [after, "SaveImaged"]]
            and all(names <= {"_target_", "keys", "save_conform"} for names in arguments)
            and config.get("save_conform", False) is False
        )
    except (KeyError, TypeError):
        as_known = False
    if not as_known:
        detail = f"{_CONFIG} does more than the known scripts"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
