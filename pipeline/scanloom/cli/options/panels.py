"""Commands that take panels: dataclasses whose fields are options.

An option is written once, as a field of a panel:

    @dataclass(frozen=True)
    class DeviceOptions:
        panel: ClassVar[str] = "Device"
        device: Annotated[str, typer.Option(help="...")] = "auto"

    @takes_panels
    def segment(scans: ScanOptions, device: DeviceOptions) -> None: ...

typer sees one parameter for each field; the command is called with the panels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import OptionInfo


def takes_panels(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one keyword parameter for each field of its panels."""
    hints = get_type_hints(command, include_extras=True)
    panels: dict[str, type] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            panels[name] = hints[name]
            flat += _parameters(hints[name])
        else:
            flat.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
    names = {name: [field.name for field in fields(panels[name])] for name in panels}
    inside = {field for listed in names.values() for field in listed}

    @functools.wraps(command)
    def flattened(**values: Any) -> None:
        filled = {
            name: panel(**{field: values[field] for field in names[name]})
            for name, panel in panels.items()
        }
        own = {name: value for name, value in values.items() if name not in inside}
        command(**own, **filled)

    del flattened.__wrapped__
    flattened.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # for typer
    return flattened


def _parameters(panel: type[Any]) -> list[inspect.Parameter]:
    """Return a parameter for each field of a panel."""
    hints = get_type_hints(panel, include_extras=True)
    parameters = []
    for field in fields(panel):
        kind, info = get_args(hints[field.name])
        info = copy(info)
        if isinstance(info, OptionInfo):
            info.rich_help_panel = panel.panel
        required = field.default is MISSING
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if required else field.default,
                annotation=Annotated[kind, info],
            )
        )
    return parameters
