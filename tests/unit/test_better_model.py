"""`docs/better-model.md`: its commands parse, its YAML is valid, and its outputs tell its story."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import typer
from PIL import Image

from scanloom.cli.main import app
from scanloom.engine.workflow.schema import read_workflow
from scanloom.training.recipe import read_recipe
from support.real_scans import ROOT

PAGE = ROOT / "docs" / "better-model.md"


def writer() -> ModuleType:
    path = ROOT / "docs" / "write_better_model.py"
    spec = importlib.util.spec_from_file_location("write_better_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks() -> list[re.Match[str]]:
    return list(writer().BLOCK.finditer(PAGE.read_text(encoding="utf-8")))


def commands() -> list[str]:
    return [each for block in blocks() for each in writer().commands_of(block[3])]


@pytest.mark.parametrize("line", [each for each in commands() if each.startswith("scanloom ")])
def test_its_commands_parse(line: str) -> None:
    words = shlex.split(line)[1:]
    command, context = typer.main.get_command(app), None
    while hasattr(command, "commands"):
        context = command.make_context("scanloom", list(words), parent=context)
        _, command, words = command.resolve_command(context, words)
    command.make_context("scanloom", words, parent=context)


def test_its_scripts_exist() -> None:
    scripts = re.findall(r"^python \.\./(\S+)", "\n".join(commands()), re.MULTILINE)
    assert len(scripts) == 2
    assert all((ROOT / script).is_file() for script in scripts)


def test_its_yaml_is_valid(tmp_path: Path) -> None:
    for _, name, content in (block.groups() for block in blocks() if block[2]):
        (tmp_path / name).write_text(content)
    assert read_workflow(tmp_path / "workflow.yaml").models == ("ct_tissue",)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    united = read_workflow(tmp_path / "united.yaml")
    assert united.models == ("ct_tissue", recipe.name)
    assert f"scanloom models add {recipe.name}" in commands()


def test_its_pictures_are_small() -> None:
    pictures = [PAGE.with_name(name) for name in writer().IMAGE.findall(PAGE.read_text("utf-8"))]
    assert len(pictures) == 7
    assert sum(path.stat().st_size for path in pictures) < 600_000
    for path in pictures:
        with Image.open(path) as image:
            assert image.width <= 1000


def test_its_outputs_tell_its_story() -> None:
    text = PAGE.read_text(encoding="utf-8")
    gain = re.compile(r"^bone +Dice +\d+ +\+0\.\d+ \(\+0\.\d+ to \+0\.\d+\)$", re.MULTILINE)
    assert "STALE" in text
    assert gain.search(text)
    assert "/tmp/" not in text
