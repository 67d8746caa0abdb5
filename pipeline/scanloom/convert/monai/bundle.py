"""Read a MONAI bundle as a `ModelCard`: its files are data, and no code in them runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from scanloom.cards.card import (
    Argmax,
    Checks,
    FastPreset,
    ModelCard,
    NetworkSpec,
    Range,
    ReferenceRange,
    Window,
)
from scanloom.convert.files import find_file, read_text
from scanloom.convert.monai.allow_list import judge_network, judge_target
from scanloom.convert.monai.checkpoint import read_arrays, read_weights_file
from scanloom.convert.monai.config.arguments import describe
from scanloom.convert.monai.config.entries import read_entries, set_entries
from scanloom.convert.monai.config.parser import Config
from scanloom.convert.monai.inferer import read_inferer
from scanloom.convert.monai.known_scripts import check_imports
from scanloom.convert.monai.metadata import (
    METADATA,
    Metadata,
    TensorFormat,
    one_line,
    read_metadata,
)
from scanloom.convert.monai.network import read_channels, read_network, read_output
from scanloom.convert.monai.obstacles import Obstacles
from scanloom.convert.monai.postprocessing import Postprocessing, read_postprocessing
from scanloom.convert.monai.preprocessing import Preprocessing, read_preprocessing, unsupported
from scanloom.convert.monai.runner import Load, Run, read_run, read_start
from scanloom.convert.monai.structures import read_structures
from scanloom.convert.monai.vista import choose, everything, output_of
from scanloom.core import Reason, ScanError, Structure, slug

STRUCTURES_OPTION: Final = "structures"
"""Option that chooses the classes of VISTA3D, by names joined with "+"."""
NO_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({})


def is_bundle(folder: Path) -> bool:
    """Return whether a folder has the layout of a MONAI bundle: a folder `configs`."""
    return (folder / "configs").is_dir()


def read_bundle(folder: Path, options: Mapping[str, str] = NO_OPTIONS) -> ModelCard:
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
    metadata = read_metadata(folder)
    chosen = dict(options)
    classes = chosen.pop(STRUCTURES_OPTION, None)
    entries = {**set_entries(read_entries(folder), chosen), "bundle_root": "."}
    obstacles = Obstacles()
    content = _read_content(folder, entries, metadata, obstacles)
    obstacles.check()
    content = _with_prompts(content, metadata, entries, classes)
    before, after = content.before, content.after
    structures = read_structures(
        content.output, after.decision, metadata.scanloom.structures, after.rests
    )
    return ModelCard(
        name=slug(folder.resolve().name) or slug(metadata.name) or "model",
        version=metadata.version,
        title=metadata.name or one_line(folder.resolve().name),
        description=metadata.description or metadata.task,
        intended_use=metadata.intended_use,
        license=metadata.scanloom.license or metadata.license or _license(folder),
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
        fast=_fast(metadata),
        flags=after.flags,
        limitations=metadata.scanloom.limitations,
        reference_ranges=_reference_ranges(metadata, structures),
    )


def _reference_ranges(
    metadata: Metadata, structures: Sequence[Structure]
) -> tuple[ReferenceRange, ...]:
    """Return the usual measurements of the structures.

    Raises
    ------
    ScanError
        MODEL_DAMAGED for a structure that the model does not have.
    """
    labels = {structure.label for structure in structures}
    for fields in metadata.scanloom.reference_ranges:
        if fields.structure not in labels:
            detail = f"{METADATA}: reference range of {fields.structure}, which the model lacks"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
    return tuple(
        ReferenceRange(each.structure, each.quantity, Range(*each.range), each.source)
        for each in metadata.scanloom.reference_ranges
    )


@dataclass(frozen=True)
class _BundleContent:
    """Content of a bundle's configs, as it was read."""

    weights: Load
    evaluator: Any
    network: NetworkSpec
    before: Preprocessing
    window: Window
    output: TensorFormat
    after: Postprocessing


