"""Base class of the commands: variables for options, values from files, and help in panels.

A value is taken from the first of: the command line, the variable SCANLOOM_<OPTION>, the file of
`--config`, the user's `config.yaml` or `config.toml`, the option's default.

Files hold keys named like options, which apply to all commands that have them, and sections named
like commands, which take precedence. An option that means something else in one command than in
others, such as `train --out`, has a variable of its own (SCANLOOM_TRAIN_OUT) and takes no value
from a key outside of the section.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from scanloom.cli.console import clean, say

MAX_CONFIG_BYTES = 1 << 20
"""A configuration is a page of text."""
USER_FILES = ("config.yaml", "config.toml")
"""Names of the user's own file, in the configuration folder."""
SOURCES = "scanloom.option_files"
"""Key of a context's `meta`: the file from which an option's value came, by the option's name."""
EMPTY = "the text is empty, as if a variable of the shell were not set"
OF_OTHER_TOOLS = {
    "--gpu": "use --device cuda",
    "--cpu": "use --device cpu",
    "--ml": "use -o labels.nii.gz",
    "--output_type": "use -o labels.dcm",
    "--task": "use --model",
    "--roi_subset": "use --structures liver,spleen",
    "--remove_small_blobs": "use --remove-small 200",
    "--statistics": "measurements are always written",
    "--preview": "a preview is always written",
    "--disable_tta": "use --mirror no",
    "--save_probabilities": "--also uncertainty writes their entropy",
}
"""Options of TotalSegmentator and nnU-Net, and what `segment` has in their place."""
OF_OTHER_TOOLS_IN_RUN = {
    "--gpu": "set `execution: {device: cuda}` in the workflow",
    "--cpu": "set `execution: {device: cpu}` in the workflow",
    "--device": "set `execution: {device: ...}` in the workflow",
    "--task": "name the models in the workflow",
    "--model": "name the models in the workflow",
}
"""What people give `run`, where the workflow has it."""
_FURTHER_VARIABLES = ("SCANLOOM_CONFIG", "SCANLOOM_KEY", "SCANLOOM_MODELS", "SCANLOOM_OFFLINE")
# Of a single call: a file must not name another file
_NOT_IN_FILES = ("config", "help", "version")

Values = dict[str, Any]


_typed: ContextVar[frozenset[str]] = ContextVar("typed", default=frozenset())
"""Names of the parameters of the command that runs which stand on its command line."""


def is_typed(name: str) -> bool:
    """Return whether a parameter is on the command line, not in a variable or file."""
    return name in _typed.get()


def option_key(option: Any) -> str:
    """Return the name of an option in files: its long form, with underscores."""
    return str(max(option.opts, key=len)).lstrip("-").replace("-", "_")


def _is_shared(option: Any) -> bool:
    """Return whether an option means the same in all commands that have one of its name."""
    return option.envvar in (None, variable_of(option))


def read_defaults(ctx: typer.Context, value: Path | None) -> Path | None:
    """Let options take their defaults from `--config` and the user's file; a callback of typer.

    Raises
    ------
    BadParameter
        If a file cannot be read or parsed, or has an unknown key or a value of another shape.
    """
    if ctx.resilient_parsing:
        return value
    _warn_of_variables(ctx)
    chosen = {option_key(option): option for option in _options(ctx.command)}
    defaults: Values = {}
    # In this order: a value of `--config` replaces that of the user's own file
    for file in filter(None, (_user_file(), value)):
        for key, setting in _settings(ctx, file).items():
            if key in chosen:
                option = chosen[key]
                defaults[option.name] = _as_typed(option, setting, f"{file}: {key}")
                ctx.meta.setdefault(SOURCES, {})[option.name] = file
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def _warn_of_variables(ctx: typer.Context) -> None:
    """Name each variable that is nearly one of ours; others may be a site's own."""
    from difflib import get_close_matches

    options = _options(ctx.find_root().command)
    known = {*_FURTHER_VARIABLES, *(o.envvar for o in options if isinstance(o.envvar, str))}
    for name in sorted(name for name in os.environ if name.startswith("SCANLOOM_")):
        if name not in known and (near := get_close_matches(name, sorted(known), 1, 0.9)):
            say(f"scanloom: no option has the variable {name}; did you mean {near[0]}?", err=True)


