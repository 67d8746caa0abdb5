"""Variants of an inference config: other forms of the same, and changes that change labels."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from scanloom.cards.card import ScaleRange
from scanloom.core import ComputeOptions, Grid, ScanError, Volume
from support import model_cards
from support.bundles import spleen_metadata

Config = dict[str, Any]
Mutation = Callable[[Config, random.Random], None]

NETWORK = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 3,
    "channels": [4, 8],
    "strides": [2],
    "norm": "batch",
}


def step(name: str, keys: str = "image", **args: Any) -> Config:
    return {"_target_": name, "keys": keys, **args}


def base(rng: random.Random) -> Config:
    """Return a config in the manner of the Model Zoo, one of three forms."""
    form = rng.choice(["scores", "labels", "own spacing"])
    before = [
        step("LoadImaged"),
        step("EnsureChannelFirstd"),
        step("Orientationd", axcodes=rng.choice(["RAS", "LPS"])),
        step("ScaleIntensityRanged", a_min=-200, a_max=200, b_min=0, b_max=1, clip=True),
        step("EnsureTyped"),
    ]
    if form != "own spacing":
        pixdim = rng.choice([[1.5, 1.5, 2.0], [2.0, 1.7, 2.2]])
        before.insert(3, step("Spacingd", pixdim=pixdim, mode="bilinear"))
    invert = step(
        *("Invertd", "pred"),
        transform="@preprocessing",
        orig_keys="image",
        nearest_interp=form == "labels",
    )
    after = [
        step("Activationsd", "pred", softmax=True),
        invert,
        step("AsDiscreted", "pred", argmax=True),
    ]
    if form == "labels":
        after[1], after[2] = after[2], after[1]
    after.append(
        step("SaveImaged", "pred", output_dir="@output_dir", separate_folder=False, resample=False)
    )
    sliding = {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 16], "overlap": 0.5}
    return {
        "imports": ["$import glob", "$import os"],
        "bundle_root": ".",
        "output_dir": "$@bundle_root + '/eval'",
        "dataset_dir": ".",
        "datalist": "$list(sorted(glob.glob(@dataset_dir + '/*.nii.gz')))",
        "device": "$torch.device('cpu')",
        "on": True,
        "off": False,
        "network_def": dict(NETWORK),
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": before},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': i} for i in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": sliding,
        "postprocessing": {"_target_": "Compose", "transforms": after},
        "handlers": [{"_target_": "StatsHandler", "iteration_log": False}],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "checkpointloader": loader("model.pt"),
        "initialize": ["$monai.utils.set_determinism(seed=1)", "$@checkpointloader(@evaluator)"],
        "run": ["$@evaluator.run()"],
    }


def loader(file: str, **args: Any) -> Config:
    return {
        "_target_": "CheckpointLoader",
        "load_path": f"$@bundle_root + '/models/{file}'",
        "load_dict": {"model": "@network"},
        **args,
    }


def pre(config: Config) -> list[Config]:
    steps: list[Config] = config["preprocessing"]["transforms"]
    return steps


def post(config: Config) -> list[Config]:
    steps: list[Config] = config["postprocessing"]["transforms"]
    return steps


def named(steps: list[Config], name: str) -> Config:
    return next((s for s in steps if s.get("_target_") == name), {})


def rename(entry: str, new: str) -> Mutation:
    """Give an entry another name, where others refer to it too."""

    def change(config: Config, _: random.Random) -> None:
        text = json.dumps(config).replace(f'"{entry}":', f'"{new}":')
        for end in ('"', "(", ")", ".", " "):
            text = text.replace(f"@{entry}{end}", f"@{new}{end}")
        renamed = json.loads(text)
        config.clear()
        config.update(renamed)

    return change


def setting(path: str, value: Any) -> Mutation:
    def change(config: Config, _: random.Random) -> None:
        *parents, last = path.split("/")
        node: Any = config
        for parent in parents:
            node = node[int(parent) if isinstance(node, list) else parent]
        node[last] = copy.deepcopy(value)

    return change


def in_step(section: str, name: str, **args: Any) -> Mutation:
    def change(config: Config, _: random.Random) -> None:
        steps = pre(config) if section == "pre" else post(config)
        if entry := named(steps, name):
            entry.update(args)

    return change


def insert(section: str, position: int, new: Config) -> Mutation:
    def change(config: Config, _: random.Random) -> None:
        steps = pre(config) if section == "pre" else post(config)
        steps.insert(position if position >= 0 else len(steps) + 1 + position, dict(new))

    return change


def remove(section: str, name: str) -> Mutation:
    def change(config: Config, _: random.Random) -> None:
        steps = pre(config) if section == "pre" else post(config)
        if entry := named(steps, name):
            steps.remove(entry)

    return change


def both(*changes: Mutation) -> Mutation:
    def change(config: Config, rng: random.Random) -> None:
        for each in changes:
            each(config, rng)

    return change


def inline(path: str, entry: str) -> Mutation:
    """Put an entry itself in the place of the reference to it."""
    return lambda c, rng: setting(path, c[entry])(c, rng)


def handler(new: Any) -> Mutation:
    return lambda c, _: c["handlers"].append(copy.deepcopy(new))


def split_steps(config: Config, rng: random.Random) -> None:
    steps = pre(config)
    cut = rng.randrange(1, len(steps))
    config["first_steps"], config["last_steps"] = steps[:cut], steps[cut:]
    config["preprocessing"]["transforms"] = "$@first_steps + @last_steps"


def sublists(config: Config, rng: random.Random) -> None:
    steps = pre(config)
    cut = rng.randrange(1, len(steps))
    inner = {"_target_": "Compose", "transforms": steps[:cut]}
    config["preprocessing"]["transforms"] = [inner, *steps[cut:]]


def other_transforms(config: Config, _: random.Random) -> None:
    """Two transforms: that of the dataset is not the one called `preprocessing`."""
    config["transforms"] = copy.deepcopy(config["preprocessing"])
    for each in config["transforms"]["transforms"]:
        if each["_target_"] == "ScaleIntensityRanged":
            each.update(a_min=-400, a_max=100)
    config["dataset"]["transform"] = "@transforms"
    if invert := named(post(config), "Invertd"):
        invert["transform"] = "@transforms"


KEEP = step("KeepLargestConnectedComponentd", "pred", applied_labels=[1])
SCALE = step("ScaleIntensityd", minv=-1.0)
LOAD = "$@network.load_state_dict(torch.load(@bundle_root + '/models/{}'{}))"


def disabled(flag: Any) -> Mutation:
    return insert("pre", -2, {**SCALE, "_disabled_": flag})


HARMLESS: dict[str, Mutation] = {
    "nothing": lambda c, rng: None,
    "rename preprocessing": rename("preprocessing", "transforms"),
    "rename postprocessing": rename("postprocessing", "afterwards"),
    "rename inferer": rename("inferer", "windows"),
    "rename evaluator": rename("evaluator", "engine"),
    "rename network_def": rename("network_def", "unet"),
    "rename network": rename("network", "net"),
    "rename dataset": rename("dataset", "scans"),
    "rename dataloader": rename("dataloader", "batches"),
    "rename checkpointloader": rename("checkpointloader", "weights"),
    "rename handlers": rename("handlers", "val_handlers_list"),
    "other transforms": other_transforms,
    "inline inferer": inline("evaluator/inferer", "inferer"),
    "inline handlers": inline("evaluator/val_handlers", "handlers"),
    "inline dataset": inline("dataloader/dataset", "dataset"),
    "inline loader": inline("evaluator/val_data_loader", "dataloader"),
    "inline postprocessing": inline("evaluator/postprocessing", "postprocessing"),
    "transforms as a list": lambda c, rng: c.update(list_of_steps=None),
    "split steps": split_steps,
    "steps in steps": sublists,
    "disabled: true": disabled(True),
    "disabled: text": disabled(" True "),
    "disabled: @on": disabled("@on"),
    "disabled: $not @off": disabled("$not @off"),
    "enabled: $not @on": disabled("$not @on"),
    "enabled: false": disabled("false"),
    "enabled: $@off": disabled("$@off"),
    "a further step": insert("pre", -2, SCALE),
    "normalised": insert("pre", -1, step("NormalizeIntensityd", nonzero=True)),
    "loader as handler": both(
        handler(loader("model.pt")), setting("initialize", ["$monai.utils.set_determinism(seed=1)"])
    ),
    "later loader among handlers": handler(loader("other.pt")),
    "other loader among handlers, disabled": handler(loader("other.pt", _disabled_="$not @off")),
    "other loader, not reached": lambda c, _: c.update(checkpointloader2=loader("other.pt")),
    "second loader in initialize": lambda c, _: (
        c.update(second=loader("other.pt")),
        c["initialize"].append("$@second(@evaluator)"),
    )[0],
    "load in run": setting("run", ["$@checkpointloader(@evaluator)", "$@evaluator.run()"]),
    "load after run": lambda c, _: (
        c.update(second=loader("other.pt")),
        c["run"].append("$@second(@evaluator)"),
    )[0],
    "load if": setting("initialize", ["$@checkpointloader(@evaluator) if @on else None"]),
    "state dict": setting("initialize", [LOAD.format("other.pt", "")]),
    "state dict of an entry": setting(
        "initialize", [LOAD.format("nested.pt", ", weights_only=True").replace("))", ")['model'])")]
    ),
    "nested weights": lambda c, _: c["checkpointloader"].update(
        load_path="$@bundle_root + '/models/nested.pt'"
    ),
    "strict text": lambda c, _: c["checkpointloader"].update(strict="True", map_location="@device"),
    "load through network_def": lambda c, _: c["checkpointloader"].update(
        load_dict={"model": "@network_def"}
    ),
    "run as text": setting("run", "$@evaluator.run()"),
    "initialize as text": setting("initialize", "$@checkpointloader(@evaluator)"),
    "cudnn": lambda c, _: c["initialize"].insert(
        0, "$setattr(torch.backends.cudnn, 'benchmark', True)"
    ),
    "makedirs": lambda c, _: c["initialize"].append("$os.makedirs(@output_dir, exist_ok=True)"),
    "finalize": setting("finalize", ["$print('done')"]),
    "post by handler": handler({"_target_": "PostProcessing", "transform": "@more"}),
    "amp": setting("evaluator/amp", True),
    "mode eval": setting("evaluator/mode", "eval"),
    "decollate": setting("evaluator/decollate", True),
    "epoch_length": setting("evaluator/epoch_length", 1),
    "cache": setting("dataset/_target_", "CacheDataset"),
    "threads": setting("dataloader/_target_", "ThreadDataLoader"),
    "two a batch": setting("dataloader/batch_size", 2),
    "shuffled": setting("dataloader/shuffle", True),
    "collate": setting("dataloader/collate_fn", "$monai.data.list_data_collate"),
    "prepare_batch": setting("evaluator/prepare_batch", "$monai.engines.default_prepare_batch"),
    "Compose options": lambda c, _: c["preprocessing"].update(
        map_items=False, unpack_items=True, log_stats=True, lazy=False
    ),
    "described": setting("evaluator/_desc_", "an evaluator"),
    "cleaned": insert("post", -2, KEEP),
    "saved as uint8": in_step("post", "SaveImaged", output_dtype="uint8"),
    "typed after": insert("post", 0, step("EnsureTyped", "pred")),
    "full names": lambda c, _: c["evaluator"].update(_target_="monai.engines.SupervisedEvaluator"),
    "small windows": setting("inferer/roi_size", [12, 16, 16]),
    "gaussian": setting("inferer/mode", "gaussian"),
    "no inferer": lambda c, _: c["evaluator"].pop("inferer"),
    "image saved too": insert(
        "pre", 3, step("SaveImaged", output_dir="@other_dir", output_postfix="scan")
    ),
    "tensor": insert("pre", -1, step("ToTensord", track_meta=True)),
    "channel first at once": both(
        in_step("pre", "LoadImaged", ensure_channel_first=True),
        remove("pre", "EnsureChannelFirstd"),
    ),
    "handlers joined": lambda c, _: c["evaluator"].update(val_handlers="$@handlers + []"),
    "network eval": lambda c, _: c["initialize"].append("$@network.eval()"),
    "scaled by percentiles": insert(
        *("pre", -2),
        step("ScaleIntensityRangePercentilesd", lower=1, upper=99, b_min=0, b_max=1, clip=True),
    ),
    "margin": insert("pre", -2, step("CropForegroundd", source_key="image", margin=3)),
    "padded to a size": insert("pre", -2, step("SpatialPadd", spatial_size=[30, 20, 25])),
    "padded to a multiple": insert("pre", -2, step("DivisiblePadd", k=8, method="end")),
    "cropped or padded": insert("pre", -2, step("ResizeWithPadOrCropd", spatial_size=24)),
    "resized": both(
        remove("pre", "Spacingd"),
        insert("pre", 3, step("Resized", spatial_size=[20, 30, 24], mode="trilinear")),
    ),
    "holes filled": insert("post", -2, step("FillHolesd", "pred")),
    "small objects removed": insert("post", -2, step("RemoveSmallObjectsd", "pred", min_size=30)),
    "reference in run": both(setting("start", "$@evaluator.run()"), setting("run", ["@start"])),
}
"""Changes of which scanloom should accept most."""

HARMFUL: dict[str, Mutation] = {
    "mode train": setting("evaluator/mode", "train"),
    "no weights": setting("initialize", []),
    "load if off": setting("initialize", ["$@checkpointloader(@evaluator) if @off else None"]),
    "strict_shape": lambda c, _: c["checkpointloader"].update(strict_shape=False),
    "load into a copy": lambda c, _: (
        c["checkpointloader"].update(load_dict={"model": "$copy.deepcopy(@network)"})
        or c["imports"].append("$import copy")
    ),
    "halved weights": lambda c, _: c["initialize"].append(
        "$[p.data.mul_(0.5) for p in @network.parameters()]"
    ),
    "weights changed by an entry": lambda c, _: c.update(
        device="$[@network_def.load_state_dict(torch.load('models/other.pt')), "
        "torch.device('cpu')][1]"
    ),
    "zeroed by a data list": lambda c, _: c["dataset"].update(
        data="$[[p.data.zero_() for p in @network.parameters()] and {'image': i} "
        "for i in @datalist]"
    ),
    "output saved early": lambda c, _: post(c).append(dict(KEEP)),
    "scaled output": in_step("post", "SaveImaged", scale=255),
    "without meta": insert("pre", 2, step("EnsureTyped", track_meta=False)),
    "as numpy": insert("pre", 2, step("EnsureTyped", data_type="numpy")),
    "whole numbers": insert("pre", -2, step("ToTensord", dtype="$torch.int16")),
    "no orig_keys": lambda c, _: named(post(c), "Invertd").pop("orig_keys", None),
    "no channel axis": remove("pre", "EnsureChannelFirstd"),
    "channel_dim": in_step("pre", "EnsureChannelFirstd", channel_dim=0),
    "entry changed by path": lambda c, _: c.update({"preprocessing#transforms#2#axcodes": "SPL"}),
    "entry merged": lambda c, _: c.update(
        {"+postprocessing": {"transforms": post(c)[:1] + post(c)[-1:]}}
    ),
    "no postprocessing": lambda c, _: c["evaluator"].pop("postprocessing"),
    "another window": setting("evaluator/inferer", {"_target_": "SimpleInferer", "x": 1}),
    "prepare_batch changed": setting(
        "evaluator/prepare_batch", "$lambda b, d, n, **k: (b['image'] * 0.5, None)"
    ),
    "iteration changed": setting("evaluator/to_kwargs", {"dtype": "$torch.float64"}),
    "no decollate": setting("evaluator/decollate", False),
    "lambda before": insert("pre", -2, step("Lambdad", func="$lambda x: x * 0.5")),
    "wrapped network": lambda c, _: c.update(network="$torch.nn.Sequential(@network_def)"),
    "half network": lambda c, _: c["initialize"].append("$@network.bfloat16().float()"),
    "handler lambda": handler({"_target_": "PostProcessing", "transform": "$lambda x: x"}),
    "post at the end": handler(
        {"_target_": "PostProcessing", "transform": "@more", "event": "ITERATION_COMPLETED"}
    ),
    "label dtype": in_step("post", "AsDiscreted", dtype="$torch.bool"),
}
"""Changes that a card can't express, or that break the bundle."""


