"""`Workflow`: the description of a run over an archive, read from a YAML or JSON file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from scanloom.core import (
    ComputeOptions,
    Outputs,
    ReadOptions,
    Reason,
    Relations,
    ScanError,
    WorkflowError,
    did_you_mean,
    is_slug,
    parse_bytes,
)
from scanloom.core.pages import read_yaml
from scanloom.core.relations import Asymmetry, CropBy, ResultOf, Share, StructuresOf, Unite
from scanloom.io.system.regular_files import read_regular_file
from scanloom.options import DEVICES, EXTRAS, FeatureFamily, Modality, Radiomics, take

T = TypeVar("T")


def listed(value: object) -> object:
    """Return a single string as a list of one; other values are kept as they are."""
    return (value,) if isinstance(value, str) else value


def comma_separated(value: object) -> object:
    """Return a text as the names between its commas, as on the command line; refuse an empty one.

    Raises
    ------
    ValueError
        If it has no name.
    """
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names:
        raise ValueError("at least one name; leave the key out for all")
    return names


def _not_empty(value: tuple[T, ...]) -> tuple[T, ...]:
    if not value:
        raise ValueError("at least one of them")
    return value


WordList = Annotated[tuple[str, ...], BeforeValidator(listed)]


class Section(BaseModel, frozen=True):
    """A part of a workflow: unknown keys and infinite numbers are errors, instances immutable.

    A section that inherits from an options class of `scanloom.options` has its fields, with
    their defaults and descriptions; a field that is defined again differs only in its type.
    """

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True, allow_inf_nan=False)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for base in filter(is_dataclass, cls.__bases__):
            hints = get_type_hints(base, include_extras=True)
            for option in fields(base):
                cls.__annotations__.setdefault(option.name, hints[option.name])
                known = {"description": option.metadata["description"], **option.metadata["schema"]}
                default = cls.__dict__.get(option.name, option.default)
                setattr(cls, option.name, Field(default=default, **known))

    def options(self, kind: type[T]) -> T:
        """Return the fields of an options class that this section inherits from."""
        return take(kind, dict(self))


@dataclass
class _Source:
    """The file of a page and its YAML. Pages are equal if they say the same, wherever they do."""

    root: yaml.Node | None = field(default=None, compare=False)
    file: str = field(default="", compare=False)


class Page(Section, frozen=True):
    """A section that is a whole file, and knows the lines of its keys."""

    _source: _Source = PrivateAttr(default_factory=_Source)

    @contextmanager
    def naming_lines(self, *keys: str | int) -> Iterator[None]:
        """Give mistakes that are found after the page was read its file, and the line there.

        Parameters
        ----------
        *keys : str or int
            Where an error that names no key has its cause.
        """
        try:
            yield
        except ScanError as error:
            root, file = self._source.root, self._source.file
            if root is None or error.private:  # which file an error is about may be known already
                raise
            loc = error.keys if isinstance(error, WorkflowError) else keys
            detail = f"line {_line(root, loc)}: {error.detail}"
            raise ScanError(error.reason, detail, file) from error


_EXPECTED = (
    ("int_", "a whole number"),
    ("float_", "a number"),
    ("bool_", "yes or no"),
    ("string_type", "text, in quotes where YAML sees yes, no or a number"),
    ("tuple_type", "a word, or a list of them, in quotes where YAML sees yes, no or a number"),
    ("model_type", "keys and values"),
    ("dataclass_type", "keys and values"),
    ("dict_type", "keys and values"),
)
"""Expected values by the prefix of pydantic's error types."""


P = TypeVar("P", bound=Page)


def explain_errors(
    model: type[BaseModel], root: yaml.Node | None, document: object, errors: ValidationError
) -> list[str]:
    """Return a message for each mistake: line, key, expected value, and the nearest valid word.

    `root` is the YAML of the `document`; None without a file. What is expected of a key that takes
    several kinds of values is told in one message.
    """
    told: dict[str, list[str]] = {}
    found = errors.errors()
    outer = {each["loc"][:n] for each in found for n in range(len(each["loc"]))}
    for error in found:
        if error["type"] == "too_short" and error["loc"] in outer:
            continue  # pydantic does not count entries with mistakes
        where, what = _explain(model, root, document, dict(error))
        told.setdefault(where, []).append(what)
    messages = []
    for where, each in told.items():
        near = [what for what in each if what.startswith(": did you mean")]
        texts = list(dict.fromkeys(near or each))
        if all(text.startswith(_EXPECTS) for text in texts):
            texts = [_EXPECTS + " or ".join(text.removeprefix(_EXPECTS) for text in texts)]
        messages += [where + text for text in texts]
    return messages


