"""Commands that take panels: dataclasses whose fields are options.

An option is written once, as a field of a panel:

    @dataclass(frozen=True)
    class InputPanel:
        panel: ClassVar[str] = "Input"
        archives: Annotated[bool, typer.Option(help="...")] = False

    @takes_panels
    def segment(scans: InputPanel, options: SegmentOptions) -> None: ...

or in `scanloom.options`, whose classes are taken like panels. typer sees one parameter for each
field; the command is called with the panels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import chain
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from scanloom.cli.options import values
from scanloom.options import PANELS

Values = Mapping[str, Any]


def takes_panels(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one keyword parameter for each field of its panels, in panel order."""
    hints = get_type_hints(command, include_extras=True)
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            flat += _parameters(hints[name])
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
    flat.sort(key=_panel_number)

    @functools.wraps(command)
    def flattened(**given: Any) -> None:
        command(
            **{
                name: _filled(hint, given) if is_dataclass(hint) else given[name]
                for name, hint in hints.items()
                if name != "return"
            }
        )

    del flattened.__wrapped__
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # for typer
    return flattened


def _panel_number(parameter: inspect.Parameter) -> int:
    """Return the number of a parameter's panel in help; arguments come first."""
    info = get_args(parameter.annotation)[1]
    panel = info.rich_help_panel if isinstance(info, OptionInfo) else None
    return PANELS.index(panel) if panel in PANELS else -1 if panel is None else len(PANELS)


def _parameters(panel: Any) -> list[inspect.Parameter]:
    """Return a parameter for each field of a panel, and of the dataclasses in it."""
    hints = get_type_hints(panel, include_extras=True)
    parameters = []
    for field in fields(panel):
        hint, default = hints[field.name], field.default
        if is_dataclass(hint):
            parameters += _parameters(hint)
            continue
        if "command" in field.metadata:
            kind, info = _command_option(field, hint)
            default = None if default == () else default
        else:
            kind, info = get_args(hint)
            info = copy(info)
            if isinstance(info, OptionInfo):
                info.rich_help_panel = panel.panel
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[kind, info],
            )
        )
    return parameters


def _command_option(field: Field[Any], hint: Any) -> tuple[Any, OptionInfo]:
    """Return the type and the option that typer needs for a field of `scanloom.options`."""
    command, schema = field.metadata["command"], field.metadata["schema"]
    parser = command["parser"] and getattr(values, command["parser"])
    info = typer.Option(
        *command["flags"],
        help=command["help"],
        metavar=command["metavar"],
        parser=parser,
        autocompletion=command["completion"] and getattr(values, command["completion"]),
        rich_help_panel=command["panel"],
        min=None if parser else schema.get("ge"),
        max=None if parser else schema.get("le"),
        case_sensitive=False,
    )
    if get_origin(hint) is not tuple:
        return hint, info
    return list[str] | None, info  # repeated; a parser may give several items of one text


def _filled(panel: Any, given: Values) -> Any:
    """Return a panel with its values, and with the dataclasses in it."""
    hints = get_type_hints(panel)
    arguments = {}
    for field in fields(panel):
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _filled(hints[field.name], given)
            continue
        value = given[field.name]
        if "command" in field.metadata and get_origin(hints[field.name]) is tuple:
            items = [each if isinstance(each, tuple) else (each,) for each in value or ()]
            value = tuple(chain.from_iterable(items))
        arguments[field.name] = value
    return panel(**arguments)
