"""A folder with model.onnx and card.yaml is run as data, or refused by its name."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from scanloom.cards.card import KeepLargest, ModelCard, Normalize
from scanloom.cards.card_file import read_card
from scanloom.convert.conversion import convert_job
from scanloom.convert.onnx_file import read_graph
from scanloom.convert.onnx_model import card_like, read_onnx_model
from scanloom.convert.readers import find_reader
from scanloom.core import ComputeOptions, ScanError, Volume
from scanloom.inference.engines.openvino_engine import compile_onnx
from scanloom.inference.predictor import TorchPredictor
from support import model_cards, onnx_files
from support.commands import scanloom

SHAPE = (20, 18, 16)
WHOLE = """
channels: [{name: CT, modality: CT}]
grid: {}
after: [{class: ScaleRange, a_min: -200, a_max: 200, b_min: 0, b_max: 1, clip: true}]
window: {size: null}
structures: [one, two]
"""


def volume() -> Volume:
    grid = model_cards.grid(SHAPE, (1.5, 1.4, 2.2), "LPS", turn=5)
    return Volume(model_cards.smooth_scan(SHAPE), grid, "HU", "CT")


def image() -> torch.Tensor:
    """Return the scan as the network sees it."""
    values = torch.from_numpy(model_cards.smooth_scan(SHAPE).astype(np.float32))
    return ((values + 200) / 400).clamp(0, 1)[None, None]


def balanced(dimensions: int = 3) -> dict[str, onnx_files.Array]:
    """Return weights with which each class wins somewhere."""
    weights = onnx_files.convolutions(dimensions)
    seen = image() if dimensions == 3 else image()[0].movedim(-1, 0)
    scores = onnx_files.reference(weights, seen).movedim(1, -1).flatten(0, -2)
    weights["b2"] -= scores.median(dim=0).values.numpy()
    return weights


def converted(folder: Path) -> ModelCard:
    """Return the card of a folder as the child process of a conversion writes it."""
    out = folder.parent / "converted"
    out.mkdir()
    convert_job(folder, {}, out)
    return read_card(out)


def labels_of(folder: Path, engine: str) -> Any:
    compute: Any = ComputeOptions(engine=engine)  # type: ignore[arg-type]  # a name
    predictor = TorchPredictor(converted(folder), compute, device="cpu")
    labels = predictor.predict(volume()).layers[0].labels
    assert predictor.engine.name == ("onnxruntime" if engine == "onnxruntime" else "openvino")
    assert predictor.precision.dtype is torch.float32
    return labels


ENGINES = ["auto", "openvino", "onnxruntime"]


def need(engine: str) -> None:
    if engine == "onnxruntime":
        for name in ("onnxruntime", "onnx", "onnxscript"):
            pytest.importorskip(name, reason="the engine onnxruntime is not installed")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_labels_are_those_of_the_graph(tmp_path: Path, last: bool, engine: str) -> None:
    need(engine)
    weights = balanced()
    card = WHOLE + ("layout: channels_last\n" if last else "")
    folder = onnx_files.write_model(tmp_path / "m", onnx_files.network(weights, last=last), card)

    labels = labels_of(folder, engine)

    expected = onnx_files.reference(weights, image()).argmax(1)[0].numpy()
    np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_planes_are_labelled_one_by_one(tmp_path: Path, engine: str) -> None:
    need(engine)
    weights = balanced(2)
    content = onnx_files.network(weights, SHAPE[:2])
    card = WHOLE.replace("{size: null}", f"{{size: [{SHAPE[0]}, {SHAPE[1]}, 1], plane: 2}}")

    labels = labels_of(onnx_files.write_model(tmp_path / "m", content, card), engine)

    planes = image()[0].movedim(-1, 0)
    expected = onnx_files.reference(weights, planes).argmax(1).movedim(0, -1).numpy()
    np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_windows_of_a_fixed_size_make_the_labels_of_the_same_network_in_pytorch(
    tmp_path: Path, engine: str
) -> None:
    need(engine)
    weights = balanced()
    content = onnx_files.network(weights, (16, 16, 16))
    folder = onnx_files.write_model(tmp_path / "m", content)

    labels = labels_of(folder, engine)
    own_card = read_card(tmp_path / "converted")

    class Network(torch.nn.Module):
        def forward(self, windows: torch.Tensor) -> torch.Tensor:
            return onnx_files.reference(weights, windows)

    predictor = TorchPredictor(own_card, ComputeOptions(), device="cpu")
    loaded = predictor.networks.load(torch.float32)
    object.__setattr__(loaded, "network", Network())
    expected = predictor.predict(volume()).layers[0].labels
    assert np.mean(labels == expected) > 0.9999
    assert len(np.unique(expected)) == 3


def test_tensors_of_files_in_the_folder_are_read(tmp_path: Path) -> None:
    weights = balanced()
    first, second = weights["w1"].tobytes(), weights["w2"].tobytes()
    external = {"w1": ("weights.bin", 0), "w2": ("weights.bin", len(first))}
    content = onnx_files.network(weights, external=external)
    folder = onnx_files.write_model(tmp_path / "m", content, WHOLE)
    (folder / "weights.bin").write_bytes(first + second)

    expected = onnx_files.reference(weights, image()).argmax(1)[0].numpy()
    np.testing.assert_array_equal(labels_of(folder, "openvino"), expected)


def test_the_card_has_what_the_file_states(tmp_path: Path) -> None:
    text = onnx_files.CARD.replace("2: Left kidney", "2: {name: Left kidney, color: [1, 2, 3]}")
    text += "cleaning: [{class: KeepLargest, numbers: [1]}]\nlicense: MIT\n"
    folder = onnx_files.write_model(tmp_path / "My Model", onnx_files.network(balanced()), text)

    card = read_onnx_model(folder)

    assert (card.name, card.title, card.license) == ("my_model", "Two convolutions", "MIT")
    assert card.grid.spacing == (2.0, 2.0, 2.0)
    assert card.cleaning == (KeepLargest((1,)),)
    spleen, kidney = card.structures
    assert (spleen.label, spleen.type.meaning) == ("spleen", "Spleen")
    assert (kidney.color, kidney.laterality and kidney.laterality.meaning) == ((1, 2, 3), "Left")
    reader = find_reader(folder)
    assert reader is not None
    assert reader.name == "ONNX network with card.yaml"


def test_the_card_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    text = page.partition("## A network in ONNX")[2].partition("```yaml\n")[2].partition("```")[0]
    content = onnx_files.network(WEIGHTS, (96, 96, 96), last=True)

    card = read_onnx_model(onnx_files.write_model(tmp_path / "m", content, text))

    assert card.window.size == (96, 96, 96)
    assert [structure.label for structure in card.structures] == ["spleen", "left_kidney"]


WEIGHTS = onnx_files.convolutions()


def graph(classes: int = 3, **changes: Any) -> Callable[[Path], object]:
    content = onnx_files.network(onnx_files.convolutions(classes=classes), **changes)
    return lambda folder: (folder / "model.onnx").write_bytes(content)


def card(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "card.yaml").write_text(onnx_files.CARD.replace(old, new))


def outside(location: str) -> Callable[[Path], object]:
    return graph(external={"w1": (location, 0)})


def link_outside(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(bytes(10_000))
    (folder / "weights.bin").symlink_to(folder.parent / "secret")
    outside("weights.bin")(folder)


def short(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"0")
    outside("weights.bin")(folder)


def more_than_32_bits(field: bytes) -> Callable[[Path], object]:
    """Write the location of the numbers, "external", in a form of which readers keep 32 bits."""

    def write(folder: Path) -> None:
        content = onnx_files.tensor("w1", WEIGHTS["w1"], ("/etc/passwd", 0))
        plain = onnx_files.message((14, 1))
        graph(nodes=[attribute(5, content.removesuffix(plain) + field)])(folder)

    return write


def attribute(number: int, content: bytes) -> bytes:
    """Return an operator with one attribute."""
    own = onnx_files.message((1, "value"), (number, content))
    return onnx_files.message((2, "out"), (4, "Constant"), (5, own))


def within_an_operator(folder: Path) -> None:
    inner = onnx_files.message((1, onnx_files.node("Relu", ["a"], "b", "my.ops")))
    graph(nodes=[attribute(6, inner)])(folder)


def constant_outside(folder: Path) -> None:
    values = onnx_files.tensor("c", np.zeros(4, np.float32), ("/etc/passwd", 0))
    graph(nodes=[attribute(5, values)])(folder)


def batch_norm(training: int) -> bytes:
    mode = onnx_files.message((1, "training_mode"), (3, training), (20, 2))
    return onnx_files.message((1, "scores"), (2, "out"), (4, "BatchNormalization"), (5, mode))


def truth(value: int, name: str = "mode") -> bytes:
    return onnx_files.message((2, 9), (8, name), (9, bytes([value])))


def mode_of(tensor: bytes) -> bytes:
    value = onnx_files.message((1, "value"), (5, tensor), (20, 4))
    return onnx_files.message((2, "mode"), (4, "Constant"), (5, value))


DROPOUT = onnx_files.node("Dropout", ["scores", "ratio", "mode"], "out")
IDENTITY = onnx_files.node("Identity", ["scores"], "again")
REFUSED: Mapping[str, tuple[Callable[[Path], object], str, str]] = {
    "custom operator": (graph(domain="my.ops"), "MODEL_UNSAFE", "my.ops.Relu"),
    "function": (
        graph(parts=[(25, onnx_files.message((1, "f")))]),
        "MODEL_UNSAFE",
        "functions of its own",
    ),
    "training": (graph(parts=[(20, b"")]), "MODEL_UNSUPPORTED", "for training"),
    "random numbers": (
        graph(nodes=[onnx_files.node("RandomUniformLike", ["scores"], "out")]),
        "MODEL_UNSUPPORTED",
        "RandomUniformLike, as networks do in training",
    ),
    "dropout of training": (
        graph(nodes=[DROPOUT]),
        "MODEL_UNSUPPORTED",
        "Dropout, as",
    ),
    "dropout by a constant": (
        graph(nodes=[mode_of(truth(1)), DROPOUT]),
        "MODEL_UNSUPPORTED",
        "Dropout, as",
    ),
    "norm of training": (
        graph(nodes=[batch_norm(1)]),
        "MODEL_UNSUPPORTED",
        "BatchNormalization, as",
    ),
    "operator within an operator": (within_an_operator, "MODEL_UNSAFE", "my.ops.Relu"),
    "external tensor of an operator": (constant_outside, "MODEL_UNSAFE", "'/etc/passwd', outside"),
    "number of 33 bits": (
        more_than_32_bits(onnx_files.message((14, 1 + (1 << 32)))),
        "MODEL_UNSAFE",
        "'/etc/passwd', outside",
    ),
    "field of 33 bits": (
        more_than_32_bits(onnx_files.message((14 + (1 << 29), 1))),
        "MODEL_DAMAGED",
        "not an ONNX file",
    ),
    "absolute path": (outside("/etc/passwd"), "MODEL_UNSAFE", "'/etc/passwd', outside"),
    "path up": (outside("../secret"), "MODEL_UNSAFE", "'../secret', outside"),
    "no path": (outside(""), "MODEL_UNSAFE", "outside"),
    "link": (link_outside, "MODEL_UNSAFE", "weights.bin is a link"),
    "missing file": (outside("weights.bin"), "MODEL_DAMAGED", "weights.bin, which"),
    "short file": (short, "MODEL_DAMAGED", "weights.bin is shorter"),
    "two inputs": (
        graph(ports=([onnx_files.port("prior", (1, 1))], ())),
        "MODEL_UNSUPPORTED",
        "2 inputs and 1 outputs",
    ),
    "two outputs": (
        graph(nodes=[IDENTITY], ports=((), [onnx_files.port("again", (1, 3))])),
        "MODEL_UNSUPPORTED",
        "1 inputs and 2 outputs",
    ),
    "two-dimensional": (
        lambda folder: (folder / "model.onnx").write_bytes(
            onnx_files.network(onnx_files.convolutions(2), (8, 8))
        ),
        "MODEL_DAMAGED",
        "scan of the ONNX graph is 1 x 1 x 8 x 8, not 3-dimensional",
    ),
    "other window": (graph(size=(16, 16, 8)), "MODEL_DAMAGED", "which is not window.size"),
    "other channels": (
        card("{name: CT, modality: CT}", "{name: CT, modality: CT}, {name: b, modality: CT}"),
        "MODEL_DAMAGED",
        "channels_first of 2",
    ),
    "few classes": (card("2: Left kidney", "7: Left kidney"), "MODEL_NETWORK", "the card 8"),
    "more classes, of which one would have the label of another": (
        graph(classes=5),
        "MODEL_NETWORK",
        "the network has 5 output channels, the card 3",
    ),
    "an entry twice": (
        card("activation: softmax", "window: {size: [8, 8, 8]}"),
        "MODEL_DAMAGED",
        "a key of the mapping in line 2 is given twice",
    ),
    "a number twice": (
        card("2: Left kidney", "1: Left kidney"),
        "MODEL_DAMAGED",
        "a key of the mapping in line 8 is given twice",
    ),
    "an alias": (
        card("2: Left kidney", "2: &a Left kidney, 3: *a"),
        "MODEL_UNSAFE",
        "card.yaml has an alias",
    ),
    "cleaning of no structure": (
        card("activation:", "cleaning: [{class: KeepLargest, numbers: [1, 4]}]\nactivation:"),
        "MODEL_DAMAGED",
        "KeepLargest of 4, which no structure has",
    ),
    "not ONNX": (
        lambda folder: (folder / "model.onnx").write_bytes(b"\x7fELF" * 40),
        "MODEL_DAMAGED",
        "not an ONNX file",
    ),
    "unknown entry": (card("title:", "titel:"), "MODEL_DAMAGED", "card.yaml: titel is unknown"),
    "unknown step": (card("ScaleRange", "ScaleRang"), "MODEL_DAMAGED", "did you mean ScaleRange?"),
    "weights of its own": (card("title:", "weights:"), "MODEL_DAMAGED", "weights is unknown"),
    "layout": (card("title: Two", "layout: first\ntitle: Two"), "MODEL_DAMAGED", "layout is not"),
    "no structures": (card("structures:", "limitations: []\n#"), "MODEL_DAMAGED", "structures are"),
    "structure 0": (card("{1: spleen", "{0: spleen"), "MODEL_DAMAGED", "structures.0"),
    "a field of no structure": (
        card("2: Left kidney", "2: {name: Left kidney, colour: [1, 2, 3]}"),
        "MODEL_DAMAGED",
        "structures.2: colour is unknown",
    ),
    "not YAML": (card("{", "{{"), "MODEL_DAMAGED", "card.yaml is not valid YAML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_data_or_contradicts_itself_is_refused(name: str, tmp_path: Path) -> None:
    change, code, named = REFUSED[name]
    folder = onnx_files.write_model(tmp_path / "m", onnx_files.network(WEIGHTS))
    change(folder)

    with pytest.raises(ScanError) as refused:
        read_onnx_model(folder)

    assert refused.value.code == code
    assert named in refused.value.detail


@pytest.mark.parametrize(
    "nodes",
    [
        [onnx_files.node("Dropout", ["scores", "ratio"], "out")],
        [onnx_files.node("Dropout", ["scores", "ratio", ""], "out")],
        [mode_of(truth(0, "")), DROPOUT],
        [mode_of(onnx_files.message((2, 9), (5, b"\0"))), DROPOUT],
        [batch_norm(0)],
    ],
)
def test_operators_that_do_as_in_training_only_on_request_are_read(
    nodes: list[bytes], tmp_path: Path
) -> None:
    content = onnx_files.network(WEIGHTS, nodes=nodes)

    assert read_onnx_model(onnx_files.write_model(tmp_path / "m", content)).n_outputs == 3


def test_the_mode_of_an_operator_may_be_a_weight() -> None:
    for value in (0, 1):
        parts = ((1, DROPOUT), (5, truth(value)))
        content = onnx_files.message((7, onnx_files.message(*parts)))
        if value:
            with pytest.raises(ScanError, match="Dropout, as networks do in training"):
                read_graph(content)
        else:
            read_graph(content)


def test_a_graph_for_several_windows_runs_one_by_one(tmp_path: Path) -> None:
    """OpenVINO changes the size of a batch, ONNX Runtime does not."""
    need("onnxruntime")
    weights = balanced()
    content = onnx_files.network(weights, SHAPE, batch=2)
    card = WHOLE.replace("{size: null}", f"{{size: [{', '.join(map(str, SHAPE))}]}}")
    own = converted(onnx_files.write_model(tmp_path / "m", content, card))
    predictor = TorchPredictor(own, ComputeOptions(engine="onnxruntime"), device="cpu")

    labels = predictor.predict(volume()).layers[0].labels

    expected = onnx_files.reference(weights, image()).argmax(1)[0].numpy()
    np.testing.assert_array_equal(labels, expected)
    assert "takes 2 windows at once" in predictor.engine.why


def test_damaged_files_raise_no_other_error() -> None:
    """Files cut off, and with single bytes changed."""
    content, rng = onnx_files.network(WEIGHTS, external={"w2": ("a", 1)}), random.Random(3)
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with suppress(ScanError):
            read_graph(bytes(damaged[: rng.randint(1, len(damaged))]))


def test_a_graph_that_openvino_does_not_know_is_refused(tmp_path: Path) -> None:
    content = onnx_files.network(WEIGHTS).replace(b"Relu", b"Nope")
    folder = onnx_files.write_model(tmp_path / "m", content)

    with pytest.raises(ScanError, match="OpenVINO can't run the ONNX graph"):
        labels_of(folder, "openvino")


def test_classes_without_a_name_are_refused_where_the_graph_does_not_state_their_number(
    tmp_path: Path,
) -> None:
    """Their voxels would be labelled as the best of the classes with a name."""
    nodes = [
        onnx_files.node("Conv", ["scan", "w1", "b1"], "a", pads=[1] * 6),
        onnx_files.node("Conv", ["a", "w2", "b2"], "scores"),
    ]
    weights = onnx_files.convolutions(classes=5)
    tensors = [onnx_files.tensor(name, values) for name, values in weights.items()]
    content = onnx_files.graph(nodes, tensors, (1, 1, "x", "y", "z"), (1, "n", "x", "y", "z"))
    folder = onnx_files.write_model(tmp_path / "m", content, WHOLE)

    with pytest.raises(ScanError, match="the network has 5 output channels, the card 3"):
        labels_of(folder, "openvino")


def test_other_engines_are_refused(tmp_path: Path) -> None:
    folder = onnx_files.write_model(tmp_path / "m", onnx_files.network(WEIGHTS))

    with pytest.raises(ScanError, match="run by openvino or onnxruntime, not torch"):
        TorchPredictor(converted(folder), ComputeOptions(engine="torch"), device="cpu")


# --- scanloom models new -------------------------------------------------------------------------


def test_a_card_like_that_of_a_model_is_read_again(tmp_path: Path) -> None:
    folder = onnx_files.write_model(tmp_path / "m", onnx_files.network(WEIGHTS))
    first = read_onnx_model(folder)
    (folder / "card.yaml").write_text(card_like(first))

    assert read_onnx_model(folder) == first


def test_questions_make_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(onnx_files.network(WEIGHTS, (16, 16, 16)))
    answers = ["Mine", "MR", "RAS", "1.5 1.5 2", "normalise", "16 16 16", "", "softmax", "a, b"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(answers) + "\n"))

    ended = scanloom("models", "new", folder)

    assert ended.code == 0, ended.err
    card = read_onnx_model(folder)
    assert (card.title, card.channels[0].modality) == ("Mine", "MR")
    assert (card.grid.orientation, card.grid.spacing) == ("RAS", (1.5, 1.5, 2.0))
    assert (card.after, card.window.size) == ((Normalize(),), (16, 16, 16))
    assert [structure.label for structure in card.structures] == ["a", "b"]
    again = scanloom("models", "new", folder)
    assert again.code != 0
    assert "already" in again.err
    for path in (folder / "card.yaml", folder / "card.yaml" / "new"):
        ended = scanloom("models", "new", path)  # before the first question
        assert ended.code == 2
        assert "Title" not in ended.err


def test_a_bundle_makes_the_card_of_its_network(tmp_path: Path) -> None:
    ended = scanloom("models", "new", tmp_path / "mine", "--from", "ct_tissue")

    assert ended.code == 0, ended.err
    assert "model.onnx" in " ".join(ended.out.split())
    classes = onnx_files.convolutions(classes=6)
    (tmp_path / "mine" / "model.onnx").write_bytes(onnx_files.network(classes, (144, 112, 64)))
    card = read_onnx_model(tmp_path / "mine")
    assert card.grid.spacing == (3.0, 3.0, 3.0)
    assert [structure.label for structure in card.structures][:3] == ["lung", "gas", "fat"]


# --- in large windows ----------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [False, True], ids=["of channels", "of a group, flattened"])
def test_norms_of_large_windows_keep_their_digits(groups: bool) -> None:
    """OpenVINO's own lose some: it adds the values of a channel one after another in float32."""
    size = (96, 80, 64)
    ones = {"one": np.ones(2, np.float32), "zero": np.zeros(2, np.float32)}
    first = {"one": np.ones(1, np.float32), "zero": np.zeros(1, np.float32)}
    shapes = {"flat": np.array([1, 1, -1]), "back": np.array([1, 2, *size])}
    norm = [onnx_files.node("InstanceNormalization", ["scan", "one", "zero"], "scores")]
    if groups:
        norm = [
            onnx_files.node("Reshape", ["scan", "flat"], "row"),
            onnx_files.node("InstanceNormalization", ["row", "one", "zero"], "normed"),
            onnx_files.node("Reshape", ["normed", "back"], "scores"),
        ]
    tensors = [
        *(onnx_files.tensor(n, values) for n, values in (first if groups else ones).items()),
        *(onnx_files.whole_numbers(n, values) for n, values in shapes.items() if groups),
    ]
    content = onnx_files.graph(norm, tensors, (1, 2, *size), (1, 2, *size))
    drawn = np.random.default_rng(0).normal(40, 1, (1, 2, *size)).astype(np.float32)
    seen = torch.from_numpy(drawn)

    scores = compile_onnx(content, (1, 2, *size), "channels_first")(seen)

    exact = seen.double()
    expected = functional.group_norm(exact, 1) if groups else functional.instance_norm(exact)
    error = float((scores - expected).abs().max())
    print(f"largest error {error:.2g}")
    assert error < 3e-5
