"""Pages of YAML that people write."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import yaml

_MOST_NODES = 1_000_000
"""Keys and values of a page, aliases in full: a few lines of nested aliases stand for billions."""
_TAG = "tag:yaml.org,2002:"
_OCTAL: Final = re.compile(r"^([-+]?)0+(?=[0-7_]+$)")


def read_yaml(text: bytes | str) -> tuple[yaml.Node | None, Any, list[str]]:
    """Return the nodes of a page, its content, and a message for each duplicate key.

    All keys are text, such as `no` and `1`, and 020 is 20: YAML 1.1 would read it as octal.

    Raises
    ------
    yaml.YAMLError, ValueError
        If it is not valid YAML.
    RecursionError
        If the page never ends, or not soon, with its aliases in full.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        twice = _plain_nodes(root)
        return root, None if root is None else loader.construct_document(root), twice
    finally:
        loader.dispose()


def _plain_nodes(root: yaml.Node | None) -> list[str]:
    """Give nodes their plain meaning; return a message for each duplicate key.

    YAML would silently take the last one.
    """
    import yaml

    messages: list[tuple[int, str]] = []
    waiting, count = [root], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if count > _MOST_NODES:
            raise RecursionError
        if isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}int":
            node.value = _OCTAL.sub(r"\1", node.value)
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # a list or mapping, which is refused when the content is made
                if key.tag != f"{_TAG}merge":
                    key.tag = f"{_TAG}str"
                if key.value in seen:
                    messages.append((key.start_mark.line + 1, key.value))
                seen.add(key.value)
            waiting += [value for _, value in reversed(node.value)]
    return [f"line {line}: {key} is given twice" for line, key in sorted(set(messages))]
