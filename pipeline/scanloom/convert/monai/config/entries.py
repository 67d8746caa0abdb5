"""Reads the entries of a bundle's inference config, and replaces those that a user sets."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from scanloom.convert.files import find_file, read_json, read_text
from scanloom.convert.monai.config.values import truncate
from scanloom.core import Reason, ScanError, did_you_mean, format_bytes

_MAX_YAML: Final = 1 << 17
"""Largest config in YAML, which Python parses slowly; the largest in the model zoo has 10 kB."""
_CONFIGS: Final = ("inference.json", "inference.yaml", "inference.yml")
_MAX_DIGITS: Final = 40
_CHOICES: Final = "displayable_configs"
"""Entry of a config that holds its author's choices for users."""


def read_entries(folder: Path) -> dict[str, Any]:
    """Return the raw entries of a bundle's inference config.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if the file is missing or neither JSON nor YAML; MODEL_UNSUPPORTED for forms
        of YAML that expand when loaded, for several files that differ, and for keys that change
        other entries; MODEL_UNSAFE for a link out of the bundle.
    """
    names = [f"configs/{name}" for name in _CONFIGS]
    names = [name for name in names if find_file(folder, name) is not None]
    if not names:
        raise ScanError(Reason.MODEL_DAMAGED, f"configs/{' or '.join(_CONFIGS)} is missing")
    first, *others = (_read_file(folder, name) for name in names)
    if any(other != first for other in others):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{' and '.join(names)} differ")
    for key in first:
        if "#" in key or "::" in key or key.startswith("+"):
            # MONAI changes another entry by it, when it loads the file
            detail = f"the config changes an entry by {truncate(key)!r}"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    return first


def _read_file(folder: Path, name: str) -> dict[str, Any]:
    if name.endswith(".json"):
        entries = read_json(folder, name)
    else:
        text = read_text(folder, name)
        if len(text) > _MAX_YAML:
            detail = f"{name} is larger than {format_bytes(_MAX_YAML)}"
            raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
        try:
            entries = yaml.load(text, Loader=_Loader)  # noqa: S506 a SafeLoader
        except (yaml.YAMLError, RecursionError, ValueError) as exc:
            raise ScanError(Reason.MODEL_DAMAGED, f"{name} is not valid YAML") from exc
    if not isinstance(entries, dict):
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is not a mapping")
    return {str(key): value for key, value in entries.items()}


def set_entries(entries: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries with the values that a user sets.

    Parameters
    ----------
    entries : mapping
        Entries of the config.
    options : mapping
        Text of a value by the name of a top-level entry or of an entry of `displayable_configs`.
        Only truth values, numbers and plain texts can be set, by values of the same type.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN if there is no such entry, or it takes no such value.
    """
    try:
        changed = copy.deepcopy(dict(entries))
    except RecursionError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, "the config is nested too deeply") from exc
    choices = changed.get(_CHOICES)
    mappings = [choices, changed] if isinstance(choices, dict) else [changed]
    for key, text in options.items():
        mapping = next((mapping for mapping in mappings if _is_plain(mapping.get(key))), None)
        if mapping is None:
            known = sorted({k for mapping in mappings for k, v in mapping.items() if _is_plain(v)})
            hint = did_you_mean(key, [str(k) for k in known])
            raise ScanError(Reason.MODEL_UNKNOWN, f"there is no option {truncate(key)!r}; {hint}")
        mapping[key] = _parse(key, text, mapping[key])
    return changed


def _is_plain(value: Any) -> bool:
    """Return whether a value is a truth value, a number or a text that refers to nothing."""
    if isinstance(value, str):
        return not value.startswith(("$", "@", "%"))
    return isinstance(value, bool | int | float)


def _parse(key: str, text: str, present: Any) -> Any:
    """Return the value of a text, which must have the type of the present value."""
    value: Any = text
    if not isinstance(present, str):
        try:
            value = json.loads(text.lower())
        except ValueError:
            value = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    matches = is_number if type(present) in (int, float) else type(value) is type(present)
    if not matches or not _is_plain(value) or len(text) > _MAX_DIGITS:
        detail = f"the option {truncate(key)} is {truncate(text)!r}, and by default {present!r}"
        raise ScanError(Reason.MODEL_UNKNOWN, detail)
    return value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without merge keys and long numbers, which expand when loaded."""

    def construct_scalar(self, node: Any) -> Any:
        """Refuse numbers with many digits, which are slow to convert."""
        number = node.tag.rpartition(":")[2] in ("int", "float")
        if number and len(node.value) > _MAX_DIGITS:
            raise ScanError(Reason.MODEL_UNSUPPORTED, f"a number of {len(node.value)} digits")
        return super().construct_scalar(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse merge keys."""
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ScanError(Reason.MODEL_UNSUPPORTED, "the config uses YAML merge keys (<<)")
        super().flatten_mapping(node)
