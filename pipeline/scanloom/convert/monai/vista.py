"""Classes of VISTA3D: the prompts of a card, from those that the bundle means by "everything"."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final

from scanloom.convert.monai.config.values import truncate
from scanloom.convert.monai.metadata import TensorFormat
from scanloom.core import Reason, ScanError, did_you_mean

LAST_CLASS: Final = 132
"""Largest number of a class that the network knows without clicks."""
_NOT_ALONE: Final = frozenset({2, 16, 18, 20, 21, 129, 130, 131})
"""Classes that are refused as prompts, or stand for several others."""


def everything(text: Any) -> tuple[int, ...]:
    """Return the classes of the bundle's `everything_labels`, decoded from its syntax tree.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if it is neither a list of numbers nor
        ``$list(set([i+1 for i in range(n)]) - set([...]))``.
    """
    numbers = text if isinstance(text, list) else _decode(text)
    if numbers is None or not all(_is_class(n) for n in numbers):
        detail = f"everything_labels is {truncate(str(text))}"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    return tuple(sorted(set(numbers)))


def _decode(text: Any) -> list[int] | None:
    """Return the numbers of the expression, None if it has another form."""
    if not isinstance(text, str) or not text.startswith("$") or len(text) > 500:
        return None
    try:
        body = ast.parse(text[1:].strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    match body:
        case ast.Call(
            func=ast.Name(id="list"),
            args=[
                ast.BinOp(
                    left=ast.Call(func=ast.Name(id="set"), args=[ast.ListComp() as all_of]),
                    op=ast.Sub(),
                    right=ast.Call(
                        func=ast.Name(id="set"), args=[ast.List(elts=numbers)], keywords=[]
                    ),
                )
            ],
            keywords=[],
        ):
            count = _count(all_of)
        case _:
            return None
    dropped = [n.value for n in numbers if isinstance(n, ast.Constant)]
    if count is None or count > LAST_CLASS or len(dropped) < len(numbers):
        return None
    return [n for n in range(1, count + 1) if n not in dropped]


def _count(node: ast.ListComp) -> int | None:
    """Return n of ``[i+1 for i in range(n)]``, None for another form."""
    match node:
        case ast.ListComp(
            elt=ast.BinOp(left=ast.Name(id=used), op=ast.Add(), right=ast.Constant(value=1)),
            generators=[
                ast.comprehension(
                    target=ast.Name(id=variable),
                    iter=ast.Call(
                        func=ast.Name(id="range"),
                        args=[ast.Constant(value=int() as count)],
                        keywords=[],
                    ),
                    ifs=[],
                )
            ],
        ) if used == variable:
            return count
    return None


def _is_class(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LAST_CLASS


def choose(
    classes: Sequence[int], output: TensorFormat, class_names: str | None
) -> tuple[int, ...]:
    """Return the classes that are asked for, by their names joined with "+"; all by default.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN, with similar names, if there is no such class.
    """
    if class_names is None:
        return tuple(classes)
    numbers = {
        _normalized(name): int(key)
        for key, name in output.channel_def.items()
        if key.isdecimal() and _is_class(int(key)) and int(key) not in _NOT_ALONE
    }
    unknown = [name for name in class_names.split("+") if _normalized(name) not in numbers]
    if unknown:
        hint = did_you_mean(_normalized(unknown[0]), sorted(numbers))
        raise ScanError(Reason.MODEL_UNKNOWN, f"there is no class {unknown[0]!r}; {hint}")
    return tuple(sorted({numbers[_normalized(name)] for name in class_names.split("+")}))


def _normalized(name: str) -> str:
    return "_".join(name.lower().split())


def output_of(classes: Sequence[int], output: TensorFormat) -> TensorFormat:
    """Return the format of the scores: the background, then the classes in their order.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a class has no name.
    """
    names = {"0": "background"}
    for channel, number in enumerate(classes, 1):
        name = output.channel_def.get(str(number))
        if name is None:
            raise ScanError(Reason.MODEL_DAMAGED, f"class {number} has no name in channel_def")
        names[str(channel)] = name
    return TensorFormat(
        num_channels=len(names), modality=output.modality, channel_def=names, label_def={}
    )
