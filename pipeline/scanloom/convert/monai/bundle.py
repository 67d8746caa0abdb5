"""Read a MONAI bundle as a `ModelCard`: its files are data, and no code in them runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from scanloom.cards import card
from scanloom.convert.files import (
    MAX_BYTES,
    NO_OPTIONS,
    TORCHSCRIPT,
    damaged,
    find_file,
    read_license,
    truncate,
    unsafe,
    unsupported,
)
from scanloom.convert.monai.allow_list import check_imports, judge_network, judge_target
from scanloom.convert.monai.config import Config, describe, is_whole, read_entries, set_entries
from scanloom.convert.monai.metadata import (
    METADATA,
    Metadata,
    ScanloomFields,
    TensorFormat,
    one_line,
    read_metadata,
)
from scanloom.convert.monai.network import (
    read_channels,
    read_inferer,
    read_network,
    read_output,
    read_structures,
)
from scanloom.convert.monai.postprocessing import Postprocessing, read_postprocessing
from scanloom.convert.monai.preprocessing import Preprocessing, read_preprocessing
from scanloom.convert.monai.runner import Load, Obstacles, Run, read_run, read_start
from scanloom.convert.unread import unread_error
from scanloom.convert.weights import find_weights, load_torch
from scanloom.core import Reason, ScanError, Structure, did_you_mean, format_bytes, slug
from scanloom.core.measurement import Range, ReferenceRange

MAX_VALUES: Final = 10_000
"""Largest number of values of an array; those of DiNTS have 120."""


def read_weights_file(folder: Path, load: Load, pinned: str | None) -> card.Weights:
    """Return the weights file that the run loads, with its SHA-256.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the file lies outside the bundle or is a program; MODEL_DAMAGED if it is
        missing or too large; MODEL_HASH if its hash is not `pinned`.
    """
    path = PurePosixPath(load.path)
    file = find_file(folder, str(path))
    if file is None and path.name:
        file = find_file(folder, str(path.with_suffix(".safetensors")))
    if file is None:
        program = find_file(folder, str(path.with_suffix(".ts"))) if path.name else None
        more = f", but for {truncate(program.name)}: {TORCHSCRIPT}" if program else ""
        raise damaged(f"the weights {truncate(str(path))} are missing{more}")
    if file.suffix not in (".pt", ".pth", ".safetensors"):
        more = f": {TORCHSCRIPT}" if file.suffix in (".ts", ".pt2") else ""
        raise unsafe(f"{truncate(str(path))} is not a state dict{more}")
    weights = find_weights(file, load.key, "the weights file")
    if pinned is not None and weights.sha256 != pinned:
        detail = f"the weights have SHA-256 {weights.sha256[:12]}..., not {pinned[:12]}..."
        raise ScanError(Reason.MODEL_HASH, detail)
    return weights


def read_arrays(folder: Path, name: str) -> dict[str, Any]:
    """Return the arrays of a bundle's `.pt` file as nested lists, and its numbers, by name.

    DiNTS keeps its architecture in such a file.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if the file holds anything but arrays, numbers, texts and containers, or lies
        outside the bundle; MODEL_DAMAGED if it is missing, too large or not PyTorch's.
    """
    file = find_file(folder, name)
    if file is None:
        raise damaged(f"{truncate(name)} is missing")
    if file.stat().st_size > MAX_BYTES:
        raise damaged(f"{truncate(name)} is larger than {format_bytes(MAX_BYTES)}")
    content = load_torch(file, truncate(name), device="meta")
    if not isinstance(content, dict):
        raise damaged(f"{truncate(name)} has no entries")
    return {key: _plain(value) for key, value in content.items() if isinstance(key, str)}


def _plain(value: Any) -> Any:
    """Return a NumPy array or number as nested lists or a number; other plain data as it is."""
    if value is None or isinstance(value, str | int | float | list | tuple | dict):
        return value
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf":
        raise unsafe("an array holds objects, not numbers")
    if value.size > MAX_VALUES:
        raise damaged("an array has more values than an architecture")
    return value.tolist()


LAST_CLASS: Final = 132
"""Largest number of a class that the network knows without clicks."""
_NOT_ALONE: Final = frozenset({2, 16, 18, 20, 21, 129, 130, 131})
"""Classes that are refused as prompts, or stand for several others."""


_EVERYTHING: Final = re.compile(
    r"\$list\(set\(\[(\w+)\+1for\1inrange\((\d+)\)\]\)-set\(\[([\d,]*)\]\)\)", re.ASCII
)
"""Its form without spaces: all classes up to a number, without some."""


def everything(text: Any) -> tuple[int, ...]:
    """Return the classes of the bundle's `everything_labels`.

    Raises
    ------
    ScanError
        MODEL_UNSAFE if it is neither a list of numbers nor
        ``$list(set([i+1 for i in range(n)]) - set([...]))``.
    """
    numbers = text
    match = _EVERYTHING.fullmatch("".join(text[:500].split())) if isinstance(text, str) else None
    if match and int(match[2]) <= LAST_CLASS:
        dropped = set(map(int, filter(None, match[3].split(","))))
        numbers = [n for n in range(1, int(match[2]) + 1) if n not in dropped]
    if not isinstance(numbers, list) or not all(_is_class(n) for n in numbers):
        raise unsafe(f"everything_labels is {truncate(str(text))}")
    return tuple(sorted(set(numbers)))


def _is_class(value: Any) -> bool:
    return is_whole(value) and 1 <= value <= LAST_CLASS


def choose(
    classes: Sequence[int], output: TensorFormat, class_names: str | None
) -> tuple[int, ...]:
    """Return the classes that are asked for, by their names joined with "+"; all by default.

    Raises
    ------
    ScanError
        MODEL_UNKNOWN, with similar names, if there is no such class.
    """
    if class_names is None:
        return tuple(classes)
    numbers = {
        _normalized(name): int(key)
        for key, name in output.channel_def.items()
        if key.isdecimal() and _is_class(int(key)) and int(key) not in _NOT_ALONE
    }
    unknown = [name for name in class_names.split("+") if _normalized(name) not in numbers]
    if unknown:
        hint = did_you_mean(_normalized(unknown[0]), sorted(numbers))
        raise ScanError(Reason.MODEL_UNKNOWN, f"there is no class {unknown[0]!r}; {hint}")
    return tuple(sorted({numbers[_normalized(name)] for name in class_names.split("+")}))


def _normalized(name: str) -> str:
    return "_".join(name.lower().split())


def output_of(classes: Sequence[int], output: TensorFormat) -> TensorFormat:
    """Return the format of the scores: the background, then the classes in their order.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a class has no name.
    """
    names = {"0": "background"}
    for channel, number in enumerate(classes, 1):
        name = output.channel_def.get(str(number))
        if name is None:
            raise damaged(f"class {number} has no name in channel_def")
        names[str(channel)] = name
    return TensorFormat(
        num_channels=len(names), modality=output.modality, channel_def=names, label_def={}
    )


STRUCTURES_OPTION: Final = "structures"
"""Option that chooses the classes of VISTA3D, by names joined with "+"."""


def is_bundle(folder: Path) -> bool:
    """Return whether a folder has the layout of a MONAI bundle: a folder `configs`."""
    return (folder / "configs").is_dir()


def read_bundle(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> card.ModelCard:
    """Read a MONAI bundle.

    Parameters
    ----------
    folder : Path
        Contains `configs/metadata.json`, `configs/inference.json` (or `.yaml`) and `models/`.
    options : mapping
        Values for entries of the config, see `set_entries`; for VISTA3D also "structures".

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file or entry is missing or files contradict each other; MODEL_UNSAFE
        if code would have to run, a file is a link out of the bundle, or the weights would expand
        excessively when read; MODEL_NETWORK if the network is not on the allow-list;
        MODEL_UNSUPPORTED if a card can't express the bundle; MODEL_HASH if the weights do not have
        the SHA-256 in the metadata; MODEL_UNKNOWN for an option that the bundle does not have. The
        detail lists all obstacles that were found.
    """
    if not any((folder / "configs").glob("inference.*")) and not (folder / METADATA).exists():
        raise unread_error(folder) or damaged("configs has no inference.json and no metadata.json")
    metadata = read_metadata(folder)
    chosen = dict(options)
    classes = chosen.pop(STRUCTURES_OPTION, None)
    # paths of the config are those in the bundle, wherever it lies
    entries = {**set_entries(read_entries(folder), chosen), "bundle_root": "."}
    obstacles = Obstacles()
    content = _read_content(folder, entries, metadata, obstacles)
    obstacles.check()
    content = _with_prompts(content, entries, classes)
    before, after = content.before, content.after
    structures = read_structures(
        content.output, after.decision, metadata.scanloom.structures, after.rests
    )
    model = card.ModelCard(
        name=slug(folder.resolve().name) or slug(metadata.name) or "model",
        version=metadata.version,
        title=metadata.name or one_line(folder.resolve().name),
        description=metadata.description or metadata.task,
        intended_use=metadata.intended_use,
        license=metadata.scanloom.license or metadata.license or read_license(folder),
        attribution=metadata.scanloom.attribution or _attribution(metadata),
        channels=read_channels(metadata, content.network, before.sources, before.clicks),
        network=_without_clicks(content.network, before.clicks),
        weights=read_weights_file(folder, content.weights, metadata.scanloom.weights_sha256),
        grid=before.grid,
        window=content.window,
        structures=structures,
        before=tuple(before.before),
        after=tuple(before.after),
        activation=after.activation,
        decision=after.decision,
        restore=after.restore,
        cleaning=after.cleaning,
        checks=_checks(metadata),
        precisions=metadata.scanloom.precisions,
        air_below=metadata.scanloom.air_below,
        kernel=metadata.scanloom.kernel,
        flags=after.flags,
    )
    try:
        return replace(model, **_said(metadata.scanloom, structures))
    except ValueError as exc:  # of a check of the card, in our own words
        raise damaged(f"{METADATA}: {exc}") from exc


def _said(stated: ScanloomFields, structures: Sequence[Structure]) -> dict[str, Any]:
    """Return the fields of a card that change no label, such as known errors and usual values."""
    ranges = stated.reference_ranges
    return {
        "fast": stated.fast and card.FastPreset(**dict(stated.fast)),
        "limitations": tuple(
            card.Limitation(each) if isinstance(each, str) else card.Limitation(**dict(each))
            for each in stated.limitations
        ),
        "reference_ranges": tuple(
            ReferenceRange(**{**dict(each), "range": Range(*each.range)}) for each in ranges
        ),
        "reference_directions": tuple(
            card.ReferenceDirection(**dict(each)) for each in stated.reference_directions
        ),
        "on_request": tuple(
            each.label
            for each in structures
            if each.label in stated.structures and stated.structures[each.label].on_request
        ),
    }


@dataclass(frozen=True)
class _BundleContent:
    """Content of a bundle's configs, as it was read."""

    weights: Load
    evaluator: Any
    network: card.NetworkSpec
    before: Preprocessing
    window: card.Window
    output: TensorFormat
    after: Postprocessing


