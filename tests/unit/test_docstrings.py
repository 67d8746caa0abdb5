"""Docstrings of the package name classes and constants that exist."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from pydicom.datadict import tag_for_keyword

ROOT = Path(__file__).parents[2] / "pipeline" / "scanloom"
FOREIGN = {"MetaImage", "ReLU", "ResNet"}
"""A format and networks whose names look like names of our classes."""
CLASS_NAME = re.compile(r"\b[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*[A-Z][a-z0-9]+\b")
TYPES_AFTER_NAMES = ("Parameters", "Attributes")
TYPES = (*TYPES_AFTER_NAMES, "Returns", "Yields")


@dataclass
class Module:
    """The names and docstrings of a module.

    Parameters
    ----------
    identifiers : set of str
        Names that it binds, imports or uses.
    classes : set of str
        Classes that it defines.
    sources : set of str
        Modules from which it imports names.
    docstrings : list of (int, str)
        Lines and texts, also of those that follow a constant or a field.
    """

    identifiers: set[str] = field(default_factory=lambda: set(dir(builtins)))
    classes: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    docstrings: list[tuple[int, str]] = field(default_factory=list)

    def add(self, node: ast.AST) -> None:
        """Take the names and docstrings of one node."""
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                self.identifiers.add(name)
            case ast.FunctionDef(name=name):
                self.identifiers.add(name)
            case ast.ClassDef(name=name):
                self.identifiers.add(name)
                self.classes.add(name)
            case ast.ImportFrom(module=str(source)):
                self.sources.add(source)
            case ast.alias(name=name, asname=short):
                self.identifiers |= {*name.split("."), short or ""}
            case ast.Constant(value=str(text)) if "\n" not in text:  # a quoted annotation, a field
                self.identifiers |= set(re.findall(r"\w+", text))
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                self.docstrings.append((line, inspect.cleandoc(text)))


@cache
def modules() -> dict[str, Module]:
    """Return the modules of the package by their dotted names."""
    parsed = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("scanloom", *path.relative_to(ROOT).with_suffix("").parts))
        module = parsed[name.removesuffix(".__init__")] = Module()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            module.add(node)
    return parsed


@cache
def all_classes() -> set[str]:
    return set().union(*(module.classes for module in modules().values()))


@cache
def all_identifiers() -> set[str]:
    return set().union(*(module.identifiers for module in modules().values()))


def last_word(name: str) -> str:
    """Return the last word of a name in CamelCase."""
    return re.findall(r"[A-Z][a-z0-9]*", name)[-1]


@cache
def class_endings() -> set[str]:
    """Return the last words of the names of our classes, such as Error, Options, Writer."""
    return {last_word(name) for name in all_classes() if CLASS_NAME.fullmatch(name)}


def section_types(text: str) -> Iterator[tuple[str, str]]:
    """Yield section and name of each class that numpydoc sections name without a library."""
    section = ""
    for line, underline in pairwise([*text.splitlines(), ""]):
        if re.fullmatch("-{3,}", underline.strip()):
            section = line
        elif line[:1].strip() and section in (*TYPES, "Raises"):
            entry = line.partition(" : ")[2] if section in TYPES_AFTER_NAMES else line
            for name in re.findall(r"(?<![\w.])[A-Z][a-z]\w+", entry):
                yield section, name


def stale_names(module: Module, text: str) -> Iterator[str]:
    """Yield the names in a docstring of a module that do not exist.

    Types must be known to the module; exceptions and names in backticks to the package; of other
    words only those that end like a class of ours are looked at.
    """
    imported = [modules()[source] for source in module.sources & set(modules())]
    types = module.identifiers.union(*(source.classes for source in imported))
    for section, name in section_types(text):
        if name not in types and not (section == "Raises" and name in all_classes()):
            yield name
    for name in re.findall(r"`([A-Z][a-z]\w*)`", text):
        if name not in module.identifiers | all_classes() and not tag_for_keyword(name):
            yield name
    for home, name in re.findall(r"`(\w+)\.([A-Z]\w*)`", text):
        homes = [modules()[path] for path in modules() if path.endswith(f".{home}")]
        if homes and not any(name in candidate.identifiers for candidate in homes):
            yield f"{home}.{name}"
    for name in CLASS_NAME.findall(re.sub(r"\S+/\S+", "", text)):
        ours = last_word(name) in class_endings() and name not in FOREIGN
        if ours and name not in all_identifiers() and not tag_for_keyword(name):
            yield name


def test_names_in_docstrings_exist() -> None:
    stale = {
        f"{path}, line {line}: {name}"
        for path, module in modules().items()
        for line, text in module.docstrings
        for name in stale_names(module, text)
    }
    assert not stale, "\n".join(sorted(stale))


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ("Raises\n------\nNotPlainError, ChildDiedError\n    Why.", {"NotPlainError"}),
        ("Returns\n-------\ntuple of CaseEnding\n    One each.", {"CaseEnding"}),
        ("Parameters\n----------\ncase : Case\ncause : CaseEnding", {"CaseEnding"}),
        ("A `CaseEnding` from `supervisor.TELLING`.", {"CaseEnding", "supervisor.TELLING"}),
        ("Catch NoEngineError, `ScanError`, ImageType.", {"NoEngineError"}),
    ],
)
def test_stale_names_are_recognised(text: str, stale: set[str]) -> None:
    supervisor = modules()["scanloom.engine.worker.supervisor"]
    assert set(stale_names(supervisor, f"Work.\n\n{text}\n")) == stale
