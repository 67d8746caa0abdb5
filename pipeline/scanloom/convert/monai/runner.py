"""Follow MONAI's runner through a bundle, from the entry `run` to the weights.

An entry counts by what reaches it, and not by its name: `run` starts an evaluator, which has a
network, windows, transforms and handlers; `initialize` and handlers load weights. Nothing is run.
Whatever is reached and not understood is refused, since it might change a label.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from scanloom.convert.files import damaged, truncate, unsupported
from scanloom.convert.monai.config import (
    MAX_DEPTH,
    MAX_STEPS,
    Arguments,
    Component,
    Config,
    Expression,
    Name,
    describe,
    dotted,
    references,
    refusal,
)
from scanloom.core import Reason, ScanError

_MAX_LISTED: Final = 12
"""Largest number of obstacles that a message lists."""


class Obstacles:
    """Errors of a bundle's parts, which are read one after another."""

    def __init__(self) -> None:
        self._errors: list[ScanError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a ScanError that is raised within this block, instead of raising it."""
        try:
            yield
        except ScanError as exc:
            self.add(exc)

    def add(self, *errors: ScanError) -> None:
        """Note errors; the same detail counts once."""
        for error in errors:
            if all(error.detail != known.detail for known in self._errors):
                self._errors.append(error)

    def check(self) -> None:
        """Raise one error that lists all that were noted.

        Raises
        ------
        ScanError
            MODEL_UNSAFE if any error is; otherwise with the reason of the first.
        """
        if not self._errors:
            return
        reasons = [error.reason for error in self._errors]
        reason = Reason.MODEL_UNSAFE if Reason.MODEL_UNSAFE in reasons else reasons[0]
        details = [error.detail for error in self._errors]
        more = len(details) - _MAX_LISTED
        listed = "; ".join(details[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
        raise ScanError(reason, listed)


_HARMLESS: Final = frozenset(
    {
        "gc.collect",
        "logging.info",
        "monai.config.print_config",
        "monai.utils.set_determinism",
        "os.makedirs",
        "print",
        "torch.cuda.empty_cache",
        "torch.manual_seed",
        "torch.set_num_threads",
    }
)
"""Calls that change no label; their arguments must be plain data."""
_BACKENDS: Final = frozenset({"torch.backends.cudnn", "torch.backends.cuda.matmul"})
_MAX_JUMPS: Final = 20
"""Largest number of references from a statement to an expression."""


@dataclass(frozen=True)
class Load:
    """Weights that are loaded into the network.

    Parameters
    ----------
    path : str
        File in the bundle.
    key : str or None
        As in `Weights`.
    """

    path: str
    key: str | None


@dataclass
class Run:
    """Effects of MONAI's runner.

    Parameters
    ----------
    inferer : Component or None
        How the network is applied; None for the whole scan at once.
    transform : any
        Transforms of the dataset, before the network.
    postprocessing : list
        Transforms after the network: of the evaluator, then of its handlers.
    weights : Load or None
        Weights that the network has when the scan reaches it; None if it has random ones.
    """

    inferer: Component | None = None
    transform: Any = None
    postprocessing: list[Any] = field(default_factory=list)
    weights: Load | None = None


@dataclass(frozen=True)
class Start:
    """Start of a run.

    Parameters
    ----------
    evaluator : str
        Path of the evaluator.
    statements : tuple of str
        Paths of the entries that were read as statements.
    loads : list
        Loads of weights before the evaluator starts.
    """

    evaluator: str
    statements: tuple[str, ...]
    loads: list[Any]


def read_start(config: Config, entries: Mapping[str, Any], obstacles: Obstacles) -> Start:
    """Read the statements of a bundle, of which one starts the evaluator.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if nothing starts an evaluator; MODEL_UNSUPPORTED if several are started, or
        for a statement that can't be read.
    """
    run_id = _run_id(entries)
    before, started, ending = (_Statements(config) for _ in range(3))
    # what is evaluated after the run may start another evaluator
    for statements, path in ((before, "initialize"), (ending, "finalize")):
        with obstacles.noted():
            statements.read(path)
    started.read(run_id)
    if before.evaluators or ending.evaluators or len(started.evaluators) != 1:
        count = len(before.evaluators + started.evaluators + ending.evaluators)
        raise unsupported(f"{count} evaluators are started, not one by `{truncate(run_id)}`")
    loads = before.loads + started.loads[: started.loaded_before]
    paths = (*before.read_paths, *started.read_paths, *ending.read_paths)
    return Start(started.evaluators[0], paths, loads)


def read_run(config: Config, start: Start, obstacles: Obstacles) -> Run:
    """Follow a run from its start.

    Parameters
    ----------
    obstacles : Obstacles
        Takes an error for each part that is not understood.
    """
    run = Run()
    for _, engine in start.loads:
        with obstacles.noted():
            if engine is not None and engine is not config.get(start.evaluator):
                raise unsupported(f"a CheckpointLoader gets {describe(engine)}, not the evaluator")
    _read_evaluator(config, run, start, obstacles)
    with obstacles.noted():
        _check_reached(config, start.statements)
    return run


def _run_id(entries: Mapping[str, Any]) -> str:
    """Return the name of the entry that is run: `run`, or the only one that starts an evaluator."""
    if "run" in entries:
        return "run"
    names = [
        name
        for name, entry in entries.items()
        for statement in (entry if isinstance(entry, list) else [entry])
        if isinstance(statement, str) and statement.startswith("$") and ".run()" in statement
    ]
    if len(names) != 1:
        raise damaged('the config has no entry `run`, such as ["$@evaluator.run()"]')
    return names[0]


class _Statements:
    """Expressions that MONAI evaluates one after another.

    Attributes
    ----------
    evaluators : list of str
        Paths of the evaluators that are started.
    loads : list of (Component or Load, Component or None)
        CheckpointLoaders that are called, with the engine that they get, and state dicts.
    loaded_before : int
        Number of loads before the evaluator is started; later ones change no label.
    read_paths : list of str
        Entries that were read as statements.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.evaluators: list[str] = []
        self.loads: list[tuple[Any, Any]] = []
        self.loaded_before = 0
        self.read_paths: list[str] = []

    def read(self, path: str) -> None:
        """Read an entry: an expression or a list of expressions; nothing if it is missing.

        Raises
        ------
        ScanError
            MODEL_UNSAFE for a call that is not on the list; MODEL_UNSUPPORTED for other forms.
        """
        self.read_paths.append(path)
        raw = self.config.raw(path)
        for statement in raw if isinstance(raw, list) else [raw]:
            self._statement(statement, path)

    def _statement(self, raw: Any, path: str) -> None:
        for _ in range(_MAX_JUMPS):
            if not isinstance(raw, str) or not raw.startswith("@"):
                break
            path = (references(raw) or [""])[0]
            self.read_paths.append(path)
            raw = self.config.raw(path)
        if raw is None or (isinstance(raw, str) and raw.startswith(("$import ", "$from "))):
            return  # imports are checked by themselves, wherever they are
        if not isinstance(raw, str) or not raw.startswith("$"):
            raise unsupported(f"{truncate(path)} has {describe(raw)}")
        expression = self.config.parsed(raw[1:].strip())
        self._call(expression, expression.tree)

    def _call(self, expression: Expression, node: ast.expr) -> None:
        refs = expression.references
        match node:
            case ast.Constant():
                return
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = expression.truth(expression.value_of(test))
                self._call(expression, body if chosen else orelse)
                return
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="run"), args=[], keywords=[]
            ) if name in refs:
                self.evaluators.append(self._component_path(refs[name]))
                self.loaded_before = len(self.loads)
                return
            case ast.Call(func=ast.Name(id=name), args=[engine], keywords=[]) if name in refs:
                loader = self.config.get(refs[name])
                if isinstance(loader, Component) and loader.kind == "checkpoint":
                    self.loads.append((loader, expression.value_of(engine)))
                    return
            case ast.Call(
                func=ast.Attribute(value=owner, attr="load_state_dict"),
                args=[source],
                keywords=keywords,
            ) if all(each.arg in ("strict", "assign") for each in keywords):
                self.loads.append((_state_dict(expression, owner, source), None))
                return
            case ast.Call(func=ast.Attribute(value=owner, attr="eval"), args=[], keywords=[]):
                if isinstance(expression.value_of(owner), Component):
                    return
            case ast.Call(func=ast.Attribute(attr="to")):
                expression.value_of(node)
                return
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(), ast.Constant()]
            ):
                if dotted(owner) in _BACKENDS:
                    return
            case ast.Call(func=func, args=args, keywords=keywords) if dotted(func) in _HARMLESS:
                for value in [*args, *(each.value for each in keywords)]:
                    expression.value_of(value)
                return
        raise refusal(expression.text, Reason.MODEL_UNSAFE)

    def _component_path(self, path: str) -> str:
        """Return the path of the component to which a path refers."""
        for _ in range(_MAX_JUMPS):
            raw = self.config.raw(path)
            if not isinstance(raw, str) or not (further := references(raw)):
                break
            if raw.removeprefix("$").strip() != f"@{further[0]}".replace("#", "::"):
                break
            path = further[0]
        return path


