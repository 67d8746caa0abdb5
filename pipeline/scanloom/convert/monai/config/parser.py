"""Read a MONAI bundle's config as data: references are followed, nothing is imported or run.

MONAI's own parser evaluates every ``$expression`` in Python and calls any ``_target_``. Here, a
small interpreter evaluates a closed list of expression forms, and a ``_target_`` is only a name.
Only requested entries are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from scanloom.convert.monai.config.expressions import MARK, Expression, parse
from scanloom.convert.monai.config.values import (
    PARTLY_READ,
    Component,
    Kind,
    Unread,
    bounded,
    refusal,
    truncate,
)
from scanloom.core import Reason, ScanError

MAX_CHARS: Final = 500
"""Longest expression that is parsed; MONAI's model zoo needs 104 characters."""
MAX_DEPTH: Final = 50
"""Deepest nesting of values, references and expressions combined; MONAI's model zoo needs 12."""
MAX_STEPS: Final = 50_000
"""Largest number of values evaluated for one bundle; MONAI's model zoo needs under 400."""

_SEPARATOR: Final = "::"
"""Separator of the keys of a path; MONAI replaces its old one, "#", in every text of a config."""
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
    find : callable, optional
        Returns a file of the bundle by its path, None if it is missing.

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
        find: Callable[[str], Path | None] | None = None,
    ) -> None:
        self.refused: list[ScanError] = []
        self._entries = entries
        self._judge = judge
        self._load = load
        self._find_file = find
        self._known: dict[str, Any] = {}
        self._open: list[str] = []
        self._depth = 0
        self._steps = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def raw(self, path: str) -> Any:
        """Return an entry or nested entry as parsed from the file, None if it is missing."""
        try:
            return self._find(_normalized(path))
        except ScanError:
            return None

    def get(self, path: str) -> Any:
        """Return the value of an entry or of a nested entry (``"inferer#roi_size"``).

        Returns
        -------
        None, bool, int, float, str, list, dict, Name or Component
            The same object each time, also where the entry is part of another one: like MONAI, a
            component stands for one object. None for a disabled component.

        Raises
        ------
        ScanError
            MODEL_DAMAGED if it refers to a missing entry or to itself; MODEL_UNSAFE if code would
            have to run; MODEL_UNSUPPORTED if the interpreter does not cover it.
        """
        path = _normalized(path)
        if path not in self._known:
            if path in self._open:
                raise ScanError(Reason.MODEL_DAMAGED, f"@{path} refers to itself")
            self._open.append(path)
            try:
                self._value(self._find(path), path)
            finally:
                self._open.pop()
        return self._known[path]

    def _value(self, raw: Any, path: str) -> Any:
        """Return the value of raw file content at a path; errors as `get`."""
        if path not in self._known:
            with self.deeper():
                self._known[path] = self._read(raw, path)
        return self._known[path]

    def _read(self, raw: Any, path: str) -> Any:
        if isinstance(raw, str):
            return self._text(_normalized(raw))
        if isinstance(raw, Mapping):
            return self._component(raw, path) if "_target_" in raw else self._items(raw, path)
        if isinstance(raw, Sequence) and not isinstance(raw, bytes):
            return self._list(raw, path)
        if raw is None or isinstance(raw, bool | int | float):
            return bounded(raw)
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"a config value is a {type(raw).__name__}")

    def _list(self, raw: Sequence[Any], path: str) -> list[Any]:
        values = []
        for number, item in enumerate(raw):
            is_component = isinstance(item, Mapping) and "_target_" in item
            try:
                value = self._value(item, f"{path}{_SEPARATOR}{number}")
            except ScanError as exc:
                if not is_component:
                    raise
                self.refused.append(exc)
                continue
            if value is not None or not is_component:  # disabled components are left out
                values.append(value)
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

    def exists(self, path: str) -> bool:
        """Return whether a file of the bundle exists.

        Raises
        ------
        ScanError
            MODEL_UNSAFE for a file outside the bundle.
        """
        parts = PurePosixPath(path).parts
        if self._find_file is None or path.startswith("/") or ".." in parts:
            raise ScanError(Reason.MODEL_UNSAFE, "the config looks for a file outside the bundle")
        return self._find_file(path) is not None

    def _items(self, raw: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        values = {key: self._value(item, f"{path}{_SEPARATOR}{key}") for key, item in raw.items()}
        return {
            key: value
            for key, value in values.items()
            if value is not None or not isinstance(raw[key], Mapping) or "_target_" not in raw[key]
        }

    def _find(self, path: str) -> Any:
        entry: Any = self._entries
        for key in path.split(_SEPARATOR):
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

    def _component(self, raw: Mapping[Any, Any], path: str) -> Component | None:
        target = raw["_target_"]
        if not isinstance(target, str):
            raise ScanError(Reason.MODEL_DAMAGED, "a _target_ is not a string")
        if self._disabled(raw, path):
            return None
        for key in ("_requires_", "_mode_"):
            if raw.get(key) not in (None, "default"):
                raise ScanError(Reason.MODEL_UNSUPPORTED, f"{truncate(target)} has {key}")
        arguments = {key: item for key, item in raw.items() if key not in _KEYWORDS}
        kind, name = self._judge(target)
        if kind == "ignored":
            return Component(target, {}, kind, name)
        if kind not in PARTLY_READ:
            return Component(target, self._items(arguments, path), kind, name)
        args: dict[str, Any] = {}
        for key, item in arguments.items():
            try:
                args |= self._items({key: item}, path)
            except ScanError as exc:
                args[key] = Unread(exc)
        return Component(target, args, kind, name)

    def _disabled(self, raw: Mapping[Any, Any], path: str) -> bool:
        """Return whether a component is disabled, by a value or by an expression."""
        flag = self._value(raw.get("_disabled_", False), f"{path}{_SEPARATOR}_disabled_")
        if isinstance(flag, str):
            return flag.strip().lower() == "true"
        if flag is None or isinstance(flag, bool | int | float):
            return bool(flag)
        detail = f"{truncate(raw['_target_'])} has _disabled_, whose value is not known"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)

    def constructed(self, target: str, arguments: Callable[[], Mapping[str, Any]]) -> Component:
        """Return the component of a call; its arguments are evaluated after its target."""
        kind, name = self._judge(target)
        return Component(target, {} if kind == "ignored" else arguments(), kind, name)

    def _expression(self, text: str) -> Any:
        return self.parsed(text).value

    def parsed(self, text: str) -> Expression:
        """Return the syntax tree of an expression, without its "$"; nothing is evaluated yet.

        Raises
        ------
        ScanError
            MODEL_UNSAFE for an import; MODEL_UNSUPPORTED if it is too long or not Python.
        """
        text = _normalized(text)
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
        return Expression(self, text, references, parse(text, _REFERENCE.sub(mark, text)))

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


def references(text: str) -> list[str]:
    """Return the paths to which a text of a config refers."""
    text = _normalized(text)
    if text.startswith("$"):
        return _REFERENCE.findall(text)
    reference = _REFERENCE.fullmatch(text)
    return [] if reference is None else [reference[1]]


def _normalized(text: str) -> str:
    return text.replace("#", _SEPARATOR)
