"""Read a MONAI bundle as a `ModelCard`: its files are data, and no code in them runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from scanloom.cards.card import Channel, Checks, ModelCard, NetworkSpec, Range, Weights
from scanloom.cards.monai.allow_list import canonical_target, check_target, judge_network
from scanloom.cards.monai.arguments import describe
from scanloom.cards.monai.config import Component, Config, Name, truncate
from scanloom.cards.monai.files import (
    check_archive,
    find_file,
    is_safetensors,
    read_json,
    read_text,
)
from scanloom.cards.monai.inferer import read_inferer
from scanloom.cards.monai.metadata import Metadata, TensorFormat, one_line, read_metadata
from scanloom.cards.monai.postprocessing import read_postprocessing
from scanloom.cards.monai.preprocessing import read_preprocessing
from scanloom.cards.monai.structures import read_structures
from scanloom.cards.networks import NETWORKS
from scanloom.core import Reason, ScanError, format_bytes, slug

_CONFIGS: Final = ("inference.json", "inference.yaml", "inference.yml")
MAX_WEIGHTS: Final = 4 << 30
"""Largest weights file; the largest in MONAI's model zoo has about 300 MB."""
_MODALITIES: Final[Mapping[str, str]] = {
    "CT": "CT",
    "MR": "MR",
    "MRI": "MR",
    "PT": "PT",
    "PET": "PT",
    "NM": "NM",
    "SPECT": "NM",
}
_MAX_DIGITS: Final = 40
_MAX_PLAIN: Final = 10_000
"""Largest number of values in a network's arguments; MONAI's model zoo has at most 40."""


def is_bundle(folder: Path) -> bool:
    """Return whether a folder has the layout of a MONAI bundle: a folder `configs`."""
    return (folder / "configs").is_dir()


def read_bundle(folder: Path) -> ModelCard:
    """Read a MONAI bundle.

    Parameters
    ----------
    folder : Path
        Contains `configs/metadata.json`, `configs/inference.json` (or `.yaml`) and `models/`.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file or entry is missing or files contradict each other; MODEL_UNSAFE
        if code would have to run, a file is a link out of the bundle, or the weights would expand
        excessively when read; MODEL_NETWORK if the network is not on the allow-list;
        MODEL_UNSUPPORTED if a card can't express the bundle; MODEL_HASH if the weights do not have
        the SHA-256 in the metadata.
    """
    metadata = read_metadata(folder)
    entries = {**_read_config(folder), "bundle_root": "."}
    network = _network(Config(entries, judge_network))
    config = Config(entries, check_target)
    _evaluator(config)
    channels = _channels(metadata, network)
    transform = config.get("preprocessing") if "preprocessing" in config else None
    before = read_preprocessing(transform, len(channels))
    window = read_inferer(config.get("inferer"))
    output = _output(metadata, network)
    result = config.get("postprocessing") if "postprocessing" in config else None
    after = read_postprocessing(result, before, transform, output.num_channels)
    return ModelCard(
        name=slug(folder.resolve().name) or slug(metadata.name) or "model",
        version=metadata.version,
        title=metadata.name or one_line(folder.resolve().name),
        description=metadata.description or metadata.task,
        intended_use=metadata.intended_use,
        license=metadata.scanloom.license or metadata.license or _license(folder),
        attribution=metadata.scanloom.attribution or _attribution(metadata),
        channels=channels,
        network=network,
        weights=_weights(folder, config, metadata.scanloom.weights_sha256),
        grid=before.grid,
        window=window,
        structures=read_structures(output, after.decision, metadata.scanloom.structures),
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
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the raw entries of the inference config."""
    names = [f"configs/{name}" for name in _CONFIGS]
    name = next((name for name in names if find_file(folder, name) is not None), None)
    if name is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"configs/{' or '.join(_CONFIGS)} is missing")
    if name.endswith(".json"):
        entries = read_json(folder, name)
    else:
        try:
            entries = yaml.load(read_text(folder, name), Loader=_Loader)  # noqa: S506 a SafeLoader
        except (yaml.YAMLError, RecursionError, ValueError) as exc:
            raise ScanError(Reason.MODEL_DAMAGED, f"{name} is not valid YAML") from exc
    if not isinstance(entries, dict):
        raise ScanError(Reason.MODEL_DAMAGED, f"{name} is not a mapping")
    return {str(key): value for key, value in entries.items()}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without merge keys and long numbers, which expand when loaded."""

    def construct_scalar(self, node: Any) -> Any:
        """Refuse numbers with many digits, which are slow to convert."""
        number = node.tag.rpartition(":")[2] in ("int", "float")
        if number and len(node.value) > _MAX_DIGITS:
            raise ScanError(Reason.MODEL_UNSUPPORTED, f"a number of {len(node.value)} digits")
        return super().construct_scalar(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse merge keys."""
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ScanError(Reason.MODEL_UNSUPPORTED, "the config uses YAML merge keys (<<)")
        super().flatten_mapping(node)


def _network(config: Config) -> NetworkSpec:
    """Return the network that `network_def` and `network` refer to."""
    networks = [config.get(key) for key in ("network_def", "network") if key in config]
    if not networks:
        raise ScanError(Reason.MODEL_DAMAGED, "the config has no network_def")
    if not isinstance(networks[0], Component) or any(spec is not networks[0] for spec in networks):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the network is {describe(networks[-1])}")
    name = canonical_target(networks[0].target)[1]
    args = {key: arg for key, arg in networks[0].args.items() if key not in NETWORKS[name].removed}
    budget = [_MAX_PLAIN]
    for key, arg in args.items():
        _plain(arg, f"{name}({truncate(str(key))}=...)", budget)
    if args.get("spatial_dims", 3) != 3:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{name} of {args['spatial_dims']} dimensions")
    return NetworkSpec(name, args)


def _evaluator(config: Config) -> None:
    """Refuse an evaluator that does not use `network`, `inferer` and `postprocessing`."""
    runner = config.raw("evaluator")
    for key in ("network", "inferer", "postprocessing"):
        reference = runner.get(key) if isinstance(runner, dict) else None
        if reference is not None and reference not in (f"@{key}", f"$@{key}", "@network_def"):
            raise ScanError(
                Reason.MODEL_UNSUPPORTED,
                f"the evaluator's {key} is {describe(reference)}, not @{key}",
            )


def _plain(value: Any, location: str, budget: list[int]) -> None:
    """Refuse values that are not plain data, and more than `_MAX_PLAIN` of them."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{location} has more than {_MAX_PLAIN} values")
    if isinstance(value, Name | Component):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{location} is {describe(value)}")
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        _plain(item, location, budget)


def _channels(metadata: Metadata, network: NetworkSpec) -> tuple[Channel, ...]:
    """Return the input channels; MONAI's metadata has one modality for all."""
    inputs = metadata.network_data_format.inputs
    if len(inputs) != 1:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the network has {len(inputs)} inputs")
    image = next(iter(inputs.values()))
    modality = _MODALITIES.get(image.modality.strip().upper())
    if modality is None:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the modality {truncate(image.modality)!r}")
    if network.args.get("in_channels", image.num_channels) != image.num_channels:
        raise ScanError(
            Reason.MODEL_DAMAGED,
            f"the network takes {describe(network.args['in_channels'])} channels, the metadata "
            f"declares {image.num_channels}",
        )
    names = [image.channel_def.get(str(n), f"channel {n}") for n in range(image.num_channels)]
    return tuple(Channel(name, modality) for name in names)


def _output(metadata: Metadata, network: NetworkSpec) -> TensorFormat:
    """Return the output with the scores."""
    outputs = metadata.network_data_format.outputs
    pred = outputs.get("pred", next(iter(outputs.values())) if len(outputs) == 1 else None)
    if pred is None:
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"{len(outputs)} outputs, none called pred")
    for key in ("out_channels", "num_classes"):
        if network.args.get(key, pred.num_channels) != pred.num_channels:
            raise ScanError(
                Reason.MODEL_DAMAGED,
                f"the network has {describe(network.args[key])} output channels, the metadata "
                f"declares {pred.num_channels}",
            )
    return pred


