"""A network in ONNX with a card by hand: a folder with `model.onnx` and `card.yaml`.

The graph says nothing of spacing, orientation, intensities, windows and structures: the card does,
with the entries of `card.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args

import yaml

from scanloom.cards.card import Argmax, ModelCard, NetworkSpec, Weights
from scanloom.cards.card_file import make_card, plain_entries
from scanloom.cards.codes import color_by_code
from scanloom.cards.networks import ONNX_GRAPH, Layout
from scanloom.convert.files import damaged, find_file, truncate, unsupported
from scanloom.convert.monai.config import read_file
from scanloom.convert.monai.metadata import StructureFields, parse
from scanloom.convert.monai.network import make_structure, structure_label
from scanloom.convert.onnx_file import MAX_BYTES, OnnxFile, Port, read_graph, with_external
from scanloom.convert.weights import ONNX_KEY, find_weights
from scanloom.core import Reason, ScanError, Structure, is_slug, slug

GRAPH_FILE: Final = "model.onnx"
CARD_YAML: Final = "card.yaml"
_OF_THE_GRAPH: Final = ("name", "network", "weights")
"""Entries of a card that follow from folder and graph."""
_OTHER_NETWORKS: Final = ("folds", "stage", "parts", "subset", "fast", "flags")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "version": "1",
    "description": "",
    "intended_use": "",
    "license": "unknown",
    "attribution": "",
}


def is_onnx_model(folder: Path) -> bool:
    """Return whether a folder has an ONNX network with its card."""
    return (folder / GRAPH_FILE).is_file() and (folder / CARD_YAML).is_file()


def read_onnx_model(folder: Path) -> ModelCard:
    """Read a folder with `model.onnx` and `card.yaml`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file or an entry is missing or invalid, or the graph contradicts the
        card; MODEL_UNSAFE for operators that are not ONNX's own, and external files or links that
        lead out of the folder; MODEL_UNSUPPORTED for more than one input or output.
    """
    entries = {**_DEFAULTS, **read_file(folder, CARD_YAML, unique=True)}
    for key in (*_OF_THE_GRAPH, *_OTHER_NETWORKS):
        if key in entries:
            raise damaged(f"{CARD_YAML}: {key} is unknown")
    layout: Layout = entries.pop("layout", "channels_first")
    if layout not in get_args(Layout):
        raise damaged(f"{CARD_YAML}: layout is not one of {', '.join(get_args(Layout))}")
    structures = _structures(entries.pop("structures", None))
    file = find_file(folder, GRAPH_FILE)
    if file is None:
        raise damaged(f"{GRAPH_FILE} is missing")
    weights = find_weights(file, ONNX_KEY, GRAPH_FILE, MAX_BYTES)
    content = file.read_bytes()
    graph = read_graph(content)
    nbytes = len(with_external(content, folder)) if graph.external else len(content)
    card = make_card(
        {"title": folder.resolve().name, **entries},
        CARD_YAML,
        name=slug(folder.resolve().name) or "model",
        network=NetworkSpec(ONNX_GRAPH, {}),
        weights=weights,
        structures=structures,
    )
    _check_cleaning(card)
    dimensions = 3 if card.window.plane is None else 2
    _check(graph, card, layout)
    args = {"nbytes": nbytes, "in_channels": len(card.channels), "layout": layout}
    network = NetworkSpec(ONNX_GRAPH, {**args, "spatial_dims": dimensions})
    return replace(card, network=network)


def _structures(entries: Any) -> tuple[Structure, ...]:
    """Return the structures: names, or their fields, by number; a list counts from 1."""
    if isinstance(entries, list):
        entries = dict(enumerate(entries, 1))
    if not isinstance(entries, Mapping) or not entries:
        raise damaged(f"{CARD_YAML}: structures are not names by number")
    structures, stated = [], []
    for key, value in entries.items():
        number = int(key) if str(key).isdecimal() else 0
        if not 1 <= number <= 65535:
            raise damaged(f"{CARD_YAML}: structures.{truncate(str(key))} is not a number from 1")
        fields = {"name": value} if isinstance(value, str) else value
        own = fields.pop("label", None) if isinstance(fields, dict) else None
        if not (own is None or (isinstance(own, str) and is_slug(own))):
            detail = f"{CARD_YAML}: structures.{number}.label is not made of a-z, 0-9, _ and -"
            raise damaged(detail)
        known = parse(StructureFields, fields, f"{CARD_YAML}: structures.{number}")
        if known.name is None:
            raise damaged(f"{CARD_YAML}: structures.{number}.name is missing")
        fields_by_label = {structure_label(known.name, number): known}
        structure = make_structure(known.name, number, fields_by_label)
        structures.append(structure if own is None else replace(structure, label=own))
        if known.color is not None:
            stated.append(structures[-1].label)
    return color_by_code(structures, stated)


def _check_cleaning(card: ModelCard) -> None:
    """Refuse cleaning of numbers that no structure has, which would change nothing."""
    known = {structure.number for structure in card.structures}
    for rule in card.cleaning:
        unknown = set(getattr(rule, "numbers", ())) - known
        if unknown:
            kind = type(rule).__name__
            raise damaged(f"{CARD_YAML}: {kind} of {min(unknown)}, which no structure has")


def _check(graph: OnnxFile, card: ModelCard, layout: Layout) -> None:
    """Refuse a graph that contradicts its card."""
    if (len(graph.inputs), len(graph.outputs)) != (1, 1):
        counts = f"{len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
        raise unsupported(f"the ONNX graph has {counts}, not one of each")
    size: tuple[int, ...] | None = card.window.size
    if size is not None:
        size = tuple(n for axis, n in enumerate(size) if axis != card.window.plane)
    dimensions = 3 if card.window.plane is None else 2
    for port, channels in ((graph.inputs[0], len(card.channels)), (graph.outputs[0], None)):
        if not port.float32:
            detail = f"{truncate(port.name)} of the ONNX graph is not float32"
            raise unsupported(f"{detail}: export the network in float32, from images to scores")
        _check_shape(port, dimensions, size, layout, channels)
    scores = graph.outputs[0].shape
    if scores is not None:
        count = scores[-1 if layout == "channels_last" else 1]
        # with argmax, a class without a name would give its voxels to the best of the others
        too_many = isinstance(card.decision, Argmax) and count != card.n_outputs
        if count is not None and (count < card.n_outputs or too_many):
            detail = f"the network has {count} output channels, the card {card.n_outputs}"
            raise ScanError(Reason.MODEL_NETWORK, detail)


def _check_shape(
    port: Port,
    dimensions: int,
    size: tuple[int, ...] | None,
    layout: Layout,
    channels: int | None,
) -> None:
    """Refuse an input or output of another shape than the card's windows."""
    if port.shape is None:
        return
    shown = " x ".join("?" if n is None else str(n) for n in port.shape)
    if len(port.shape) != dimensions + 2:
        detail = f"{truncate(port.name)} of the ONNX graph is {shown}, not {dimensions}-dimensional"
        raise damaged(detail)
    own = port.shape[-1] if layout == "channels_last" else port.shape[1]
    axes = port.shape[1:-1] if layout == "channels_last" else port.shape[2:]
    if channels is not None and own not in (None, channels):
        detail = f"{truncate(port.name)} of the ONNX graph is {shown}, not {layout} of {channels}"
        raise damaged(f"{detail}: {CARD_YAML} states layout and channels")
    fixed = any(n is not None for n in axes)
    if fixed and (size is None or any(n not in (None, m) for n, m in zip(axes, size, strict=True))):
        detail = f"{truncate(port.name)} of the ONNX graph is {shown}"
        raise damaged(f"{detail}, which is not window.size in the layout of {CARD_YAML}")


