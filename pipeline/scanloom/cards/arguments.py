"""The arguments of one component of a config, taken one by one; what is left over is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from scanloom.cards.config import Component, Name, short
from scanloom.core import Reason, ScanError

T = TypeVar("T")


class Arguments:
    """Arguments of a component, by name.

    MONAI's dictionary transforms take a value for each key: with one key, a list of one value
    means that value. The words "True" and "true" occur in real bundles and mean True.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming the component and the argument, whenever a value has another form
        than is asked for.
    """

    def __init__(self, component: Component) -> None:
        self.name = component.target.rsplit(".", 1)[-1]
        self._left = dict(component.args)

    def take(self, name: str, default: Any = None) -> Any:
        """Return an argument as it is."""
        return self._left.pop(name, default)

    def ignore(self, *names: str) -> None:
        """Leave out arguments that can't change a label."""
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, *allowed: Any) -> None:
        """Accept an argument at nothing but a value that means what a card means."""
        if name in self._left:
            value = _one(self.take(name))
            if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
                raise self.refused(name, value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = _one(self.take(name, default))
        if value in ("True", "true"):
            return True
        if not isinstance(value, bool):
            raise self.refused(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number, which must be there if it has no default."""
        return self.number_of(name, _one(self.take(name, default)))

    def number_or_none(self, name: str) -> float | None:
        """Return a finite number, or None where there is none."""
        value = _one(self.take(name))
        return None if value is None else self.number_of(name, value)

    def whole_or_none(self, name: str) -> int | None:
        """Return a whole number of at least 1, or None where there is none."""
        value = _one(self.take(name))
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise self.refused(name, value)
        return None if value is None else int(value)

    def number_of(self, name: str, value: Any) -> float:
        """Return `value` as a number."""
        if not is_number(value):
            raise self.refused(name, value)
        return float(value)

    def same(self, name: str, default: float) -> float:
        """Return a number that may also be given for each axis, if it is the same for all."""
        value = self.take(name, default)
        values = value if isinstance(value, list) else [value]
        if not values or not all(is_number(v) and v == values[0] for v in values):
            raise self.refused(name, value)
        return float(values[0])

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """Return what a word stands for."""
        value = _one(self.take(name, default))
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, value)
        return choices[value]

    def floating(self, name: str) -> None:
        """Accept a floating type of at least 32 bits, or none: the network sees float32 anyway."""
        value = _one(self.take(name))
        text = value.text if isinstance(value, Name) else value
        if text not in (None, "float", "float32", "float64", "double"):
            raise self.refused(name, value)

    def done(self) -> None:
        """Refuse what was not taken: it might change a label."""
        for name, value in self._left.items():
            raise self.refused(name, value)

    def refused(self, name: str, value: Any) -> ScanError:
        """Return the error for a value that a card can't express."""
        return ScanError(
            Reason.MODEL_UNSUPPORTED, f"{short(self.name)}({short(str(name))}={describe(value)})"
        )


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def describe(value: Any) -> str:
    """Return a bundle's value for quoting, never long."""
    if isinstance(value, Name):
        return short(value.text)
    if isinstance(value, Component):
        return short(value.target)
    if isinstance(value, list):
        shown = ", ".join(describe(v) for v in value[:6] if not isinstance(v, list | dict))
        return f"[{shown}{', ...' if len(value) > 6 else ''}]"
    if isinstance(value, dict):
        return "{...}"
    return short(repr(value), 60)


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value
