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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, RootModel, ValidationError

from scanloom.cards import card
from scanloom.cards.codes import coded_structure, color_by_code
from scanloom.convert.download.addresses import BRAINCHOP_MODELS
from scanloom.convert.files import damaged, find_file, read_json, read_license, unsafe, unsupported
from scanloom.convert.monai.metadata import parse
from scanloom.convert.weights import FLOAT32_KEY, ForeignWeights, find_weights
from scanloom.core import Reason, ScanError, Structure, printable, slug

QUANTILES: Final = card.ScaleQuantiles(0.05, 0.95)
MINDGRAB_QUANTILES: Final = card.ScaleQuantiles(0.02, 0.98, 1e-3, clip=True, interpolated=True)
_PUBLISHED_SAFETENSORS: Final[Mapping[str, str]] = {
    "mindgrab": "9ead2564b7731b585267d11e0df968c9e5a2bd198cbc0c01c8da58319ec0f0cf",
    "model18cls": "b872accef8237d2e449b2f0fcc12f05a5b6c5f8adee0636f1a37db229ddc7043",
    "model20chan3cls": "c60e73aae96e83f3866607c0c222540033769c037078f3b39d5d70e75c1b2d0a",
    "model21_104class": "a981d13d6baa0256387f14838c0997265a646616957c7e2bf742340a28a826df",
    "model30chan18cls": "58441bcc4533346c2dffd4702ba8435a930bdb2e726f0b48f45d544124f75e48",
    "model30chan50cls": "d217ed8f675208004081516bac6ca926c61670c8fb5ca44412f8c879ff624d1c",
    "model5_gw_ae": "262df624dcb0466bd58620d7862d9c3585ad9a4df5499243967435ce5bd0d98f",
}
"""SHA-256 of brainchop's weights as safetensors; `BRAINCHOP_MODELS` has those of layer models."""
_MAX_WEIGHTS: Final = 64 << 20
"""Largest file of weights; brainchop's largest has 800 kB."""
_AS_CODED: Final = {"ventricle": "brain ventricle"}
"""Names that mean a part of the brain here, by the name under which codes are looked up."""
_BUNDLE_CONFIG, _METADATA = "configs/inference.json", "configs/metadata.json"
_WEIGHTS: Final = "models/model.pt"
_MAX_SCRIPT: Final = 1 << 18
"""Largest script that is hashed, in bytes."""


@dataclass(frozen=True)
class Recipe:
    """Steps before and after a network.

    Parameters
    ----------
    normalize : IntensityStep
        Last intensity step on the network grid.
    above : float or None
        Fraction of the largest intensity that the crop exceeds; None for no crop.
    margin : int
        Voxels around the crop.
    classifier_bias : bool
        Whether the bias of the last convolution is applied.
    """

    title: str
    normalize: card.IntensityStep = field(default_factory=card.ScaleMinMax)
    above: float | None = 0.0
    margin: int = 0
    modality: str = "MR"
    classifier_bias: bool = True


DEFAULT: Final = Recipe("MeshNet")
"""The application's defaults, for networks that it does not have."""

