"""Read a MONAI bundle's config as data: references are followed, nothing is imported or run.

MONAI's own parser evaluates every ``$expression`` in Python and calls any ``_target_``. Here, a
small interpreter evaluates a closed list of expression forms, and a ``_target_`` is only a name.
Only requested entries are read: ``imports``, ``initialize``, ``run`` and ``handlers`` never are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from scanloom.cards.monai.config.expressions import MARK, Expression
from scanloom.cards.monai.config.values import Component, Kind, bounded, refusal, truncate
from scanloom.core import Reason, ScanError

MAX_CHARS: Final = 500
"""Longest expression that is parsed; MONAI's model zoo needs 104 characters."""
MAX_DEPTH: Final = 50
"""Deepest nesting of values, references and expressions combined; MONAI's model zoo needs 12."""
MAX_STEPS: Final = 50_000
"""Largest number of values evaluated for one bundle; MONAI's model zoo needs under 400."""

_REFERENCE = re.compile(r"@([A-Za-z_]\w*(?:(?:#|::)\w+)*)")
_KEYWORDS: Final = ("_target_", "_disabled_", "_desc_", "_mode_", "_requires_")


class Config:
    """The config of one bundle.

    Parameters
    ----------
    entries : mapping
        As parsed from JSON or YAML.
    judge : callable
        Called with each ``_target_`` before its arguments are read. Raises ScanError if the target
        is not on a list; returns its kind and name. Arguments of kind "ignored" are not read.
    load : callable, optional
        Returns the content of a file of arrays, by its path in the bundle.

    Attributes
    ----------
    refused : list of ScanError
        Errors of components in lists, such as transforms, which are left out of their lists: the
        caller reports all of them.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        judge: Callable[[str], tuple[Kind, str]],
        load: Callable[[str], Any] | None = None,
    ) -> None:
        self.refused: list[ScanError] = []
        self._entries = entries
        self._judge = judge
        self._load = load
        self._known: dict[str, Any] = {}
        self._open: list[str] = []
        self._depth = 0
        self._steps = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def raw(self, key: str) -> Any:
        """Return an entry as parsed from the file, None if it is missing."""
        return self._entries.get(key)

    def get(self, path: str) -> Any:
        """Return the value of an entry or of a nested entry (``"inferer#roi_size"``).

        Returns
        -------
        None, bool, int, float, str, list, dict, Name or Component
            The same object each time.

        Raises
        ------
        ScanError
            MODEL_DAMAGED if it refers to a missing entry or to itself; MODEL_UNSAFE if code would
            have to run; MODEL_UNSUPPORTED if the interpreter does not cover it.
        """
        path = path.replace("::", "#")
        if path not in self._known:
            if path in self._open:
                raise ScanError(Reason.MODEL_DAMAGED, f"@{path} refers to itself")
            self._open.append(path)
            try:
                self._known[path] = self.value(self._find(path))
            finally:
                self._open.pop()
        return self._known[path]

    def value(self, raw: Any) -> Any:
        """Return the value of raw file content; errors as `get`."""
        with self.deeper():
            if isinstance(raw, str):
                return self._text(raw)
            if isinstance(raw, Mapping):
                return self._component(raw) if "_target_" in raw else self._items(raw)
            if isinstance(raw, Sequence) and not isinstance(raw, bytes):
                return self._list(raw)
            if raw is None or isinstance(raw, bool | int | float):
                return bounded(raw)
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"a config value is a {type(raw).__name__}")

    def _list(self, raw: Sequence[Any]) -> list[Any]:
        values = []
        for item in raw:
            if _disabled(item):
                continue
            try:
                values.append(self.value(item))
            except ScanError as exc:
                if not isinstance(item, Mapping) or "_target_" not in item:
                    raise
                self.refused.append(exc)
        return values

    def load(self, path: Any) -> Any:
        """Return the arrays of a file of the bundle, as nested lists by name.

        Raises
        ------
        ScanError
            MODEL_UNSAFE if this config loads no files; or as the function `load`.
        """
        if self._load is None or not isinstance(path, str):
            raise ScanError(Reason.MODEL_UNSAFE, "the config loads a file")
        return self._load(path)

    def _items(self, raw: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self.value(item) for key, item in raw.items() if not _disabled(item)}

    def _find(self, path: str) -> Any:
        entry: Any = self._entries
        for key in path.split("#"):
            if isinstance(entry, Mapping) and key in entry:
                entry = entry[key]
            elif isinstance(entry, list) and key.isdecimal() and int(key) < len(entry):
                entry = entry[int(key)]
            else:
                raise ScanError(Reason.MODEL_DAMAGED, f"the config has no entry @{truncate(path)}")
        return entry

    def _text(self, text: str) -> Any:
        if text.startswith("$"):
            return self._expression(text[1:].strip())
        if text.startswith("@"):
            reference = _REFERENCE.fullmatch(text)
            if reference is None:
                raise refusal(text)
            return self.get(reference[1])
        if text.startswith("%"):
            raise ScanError(
                Reason.MODEL_UNSUPPORTED, f"the macro {truncate(text)} is not supported"
            )
        return text

    def _component(self, raw: Mapping[Any, Any]) -> Component:
        target = raw["_target_"]
        if not isinstance(target, str):
            raise ScanError(Reason.MODEL_DAMAGED, "a _target_ is not a string")
        for key in ("_requires_", "_mode_"):
            if raw.get(key) not in (None, "default"):
                raise ScanError(Reason.MODEL_UNSUPPORTED, f"{truncate(target)} has {key}")
        arguments = {key: item for key, item in raw.items() if key not in _KEYWORDS}
        return self.component(target, lambda: self._items(arguments))

    def component(self, target: str, arguments: Callable[[], Mapping[str, Any]]) -> Component:
        """Return a component; its arguments are evaluated only after its target was accepted."""
        kind, name = self._judge(target)
        return Component(target, {} if kind == "ignored" else arguments(), kind, name)

    def _expression(self, text: str) -> Any:
        if len(text) > MAX_CHARS:
            detail = f"an expression exceeds {MAX_CHARS} characters: {truncate(text)}"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
        if re.match(r"(import|from)\b", text):
            raise refusal(text, Reason.MODEL_UNSAFE)
        references: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            references[name := f"{MARK}{len(references)}"] = match[1]
            return name

        if MARK in text:
            raise refusal(text)
        return Expression(self, text, references).evaluate(_REFERENCE.sub(mark, text))

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Count a value and a nesting level, and refuse configs that exceed the limits."""
        self._depth += 1
        self._steps += 1
        try:
            if self._depth > MAX_DEPTH:
                detail = f"the config is nested deeper than {MAX_DEPTH}"
                raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
            if self._steps > MAX_STEPS:
                detail = f"the config has more than {MAX_STEPS} values"
                raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
            yield
        finally:
            self._depth -= 1


def _disabled(item: Any) -> bool:
    if not isinstance(item, Mapping) or "_target_" not in item:
        return False
    flag = item.get("_disabled_", False)
    return flag.strip().lower() == "true" if isinstance(flag, str) else bool(flag)
