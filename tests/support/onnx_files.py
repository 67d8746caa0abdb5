"""ONNX files written by hand, as messages of Protocol Buffers: a network of two convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

Array = NDArray[np.float32]
FLOAT, INTS, STRING = 1, 7, 3
"""Types of attributes."""


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Return a message of fields, by number."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(content)) + content
    return out


def tensor(name: str, values: Array, external: tuple[str, int] | None = None) -> bytes:
    """Return a tensor; `external` are the file of its numbers, and where they begin."""
    dims = [(1, n) for n in values.shape]
    head = [*dims, (2, 1), (8, name)]
    if external is None:
        return message(*head, (9, values.tobytes()))
    where = {"location": external[0], "offset": str(external[1]), "length": str(values.nbytes)}
    entries = [(13, message((1, key), (2, text))) for key, text in where.items()]
    return message(*head, *entries, (14, 1))


def whole_numbers(name: str, values: NDArray[np.int64]) -> bytes:
    """Return a tensor of int64, such as a shape."""
    return message((1, len(values)), (2, 7), (8, name), (9, values.astype(np.int64).tobytes()))


def graph(
    nodes: Sequence[bytes], tensors: Sequence[bytes], taken: Sequence[int], given: Sequence[int]
) -> bytes:
    """Return the file of a graph from "scan" to "scores", of these shapes."""
    content = message(
        *((1, each) for each in nodes),
        (2, "graph"),
        *((5, each) for each in tensors),
        (11, port("scan", taken)),
        (12, port("scores", given)),
    )
    return message((1, 8), (7, content), (8, message((1, ""), (2, 17))))


def port(name: str, shape: Sequence[int | str], kind: int = 1) -> bytes:
    """Return an input or output; an axis with a name has any length."""
    dims = [(1, message((1 if isinstance(n, int) else 2, n))) for n in shape]
    return message((1, name), (2, message((1, message((1, kind), (2, message(*dims)))))))


def node(kind: str, inputs: Sequence[str], output: str, domain: str = "", **ints: Any) -> bytes:
    """Return an operator with attributes of whole numbers."""
    names = [(1, each) for each in inputs]
    attributes = [
        (5, message((1, name), *((8, n) for n in values), (20, INTS)))
        for name, values in ints.items()
    ]
    return message(*names, (2, output), (4, kind), *attributes, *([(7, domain)] if domain else []))


def convolutions(dimensions: int = 3, channels: int = 1, classes: int = 3) -> dict[str, Array]:
    """Return random weights: 3 x 3 x 3, then single voxels."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "w1": draw(6, channels, *[3] * dimensions),
        "b1": draw(6),
        "w2": draw(classes, 6, *[1] * dimensions),
        "b2": draw(classes),
    }


def network(
    weights: Mapping[str, Array],
    size: Sequence[int | str] = ("x", "y", "z"),
    *,
    last: bool = False,
    batch: int = 1,
    external: Mapping[str, tuple[str, int]] | None = None,
    domain: str = "",
    nodes: Sequence[bytes] = (),
    ports: tuple[Sequence[bytes], Sequence[bytes]] = ((), ()),
    parts: Sequence[tuple[int, bytes]] = (),
) -> bytes:
    """Return the file of convolution, ReLU, convolution; with channels last between transposes."""
    dims = len(size)
    to_first, to_last = [0, dims + 1, *range(1, dims + 1)], [0, *range(2, dims + 2), 1]
    channels, classes = weights["w1"].shape[1], len(weights["w2"])
    steps = [
        *([node("Transpose", ["scan"], "image", perm=to_first)] if last else []),
        node("Conv", ["image" if last else "scan", "w1", "b1"], "a", pads=[1] * 2 * dims),
        node("Relu", ["a"], "r", domain),
        node("Conv", ["r", "w2", "b2"], "c" if last else "scores"),
        *([node("Transpose", ["c"], "scores", perm=to_last)] if last else []),
        *nodes,
    ]
    shapes = [(batch, *size, n) if last else (batch, n, *size) for n in (channels, classes)]
    tensors = [tensor(n, values, (external or {}).get(n)) for n, values in weights.items()]
    graph = message(
        *((1, each) for each in steps),
        (2, "network"),
        *((5, each) for each in tensors),
        *((11, each) for each in (port("scan", shapes[0]), *ports[0])),
        *((12, each) for each in (port("scores", shapes[1]), *ports[1])),
    )
    opset = message((1, ""), (2, 17))
    return message((1, 8), (7, graph), (8, opset), *parts)


def reference(weights: Mapping[str, Array], image: torch.Tensor) -> torch.Tensor:
    """Return the scores of an image (N, channels, ...) by PyTorch."""
    convolve = functional.conv3d if image.ndim == 5 else functional.conv2d
    w1, b1, w2, b2 = (torch.from_numpy(weights[name]) for name in ("w1", "b1", "w2", "b2"))
    return convolve(convolve(image, w1, b1, padding=1).relu(), w2, b2)


CARD = """
title: Two convolutions
channels: [{name: CT, modality: CT}]
grid: {orientation: RAS, spacing: [2, 2, 2]}
after: [{class: ScaleRange, a_min: -200, a_max: 200, b_min: 0, b_max: 1, clip: true}]
window: {size: [16, 16, 16], overlap: 0.5}
activation: softmax
structures: {1: spleen, 2: Left kidney}
"""


def write_model(folder: Path, content: bytes, card: str = CARD) -> Path:
    """Write a model's folder, and return it."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(content)
    (folder / "card.yaml").write_text(card)
    return folder