_EXPECTS = ": expected "


def _explain(
    model: type[BaseModel], root: yaml.Node | None, document: object, error: Mapping[str, Any]
) -> tuple[str, str]:
    """Return where one of pydantic's errors is, and what it says."""
    loc = tuple(error["loc"])
    names = _names(document, error)
    key = ".".join(names) or "the page"
    where = key if root is None else f"line {_line(root, loc)}: {key}"
    section = _section(model, names[:-1])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument") and section is not None:
        known = sorted(_keys(section))
        return where, f" is not a key here; {did_you_mean(names[-1], known)}"
    field = _field(model, names)
    length = _length(field.annotation if field else None)
    if length and error["type"] in ("tuple_type", "too_long", "missing"):
        return where, f": expected a list of {length}"
    if error["type"] == "missing":
        return where, " is missing"
    allowed = _choices(field.annotation if field else None)
    value = error.get("input")
    if error["type"] == "tuple_type" and _section(model, names) is not None:
        return where, ": expected a list: a - before the keys of each entry"
    if allowed and error["type"] == "tuple_type":
        return where, f": expected one or several of {', '.join(allowed)}"
    if error["type"] == "literal_error" and allowed and isinstance(value, str):
        return where, f": {did_you_mean(value, allowed)}"
    return where, f": expected {_expected(error, field)}"


def _expected(error: Mapping[str, Any], field: FieldInfo | None) -> str:
    kind = str(error["type"])
    if kind == "string_pattern_mismatch" and field is not None and field.description:
        expected = f"{field.description[:1].lower()}{field.description[1:]}"
        return f"{expected}, such as {field.examples[0]}" if field.examples else expected
    if kind == "too_short":
        return f"at least {error['ctx']['min_length']} of them"
    for start, expected in _EXPECTED:
        if kind.startswith(start):
            return expected
    expected = str(error["msg"]).removeprefix("Value error, ")
    return f"{expected[:1].lower()}{expected[1:]}".removeprefix("input should be ")


def _names(document: object, error: Mapping[str, Any]) -> list[str]:
    """Return the keys of an error's location; names of pydantic's validators are none."""
    names, value = [], document
    for entry in error["loc"]:
        if isinstance(value, Mapping):
            if entry in value or error["type"] == "missing":
                names.append(str(entry))
            value = value.get(entry)
        elif isinstance(value, list | tuple) and isinstance(entry, int) and entry < len(value):
            value = value[entry]
    return names


def _line(node: yaml.Node | None, loc: tuple[object, ...]) -> int:
    """Return the line, from 1, of the innermost key of `loc` that the file has."""
    line = 1
    for key_or_index in loc:
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value}
            if str(key_or_index) not in pairs:
                break
            key, node = pairs[str(key_or_index)]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(key_or_index, int):
            if key_or_index >= len(node.value):
                break
            node = node.value[key_or_index]
            line = node.start_mark.line + 1
    return line


def _section(model: type[BaseModel], names: Sequence[str]) -> object:
    """Return the section, a model or dataclass, at a path of keys, or None."""
    kind: object = model
    for name in names:
        kind = get_args(kind)[1] if get_origin(kind) is dict else _keys(kind).get(name)
        if get_origin(kind) is tuple or type(None) in get_args(kind):  # a list, or not needed
            kind = get_args(kind)[0]
    return kind if _keys(kind) else None


def _keys(kind: object) -> dict[str, object]:
    """Return the keys of a section with their types; empty for other types."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {entry.alias or name: entry.annotation for name, entry in kind.model_fields.items()}
    return get_type_hints(kind) if isinstance(kind, type) and is_dataclass(kind) else {}


def _field(model: type[BaseModel], names: Sequence[str]) -> FieldInfo | None:
    section = _section(model, names[:-1])
    if not names or not isinstance(section, type) or not issubclass(section, BaseModel):
        return None
    fields_by_key = {entry.alias or key: entry for key, entry in section.model_fields.items()}
    return fields_by_key.get(names[-1])


def _length(annotation: object) -> int | None:
    """Return the length of lists that an annotation allows, None for any."""
    if get_origin(annotation) is tuple:
        return None if ... in get_args(annotation) else len(get_args(annotation))
    lengths = (_length(each) for each in get_args(annotation))
    return next((each for each in lengths if each), None)


def _choices(annotation: object) -> list[str]:
    """Return the words of all Literals in an annotation."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]