def _checks(metadata: Metadata) -> Checks:
    fields = metadata.scanloom.checks
    ranges = {}
    for name in ("low", "high", "spacing", "extent"):
        pair = getattr(fields, name)
        if pair is not None and not pair[0] <= pair[1]:
            raise ScanError(Reason.MODEL_DAMAGED, f"scanloom.checks.{name} is empty")
        ranges[name] = None if pair is None else Range(*pair)
    return Checks(**ranges, refuse=fields.refuse)


def _weights(folder: Path, config: Config, pinned: str | None) -> Weights:
    """Find the weights file and compute its SHA-256."""
    listed, key = _checkpoint(config)
    path = PurePosixPath(listed or "models/model.pt")
    if path.is_absolute() or ".." in path.parts:
        detail = f"the weights {truncate(str(path))} are outside the bundle"
        raise ScanError(Reason.MODEL_UNSAFE, detail)
    file = find_file(folder, str(path))
    if file is None and path.name:
        file = find_file(folder, str(path.with_suffix(".safetensors")))
    if file is None:
        raise ScanError(Reason.MODEL_DAMAGED, f"the weights {truncate(str(path))} are missing")
    if file.suffix not in (".pt", ".pth", ".safetensors"):
        raise ScanError(Reason.MODEL_UNSAFE, f"{truncate(str(path))} is not a state dict")
    try:
        sha256, safetensors = _digest(file)
    except OSError as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{truncate(str(path))} can't be read") from exc
    if pinned is not None and sha256 != pinned:
        detail = f"the weights have SHA-256 {sha256[:12]}..., not {pinned[:12]}..."
        raise ScanError(Reason.MODEL_HASH, detail)
    return Weights(file, sha256, None if safetensors else key)


def _checkpoint(config: Config) -> tuple[str | None, str | None]:
    """Return the weights file that the config loads and its key, None for each if not given."""
    loader = config.raw("checkpointloader")
    if isinstance(loader, dict) and "load_path" in loader:
        load_dict = loader.get("load_dict")
        keys = list(load_dict) if isinstance(load_dict, dict) else []
        path = config.value(loader["load_path"])
        key = keys[0] if len(keys) == 1 and isinstance(keys[0], str) else None
    elif "ckpt_path" in config:
        path, key = config.get("ckpt_path"), None
    else:
        return None, None
    if not isinstance(path, str):
        raise ScanError(Reason.MODEL_UNSUPPORTED, f"the weights are {describe(path)}")
    return path, key


def _digest(file: Path) -> tuple[str, bool]:
    """Return the SHA-256 (hex) of weights and whether they are safetensors, after checks."""
    with file.open("rb") as stream:
        if file.stat().st_size > MAX_WEIGHTS:
            detail = f"the weights are larger than {format_bytes(MAX_WEIGHTS)}"
            raise ScanError(Reason.MODEL_DAMAGED, detail)
        check_archive(stream)
        safetensors = is_safetensors(stream)
        stream.seek(0)
        return hashlib.file_digest(stream, "sha256").hexdigest(), safetensors


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
    parts = [metadata.authors, metadata.copyright, metadata.data_source]
    return ". ".join(text.strip().rstrip(".") for text in parts if text.strip())
