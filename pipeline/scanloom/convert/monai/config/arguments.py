"""Arguments of a config component, consumed one by one; any argument left over is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from scanloom.convert.monai.config.values import Component, Name, Unread, truncate
from scanloom.core import Reason, ScanError

T = TypeVar("T")


class Arguments:
    """Arguments of a component, by name.

    MONAI's dictionary transforms take a value for each key: with a single key, a list of one value
    means that value. The strings "True" and "true" occur in real bundles and mean True.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED, naming component and argument, if a value has an unexpected type.
    """

    def __init__(self, component: Component) -> None:
        self.name = component.target.rsplit(".", 1)[-1]
        self._remaining = dict(component.args)

    def take(self, name: str, default: Any = None) -> Any:
        """Return an argument unchanged; raises the error of one that could not be read."""
        value = self._remaining.pop(name, default)
        if isinstance(value, Unread):
            raise value.error
        return value

    def ignore(self, *names: str) -> None:
        """Discard arguments that can't change a label."""
        for name in names:
            self._remaining.pop(name, None)

    def only(self, name: str, *allowed: Any) -> None:
        """Accept an argument only with an allowed value: a card can't express others."""
        if name in self._remaining:
            value = _unwrapped(self.take(name))
            if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
                raise self.refused(name, value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = _unwrapped(self.take(name, default))
        if value in ("True", "true"):
            return True
        if not isinstance(value, bool):
            raise self.refused(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; required if it has no default."""
        return self.number_of(name, _unwrapped(self.take(name, default)))

    def number_or_none(self, name: str) -> float | None:
        """Return a finite number, or None if the argument is missing."""
        value = _unwrapped(self.take(name))
        return None if value is None else self.number_of(name, value)

    def whole_or_none(self, name: str) -> int | None:
        """Return an integer of at least 1, or None if the argument is missing."""
        value = _unwrapped(self.take(name))
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise self.refused(name, value)
        return None if value is None else int(value)

    def number_of(self, name: str, value: Any) -> float:
        """Return `value` as a number."""
        if not is_number(value):
            raise self.refused(name, value)
        return float(value)

    def same(self, name: str, default: float) -> float:
        """Return a number; a list of equal numbers, one for each axis, is accepted too."""
        value = self.take(name, default)
        values = value if isinstance(value, list) else [value]
        if not values or not all(is_number(v) and v == values[0] for v in values):
            raise self.refused(name, value)
        return float(values[0])

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """Return the value that `choices` has for a string."""
        value = _unwrapped(self.take(name, default))
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, value)
        return choices[value]

    def floating(self, name: str) -> None:
        """Accept a floating-point dtype of at least 32 bits, or none: the network gets float32."""
        value = _unwrapped(self.take(name))
        text = value.text if isinstance(value, Name) else value
        if text not in (None, "float", "float32", "float64", "double"):
            raise self.refused(name, value)

    def done(self) -> None:
        """Refuse arguments that were not consumed: they might change a label."""
        for name, value in self._remaining.items():
            raise value.error if isinstance(value, Unread) else self.refused(name, value)

    def refused(self, name: str, value: Any) -> ScanError:
        """Return the error for a value that a card can't express."""
        return ScanError(
            Reason.MODEL_UNSUPPORTED,
            f"{truncate(self.name)}({truncate(str(name))}={describe(value)})",
        )


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def describe(value: Any) -> str:
    """Return a short text for a bundle's value, for messages."""
    if isinstance(value, Name):
        return truncate(value.text)
    if isinstance(value, Component):
        return truncate(value.target)
    if isinstance(value, list):
        shown = ", ".join(describe(v) for v in value[:6] if not isinstance(v, list | dict))
        return f"[{shown}{', ...' if len(value) > 6 else ''}]"
    if isinstance(value, dict):
        return "{...}"
    return truncate(repr(value), 60)


def _unwrapped(value: Any) -> Any:
    """Return the value of a list of one, any other value unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