@dataclass(frozen=True)
class Variant:
    """A config and the names of its changes."""

    config: Config
    names: tuple[str, ...]
    harmless: bool


def variants(seed: int, count: int) -> list[Variant]:
    """Return variants with one to three changes, each change about equally often."""
    rng = random.Random(seed)
    names = [*HARMLESS, *HARMFUL]
    rng.shuffle(names)
    drawn = []
    for number in range(count):
        config = base(rng)
        chosen = [names[number % len(names)]]
        chosen += rng.sample(list(HARMLESS), rng.choice([0, 1, 2]))
        applied = []
        for name in sorted(set(chosen), key=lambda n: n.startswith("rename")):
            try:
                changed = copy.deepcopy(config)
                ({**HARMLESS, **HARMFUL}[name])(changed, rng)
            except (KeyError, TypeError, AttributeError, IndexError):
                continue  # an earlier change took away what it changes
            config = changed
            applied.append(name)
        if "post by handler" in applied or "post at the end" in applied:
            _move_after_handler(config)
        config["other_dir"] = "$@bundle_root + '/scans'"
        drawn.append(Variant(config, tuple(applied), all(n in HARMLESS for n in applied)))
    return drawn


def _move_after_handler(config: Config) -> None:
    """Move the last transforms, with the saving, to the handler's."""
    section = "postprocessing" if "postprocessing" in config else "afterwards"
    steps = config[section]["transforms"]
    config["more"] = {"_target_": "Compose", "transforms": steps[-1:]}
    config[section]["transforms"] = steps[:-1]