_HEADING: Final = """\
# How the network in model.onnx is used. The entries are those of card.json; missing ones have their
# defaults: docs/models.md, "A network in ONNX".
"""
NO_INTENSITIES: Final = "none"
"""Answer for a network that takes intensities as they are."""


@dataclass(frozen=True)
class Answers:
    """The user's answers about a network.

    Parameters
    ----------
    intensity : str
        Two numbers, the range that is mapped to 0 to 1; "normalise"; or "none".
    spacing, window : str
        Three numbers each; empty for the scan's own spacing, and for the whole scan.
    structures : str
        Names, separated by commas.
    scores : "softmax", "sigmoid" or "none"
        Function that makes probabilities of scores. With "sigmoid" structures may overlap.
    """

    title: str
    modality: str
    orientation: str
    spacing: str
    intensity: str
    window: str
    layout: str
    scores: str
    structures: str


def card_of_answers(answers: Answers) -> str:
    """Return `card.yaml` by answers; MODEL_DAMAGED for an answer that makes no card."""
    try:
        spacing = [float(each) for each in answers.spacing.split()] or None
        window = [int(each) for each in answers.window.split()] or None
        steps: list[dict[str, Any]] = []
        if answers.intensity == "normalise":
            steps = [{"class": "Normalize"}]
        elif answers.intensity != NO_INTENSITIES:
            low, high = (float(each) for each in answers.intensity.split())
            ends = {"a_min": low, "a_max": high, "b_min": 0, "b_max": 1}
            steps = [{"class": "ScaleRange", **ends, "clip": True}]
    except ValueError as exc:
        raise damaged("an answer is not made of numbers") from exc
    names = [name.strip() for name in answers.structures.split(",") if name.strip()]
    decision = "Threshold" if answers.scores == "sigmoid" else "Argmax"
    entries = {
        "title": answers.title,
        **_DEFAULTS,
        "channels": [{"name": answers.modality, "modality": answers.modality}],
        "grid": {"orientation": answers.orientation or None, "spacing": spacing},
        "after": steps,
        "window": {"size": window, "overlap": 0.5 if window else 0.0},
        "activation": None if answers.scores == "none" else answers.scores,
        "decision": {"class": decision},
    }
    make_card(
        entries,
        CARD_YAML,
        name="model",
        network=NetworkSpec(ONNX_GRAPH, {}),
        weights=Weights(Path(GRAPH_FILE), "0" * 64),
        structures=_structures(names),
    )
    return _text({"layout": answers.layout, **entries, "structures": dict(enumerate(names, 1))})


def card_like(card: ModelCard) -> str:
    """Return `card.yaml` for a network that is used like that of another model.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED if that model is more than one network.
    """
    if card.parts or card.stage or card.folds:
        raise unsupported(f"{card.name} has several networks, and an ONNX model has one")
    entries: dict[str, Any] = plain_entries(card)
    for key in (*_OF_THE_GRAPH, *_OTHER_NETWORKS, "precisions"):  # a graph has its own
        entries.pop(key, None)
    structures = {
        each["number"]: {key: value for key, value in each.items() if key != "number"}
        for each in entries.pop("structures")
    }
    layout = card.network.args.get("layout", "channels_first")
    return _text({"layout": layout, **entries, "structures": structures})


def _text(entries: Mapping[str, Any]) -> str:
    dumped = yaml.safe_dump(
        dict(entries), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    return _HEADING + dumped