def _checked_slug(value: str) -> str:
    if not is_slug(value):
        raise ValueError("a name of a-z, 0-9, _ and -")
    return value


Name = Annotated[str, AfterValidator(_checked_slug)]


def names_listed(value: object) -> object:
    """Return the relations of a workflow's file with lists of one where a single name stands."""
    if isinstance(value, dict):
        names = ("structures", "of", "left", "right")
        return {
            key: (entry,) if key in names and isinstance(entry, str) else names_listed(entry)
            for key, entry in value.items()
        }
    return [names_listed(entry) for entry in value] if isinstance(value, list) else value


MAX_PAGE_BYTES = 1 << 20
"""A workflow, a recipe or a site is a page of text."""

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Units of durations, in seconds."""
_WALLTIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _seconds(value: object) -> object:
    """Return a duration in seconds: a number with a unit, HH:MM:SS or D-HH:MM:SS.

    Plain numbers are kept as they are.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if (match := _WALLTIME.fullmatch(text)) is not None:  # as batch systems write it
        days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    match = _DURATION.fullmatch(text)
    if match is not None and not match[2]:
        return value
    if match is None or match[2] not in _SECONDS:
        units = ", ".join(_SECONDS)
        raise ValueError(f"a number with one of the units {units}, such as 20 min")
    return float(match[1]) * _SECONDS[match[2]]


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as exc:
        raise ValueError("a regular expression") from exc
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
Patterns = Annotated[tuple[Pattern, ...], BeforeValidator(listed)]
Seconds = Annotated[
    float, Field(gt=0), BeforeValidator(_seconds, json_schema_input_type=float | str)
]
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Count = Annotated[int, Field(ge=1)] | Literal["auto"]
Modalities = Annotated[tuple[Modality, ...], BeforeValidator(listed)]


