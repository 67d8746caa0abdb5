"""Reads ONNX files as data, without ONNX's library: inputs, outputs, operators, external files.

An ONNX file is a message of Protocol Buffers: fields of a number and a value, which may be a
message itself. Only those that decide whether a graph can be run as data are looked at. Numbers are
those of onnx.proto3 (IR version 13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scanloom.convert.files import damaged, find_file, truncate, unsafe, unsupported
from scanloom.core import Reason, ScanError, format_bytes, is_passing, read_error

MAX_BYTES: Final = (2 << 30) - 1
"""Largest graph with its weights: the limit of Protocol Buffers."""
_OWN_DOMAINS: Final = ("", "ai.onnx")
"""Domains of ONNX's own operators; those of others are code."""
_RANDOM: Final = (
    *("Bernoulli", "Multinomial"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
)
"""Operators whose result differs from run to run."""
_MAX_DEPTH: Final = 50
"""Largest depth of graphs within operators."""
_FLOAT32: Final = 1
_BOOL: Final = 9
_EXTERNAL: Final = 1
_UINT32: Final = (1 << 32) - 1

_SUBMESSAGES: Final[Mapping[str, Mapping[int, str]]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Messages in which tensors are found, by the numbers of their fields."""


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    Parameters
    ----------
    name : str
        Its name.
    shape : tuple of (int or None), or None
        Lengths of the axes; None for one that is not fixed, or if the number of axes is not known.
    float32 : bool
        Whether its numbers are float32.
    """

    name: str
    shape: tuple[int | None, ...] | None
    float32: bool


@dataclass
class OnnxFile:
    """The graph of an ONNX file, as far as it is read.

    Parameters
    ----------
    inputs, outputs : list of Port
        Inputs without those that have a value of their own.
    external : bool
        Whether tensors are in other files.
    modes, never : set of str
        Values by which a Dropout does as in training if they are true, and values that are false.
    """

    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    external: bool = False
    modes: set[str] = field(default_factory=set)
    never: set[str] = field(default_factory=set)


def read_graph(content: bytes) -> OnnxFile:
    """Return the graph of an ONNX file.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is not an ONNX file; MODEL_UNSAFE if it has operators or functions of
        its own; MODEL_UNSUPPORTED if it has graphs or operators for training, or is nested too
        deeply.
    """
    graph, values, has_graph = OnnxFile(), set[str](), False
    for number, value, _ in _fields(memoryview(content)):
        if isinstance(value, int):
            continue
        if number == 25:
            raise unsafe("the ONNX file defines functions of its own")
        if number == 20:
            raise unsupported("the ONNX file is for training")
        if number == 7:
            has_graph = True
            _check_message("graph", value, graph, 0)
            for inner, entry, _ in _fields(value):
                if inner == 5 and not isinstance(entry, int):
                    values.add(_text(entry, 8))
                elif inner in (11, 12) and not isinstance(entry, int):
                    (graph.inputs if inner == 11 else graph.outputs).append(_port(entry))
    if not has_graph:
        raise damaged("model.onnx is not an ONNX file")
    if not graph.modes <= graph.never:
        raise _training_error("Dropout")
    graph.inputs = [port for port in graph.inputs if port.name not in values]
    return graph


def with_external(content: bytes, folder: Path) -> bytes:
    """Return an ONNX file with the tensors of other files in it.

    Raises
    ------
    ScanError
        MODEL_UNSAFE for a file outside the folder; MODEL_DAMAGED if it is missing or too short;
        MODEL_UNSUPPORTED if all are larger than an ONNX file can be.
    """
    return bytes(_rewritten("model", memoryview(content), folder, [MAX_BYTES - len(content)]))


def _check_message(kind: str, data: memoryview, graph: OnnxFile, depth: int) -> None:
    """Check the operators of a message and of those in it; note external tensors."""
    if depth > _MAX_DEPTH:
        raise unsupported("the ONNX file is nested too deeply")
    if kind == "node":
        _check_operator(data, graph)
    for number, value, _ in _fields(data):
        if kind == "tensor" and number == 14 and _is_external(value):
            graph.external = True
        if kind == "graph" and number == 5 and not isinstance(value, int) and _is_false(value):
            graph.never.add(_text(value, 8))
        nested = _SUBMESSAGES[kind].get(number)
        if nested is not None and not isinstance(value, int):
            _check_message(nested, value, graph, depth + 1)


def _check_operator(node: memoryview, graph: OnnxFile) -> None:
    """Check the operator of a node; note what tells whether a Dropout does as in training."""
    domain, operator = _text(node, 7), _text(node, 4)
    if domain not in _OWN_DOMAINS:
        named = f"{truncate(domain, 60)}.{truncate(operator, 40)}"
        raise unsafe(f"the ONNX file has the operator {named}, which is none of ONNX's own")
    if operator in _RANDOM or (operator == "BatchNormalization" and _is_training(node)):
        raise _training_error(operator)
    if operator == "Dropout":
        inputs = [bytes(v) for n, v, _ in _fields(node) if n == 1 and not isinstance(v, int)]
        # An input that is left out is empty
        graph.modes |= {name.decode("utf-8", "replace") for name in inputs[2:] if name}
    elif operator == "Constant" and _is_false(_message(_message(node, 5), 5)):
        graph.never.add(_text(node, 2))


def _training_error(operator: str) -> ScanError:
    detail = f"the ONNX graph has the operator {operator}, as networks do in training"
    return unsupported(f"{detail}: export it after `eval()`, so that results do not vary")


def _is_training(node: memoryview) -> bool:
    """Return whether a node has `training_mode`."""
    attributes = [v for n, v, _ in _fields(node) if n == 5 and not isinstance(v, int)]
    fields = [(_text(a, 1), number, v) for a in attributes for number, v, _ in _fields(a)]
    return ("training_mode", 3, 1) in fields


def _is_false(tensor: memoryview) -> bool:
    """Return whether a tensor of truth values in the file has none that is true."""
    values = {number: value for number, value, _ in _fields(tensor)}
    stored = [values[number] for number in (5, 9) if number in values]  # numbers, or their bytes
    return (
        values.get(2) == _BOOL
        and bool(stored)
        and not any(value if isinstance(value, int) else any(value) for value in stored)
    )


def _is_external(value: int | memoryview) -> bool:
    """Return whether a tensor's `data_location` is a file, as Protocol Buffers reads an enum.

    Its C++ library keeps the lower 32 bits of a number.
    """
    return isinstance(value, int) and value & _UINT32 == _EXTERNAL


def _port(data: memoryview) -> Port:
    """Return an input or output, from its ValueInfoProto."""
    tensor = _message(_message(data, 2), 1)
    shape: tuple[int | None, ...] | None = None
    float32 = False
    for number, value, _ in _fields(tensor):
        if number == 1:
            float32 = value == _FLOAT32
        elif number == 2 and not isinstance(value, int):
            dims = [each for n, each, _ in _fields(value) if n == 1 and not isinstance(each, int)]
            sizes = [next((v for n, v, _ in _fields(dim) if n == 1), 0) for dim in dims]
            shape = tuple(size if isinstance(size, int) and size > 0 else None for size in sizes)
    return Port(_text(data, 1), shape, float32)


def _rewritten(kind: str, data: memoryview, folder: Path, budget: list[int]) -> memoryview:
    """Return a message with external tensors in it; `budget` has the bytes that they may take."""
    if kind == "tensor":
        return _with_raw_data(data, folder, budget)
    pieces = bytearray()
    for number, value, raw in _fields(data):
        nested = _SUBMESSAGES[kind].get(number)
        if nested is None or isinstance(value, int):
            pieces += raw
        else:
            pieces += _field(number, _rewritten(nested, value, folder, budget))
    return memoryview(pieces)


def _with_raw_data(data: memoryview, folder: Path, budget: list[int]) -> memoryview:
    """Return a tensor with its numbers in it."""
    where, own, external = dict[str, str](), bytearray(), False
    for number, value, raw in _fields(data):
        if number == 13 and not isinstance(value, int):
            where[_text(value, 1)] = _text(value, 2)
        elif number == 14:
            external = _is_external(value)
        else:
            own += raw
    if not external:
        return data
    name = where.get("location", "")
    path = Path(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise unsafe(f"the ONNX file reads {truncate(name)!r}, outside its folder")
    file = find_file(folder, name)
    if file is None:
        raise damaged(f"{truncate(name)}, which model.onnx reads, is missing")
    try:
        offset, length = int(where.get("offset", "0")), int(where.get("length", "-1"))
        size = file.stat().st_size
    except (ValueError, OSError) as exc:
        if is_passing(exc):
            raise read_error(exc, truncate(name), Reason.MODEL_DAMAGED) from exc
        raise damaged("model.onnx describes its external files wrongly") from exc
    length = size - offset if length < 0 else length
    if not 0 <= offset <= offset + length <= size:
        raise damaged(f"{truncate(name)} is shorter than model.onnx says")
    budget[0] -= length
    if budget[0] < 0:
        raise unsupported(f"the network is larger than {format_bytes(MAX_BYTES)}")
    with file.open("rb") as stream:
        stream.seek(offset)
        own += _field(9, memoryview(stream.read(length)))
    return memoryview(own)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview, memoryview]]:
    """Yield number, value and all bytes of a message's fields; numbers of fixed size count as 0.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if it is not a message.
    """
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        if tag > _UINT32:  # of which Protocol Buffers keeps the lower bits: those of another field
            raise damaged("model.onnx is not an ONNX file")
        value: int | memoryview = 0
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            case 5:
                at += 4
            case _:
                raise damaged("model.onnx is not an ONNX file")
        if at > len(data):
            raise damaged("model.onnx is not an ONNX file, or cut off")
        yield tag >> 3, value, data[start:at]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    number = shift = 0
    while at < len(data) and shift < 70:
        number |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return number, at
    raise damaged("model.onnx is not an ONNX file, or cut off")


def _field(number: int, value: memoryview) -> bytes:
    """Return a field that holds bytes, with them."""
    head, size = bytearray(), number << 3 | 2
    for each in (size, len(value)):
        while each > 0x7F:
            head.append(each & 0x7F | 0x80)
            each >>= 7
        head.append(each)
    return bytes(head) + bytes(value)


def _message(data: memoryview, number: int) -> memoryview:
    """Return the last message of a field, or an empty one."""
    messages = [v for n, v, _ in _fields(data) if n == number and not isinstance(v, int)]
    return messages[-1] if messages else memoryview(b"")


def _text(data: memoryview, number: int) -> str:
    """Return the text of a field, or an empty one."""
    return bytes(_message(data, number)).decode("utf-8", "replace")
