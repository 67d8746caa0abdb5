"""Pages of YAML that people write."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml

_MOST_NODES = 1_000_000
"""Keys and values of a page, aliases in full: a few lines of nested aliases stand for billions."""


def duplicate_keys(node: yaml.Node | None) -> list[str]:
    """Return a message for each duplicate key: YAML would silently take the last one.

    Raises
    ------
    RecursionError
        If the page never ends, or not soon, with its aliases in full.
    """
    import yaml

    messages: list[tuple[int, str]] = []
    waiting, count = [node], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if count > _MOST_NODES:
            raise RecursionError
        if isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen:
                    messages.append((key.start_mark.line + 1, key.value))
                seen.add(key.value)
            waiting += [value for _, value in reversed(node.value)]
    return [f"line {line}: {key} is given twice" for line, key in sorted(set(messages))]
