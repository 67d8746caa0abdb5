"""Every option that a message advises exists in the command that is named with it or shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import scanloom
from scanloom.cli.main import app
from scanloom.core import Reason

PACKAGE = Path(scanloom.__file__).parent
ON_SCANS = ("segment", "index", "plan", "run")
"""Commands that show the reason of any scan."""
ON_RESULTS = ("segment", "plan", "run")
SHOWN_BY = {
    Reason.ID_UNKNOWN: ("where", "join"),
    Reason.COLUMN_UNKNOWN: ("join",),
    Reason.SERIES_AMBIGUOUS: ("segment",),
    Reason.SERIES_UNKNOWN: ("segment",),
    Reason.CLUSTER: ("run",),
    Reason.MODEL_EXISTS: ("models",),
    Reason.LICENCE: ("models",),
    Reason.SAMPLE: ("plan",),
    **{reason: ON_RESULTS for reason in Reason if reason.subject == "result"},
}
"""Commands that show a reason; `ON_SCANS` for all others."""
ROOMS = (
    *("core", "cards", "ops", "io", "inference", "convert"),
    *("review", "engine", "training", "cli/checks"),
)
WITH_KEY = ("segment", "index", "plan", "run", "report", "where", "join")
SHOWN_BY_FILE = {
    "convert/download/add.py": ("models",),
    "cli/checks.py": ("doctor",),
    "engine/clusters/connect.py": ("run",),
    "engine/default_model.py": ("segment",),
    "engine/monitor.py": ("run",),
    "engine/planning.py": ("plan", "run"),
    "engine/result_file.py": ("segment",),
    "engine/revisions.py": ("review",),
    "engine/run.py": ("run",),
    "engine/run_files.py": ("run",),
    "io/identity.py": WITH_KEY,
    "engine/segment.py": ("segment",),
    "io/index/ranking.py": ("segment",),
    "io/index/sample.py": ("plan",),
    "io/output/layout.py": ON_RESULTS,
    "io/formats.py": ("segment",),
    "io/write/bids.py": ("run",),
    "training/dataset.py": ("dataset",),
    "training/evaluate.py": ("evaluate",),
    "training/evaluation_page.py": ("evaluate",),
    "training/recipe.py": ("train",),
}
"""Commands that show the messages of a module; `ON_SCANS` for all others."""
PROGRAMS = ("pip", "sbatch", "sha256sum", "--constraint", "python -m")
"""Marks of texts about options of programs other than scanloom."""
NOT_MESSAGES = (
    "core/reasons.py",
    "engine/clusters/remote_worker.py",
    "engine/clusters/launchers.py",
    "training/train.py",
)
"""Modules with arguments of programs, and the reasons, which have a test of their own."""

_OPTION = re.compile(r"(?:`(?:scanloom )?(?P<command>[a-z]+) [^`]*?)?(?P<option>--[a-z][a-z-]+)")


def options_by_command() -> dict[str, set[str]]:
    """Return the options of each command; those of a group are the options of its commands."""
    group = typer.main.get_command(app)
    return {
        name: {
            option
            for single in getattr(command, "commands", {"": command}).values()
            for parameter in single.params
            for option in parameter.opts
        }
        for name, command in group.commands.items()
    }


OPTIONS = options_by_command()


def missing(text: str, commands: tuple[str, ...]) -> list[str]:
    """Return the options in a text that a command lacks, which is named with them or shows it."""
    return [
        f"{command} {match['option']}"
        for match in _OPTION.finditer(text)
        for command in ((match["command"],) if match["command"] else commands)
        if match["option"] not in OPTIONS[command]
    ]


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.code)
def test_options_in_the_advice_of_a_reason_exist(reason: Reason) -> None:
    assert missing(reason.advice, SHOWN_BY.get(reason, ON_SCANS)) == []


def messages(file: Path) -> Iterator[str]:
    """Yield the texts of a module that name an option, without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {
        id(piece)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for piece in node.values
    }
    for node in ast.walk(tree):
        if id(node) in comments | inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
        else:
            continue
        if "--" in text and not any(mark in text for mark in PROGRAMS):
            yield text


def test_options_in_messages_exist() -> None:
    files = {
        path.relative_to(PACKAGE).as_posix(): path
        for room in ROOMS
        for path in sorted([*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")])
    }
    assert set(SHOWN_BY_FILE) <= set(files)
    wrong = {
        f"{name}: {text}": lacking
        for name, path in files.items()
        if name not in NOT_MESSAGES
        for text in messages(path)
        if (lacking := missing(text, SHOWN_BY_FILE.get(name, ON_SCANS)))
    }
    assert wrong == {}


@pytest.mark.parametrize("command", [name for name in OPTIONS if name != "models"])
def test_options_in_messages_of_a_command_exist(command: str) -> None:
    file = PACKAGE / "cli" / "commands" / f"{command}.py"
    assert [lack for text in messages(file) for lack in missing(text, (command,))] == []


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("use `segment --phase 1` or --out", []),
        ("use `scanloom index --phase 1`", ["index --phase"]),
        ("use --phase", ["index --phase"]),
    ],
)
def test_named_commands_are_recognised(text: str, lacking: list[str]) -> None:
    assert missing(text, ("segment", "index")) == lacking