class Selection(Section, frozen=True):
    """Criteria for the series to segment; a criterion that is not given accepts all."""

    modality: Modalities = Field(default=(), description="CT, MR, PT, NM; one or a list")
    body_part: WordList = Field(
        default=(), description="BodyPartExamined, for example CHEST; any case"
    )
    description: Patterns = Field(
        default=(),
        description="Regular expressions, of which one must match in SeriesDescription; any case",
    )
    not_description: Patterns = Field(
        default=(), description="Regular expressions, of which none may match in SeriesDescription"
    )
    image_type: WordList = Field(
        default=(), description="Words that ImageType must contain, such as ORIGINAL"
    )
    kernel: Patterns = Field(default=(), description="Regular expressions for ConvolutionKernel")
    contrast: bool | None = Field(default=None, description="Whether a contrast agent was used")
    orientation: Literal["axial", "sagittal", "coronal", "any"] = Field(
        default="any", description="Plane nearest to that of the slices"
    )
    min_spacing: float = Field(
        default=0.0, ge=0, description="Smallest distance between slices, mm"
    )
    max_spacing: float | None = Field(default=None, gt=0, description="Largest distance, mm")
    prefer_spacing: float | None = Field(
        default=None, gt=0, description="Preferred distance, mm, when choosing between series"
    )
    min_slices: int = Field(default=3, ge=3, description="Fewest slices")
    choose: Literal["all", "best", "newest"] = Field(
        default="all",
        description="Of the matching series of a study: all, the best or the newest",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_spacing is not None and self.max_spacing < self.min_spacing:
            raise ValueError("max_spacing at least as large as min_spacing")
        return self


class Policy(Section, ReadOptions, frozen=True):
    """Handling of series that are not one complete volume."""

    max_size: Bytes | None = None
    phases: Literal["refuse", "first", "all"] = Field(
        default="refuse",
        description="Several volumes in a series: refuse it, take the first, or take all",
    )


class RadiomicsSettings(Section, Radiomics, frozen=True):
    """Features of `also: radiomics`. See docs/runs.md."""

    families: Annotated[
        tuple[FeatureFamily, ...], AfterValidator(_not_empty), BeforeValidator(comma_separated)
    ] = Radiomics().families


class Results(Section, Outputs, frozen=True):
    """Files that are written for each case."""

    # mypy cannot evaluate a literal of the names of a table
    also: Annotated[tuple[Literal[*EXTRAS], ...], BeforeValidator(comma_separated)] = ()  # type: ignore[valid-type]
    structures: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = ()
    radiomics: RadiomicsSettings = RadiomicsSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.radiomics != RadiomicsSettings() and "radiomics" not in self.also:
            raise ValueError("radiomics among also, since it has settings")
        return self


class Cluster(Section, frozen=True):
    """Workers of `--cluster`, in the terms of dask-jobqueue. See docs/clusters.md."""

    queue: str | None = Field(default=None, description="slurm: the partition")
    account: str | None = Field(default=None, description="slurm: account to charge")
    walltime: Seconds | None = Field(
        default=None, description="slurm: longest time of a job: 24 h, 1-00:00:00"
    )
    cores: int | None = Field(default=None, ge=1, description="slurm: CPU cores of a job")
    memory: Bytes | None = Field(default=None, description="slurm: memory of a job: 32 GiB")
    gpus: int = Field(
        default=0,
        ge=0,
        description="GPUs of a job or host, one worker for each; 0: those found there",
    )
    job_extra_directives: WordList = Field(
        default=(), description="slurm: further options of sbatch, such as --constraint=a100"
    )
    job_script_prologue: WordList = Field(
        default=(),
        description="slurm, ssh: shell commands to run before the worker: module load ...",
    )
    python: str | None = Field(
        default=None,
        description="slurm, ssh: Python interpreter there; by default, the path of this one",
    )
    interface: str | None = Field(
        default=None, description="slurm, ssh: network interface of scheduler and workers: ib0"
    )
    hosts: WordList = Field(default=(), description="ssh: hosts, in the syntax of the ssh client")
    ssh_options: WordList = Field(default=(), description="ssh: options of the client")
    wait: Seconds | None = Field(
        default=None,
        description="Longest wait for the first worker; slurm: as long as the queue takes",
    )
    dashboard: bool = Field(
        default=False, description="Serve Dask's pages on loopback, port 8787, in clear text"
    )


class Execution(Section, ComputeOptions, frozen=True):
    """Execution of the work. Only `device` and the options of networks can change a result."""

    workers: Count = Field(
        default="auto",
        description="Processes with a device each; auto: one for each GPU, or one on the CPU",
    )
    threads: Count = Field(
        default="auto", description="CPU threads per worker; auto: the cores divided by the workers"
    )
    in_flight: int = Field(default=3, ge=1, le=8, description="Most concurrent cases in a worker")
    device: str = Field(
        default="auto",
        pattern=f"^({DEVICES})$",
        examples=["cuda:0"],
        description="auto, cpu, cuda, cuda:N, mps, xpu, xpu:N",
    )
    time_limit: Seconds = Field(
        default=3600.0, description="Longest time for a case: 90 s, 20 min, 2 h"
    )
    memory_limit: Bytes | None = Field(default=None, description="Memory limit of a worker: 8 GiB")
    cluster: Cluster = Field(default=Cluster(), description=Cluster.__doc__)


class Workflow(Page, frozen=True):
    """A run over an archive: series, models, files to write, and execution."""

    name: str = Field(
        pattern="^[a-z0-9][a-z0-9_-]{0,63}$", examples=["chest_ct"], description="A slug"
    )
    models: Annotated[WordList, Field(min_length=1)] = Field(
        description="Models from the store, or bundle folders; all of them run on each case"
    )
    select: Selection = Field(default=Selection(), description=Selection.__doc__)
    channels: dict[str, Selection] = Field(
        default={},
        description="For models with several inputs: criteria for the series of a study for each "
        "input, by its name and in the model's order; `select` applies to all of them",
    )
    results: dict[Name, ResultOf] = Field(
        default={},
        description="Models whose results have names of their own, by that name: a model may have "
        "several, such as one for each side of the body",
    )
    crop_by: Annotated[dict[Name, CropBy], BeforeValidator(names_listed)] = Field(
        default={},
        description="Models that run on the box around structures of another model, by name",
    )
    restrict_to: Annotated[dict[Name, StructuresOf], BeforeValidator(names_listed)] = Field(
        default={},
        description="Models whose labels outside structures of another model become background, "
        "by name",
    )
    ensembles: dict[Name, Annotated[WordList, Field(min_length=2)]] = Field(
        default={},
        description="Models of equal structures and grid whose scores are averaged, by the name of "
        "their result",
    )
    unite: Annotated[dict[Name, Unite], BeforeValidator(names_listed)] = Field(
        default={},
        description="Label maps of structures of several models, by name; they take the place of "
        "the models' own results",
    )
    shares: Annotated[tuple[Share, ...], BeforeValidator(names_listed)] = Field(
        default=(), description="Volumes to measure as shares of other volumes"
    )
    asymmetries: Annotated[tuple[Asymmetry, ...], BeforeValidator(names_listed)] = Field(
        default=(), description="Volumes of two sides to measure the asymmetry of"
    )
    policy: Policy = Field(default=Policy(), description=Policy.__doc__)
    outputs: Results = Field(default=Results(), description=Results.__doc__)
    execution: Execution = Field(default=Execution(), description=Execution.__doc__)

    @property
    def read_options(self) -> ReadOptions:
        """Options for reading scans."""
        return self.policy.options(ReadOptions)

    @property
    def output_options(self) -> Outputs:
        """Files that are written for a case."""
        settings = self.outputs.radiomics.options(Radiomics)
        return take(Outputs, {**dict(self.outputs), "radiomics": settings})

    @property
    def relations(self) -> Relations:
        """Relations between the models."""
        return take(Relations, dict(self))

    @property
    def computed_labels(self) -> tuple[str, ...]:
        """Labels that the models must find; empty for all."""
        return self.relations.labels_to_compute(self.outputs.structures)

    @property
    def compute_options(self) -> ComputeOptions:
        """Options for running networks."""
        return self.execution.options(ComputeOptions)


def make_workflow(**sections: object) -> Workflow:
    """Return a workflow from its parts, as they would stand in a file.

    Raises
    ------
    ScanError
        WORKFLOW, as `read_workflow`.
    """
    try:
        return Workflow.model_validate(sections)
    except ValidationError as exc:
        mistakes = explain_errors(Workflow, None, sections, exc)
        raise ScanError(Reason.WORKFLOW, "; ".join(mistakes)) from None


def read_workflow(path: Path) -> Workflow:
    """Read a workflow from a YAML or JSON file.

    Raises
    ------
    ScanError
        WORKFLOW, with line, key, expected value and nearest valid word for each mistake.
    """
    return read_page(path, Workflow, Reason.WORKFLOW)


def parse_workflow(text: bytes | str) -> Workflow:
    """Read a workflow from text; see `read_workflow`."""
    return parse_page(text, Workflow, Reason.WORKFLOW)


def read_page(path: Path, model: type[P], reason: Reason) -> P:
    """Read a page of YAML or JSON from a file; errors as in `parse_page`, with the file."""
    try:
        raw = read_regular_file(path, MAX_PAGE_BYTES)
    except OSError as exc:
        detail = f"the file can't be read ({type(exc).__name__})"
        raise ScanError(reason, detail, str(path)) from exc
    if len(raw) > MAX_PAGE_BYTES:
        raise ScanError(reason, f"the file is too large for a {reason.code.lower()}", str(path))
    try:
        page = parse_page(raw, model, reason)
    except ScanError as error:
        raise error.about(str(path)) from None
    page._source.file = str(path)
    return page


def parse_page(text: bytes | str, model: type[P], reason: Reason) -> P:
    """Read a page of YAML or JSON as a model of its keys.

    Raises
    ------
    ScanError
        `reason`, with line, key, expected value and nearest valid word for each mistake.
    """
    try:
        node, document, mistakes = read_yaml(text)
    except RecursionError as exc:
        detail = "not valid YAML: nested too deeply, or an alias contains itself or too much"
        raise ScanError(reason, detail) from exc
    except (yaml.YAMLError, ValueError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(exc, "problem", None) or "it can't be parsed"
        raise ScanError(reason, f"{where}not valid YAML: {problem}") from exc
    if not isinstance(document, dict):
        raise ScanError(reason, f"a {reason.code.lower()} is a mapping of keys to values")
    try:
        page = model.model_validate(document)
    except ValidationError as exc:
        mistakes += explain_errors(model, node, document, exc)
        raise ScanError(reason, "; ".join(mistakes)) from None
    if mistakes:
        raise ScanError(reason, "; ".join(mistakes))
    page._source.root = node
    return page


def parse_stored_workflow(text: bytes | str) -> Workflow:
    """Read the workflow that a run stored: JSON.

    Raises
    ------
    ScanError
        WORKFLOW, as `read_workflow`.
    """
    try:
        document = json.loads(text)
    except ValueError as exc:
        raise ScanError(Reason.WORKFLOW, "the stored workflow is not JSON") from exc
    if not isinstance(document, dict):
        raise ScanError(Reason.WORKFLOW, "the stored workflow is not a JSON object")
    return make_workflow(**document)
