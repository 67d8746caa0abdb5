"""Reads pickles as plain data.

A pickle is a program: Python's own unpickler imports and calls whatever the file names. This
interpreter imports nothing. It builds containers and numbers, and gives the arguments of a call to
one of the functions that its caller lists by the name in the file. Any other name is refused.

Instructions are those of protocols 2 to 5 without text arguments (Python's pickletools documents
them). PyTorch writes protocol 2.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scanloom.cards.monai.config import truncate
from scanloom.core import Reason, ScanError, format_bytes

MAX_BYTES: Final = 64 << 20
"""Largest pickle that is read. nnU-Net's holds Dice values of each class and epoch: some MB."""

Known = Mapping[str, Callable[..., Any]]
"""Functions of this program by the names in a file, such as "collections.OrderedDict"."""


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names, not imported."""

    text: str


def read_pickle(
    data: bytes, known: Known, persistent: Callable[[Any], Any] | None = None, *, name: str
) -> Any:
    """Return the content of a pickle: containers, texts, numbers and results of known functions.

    Parameters
    ----------
    data : bytes
        The pickle.
    known : mapping
        Functions that stand for the names in the pickle.
    persistent : callable, optional
        Returns the value of a persistent id; without it, such ids are refused.
    name : str
        Name of the file, for messages.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the pickle names anything else, or uses a rare instruction; MODEL_DAMAGED if
        it is not a pickle, or larger than `MAX_BYTES`.
    """
    if len(data) > MAX_BYTES:
        detail = f"{name} describes its weights in more than {format_bytes(MAX_BYTES)}"
        raise ScanError(Reason.MODEL_DAMAGED, detail)
    try:
        return _Reader(data, known, persistent, name).read()
    except ScanError:
        raise
    except Exception as exc:  # a damaged pickle raises errors of many types
        detail = f"{name} is not a valid pickle ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_DAMAGED, detail) from exc


class Stateful(ABC):
    """A value that takes the state which the pickle has for it, such as an array its numbers."""

    @abstractmethod
    def set_state(self, state: Any) -> None:
        """Take the state as the pickle has it."""


@dataclass
class _Reader:
    """A pickle that is being read: position, values, values below the last marks, and memo."""

    data: bytes
    known: Known
    persistent: Callable[[Any], Any] | None
    file: str
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    outer: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def read(self) -> Any:
        """Return the value at the end of the pickle."""
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            try:
                run = _INSTRUCTIONS[code]
            except KeyError:
                detail = f"{self.file} has the pickle instruction {chr(code)!r}"
                raise ScanError(Reason.MODEL_UNSAFE, detail) from None
            run(self)

    def number(self, layout: struct.Struct) -> Any:
        """Return the number at the current position."""
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def take(self, size: struct.Struct) -> bytes:
        """Return the bytes after their number, which has the type `size`."""
        count = self.number(size)
        value = self.data[self.at : self.at + count]
        if len(value) != count:
            raise EOFError("text ends with the file")
        self.at += count
        return value

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def group(self) -> list[Any]:
        """Remove and return the values after the last mark; the stack is another one afterwards."""
        values, self.stack = self.stack, self.outer.pop()
        return values

    def last(self, kind: type) -> Any:
        """Return the last value, which must be a container of a type."""
        value = self.stack[-1]
        if type(value) is not kind:
            raise TypeError(f"not a {kind.__name__}")
        return value

    def refer(self, module: str, name: str) -> None:
        """Push a name, if it is known."""
        text = f"{module}.{name}"
        if text not in self.known:
            detail = f"{self.file} would run code: it names {truncate(text)!r}"
            raise ScanError(Reason.MODEL_UNSAFE, detail)
        self.stack.append(Name(text))


def _push(reader: _Reader, value: Any) -> None:
    reader.stack.append(value)


def _name(reader: _Reader) -> None:
    module = reader.line()
    reader.refer(module, reader.line())


def _stack_name(reader: _Reader) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    reader.refer(str(module), str(name))


def _call(reader: _Reader) -> None:
    arguments, function = reader.stack.pop(), reader.stack.pop()
    if type(function) is not Name or type(arguments) is not tuple:
        raise ScanError(Reason.MODEL_UNSAFE, f"{reader.file} calls a value that is not a name")
    reader.stack.append(reader.known[function.text](*arguments))


def _build(reader: _Reader) -> None:
    """Give a state to the last value; attributes of containers are dropped."""
    state = reader.stack.pop()
    if isinstance(reader.stack[-1], Stateful):
        reader.stack[-1].set_state(state)


def _refer_outside(reader: _Reader) -> None:
    if reader.persistent is None:
        raise ScanError(Reason.MODEL_UNSAFE, f"{reader.file} refers to data outside of it")
    reader.stack.append(reader.persistent(reader.stack.pop()))


def _mark(reader: _Reader) -> None:
    reader.outer.append(reader.stack)
    reader.stack = []


def _tuple(count: int) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        values = tuple(reader.stack[-count:])
        if len(values) != count:
            raise IndexError("too few values")
        del reader.stack[-count:]
        reader.stack.append(values)

    return run


def _grouped(kind: Callable[[list[Any]], Any]) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        values = reader.group()
        reader.stack.append(kind(values))

    return run


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    reader.last(list).append(value)


def _set_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.last(dict)[key] = value


def _add(kind: type, values: Callable[[list[Any]], Any]) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        group = values(reader.group())
        container = reader.last(kind)
        container.extend(group) if kind is list else container.update(group)

    return run


def _put(size: struct.Struct) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        reader.memo[reader.number(size)] = reader.stack[-1]

    return run


def _get(size: struct.Struct) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        reader.stack.append(reader.memo[reader.number(size)])

    return run


def _memoize(reader: _Reader) -> None:
    reader.memo[len(reader.memo)] = reader.stack[-1]


def _literal(layout: struct.Struct) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(reader.number(layout))


def _text(size: struct.Struct) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(reader.take(size).decode("utf-8", "surrogatepass"))


def _bytes(size: struct.Struct) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(reader.take(size))


def _long(size: struct.Struct) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(
        int.from_bytes(reader.take(size), "little", signed=True)
    )


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_STOP: Final = ord(".")
_INSTRUCTIONS: Final[Mapping[int, Callable[[_Reader], object]]] = {
    0x80: lambda reader: reader.number(_U1),  # PROTO
    0x95: lambda reader: reader.number(_U8),  # FRAME
    ord("N"): lambda reader: _push(reader, None),
    0x88: lambda reader: _push(reader, True),
    0x89: lambda reader: _push(reader, False),
    ord("J"): _literal(struct.Struct("<i")),
    ord("K"): _literal(_U1),
    ord("M"): _literal(_U2),
    ord("G"): _literal(struct.Struct(">d")),
    0x8A: _long(_U1),
    0x8B: _long(_U4),
    ord("X"): _text(_U4),
    0x8C: _text(_U1),
    0x8D: _text(_U8),
    ord("B"): _bytes(_U4),
    ord("C"): _bytes(_U1),
    0x8E: _bytes(_U8),
    ord("c"): _name,
    0x93: _stack_name,
    ord("R"): _call,
    0x81: _call,  # NEWOBJ
    ord("b"): _build,
    ord("Q"): _refer_outside,
    ord("q"): _put(_U1),
    ord("r"): _put(_U4),
    0x94: _memoize,
    ord("h"): _get(_U1),
    ord("j"): _get(_U4),
    ord("("): _mark,
    ord("0"): lambda reader: reader.stack.pop(),
    ord("1"): lambda reader: reader.group(),
    ord(")"): lambda reader: _push(reader, ()),
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    ord("t"): _grouped(tuple),
    ord("]"): lambda reader: _push(reader, []),
    ord("l"): _grouped(list),
    ord("a"): _append,
    ord("e"): _add(list, list),
    ord("}"): lambda reader: _push(reader, {}),
    ord("d"): _grouped(_pairs),
    ord("s"): _set_item,
    ord("u"): _add(dict, _pairs),
    0x8F: lambda reader: _push(reader, set()),
    0x90: _add(set, list),
    0x91: _grouped(frozenset),
}