@dataclass(frozen=True)
class _StateDict:
    """Call of a network's `load_state_dict`."""

    network: Any
    load: Load


def _state_dict(expression: Expression, owner: ast.expr, source: ast.expr) -> _StateDict:
    """Read ``network.load_state_dict(torch.load(path))``, or of an entry of that file."""
    key = None
    match source:
        case ast.Subscript(value=inner, slice=ast.Constant(value=str() as name)):
            source, key = inner, name
    match source:
        case ast.Call(func=func, args=[file], keywords=keywords) if dotted(
            func
        ) == "torch.load" and all(
            each.arg in ("map_location", "weights_only") for each in keywords
        ):
            path = expression.value_of(file)
            if isinstance(path, str):
                return _StateDict(expression.value_of(owner), Load(path, key))
    raise refusal(expression.text, Reason.MODEL_UNSAFE)


def _read_evaluator(config: Config, run: Run, start: Start, obstacles: Obstacles) -> None:
    """Read the evaluator and its parts, and the weights that it has at last."""
    path, loads = start.evaluator, [load for load, _ in start.loads]

    def component(key: str) -> Any:
        raw = config.raw(path)
        present = isinstance(raw, Mapping) and key in raw
        return config.get(f"{path}::{key}") if present else None

    # each component by itself: a message lists all obstacles of a bundle at once
    handlers: Sequence[Any] = ()
    with obstacles.noted():
        _check_evaluator(config.get(path), path)
    with obstacles.noted():
        run.inferer = component("inferer")
    with obstacles.noted():
        run.transform = _transform(component("val_data_loader"))
    with obstacles.noted():
        value = component("postprocessing")
        run.postprocessing += [] if value is None else [value]
    with obstacles.noted():
        value = component("val_handlers")
        handlers = value if isinstance(value, list) else [] if value is None else [value]
    for handler in handlers:
        with obstacles.noted():
            loads += _handler(handler, run)
    obstacles.add(*config.refused)
    network = None
    with obstacles.noted():
        network = component("network")
    # in the order in which MONAI loads them: the last one counts
    for load in loads if network is not None else ():
        with obstacles.noted():
            run.weights = _load(load, network)