def _read_content(
    folder: Path, entries: Mapping[str, Any], metadata: Metadata, obstacles: Obstacles
) -> _BundleContent:
    """Read the parts that the run reaches; errors are noted, the result is then meaningless."""
    # the network is judged by a stricter list than other parts: only networks may be in it
    load, find = partial(read_arrays, folder), partial(find_file, folder)
    config = Config(entries, partial(judge_target, folder), load, find)
    networks = Config(entries, partial(judge_network, folder), load, find)
    run, network = Run(), card.NetworkSpec("", {})
    evaluator: Any = None
    with obstacles.noted():
        start = read_start(config, entries, obstacles)
        evaluator = config.raw(start.evaluator)
        with obstacles.noted():
            path = f"{start.evaluator}::network"
            present = isinstance(evaluator, Mapping) and "network" in evaluator
            network = read_network(networks.get(path) if present else None)
        run = read_run(config, start, obstacles)
    with obstacles.noted():
        check_imports(folder, entries)
    before = Preprocessing()
    with obstacles.noted():
        inputs = metadata.network_data_format.inputs.values()
        most = max((each.num_channels for each in inputs), default=1)
        before = read_preprocessing(run.transform, most, obstacles)
    window = card.Window(None)
    with obstacles.noted():
        window = read_inferer(run.inferer)
        _check_dimensions(network, window)
    if not obstacles:
        with obstacles.noted():
            read_channels(metadata, network, before.sources, before.clicks)
    output = TensorFormat(num_channels=1)
    with obstacles.noted():
        output = read_output(metadata, network)
        if len(window.mirrored_channels) not in (0, output.num_channels):
            channels = f"{len(window.mirrored_channels)} channels of {output.num_channels}"
            raise unsupported(f"the mean with the mirrored scan is of {channels}")
    # values without meaning, which obstacles keep from being used
    after = Postprocessing(None, card.Argmax(), "scores", ())
    with obstacles.noted():
        after = read_postprocessing(
            run.postprocessing, before, run.transform, network, output.num_channels, obstacles
        )
    obstacles.add(*config.refused)
    if run.weights is None and not obstacles:
        loader = "as a CheckpointLoader among the evaluator's val_handlers does"
        detail = f"nothing that `run` reaches loads weights into the network, {loader}"
        obstacles.add(unsupported(detail))
    return _BundleContent(
        run.weights or Load("", None), evaluator, network, before, window, output, after
    )


