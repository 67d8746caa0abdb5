"""Values of options from files: `--config FILE`, and the user's own file of defaults.

A value is taken from the first of: the command line, the variable SCANLOOM_<OPTION>, the file of
`--config`, the user's `config.yaml` or `config.toml`, the option's default.

Files hold keys named like options, which apply to all commands that have them, and sections named
like commands, which take precedence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

MAX_CONFIG_BYTES = 1 << 20
"""A configuration is a page of text."""
USER_FILES = ("config.yaml", "config.toml")
"""Names of the user's own file, in the configuration folder."""
SOURCES = "scanloom.option_files"
"""Key of a context's `meta`: the file from which an option's value came, by the option's name."""
EMPTY = "the text is empty, as if a variable of the shell were not set"
_NOT_IN_FILES = ("config", "help", "version")

Values = dict[str, Any]


def option_key(option: Any) -> str:
    """Return the name of an option in files: its long form, with underscores."""
    return str(max(option.opts, key=len)).lstrip("-").replace("-", "_")


def read_defaults(ctx: typer.Context, value: Path | None) -> Path | None:
    """Let options take their defaults from `--config` and the user's file; a callback of typer.

    Raises
    ------
    BadParameter
        If a file cannot be read or parsed, or has an unknown key or a value of another shape.
    """
    if ctx.resilient_parsing:
        return value
    chosen = {option_key(option): option for option in _options(ctx.command)}
    defaults: Values = {}
    for file in filter(None, (_user_file(), value)):
        for key, setting in _settings(ctx, file).items():
            if key in chosen:
                option = chosen[key]
                defaults[option.name] = _as_typed(option, setting, f"{file}: {key}")
                ctx.meta.setdefault(SOURCES, {})[option.name] = file
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return value


def _user_file() -> Path | None:
    """Return the user's own file of defaults, if there is one."""
    from scanloom.core.paths import user_config_folder

    files = [file for name in USER_FILES if (file := user_config_folder() / name).is_file()]
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
    settings, sections = Values(), dict[str, Values]()
    for key, value in _document(file).items():
        name = str(key).replace("-", "_")
        if key in known and isinstance(value, dict):
            sections[key] = {str(inner).replace("-", "_"): v for inner, v in value.items()}
            if unknown := sorted(sections[key].keys() - known[key]):
                hint = did_you_mean(unknown[0], sorted(known[key]))
                raise typer.BadParameter(
                    f"{file}: {key} has no option {unknown[0]}; {hint} "
                    f"(`scanloom {key} --help` lists all)"
                )
        elif name in everywhere:
            settings[name] = value
        else:
            hint = did_you_mean(name, sorted(everywhere))
            raise typer.BadParameter(
                f"{file}: no command has an option {key}; {hint} "
                "(`scanloom COMMAND --help` lists all)"
            )
    return settings | sections.get(_command_name(ctx), {})


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

    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1).decode("utf-8")
        if len(text) > MAX_CONFIG_BYTES:
            raise typer.BadParameter(f"{file} is too large for a configuration")
        document = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except OSError as exc:
        raise typer.BadParameter(f"{file} can't be read ({type(exc).__name__})") from exc
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise typer.BadParameter(f"{file} is not valid YAML{where}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        form = "TOML" if file.suffix == ".toml" else "YAML"
        raise typer.BadParameter(f"{file} is not valid {form}") from exc
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
    return texts if option.multiple else ",".join(texts)


def _text(value: Any) -> str:
    """Return a scalar as text; YAML and TOML read yes and no as booleans.

    A path that begins with ~ is in the home folder, as a shell would read it.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return os.path.expanduser(value) if str(value).startswith("~/") else str(value)  # noqa: PTH111