RECIPES: Final[Mapping[str, Recipe]] = {
    "mindgrab": Recipe(
        "MindGrab: brain in images of any modality",
        MINDGRAB_QUANTILES,
        above=None,
        modality=card.ANY_MODALITY,
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


def known_name(sha256: str) -> str | None:
    """Return the name of brainchop's network with these weights, None if it is another network."""
    return next(
        (
            name
            for name, files in BRAINCHOP_MODELS.items()
            if sha256 in files.values() or sha256 == _PUBLISHED_SAFETENSORS.get(name)
        ),
        None,
    )


def make_card(
    folder: Path,
    network: Mapping[str, Any],
    weights: ForeignWeights,
    recipe: Recipe,
    structures: tuple[Structure, ...],
) -> card.ModelCard:
    """Return the card of a MeshNet, by the arguments of its network; it has the folder's name."""
    known = known_name(weights.sha256) is not None
    try:
        channel = card.Channel("image", recipe.modality)
    except ValueError as exc:
        raise unsupported("the model's modality is unknown") from exc
    crop = None
    if recipe.above is not None:
        crop = card.Crop("positive", "network", margin=recipe.margin, above=recipe.above)
    return card.ModelCard(
        name=slug(folder.resolve().name) or "meshnet",
        version=weights.sha256[:8],
        title=recipe.title,
        description="A MeshNet on FreeSurfer's grid of 256 x 256 x 256 voxels of 1 mm.",
        intended_use="Research",
        license="MIT" if known else read_license(folder),
        attribution="neuroneural/brainchop" if known else "",
        channels=(channel,),
        network=card.NetworkSpec("MeshNet", network),
        weights=replace(weights, arrays=_arrays(network)),
        grid=card.NetworkGrid(  # of FreeSurfer's conform
            "LIA", (1.0, 1.0, 1.0), alignment="centre", shape=(256, 256, 256), crop=crop
        ),
        window=card.Window(None),
        structures=structures,
        before=(card.ScaleHistogram(),),
        after=(card.Round(), recipe.normalize),
        restore="labels",
        cleaning=(card.KeepLargest(together=True, when="before"),),
    )


def folder_weights(folder: Path, name: str, key: str | None) -> ForeignWeights:
    """Return the weights of a folder with their hash; errors as `find_weights`."""
    file = find_file(folder, name)
    if file is None:
        raise damaged(f"{name} is missing")
    weights = find_weights(file, key, "the file of weights", _MAX_WEIGHTS)
    return ForeignWeights(file, weights.sha256, key=key)


def _arrays(network: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes of the weights of `MeshNet`, in the order of its layers."""
    hidden = (network["channels"], 3, network["bias"])
    layers = {f"layers.{n}": hidden for n in range(len(network["dilations"]))}
    layers["classifier"] = (network["classes"], 1, network["classifier_bias"])
    channels, arrays = network["in_channels"], list[tuple[str, tuple[int, ...]]]()
    for name, (outputs, size, bias) in layers.items():
        arrays.append((f"{name}.weight", (outputs, channels, size, size, size)))
        if bias:
            arrays.append((f"{name}.bias", (outputs,)))
        channels = outputs
    return tuple(arrays)


class LabelFields(BaseModel, frozen=True):
    """An entry of `labels.json`."""

    number: int = Field(ge=0)
    name: str = Field(min_length=1, max_length=64)
    color: tuple[int, int, int] | None = None


class _Labels(RootModel[list[LabelFields]]):
    """`labels.json`."""


class Colormap(BaseModel, frozen=True):
    """`colormap.json` of brainchop: a colour and a name for each class, in their order."""

    red: list[int] = Field(alias="R")
    green: list[int] = Field(alias="G")
    blue: list[int] = Field(alias="B")
    labels: list[str]

    @property
    def fields(self) -> list[LabelFields]:
        """The entries of the classes."""
        rows = zip(self.labels, self.red, self.green, self.blue, strict=True)
        return [LabelFields(number=n, name=row[0], color=row[1:]) for n, row in enumerate(rows)]


def make_structures(labels: Sequence[LabelFields], classes: int) -> tuple[Structure, ...]:
    """Return the structures of classes 1 and above; class 0 is the background.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if there is not one name for each class, or a name or colour is invalid.
    """
    ordered = sorted(labels, key=lambda label: label.number)
    if [label.number for label in ordered] != list(range(classes)) or classes < 2:
        raise damaged(f"the labels do not name the network's {classes} classes")
    structures = tuple(_structure(label) for label in ordered[1:])
    if len({structure.label for structure in structures}) < len(structures):
        raise damaged("two structures have the same name")
    colored = {label.number for label in ordered if label.color is not None}
    return color_by_code(structures, [s.label for s in structures if s.number in colored])


def _structure(label: LabelFields) -> Structure:
    text = re.sub(r"[_\s*]+", " ", label.name).strip()
    try:
        return coded_structure(
            slug(label.name),
            label.number,
            text[:1].upper() + text[1:],
            coded_as=_AS_CODED.get(label.name.lower(), label.name),
            rgb=label.color,
        )
    except ValueError as exc:
        detail = f"the structure {printable(label.name)!r} has an invalid name or colour"
        raise damaged(detail) from exc


MINDGRAB_SCRIPTS: Mapping[str, str] = {
    "scripts/checkpoint.py": "d0cdc8a050b739a82190e9fec8fbca44dffcd9ce79dd12ab107f62f4bb3306a8",
    "scripts/conform.py": "799a8c6ae1849993f780466ce3c1ad12cfe976a63dbd5370fa3a32aa082beae5",
    "scripts/network.py": "e77fb49541ea07d60ecd3ed41d48b35723152aff1e22e5ed74358a4898eeaab3",
    "scripts/postprocess.py": "4718d1436684c762c38431de1fda3a8eb591826a337f268543088882ebd5171a",
    "scripts/transforms.py": "2b45421de253cae2a52cd0f873ba6b0035a1e53e952c51853a1c278929e7bdfd",
}
"""SHA-256 of all scripts of MindGrab's bundle."""
MINDGRAB_CLASSES: Final = (
    "scripts.network.MindGrabNet",
    "scripts.transforms.MindGrabPreprocessd",
    "scripts.transforms.MindGrabPostprocessd",
)
"""Classes of its network, and of the transforms before and after it, as in the config."""
_MINDGRAB_NETWORK: Final[Mapping[str, Any]] = {
    "in_channels": 1,
    "channels": 15,
    "classes": 2,
    "dilations": [16, 8, 4, 2, 1] * 5,
    "activation": "gelu",
    "norm": "instance",
    "bias": False,
    "classifier_bias": False,
}


def is_known_bundle(folder: Path) -> bool:
    """Return whether a folder is a bundle whose scripts are those of MindGrab."""
    try:
        present = {
            f"scripts/{file.relative_to(folder / 'scripts').as_posix()}": _sha256(folder, file)
            for file in (folder / "scripts").rglob("*.py")
            if file.name != "__init__.py"
        }
    except (OSError, ScanError, ValueError):
        return False
    return present == MINDGRAB_SCRIPTS


def read_known_bundle(folder: Path) -> card.ModelCard:
    """Read a bundle that `is_known_bundle` accepts.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file is missing or malformed; MODEL_UNSUPPORTED if the config uses other
        classes or arguments; MODEL_HASH if the weights differ from those that the config names.
    """
    config, metadata = read_json(folder, _BUNDLE_CONFIG), read_json(folder, _METADATA)
    _check_config(config)
    weights = folder_weights(folder, _WEIGHTS, None)
    expected = config.get("checkpoint_sha256")
    if expected not in (None, weights.sha256):
        detail = f"the weights' SHA-256 is {weights.sha256[:12]}.., but another in the config"
        raise ScanError(Reason.MODEL_HASH, detail)
    try:
        names = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
        labels = [LabelFields(number=int(n), name=name) for n, name in names.items()]
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise damaged(f"{_METADATA} does not name the classes") from exc
    structures = make_structures(labels, _MINDGRAB_NETWORK["classes"])
    return make_card(folder, _MINDGRAB_NETWORK, weights, RECIPES["mindgrab"], structures)


def _sha256(folder: Path, file: Path) -> str:
    inside = find_file(folder, file.relative_to(folder).as_posix())
    if inside is None or inside.stat().st_size > _MAX_SCRIPT:
        return ""
    return hashlib.sha256(inside.read_bytes()).hexdigest()


def _check_config(config: Any) -> None:
    """Refuse a config (MODEL_UNSUPPORTED) that is not made of the known classes alone."""
    network, before, after = MINDGRAB_CLASSES
    try:
        transforms = [config[step]["transforms"] for step in ("preprocessing", "postprocessing")]
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
        raise unsupported(f"{_BUNDLE_CONFIG} does more than the known scripts")


MODEL_FILE: Final = "model.json"
_NORM_SUFFIX: Final = "_gn"
"""End of the name of a convolution that is followed by an instance norm (brainchop)."""
_MAX_LAYERS: Final = 200

PerAxis = tuple[int, int, int]

_CONFIG, _LABELS, _SAFETENSORS = "config.json", "labels.json", "model.safetensors"
_COLORMAPS: Final = "colormap*.json"
Document = TypeVar("Document", bound=BaseModel)


class _Convolution(BaseModel, frozen=True):
    """Configuration of a layer of the class Conv3D; other keys concern training only."""

    name: str
    filters: int = Field(ge=1, le=1024)
    kernel_size: PerAxis
    dilation_rate: PerAxis = (1, 1, 1)
    strides: Literal[1] | tuple[Literal[1], Literal[1], Literal[1]] = 1
    groups: Literal[1] = 1
    padding: Literal["same"]
    data_format: Literal["channels_last"] = "channels_last"
    activation: Literal["linear"] = "linear"
    use_bias: bool = True


class _Activation(BaseModel, frozen=True):
    activation: Literal["elu", "relu", "gelu"]


class _Input(BaseModel, frozen=True):
    batch_input_shape: tuple[None, int | None, int | None, int | None, int]


class _Layer(BaseModel, frozen=True):
    class_name: str
    config: dict[str, Any]
    name: str
    inbound_nodes: list[Any] = []


class _Tensor(BaseModel, frozen=True, extra="forbid"):
    """A tensor of the manifest; one that is quantized has a further key."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32"]


class _Group(BaseModel, frozen=True):
    paths: tuple[str]
    weights: list[_Tensor]


def read_layers_model(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the network's arguments, and the name of the file of weights, as in `model.json`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if `model.json` is malformed; MODEL_UNSUPPORTED if it is not a MeshNet;
        MODEL_UNSAFE if it names a file outside the folder.
    """
    document = read_json(folder, MODEL_FILE)
    try:
        topology = document["modelTopology"]
        layers = topology.get("model_config", topology)["config"]["layers"]
        groups = document["weightsManifest"]
    except (KeyError, TypeError, AttributeError) as exc:
        raise damaged(f"{MODEL_FILE} has no layers or no weightsManifest") from exc
    if not isinstance(layers, list) or not isinstance(groups, list) or len(groups) != 1:
        raise unsupported(f"{MODEL_FILE} has several groups of weights")
    if not 3 <= len(layers) <= _MAX_LAYERS:
        raise unsupported(f"{MODEL_FILE} has {len(layers)} layers")
    chain = [_parse(_Layer, layer, "a layer") for layer in layers]
    group = _parse(_Group, groups[0], "weightsManifest")
    file = group.paths[0]
    image, convolutions, activation = _read_chain(chain)
    network = _network(image, convolutions, activation)
    # the file is a row of numbers, which only their order tells apart: kernels, channels last
    names = [
        f"{layer.name}/{part}"
        for layer in convolutions
        for part in ("kernel", "bias")[: 1 + layer.use_bias]
    ]
    shapes = [(*s[2:], s[1], s[0]) if len(s) > 1 else s for _, s in _arrays(network)]
    if [(each.name, each.shape) for each in group.weights] != [*zip(names, shapes, strict=True)]:
        raise damaged("the weightsManifest does not fit the layers")
    if PurePosixPath(file).name != file or file in (".", ".."):
        raise unsafe(f"{MODEL_FILE} names weights outside its folder")
    return network, file


def _parse(model: type[Document], value: object, subject: str) -> Document:
    """Return a part of the document; MODEL_UNSUPPORTED, with the key, if it has another form."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        error = exc.errors()[0]
        key = ".".join(printable(str(entry))[:60] for entry in error["loc"])
        detail = f"{subject} of {MODEL_FILE} has {key or 'a value'} of another kind"
        raise unsupported(detail) from exc


def _read_chain(chain: Sequence[_Layer]) -> tuple[int, list[_Convolution], str]:
    """Return the image's channels, the convolutions in their order, and their activation."""
    for first, second in pairwise(chain):
        # one input from the layer before, by Keras: (name, node, tensor, arguments)
        if second.inbound_nodes != [[[first.name, 0, 0, {}]]]:
            detail = f"layer {printable(second.name[:60])!r} does not follow the one before it"
            raise unsupported(detail)
    kinds = [layer.class_name for layer in chain]
    pairs = (len(chain) - 2) // 2
    expected = ["InputLayer", *["Conv3D", "Activation"] * pairs, "Conv3D"]
    if kinds != expected:
        foreign = sorted({*kinds} - {*expected}) or ["an order of layers"]
        raise unsupported(f"{printable(foreign[0][:60])} is not part of a MeshNet")
    image = _parse(_Input, chain[0].config, "the input").batch_input_shape[-1]
    convolutions = [_parse(_Convolution, layer.config, "a convolution") for layer in chain[1::2]]
    activations = {_parse(_Activation, layer.config, "an activation") for layer in chain[2::2]}
    if len(activations) != 1:
        raise unsupported("the layers have different activations")
    return image, convolutions, activations.pop().activation


def _network(image: int, convolutions: Sequence[_Convolution], activation: str) -> dict[str, Any]:
    """Return the arguments of the network."""
    # the last one is the classifier of single voxels
    *hidden, last = convolutions
    norms = {layer.name.endswith(_NORM_SUFFIX) for layer in hidden}
    sizes = {(layer.filters, layer.kernel_size, layer.use_bias) for layer in hidden}
    dilated = all(len(set(layer.dilation_rate)) == 1 for layer in hidden)
    regular = len(norms) == len(sizes) == 1 and hidden[0].kernel_size == (3, 3, 3) and dilated
    if not regular or last.kernel_size != (1, 1, 1) or last.name.endswith(_NORM_SUFFIX):
        raise unsupported("the convolutions are not those of a MeshNet")
    return {
        "in_channels": image,
        "channels": hidden[0].filters,
        "classes": last.filters,
        "dilations": [layer.dilation_rate[0] for layer in hidden],
        "activation": activation,
        "norm": "instance" if norms == {True} else None,
        "bias": hidden[0].use_bias,
        "classifier_bias": last.use_bias,
    }


class _Normalise(BaseModel, frozen=True):
    kind: Literal["minmax", "quantile"]
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)
    eps: float = Field(default=0.0, ge=0)
    clip: tuple[Literal[0], Literal[1]] | None = None
    mode: str = "rank"

    def step(self) -> card.IntensityStep:
        """Return the intensity step."""
        if self.kind == "minmax":
            return card.ScaleMinMax()
        interpolated = self.mode.startswith("linear")
        return card.ScaleQuantiles(
            self.low, self.high, self.eps, self.clip is not None, interpolated
        )


class _Crop(BaseModel, frozen=True):
    above: float = Field(default=0.0, ge=0, lt=1)
    margin: int = Field(default=0, ge=0, le=255)


class _Config(BaseModel, frozen=True):
    """`config.json`; keys that describe what is always done are not read."""

    name: str = ""
    title: str = ""
    network: Literal["MeshNet"]
    in_channels: Literal[1] = 1
    channels: int = Field(ge=1, le=1024)
    classes: int = Field(ge=2, le=1024)
    dilations: list[int] = Field(min_length=1, max_length=100)
    kernel: Literal[3] = 3
    activation: Literal["elu", "relu", "gelu"]
    norm: Literal["instance"] | None = None
    norm_eps: float = Field(default=1e-5, ge=1e-5, le=1e-5)
    bias: list[bool]
    classifier_bias: bool = True
    normalise: _Normalise
    modality: str = "MR"
    crop: _Crop | None = None


def is_layers_model(folder: Path) -> bool:
    """Return whether a folder has the files of brainchop's layer models."""
    return (folder / MODEL_FILE).is_file() and any(folder.glob(_COLORMAPS))


def is_meshnet_folder(folder: Path) -> bool:
    """Return whether a folder has the files of a MeshNet with safetensors."""
    return all((folder / name).is_file() for name in (_CONFIG, _LABELS, _SAFETENSORS))


def read_layers_folder(folder: Path) -> card.ModelCard:
    """Read a layer model, with the recipe of brainchop if its weights are brainchop's.

    Raises
    ------
    ScanError
        As `read_layers_model`; MODEL_DAMAGED if a file is missing or malformed.
    """
    network, file = read_layers_model(folder)
    weights = folder_weights(folder, file, FLOAT32_KEY)
    recipe = RECIPES.get(known_name(weights.sha256) or "", DEFAULT)
    network["classifier_bias"] &= recipe.classifier_bias
    structures = _read_colormap(folder, network["classes"])
    return make_card(folder, network, weights, recipe, structures)


def read_meshnet_folder(folder: Path) -> card.ModelCard:
    """Read a MeshNet with safetensors; the crop is that of brainchop's network of this name.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file is missing or malformed.
    """
    config = parse(_Config, read_json(folder, _CONFIG), _CONFIG)
    labels = parse(_Labels, read_json(folder, _LABELS), _LABELS).root
    if len(config.bias) != len(config.dilations) + 1 or len(set(config.bias[:-1])) != 1:
        raise unsupported(f"{_CONFIG} has a bias in some layers only")
    known = RECIPES.get(config.name)
    recipe = Recipe(
        title=config.title or (known or DEFAULT).title,
        normalize=config.normalise.step(),
        above=known.above if known else None,
        margin=known.margin if known else 0,
        modality=card.ANY_MODALITY
        if config.modality == "any"
        else config.modality.partition(" ")[0],
    )
    if config.crop is not None:
        recipe = replace(recipe, above=config.crop.above, margin=config.crop.margin)
    network = {
        "in_channels": config.in_channels,
        "channels": config.channels,
        "classes": config.classes,
        "dilations": config.dilations,
        "activation": config.activation,
        "norm": config.norm,
        "bias": config.bias[0],
        "classifier_bias": config.bias[-1] and config.classifier_bias,
    }
    structures = make_structures(labels, config.classes)
    weights = folder_weights(folder, _SAFETENSORS, None)
    return make_card(folder, network, weights, recipe, structures)


def _read_colormap(folder: Path, classes: int) -> tuple[Structure, ...]:
    """Return the structures of the colormap that names all classes of the network."""
    names = sorted(path.name for path in folder.glob(_COLORMAPS))
    # of a folder with many, the first ones: each is a file to be read
    colormaps = [parse(Colormap, read_json(folder, name), name) for name in names[:10]]
    fitting = [each for each in colormaps if len(each.labels) == classes]
    if not fitting:
        raise damaged(f"no colormap names the network's {classes} classes")
    try:
        return make_structures(fitting[0].fields, classes)
    except ValueError as exc:
        raise damaged("the colormap's lists differ in length") from exc
