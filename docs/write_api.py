"""Write the keywords of `scanloom.segment` into `engine/api.py` from `scanloom.options`.

python docs/write_api.py
"""

from __future__ import annotations

import textwrap
from dataclasses import Field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from scanloom.options import walk_options

MODULE = Path(__file__).parents[1] / "pipeline" / "scanloom" / "engine" / "api.py"
WIDTH = 100
SPECIAL = ("models", "out")
"""Options that `segment` takes in another form than the table."""
WIDER = {"series": "str | int | None"}


def keyword_type(option: Field[Any]) -> str:
    """Return the annotation of a keyword; Python takes more forms than the table."""
    kind = str(option.type)
    if option.name in WIDER:
        return WIDER[option.name]
    if option.metadata["command"]["parser"] == "byte_count":
        return "int | str | None"
    if kind == "tuple[str, ...]":
        return "str | Sequence[str]"
    return kind.replace("Path", "str | Path")


def described_type(option: Field[Any], hint: Any) -> str:
    """Return the type in the docstring: the words of a closed list, or names of types."""
    words = [word for kind in (hint, *get_args(hint)) for word in literals(kind)]
    if words:
        kinds = [f'"{word}"' for word in words] + ["None"] * (type(None) in get_args(hint))
    elif keyword_type(option).endswith("Sequence[str]"):
        return "str, or sequence of str"
    else:
        kinds = keyword_type(option).split(" | ")
    return " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))


def literals(kind: Any) -> tuple[Any, ...]:
    """Return the words of a Literal; none of another type."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def signature() -> str:
    """Return the lines of the signature."""
    lines = []
    for _, option, _ in walk_options():
        if option.name not in SPECIAL:
            default = repr(option.default).replace("'", '"')
            lines.append(f"    {option.name}: {keyword_type(option)} = {default},\n")
    return "".join(lines)


def documentation() -> str:
    """Return the lines of the docstring."""
    lines = []
    for _, option, hint in walk_options():
        if option.name not in SPECIAL:
            text = option.metadata["description"].rstrip(".") + "."
            kind = described_type(option, hint)
            if len(f"    {option.name} : {kind}") > WIDTH:  # numpydoc has types in one line
                kind, text = "str", f"{kind}. {text}"
            body = textwrap.fill(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
            lines.append(f"    {option.name} : {kind}\n{body}\n")
    return "".join(lines)


def written(module: str) -> str:
    """Return the text of the module with the keywords of today."""
    start, end = "    progress: Progress | None = None,\n", ") -> tuple[CaseRecord, ...]:"
    head, _, rest = module.partition(start)
    _, _, rest = rest.partition(end)
    before, _, rest = rest.partition("    archives : ")
    _, _, after = rest.partition("\n    Returns\n")
    return f"{head}{start}{signature()}{end}{before}{documentation()}\n    Returns\n{after}"


if __name__ == "__main__":
    MODULE.write_text(written(MODULE.read_text(encoding="utf-8")), encoding="utf-8")
    print(MODULE.name)