def _handler(handler: Any, run: Run) -> list[Component]:
    """Read a handler; return it if it loads weights."""
    if not isinstance(handler, Component):
        raise unsupported(f"a handler is {describe(handler)}")
    match handler.kind:
        case "checkpoint":
            return [handler]
        case "postprocessing":
            args = Arguments(handler)
            args.only("event", "MODEL_COMPLETED", "model_completed")
            run.postprocessing.append(args.take("transform"))
            args.done()
        case "ignored":
            pass
        case _:
            raise unsupported(f"{handler.name} is not a handler")
    return []


def _check_evaluator(evaluator: Any, path: str) -> None:
    """Refuse an evaluator that does other than apply the network to a scan."""
    if not isinstance(evaluator, Component) or evaluator.kind != "evaluator":
        raise unsupported(f"@{path}, {describe(evaluator)}, is not an evaluator")
    args = Arguments(evaluator)
    args.only("mode", "eval")
    args.only("decollate", True)
    args.only("prepare_batch", Name("default_prepare_batch"))
    args.only("iteration_update", None)
    args.only("compile", False)
    args.only("to_kwargs", None, {})
    args.only("event_names", None)
    args.only("event_to_attr", None)
    args.whole_or_none("epoch_length")
    for key in ("key_val_metric", "additional_metrics"):
        args.take(key)  # measured on labels that are complete; a metric of other code is refused
    # Precision is scanloom's own choice. The other parts are read one by one.
    args.ignore("device", "non_blocking", "amp", "amp_kwargs", "compile_kwargs", "metric_cmp_fn")
    args.ignore("network", "inferer", "val_data_loader", "postprocessing", "val_handlers")
    if evaluator.name == "Vista3dEvaluator":
        args.ignore("hyper_kwargs")  # see `convert.monai.bundle`
    args.done()


