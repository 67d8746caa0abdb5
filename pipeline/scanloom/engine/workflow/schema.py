"""`Workflow`: the description of a run over an archive, read from a YAML or JSON file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from scanloom.core import (
    ComputeOptions,
    Outputs,
    ReadOptions,
    Reason,
    Relations,
    ScanError,
    parse_bytes,
)
from scanloom.engine.workflow.error_messages import duplicate_keys, explain_error
from scanloom.engine.workflow.relations import (
    Crops,
    Ensembles,
    Restrictions,
    Shares,
    Unions,
    make_relations,
)
from scanloom.engine.workflow.section import Section, WordList, comma_separated, listed
from scanloom.io.system.regular_files import read_regular_file
from scanloom.options import EXTRAS, Modality

MAX_WORKFLOW_BYTES = 1 << 20
"""A workflow is a page of text."""

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Units of durations, in seconds."""
_WALLTIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _seconds(value: object) -> object:
    """Return a number with a unit of time in seconds; plain numbers are kept as they are."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None and not match[2]:
        return value
    if match is None or match[2] not in _SECONDS:
        units = ", ".join(_SECONDS)
        raise ValueError(f"a number with one of the units {units}, such as 20 min")
    return float(match[1]) * _SECONDS[match[2]]


def _walltime(value: object) -> object:
    """Return a duration in seconds; HH:MM:SS and D-HH:MM:SS of batch systems are allowed too."""
    match = _WALLTIME.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return _seconds(value)
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


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
Walltime = Annotated[
    float, Field(gt=0), BeforeValidator(_walltime, json_schema_input_type=float | str)
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


class Results(Section, Outputs, frozen=True):
    """Files that are written for each case."""

    # mypy cannot evaluate a literal of the names of a table
    also: Annotated[tuple[Literal[*EXTRAS], ...], BeforeValidator(comma_separated)] = ()  # type: ignore[valid-type]
    structures: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = ()


class Cluster(Section, frozen=True):
    """Workers of `--cluster`, in the terms of dask-jobqueue. See docs/clusters.md."""

    queue: str | None = Field(default=None, description="slurm: the partition")
    account: str | None = Field(default=None, description="slurm: account to charge")
    walltime: Walltime | None = Field(
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
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        examples=["cuda:0"],
        description="auto, cpu, cuda, cuda:N",
    )
    time_limit: Seconds = Field(
        default=3600.0, description="Longest time for a case: 90 s, 20 min, 2 h"
    )
    memory_limit: Bytes | None = Field(default=None, description="Memory limit of a worker: 8 GiB")
    cluster: Cluster = Field(default=Cluster(), description=Cluster.__doc__)


class Workflow(Section, frozen=True):
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
    crop_by: Crops = Field(default={})
    restrict_to: Restrictions = Field(default={})
    ensembles: Ensembles = Field(default={})
    unite: Unions = Field(default={})
    shares: Shares = ()
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
        return self.outputs.options(Outputs)

    @property
    def relations(self) -> Relations:
        """Relations between the models."""
        relations = (self.crop_by, self.restrict_to, self.ensembles, self.unite, self.shares)
        return make_relations(*relations)

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
        mistakes = [explain_error(Workflow, None, dict(error)) for error in exc.errors()]
        raise ScanError(Reason.WORKFLOW, "; ".join(mistakes)) from None


def read_workflow(path: Path) -> Workflow:
    """Read a workflow from a YAML or JSON file.

    Raises
    ------
    ScanError
        WORKFLOW, with line, key, expected value and nearest valid word for each mistake.
    """
    try:
        raw = read_regular_file(path, MAX_WORKFLOW_BYTES)
    except OSError as exc:
        raise ScanError(Reason.WORKFLOW, f"the file can't be read ({type(exc).__name__})") from exc
    if len(raw) > MAX_WORKFLOW_BYTES:
        raise ScanError(Reason.WORKFLOW, "the file is too large for a workflow")
    return parse_workflow(raw)


def parse_workflow(text: bytes | str) -> Workflow:
    """Read a workflow from text; see `read_workflow`."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
        mistakes = duplicate_keys(node)
    except RecursionError as exc:
        detail = "not valid YAML: it is nested too deeply, or an alias contains itself"
        raise ScanError(Reason.WORKFLOW, detail) from exc
    except (yaml.YAMLError, ValueError) as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(exc, "problem", None) or "it can't be parsed"
        raise ScanError(Reason.WORKFLOW, f"{where}not valid YAML: {problem}") from exc
    if not isinstance(document, dict):
        raise ScanError(Reason.WORKFLOW, "a workflow is a mapping of keys to values")
    try:
        workflow = Workflow.model_validate(document)
    except ValidationError as exc:
        mistakes += [explain_error(Workflow, node, dict(error)) for error in exc.errors()]
        raise ScanError(Reason.WORKFLOW, "; ".join(mistakes)) from None
    if mistakes:
        raise ScanError(Reason.WORKFLOW, "; ".join(mistakes))
    return workflow


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