def _read_content(
    folder: Path, entries: Mapping[str, Any], metadata: Metadata, obstacles: Obstacles
) -> _BundleContent:
    """Read the parts that the run reaches; errors are noted, the result is then meaningless."""
    load, find = partial(read_arrays, folder), partial(find_file, folder)
    config = Config(entries, partial(judge_target, folder), load, find)
    networks = Config(entries, partial(judge_network, folder), load, find)
    run, network = Run(), NetworkSpec("", {})
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
        before = read_preprocessing(run.transform, _inputs(metadata), obstacles)
    window = Window(None)
    with obstacles.noted():
        window = read_inferer(run.inferer)
        _check_dimensions(network, window)
    if not obstacles:
        with obstacles.noted():
            read_channels(metadata, network, before.sources, before.clicks)
    output = TensorFormat(num_channels=1)
    with obstacles.noted():
        output = read_output(metadata, network)
    after = Postprocessing(None, Argmax(), "scores", ())
    with obstacles.noted():
        after = read_postprocessing(
            run.postprocessing, before, run.transform, network, output.num_channels, obstacles
        )
    obstacles.add(*config.refused)
    if run.weights is None and not obstacles:
        detail = "nothing that `run` reaches loads weights into the network"
        obstacles.add(ScanError(Reason.MODEL_UNSUPPORTED, detail))
    return _BundleContent(
        run.weights or Load("", None), evaluator, network, before, window, output, after
    )


def _inputs(metadata: Metadata) -> int:
    """Return the largest number of channels of an input."""
    return max((i.num_channels for i in metadata.network_data_format.inputs.values()), default=1)


def _check_dimensions(network: NetworkSpec, window: Window) -> None:
    """Refuse a two-dimensional network without planes, or a three-dimensional one with them."""
    dimensions = network.args.get("spatial_dims", 3)
    if network.name and dimensions != (3 if window.plane is None else 2):
        detail = f"{network.name} of {describe(dimensions)} dimensions with such windows"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)


def _with_prompts(
    content: _BundleContent, metadata: Metadata, entries: Mapping[str, Any], class_names: str | None
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
        network=NetworkSpec("Vista3d", args),
        output=output_of(classes, content.output),
    )


def _everything_labels(evaluator: Any, entries: Mapping[str, Any]) -> Any:
    """Return the classes that VISTA3D's evaluator means by "everything", as the config has them.

    Raises
    ------
    ScanError
        MODEL_UNSUPPORTED for other arguments of that evaluator.
    """
    prompts = evaluator.get("hyper_kwargs")
    labels = prompts.get("everything_labels") if isinstance(prompts, dict) else None
    if labels is None or set(prompts) != {"user_prompt", "everything_labels"}:
        raise unsupported(f"hyper_kwargs is {describe(prompts)}")
    if prompts["user_prompt"] is not True:
        raise unsupported("hyper_kwargs of VISTA3D without user_prompt")
    if isinstance(labels, str) and labels.startswith("@"):
        return entries.get(labels[1:])
    return labels


def _without_clicks(network: NetworkSpec, clicks: int | None) -> NetworkSpec:
    """Return the network that adds empty channels in the place of clicks."""
    if clicks is None:
        return network
    if network.name != "DynUNet":
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"clicks with {network.name}")
    return NetworkSpec("DynUNetWithoutClicks", network.args)


def _checks(metadata: Metadata) -> Checks:
    fields = metadata.scanloom.checks
    ranges = {}
    for name in ("low", "high", "spacing", "extent"):
        pair = getattr(fields, name)
        if pair is not None and not pair[0] <= pair[1]:
            raise ScanError(Reason.MODEL_DAMAGED, f"scanloom.checks.{name} is empty")
        ranges[name] = None if pair is None else Range(*pair)
    return Checks(**ranges, refuse=fields.refuse, hounsfield=fields.hounsfield)


def _fast(metadata: Metadata) -> FastPreset | None:
    fields = metadata.scanloom.fast
    return None if fields is None else FastPreset(**dict(fields))


def _license(folder: Path) -> str:
    """Return the licence (SPDX) that the bundle's LICENSE file names, else "unknown"."""
    for name in ("LICENSE", "docs/license.txt"):
        if find_file(folder, name) is not None:
            text = read_text(folder, name)
            for phrase, spdx in (("Apache License", "Apache-2.0"), ("MIT License", "MIT")):
                if phrase in text:
                    return spdx
            return f"see {name.rpartition('/')[2]}"
    return "unknown"


def _attribution(metadata: Metadata) -> str:
    texts = [metadata.authors, metadata.copyright, metadata.data_source]
    return ". ".join(text.strip().rstrip(".") for text in texts if text.strip())