def _check_dimensions(network: card.NetworkSpec, window: card.Window) -> None:
    """Refuse a two-dimensional network without planes, or a three-dimensional one with them."""
    dimensions = network.args.get("spatial_dims", 3)
    if network.name and dimensions != (3 if window.plane is None else 2):
        raise unsupported(f"{network.name} of {describe(dimensions)} dimensions with such windows")


def _with_prompts(
    content: _BundleContent, entries: Mapping[str, Any], class_names: str | None
) -> _BundleContent:
    """Return the content with VISTA3D's classes: those that a user chooses, or all."""
    if content.network.name != "Vista3d":
        if class_names is not None:
            detail = f"the model has no option {STRUCTURES_OPTION!r}: its classes are fixed"
            raise ScanError(Reason.MODEL_UNKNOWN, detail)
        return content
    classes = everything(_everything_labels(content.evaluator, entries))
    classes = choose(classes, content.output, class_names)
    args = {**content.network.args, "classes": list(classes)}
    return replace(
        content,
        network=card.NetworkSpec("Vista3d", args),
        output=output_of(classes, content.output),
    )


def _everything_labels(evaluator: Any, entries: Mapping[str, Any]) -> Any:
    """Return the classes that VISTA3D's evaluator means by "everything", as the config has them."""
    prompts = evaluator.get("hyper_kwargs")
    labels = prompts.get("everything_labels") if isinstance(prompts, dict) else None
    if labels is None or set(prompts) != {"user_prompt", "everything_labels"}:
        raise unsupported(f"hyper_kwargs is {describe(prompts)}")
    if prompts["user_prompt"] is not True:
        raise unsupported("hyper_kwargs of VISTA3D without user_prompt")
    if isinstance(labels, str) and labels.startswith("@"):
        return entries.get(labels[1:])
    return labels


def _without_clicks(network: card.NetworkSpec, clicks: int | None) -> card.NetworkSpec:
    """Return the network that adds empty channels in the place of clicks."""
    if clicks is None:
        return network
    if network.name != "DynUNet":
        raise unsupported(f"clicks with {network.name}")
    return card.NetworkSpec("DynUNetWithoutClicks", network.args)


def _checks(metadata: Metadata) -> card.Checks:
    fields = metadata.scanloom.checks
    ranges = {}
    for name in ("low", "high", "spacing", "extent"):
        pair = getattr(fields, name)
        if pair is not None and not pair[0] <= pair[1]:
            raise damaged(f"scanloom.checks.{name} is empty")
        ranges[name] = None if pair is None else Range(*pair)
    return card.Checks(
        **ranges, tilt=fields.tilt, refuse=fields.refuse, hounsfield=fields.hounsfield
    )


def _attribution(metadata: Metadata) -> str:
    texts = [metadata.authors, metadata.copyright, metadata.data_source]
    return ". ".join(text.strip().rstrip(".") for text in texts if text.strip())