HOME = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from monai.bundle import run
scans, *bundles = sys.argv[1:]
for bundle in bundles:
    os.chdir(bundle)
    try:
        run("run", config_file="configs/inference.json", bundle_root=bundle, dataset_dir=scans)
    except BaseException as exc:
        open("failed", "w").write(f"{type(exc).__name__}: {exc}")
"""


def write_variants(folder: Path, drawn: Sequence[Variant]) -> tuple[Volume, list[Path]]:
    """Write a scan and the variants' bundles; return the scan, as stored, and their folders."""
    import torch
    from monai.networks.nets.unet import UNet

    scans = folder / "scans"
    scans.mkdir(parents=True)
    grid = model_cards.grid((28, 26, 20), (1.4, 1.3, 2.4), "LPS", turn=4)
    array = model_cards.smooth_scan(grid.shape, 1)
    nib.save(nib.Nifti1Image(array, grid.affine), scans / "scan.nii.gz")
    stored = nib.load(scans / "scan.nii.gz")
    volume = Volume(array, Grid(grid.shape, stored.affine), "HU", "CT")
    steps = (ScaleRange(-200.0, 200.0, 0.0, 1.0, clip=True),)
    args = {key: value for key, value in NETWORK.items() if key != "_target_"}
    for seed, name in enumerate(("model.pt", "other.pt")):
        torch.manual_seed(seed)
        model_cards.balanced_weights(UNet(**args), steps, array, folder / name)
    torch.save({"model": torch.load(folder / "other.pt")}, folder / "nested.pt")
    metadata = spleen_metadata()
    output = metadata["network_data_format"]["outputs"]["pred"]
    output.update(num_channels=3, channel_def={"0": "background", "1": "spleen", "2": "liver"})
    bundles = []
    for number, variant in enumerate(drawn):
        bundle = folder / f"v{number:03d}"
        (bundle / "configs").mkdir(parents=True)
        (bundle / "models").mkdir()
        for name in ("model.pt", "other.pt", "nested.pt"):
            os.link(folder / name, bundle / "models" / name)
        (bundle / "configs" / "inference.json").write_text(json.dumps(variant.config))
        (bundle / "configs" / "metadata.json").write_text(json.dumps(metadata))
        bundles.append(bundle)
    return volume, bundles


def run_home(folder: Path, bundles: Sequence[Path]) -> None:
    """Run the bundles by MONAI's runner, each in its own folder."""
    command = [sys.executable, "-c", HOME, str(folder / "scans"), *map(str, bundles)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def home_labels(bundle: Path) -> NDArray[Any] | None:
    """Return the labels that MONAI wrote; None if it failed or wrote none."""
    files = sorted((bundle / "eval").glob("*.nii.gz"))
    if (bundle / "failed").exists() or len(files) != 1:
        return None
    return np.squeeze(np.asarray(nib.load(files[0]).dataobj))


def our_labels(bundle: Path, volume: Volume) -> NDArray[Any] | ScanError:
    """Return scanloom's labels, or the error that refuses the bundle."""
    from scanloom.convert.conversion import load_card
    from scanloom.inference.predictor import TorchPredictor

    try:
        card = load_card(bundle)
        compute = ComputeOptions(precision="float32")
        labels = (
            TorchPredictor(card, device="cpu", compute=compute).predict(volume).layers[0].labels
        )
    except ScanError as exc:
        return exc
    return np.asarray(labels)