def _user_file() -> Path | None:
    """Return the user's own file of defaults, if there is one."""
    from scanloom.core.paths import user_config_folder

    files = []
    for name in USER_FILES:
        file = user_config_folder() / name
        try:
            files += [file] if file.is_file() else []
        except OSError as exc:  # its folder is another user's: a file there may count, or none
            problem = f"{file} can't be read ({type(exc).__name__})"
            advice = "set XDG_CONFIG_HOME to a folder of your own"
            raise typer.BadParameter(f"{problem}: {advice}") from exc
    if len(files) > 1:
        raise typer.BadParameter(f"there are {files[0]} and {files[1].name}: remove one of them")
    return files[0] if files else None


def _settings(ctx: typer.Context, file: Path) -> Values:
    """Return the values of a file that may apply to a command, after a check of all its keys."""
    from scanloom.core import did_you_mean

    program = ctx.find_root().command
    commands: Mapping[str, Any] = getattr(program, "commands", {})
    known = {name: {option_key(o) for o in _options(command)} for name, command in commands.items()}
    everywhere = set().union(*known.values())
    own = {option_key(option) for option in _options(ctx.command) if not _is_shared(option)}
    settings, sections = Values(), dict[str, Values]()
    for key, (name, value) in _named(_document(file), file).items():
        if key in known and isinstance(value, dict):
            sections[key] = dict(_named(value, file).values())
            if unknown := sorted(sections[key].keys() - known[key]):
                hint = did_you_mean(unknown[0], sorted(known[key]))
                raise typer.BadParameter(
                    f"{file}: {key} has no option {unknown[0]}; {hint} "
                    f"(`scanloom {key} --help` lists all)"
                )
        elif name in everywhere:
            if name not in own:
                settings[name] = value
        else:
            hint = did_you_mean(name, sorted(everywhere))
            raise typer.BadParameter(
                f"{file}: no command has an option {key}; {hint} "
                "(`scanloom COMMAND --help` lists all)"
            )
    return settings | sections.get(_command_name(ctx), {})


def _named(document: Values, file: Path) -> dict[str, tuple[str, Any]]:
    """Return the names of options and their values, by the keys as they are written."""
    named = {key: (str(key).replace("-", "_"), value) for key, value in document.items()}
    names = [name for name, _ in named.values()]
    for name in names:
        if names.count(name) > 1:
            raise typer.BadParameter(f"{file}: {name} is given twice")
    return named


def _command_name(ctx: typer.Context) -> str:
    """Return the name of the program's command, such as "models" for `scanloom models add`."""
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent  # type: ignore[assignment]  # the same class
    return ctx.info_name or ""


def _options(command: Any) -> Iterator[Any]:
    """Yield the options of a command, or of all commands of a group, that files may set."""
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)
    for parameter in command.params:
        if parameter.param_type_name == "option" and option_key(parameter) not in _NOT_IN_FILES:
            yield parameter


def _document(file: Path) -> Values:
    """Return the content of a YAML or TOML file."""
    import tomllib

    import yaml

    from scanloom.core.pages import read_yaml

    document: Any
    twice: list[str] = []
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1).decode("utf-8")
        if len(text) > MAX_CONFIG_BYTES:
            raise typer.BadParameter(f"{file} is too large for a configuration")
        if file.suffix == ".toml":
            document = tomllib.loads(text)
        else:
            _, document, twice = read_yaml(text)
    except OSError as exc:
        raise typer.BadParameter(f"{file} can't be read ({type(exc).__name__})") from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise typer.BadParameter(f"{file} is not valid YAML{where}") from exc
    except (ValueError, RecursionError) as exc:  # of TOML, of UTF-8, and a date that is none
        form = "TOML" if file.suffix == ".toml" else "YAML"
        raise typer.BadParameter(f"{file} is not valid {form}") from exc
    if twice:
        raise typer.BadParameter(f"{file}: {'; '.join(twice)}")
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise typer.BadParameter(f"{file} must hold keys and values, such as `device: cpu`")
    return document