def _transform(loader: Any) -> Any:
    """Return the transforms of the dataset of a loader."""
    if not isinstance(loader, Component) or loader.kind != "loader":
        raise unsupported(f"the evaluator's val_data_loader is {describe(loader)}")
    args = Arguments(loader)
    dataset = args.take("dataset")
    if "batch_size" in loader.args and args.whole_or_none("batch_size") is None:
        raise args.refused("batch_size", None)
    args.only("collate_fn", None, Name("list_data_collate"))
    for name in ("sampler", "batch_sampler", "worker_init_fn"):
        args.only(name, None)
    # order, number of workers and memory change no label
    args.ignore("shuffle", "num_workers", "pin_memory", "pin_memory_device", "drop_last")
    args.ignore("timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context")
    args.ignore("generator", "in_order", "use_thread_workers", "buffer_size", "buffer_timeout")
    args.ignore("repeats")
    args.done()
    if not isinstance(dataset, Component) or dataset.kind != "dataset":
        raise unsupported(f"the dataset is {describe(dataset)}")
    args = Arguments(dataset)
    transform = args.take("transform")
    args.ignore("data", "cache_num", "cache_rate", "num_workers", "progress", "copy_cache")
    args.ignore("as_contiguous", "hash_as_key", "hash_func", "runtime_cache")
    args.done()
    return transform


def _load(load: Any, network: Any) -> Load:
    """Return the weights that a CheckpointLoader or a state dict gives the network."""
    if isinstance(load, _StateDict):
        if load.network is not network:
            detail = (
                f"weights are loaded into {describe(load.network)}, not the evaluator's network"
            )
            raise unsupported(detail)
        return load.load
    args = Arguments(load)
    path, objects = args.take("load_path"), args.take("load_dict")
    args.only("strict_shape", True)  # otherwise MONAI skips what does not fit
    # a state dict that lacks a weight is refused anyway
    args.ignore("strict", "map_location", "name")
    args.done()
    if not isinstance(objects, dict) or [*objects.values()] != [network]:
        raise args.refused("load_dict", objects)
    key = next(iter(objects))
    if not isinstance(path, str):
        raise unsupported(f"the weights are {describe(path)}")
    return Load(path, key if isinstance(key, str) else None)


def _check_reached(config: Config, statements: Sequence[str]) -> None:
    """Refuse an expression that is evaluated at home, not understood here, and has a component.

    What has no component, such as a list of files, can't change one.
    """
    for path, text in _expressions(config, statements):
        try:
            config.get(path)
        except ScanError as exc:
            touched = [ref for ref in references(text) if _has_component(config, ref)]
            if touched:
                detail = f"${truncate(text[1:])} refers to @{truncate(touched[0])}"
                raise ScanError(exc.reason, detail) from exc


def _expressions(config: Config, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of the expressions that entries reach, without the entries' own."""
    waiting = [(path, config.raw(path)) for path in paths]
    known = set(paths)
    while waiting:
        if len(known) > MAX_STEPS:
            raise unsupported(f"the config has more than {MAX_STEPS} values")
        path, raw = waiting.pop()
        if path.count("::") > MAX_DEPTH:
            raise unsupported(f"the config is nested deeper than {MAX_DEPTH}")
        further: list[str] = []
        if isinstance(raw, str):
            further = references(raw)
            own = any(path == p or path.startswith(f"{p}::") for p in paths)
            if raw.startswith("$") and not own:
                yield path, raw
        elif isinstance(raw, Mapping):
            further = [f"{path}::{key}" for key in raw if key not in ("_target_", "_desc_")]
        elif isinstance(raw, list):
            further = [f"{path}::{number}" for number in range(len(raw))]
        for each in further:
            name = each.replace("#", "::")
            if name not in known:
                known.add(name)
                waiting.append((name, config.raw(name)))


def _has_component(config: Config, path: str) -> bool:
    """Return whether an entry is a component, holds or refers to one."""
    waiting, known = [config.raw(path)], set()
    while waiting:
        raw = waiting.pop()
        if id(raw) in known:
            continue
        known.add(id(raw))
        if isinstance(raw, Mapping):
            if "_target_" in raw:
                return True
            waiting += raw.values()
        elif isinstance(raw, list):
            waiting += raw
        elif isinstance(raw, str):
            waiting += [config.raw(ref) for ref in references(raw)]
    return False
