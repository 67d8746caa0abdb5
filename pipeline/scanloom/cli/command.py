"""Base class of the commands: variables for options, and help in panels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from scanloom.cli.config_file import EMPTY, SOURCES, option_key
from scanloom.cli.console import clean

PANEL = "General"
_PREFIX = "Value error, "
"""Words of pydantic in front of our own."""
HELP = {"help_option_names": ["-h", "--help"]}
"""Settings of the program, which its commands inherit."""


def variable_of(option: Any) -> str:
    """Return the name of the environment variable of an option: SCANLOOM_DEVICE."""
    return f"SCANLOOM_{option_key(option).upper()}"


class _PlainHelp:
    """Help without the types of flags and arguments, which typer shows as <bool>, <list[Path]>."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, those that typer adds included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of click's command
        for parameter in parameters:
            if parameter.param_type_name == "argument":
                _simplify_argument(parameter)
                continue
            parameter.show_envvar = False  # the help of the program tells of all
            if getattr(parameter, "is_flag", False):
                parameter.metavar, parameter.show_default = "", False
        return parameters

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option --help, with the other general ones."""
        option = super().get_help_option(ctx)  # type: ignore[misc]  # of click's command
        if option is not None:
            option.metavar = ""
            option.rich_help_panel = PANEL if isinstance(self, Command) else None
        return option


def _simplify_argument(argument: Any) -> None:
    """Show an argument as ID..., or [PATH]... if it may be left out."""
    name = argument.metavar if argument.required else f"[{argument.metavar}]"
    shown = [] if argument.hidden else [f"{name}{'' if argument.nargs == 1 else '...'}"]
    argument.display_type_rich = lambda ctx: ""
    argument.get_usage_pieces = lambda ctx: shown


class Command(_PlainHelp, TyperCommand):
    """A command whose options may be set by environment variables and files."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for parameter in self.params:
            # SCANLOOM_KEY is read where keys are: `report` goes on without the key that it names
            if parameter.param_type_name == "option" and option_key(parameter) != "key":
                parameter.envvar = variable_of(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; a blank one would be the current folder as a path, and is refused."""
        for option in filter(None, (*_blank_arguments(args), *self._blank_variables())):
            raise typer.BadParameter(EMPTY, ctx=ctx, param_hint=f"'{option}'")
        return super().parse_args(ctx, args)

    def _blank_variables(self) -> Iterator[str]:
        """Yield variables that hold blanks only; an empty one counts as not set."""
        for name in filter(None, (parameter.envvar for parameter in self.params)):
            if isinstance(name, str) and (value := os.environ.get(name)) and not value.strip():
                yield name


def _blank_arguments(args: Sequence[str]) -> Iterator[str]:
    """Yield the option, or PATH, of each argument without text, such as `-o ""` and `--out=`.

    `--structures` says itself what it expects.
    """
    for before, argument in zip(["", *args], args, strict=False):
        option, equals, value = argument.partition("=")
        if argument.startswith("--") and equals and not value.strip():
            yield "" if option == "--structures" else option
        elif not argument.strip() and before != "--structures":
            yield before if before.startswith("-") else "PATH"


class Group(_PlainHelp, TyperGroup):
    """Commands whose usage errors name the source of a value; foreign text in them is escaped."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the context of a command line."""
        with _explained():
            return super().make_context(*arguments, **keywords)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _explained():
            return super().invoke(ctx)


@contextmanager
def _explained() -> Iterator[None]:
    """Escape the text of usage errors, which quote file names; name the variable or file."""
    try:
        yield
    except Exception as error:
        if isinstance(getattr(error, "message", None), str):  # click.UsageError, vendored by typer
            error.message = clean(error.message.replace(_PREFIX, ""))  # type: ignore[attr-defined]
            _name_source(error)
        raise


def _name_source(error: Any) -> None:
    """Add to the hint of a BadParameter where a value came from, if not from the command line."""
    ctx, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if ctx is None or parameter is None or getattr(error, "param_hint", None):
        return
    source = ctx.get_parameter_source(parameter.name)
    hints = {
        "ENVIRONMENT": parameter.envvar,
        "DEFAULT_MAP": ctx.meta.get(SOURCES, {}).get(parameter.name),
    }
    if origin := hints.get(getattr(source, "name", "")):
        error.param_hint = clean(f"{parameter.get_error_hint()} (from {origin})")