def _as_typed(option: Any, value: Any, where: str) -> Any:
    """Return a value of a file as it would be typed, so that both are parsed alike."""
    items = value if isinstance(value, list) else [value]
    if any(item is None or isinstance(item, (dict, list)) for item in items):
        raise typer.BadParameter(f"{where}: expected a value")
    if option.is_flag:
        if isinstance(value, str) and not value.strip():
            raise typer.BadParameter(f"{where}: expected yes or no, but the text is empty")
        return value
    texts = [_text(item) for item in items]
    if not all(text.strip() for text in texts):
        raise typer.BadParameter(f"{where}: expected a value, but the text is empty")
    # A list for an option that is not repeated is typed with commas, such as `structures`
    return texts if option.multiple else ",".join(texts)


def _text(value: Any) -> str:
    """Return a scalar as text; YAML and TOML read yes and no as booleans.

    A path that begins with ~ is in the home folder, as a shell would read it.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return os.path.expanduser(text) if text.startswith("~/") else text  # noqa: PTH111  # no errors


PANEL = "General"
_PREFIX = "Value error, "
"""Words of pydantic in front of our own."""
_NO_FLAG = "Input should be a valid boolean"
"""Its words for the value of a flag in a variable or file."""
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


_UNSET = object()
"""What stands for the value of an option that --no-NAME unsets."""


class _Option(TyperOption):
    """An option whose default --no-NAME restores."""

    def consume_value(self, ctx: Any, opts: Any) -> Any:
        """Return the value and its source."""
        if opts.get(self.name) is not _UNSET:
            return super().consume_value(ctx, opts)
        _, source = super().consume_value(ctx, {})  # an enum of click's, or of typer's own copy
        return self.default, type(source)["DEFAULT"]


class Command(_PlainHelp, TyperCommand):
    """A command whose options may be set by environment variables and files."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        for parameter in self.params:
            # SCANLOOM_KEY is read where keys are: `report` goes on without the key that it names
            if parameter.param_type_name == "option" and option_key(parameter) != "key":
                parameter.envvar = parameter.envvar or variable_of(parameter)
                parameter.__class__ = _Option  # typer makes them, and has no place for a class

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser: --no-NAME unsets each option that a variable or file may set."""
        parser = super().make_parser(ctx)
        for opposite, option in self._opposites():
            value = False if option.is_flag else _UNSET
            # typer's own copy of click's Option
            parser.add_option(option, [opposite], option.name, "store_const", const=value)
        return parser

    def _opposites(self) -> Iterator[tuple[str, Any]]:
        for option in _options(self):
            if isinstance(option, _Option) and not option.secondary_opts:
                yield f"--no-{max(option.opts, key=len).lstrip('-')}", option

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the words that may follow; each --no-NAME only where its begin is typed."""
        unset = (name for name, _ in self._opposites() if incomplete.startswith("--no"))
        named = [SimpleNamespace(value=n, type="plain", help="") for n in unset]
        listed = super().shell_complete(ctx, incomplete)
        return listed + [each for each in named if each.value.startswith(incomplete)]

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
        typed = (n for n, source in sources.items() if getattr(source, "name", "") == "COMMANDLINE")
        _typed.set(frozenset(typed))
        return super().invoke(ctx)

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

    `--structures` has a message of its own.
    """
    # A value after a blank is the option's before it; "--out=" has its own
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
        usage: Any = error
        if isinstance(getattr(usage, "message", None), str):  # click.UsageError, vendored by typer
            usage.message = clean(usage.message.replace(_PREFIX, ""))
            if usage.message.startswith(_NO_FLAG):
                usage.message = "expected yes or no"
            _name_source(usage)
            _translate(usage)
        raise


def _translate(error: Any) -> None:
    """For an option of another tool, name ours in place of those of similar spelling."""
    hints = {"segment": OF_OTHER_TOOLS, "run": OF_OTHER_TOOLS_IN_RUN, "plan": OF_OTHER_TOOLS_IN_RUN}
    command = error.ctx.info_name if getattr(error, "ctx", None) else ""
    if hint := hints.get(command, {}).get(getattr(error, "option_name", "")):
        error.possibilities = None
        error.message = f"{error.message}; {hint}"


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
