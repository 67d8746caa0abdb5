"""Compare labels with those of MONAI's bundle runner, for bundles of MONAI's Model Zoo.

    python zoo_parity.py ZOO SCAN --home PYTHON [--bundle NAME ...] [--work FOLDER]

ZOO is a checkout of github.com/Project-MONAI/model-zoo, SCAN a CT as NIfTI, PYTHON the interpreter
of an environment with MONAI 1.6.1, ignite and what the bundles need (itk, einops, pandas). Weights
are random, with biases such that all classes occur. Each bundle sees a part of the scan twice:
with half the network's spacing, and turned by 9 degrees. Prints a row for each; exit status 1 if
labels differ in more than 0.05 % of voxels, or Dice of a class of 1,000 voxels is below 0.999.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from agreement import agreement
from numpy.typing import NDArray
from zoo_bundles import BUNDLES, CPU

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from meter import SAMPLE, parse, unavailable

SEED = 7


def entry(form: str, scans: list[str]) -> Any:
    """Return the entry of the config that lists the scans."""
    match form:
        case "images":
            return [{"image": scans[0]}]
        case "list":
            return [{"image": scans}]
        case "phases":  # a label of the same name as a scan would overwrite its result
            label = Path(scans[0]).with_name("label.nii.gz")
            shutil.copy(scans[0], label)
            return [
                dict(zip(("artery", "vein", "excret", "label"), [*scans, str(label)], strict=True))
            ]
        case "clicks":
            return [{"image": scans[0], "guidance": {}, "spleen": [], "background": []}]
        case "prompts":
            return {"image": scans[0], "label_prompt": [1, 3, 6]}
    return scans


def config_file(bundle: Path) -> Path:
    """Return the inference config of a bundle."""
    return next(
        f for n in ("json", "yaml") if (f := bundle / "configs" / f"inference.{n}").is_file()
    )


def read_config(file: Path) -> dict[str, Any]:
    """Return the entries of a config."""
    import yaml

    entries: dict[str, Any] = yaml.safe_load(file.read_text())  # JSON is YAML
    return entries


def prepare(zoo: Path, name: str, work: Path) -> Path:
    """Copy a bundle, with the edits of its entry in BUNDLES; return its folder."""
    home, bundle = BUNDLES[name], work / name
    shutil.rmtree(bundle, ignore_errors=True)
    source = zoo / "models" / name if (zoo / "models").is_dir() else zoo / name
    shutil.copytree(source, bundle)
    file = config_file(bundle)
    entries = read_config(file)
    for path, value in home.edits.items():
        *parents, last = path.split("#")
        place = entries
        for parent in parents:
            place = place[parent]
        place[last] = value
    for argument in home.dropped:
        entries["network_def"].pop(argument, None)
    file.unlink()
    file.with_suffix(".json").write_text(json.dumps(entries))
    (bundle / "models").mkdir(exist_ok=True)
    return bundle


def write_weights(bundle: Path, name: str, scans: list[Path]) -> None:
    """Write random weights where the config expects them, and the architecture of DiNTS."""
    import torch

    from scanloom.convert.monai.bundle import read_bundle
    from scanloom.inference.network.architectures import build_network

    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    if "dints_space" in read_config(config_file(bundle)):
        paths = (rng.random((12, 10)) < 0.5).astype(np.float64)
        paths[:, ::3] = 1.0  # paths that keep the resolution: each node has an input
        code = {
            "node_a": np.ones((13, 4)),
            "arch_code_a": paths,
            "arch_code_c": rng.integers(0, 5, (12, 10)).astype(np.float64),
        }
        torch.save(code, bundle / "models" / "search_code_18590.pt")
    for file in ("model.pt", "dynunet_FT.pt"):
        (bundle / "models" / file).write_bytes(b"-")
    card = read_bundle(bundle, BUNDLES[name].options)
    network = build_network(card.network)
    torch.save(balanced(network, card, scans), card.weights.file)


def balanced(network: Any, card: Any, scans: list[Path]) -> dict[str, Any]:
    """Return the state dict of a network, its last biases such that all classes occur."""
    import torch

    from scanloom.inference.geometry import plan_grid
    from scanloom.inference.intensity import apply_steps
    from scanloom.inference.resampling.resample import to_network

    volumes = [volume_of(path) for path in scans]
    plan = plan_grid(volumes[0].grid, card.grid)
    cpu = torch.device("cpu")
    images = [apply_steps(to_network(v.array, plan, cpu, card.before), card.after) for v in volumes]
    image = torch.stack(images)[None]
    size = [64, 64, 64]  # enough for the norms of the deepest layers
    if card.grid.shape or card.window.size is None:
        size = [n // 32 * 32 or n for n in image.shape[2:]]
    if card.network.name == "UNesT":
        size = [96, 96, 96]  # no other size fits its position embeddings
    if card.window.plane is not None:
        image, size = image[..., image.shape[-1] // 2], size[:2]
    for dim, n in enumerate(size):
        length = image.shape[dim + 2]
        if length < n:
            pad = [0, 0] * (len(size) - dim - 1) + [0, n - length]
            image = torch.nn.functional.pad(image, pad)
        else:
            image = image.narrow(dim + 2, (length - n) // 2, n)
    with torch.inference_mode():
        scores = network(image)[0].flatten(1)
    state = network.state_dict()
    if len(scores) == card.n_outputs and card.network.name != "Vista3d":
        last = [key for key, value in state.items() if value.shape == (len(scores),)][-1]
        state[last] -= scores.median(dim=1).values
    return dict(state)


def volume_of(path: Path) -> Any:
    """Return a scan as scanloom sees it."""
    from scanloom.core import Grid, Volume

    image = nib.load(path)
    array = np.asanyarray(image.dataobj)
    return Volume(array, Grid(array.shape, image.affine), "unknown", None)


def write_scans(
    scan: Path, work: Path, spacing: tuple[float, ...] | None, case: str, count: int
) -> list[Path]:
    """Write a part of a scan, with half the network's spacing or turned; one file a channel."""
    image = nib.load(scan)
    values = np.asanyarray(image.dataobj).astype(np.float32)
    target = spacing or (1.5, 1.5, 1.5)
    shape = (96, 88, 80) if case == "twice" else (72, 80, 56)
    if spacing is None:
        shape = (64, 56, 48)
    start = [max(0, (n - m) // 2) for n, m in zip(values.shape, shape, strict=True)]
    part = values[tuple(slice(a, a + m) for a, m in zip(start, shape, strict=True))]
    affine = np.diag([*(t / 2 for t in target), 1.0])
    affine[:2] *= -1  # LPS, as DICOM is stored
    if case != "twice":
        factors = np.array([0.74, 0.61, 1.37]) if spacing else np.array([1.0, 1.1, 1.3])
        affine[:3, :3] = turned(9.0) @ np.diag([-1, 1, 1]) @ np.diag(target * factors)
    affine[:3, 3] = (11.0, -7.5, 20.25)
    paths = []
    for n in range(count):
        path = work / f"{case}_{n}.nii.gz"
        shifted = np.roll(part, 3 * n, axis=n % 3) * (1.0 if n % 2 == 0 else -0.7)
        nib.save(nib.Nifti1Image(shifted.astype(np.int16), affine), path)
        paths.append(path)
    return paths


def turned(degrees: float) -> NDArray[np.float64]:
    """Return a rotation about all axes."""
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    about_x = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    about_y = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
    about_z = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
    return np.asarray(about_z @ about_y @ about_x)


def run_home(python: str, bundle: Path, name: str, scans: list[Path], out: Path) -> dict[str, Any]:
    """Run MONAI; return its measurements, and its labels as "labels"."""
    home = BUNDLES[name]
    overrides: dict[str, Any] = {
        "device": CPU,
        "output_dir": str(out),
        "dataset_dir": str(scans[0].parent),
        "dataloader#num_workers": 0,
        home.data: entry(home.form, [str(path) for path in scans]),
        **home.overrides,
    }
    inferer = read_config(config_file(bundle))["inferer"]
    if "sw_batch_size" in inferer:
        overrides["inferer#sw_batch_size"] = 1
    script = Path(__file__).with_name("zoo_home.py")
    command = [python, str(script), str(bundle), config_file(bundle).name, home.run]
    shutil.rmtree(out, ignore_errors=True)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*command, json.dumps(overrides)], capture_output=True, text=True, env=env, check=False
    )
    if done.returncode:
        raise RuntimeError(f"MONAI on {name}: {done.stderr[-1500:]}")
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    written = sorted(out.rglob("*.nii.gz"), key=lambda p: p.stat().st_mtime)
    files = [p for p in written if "label" not in p.name] or written
    measured["labels"] = np.squeeze(np.asanyarray(nib.load(files[0]).dataobj))
    return measured


def run_ours(bundle: Path, name: str, scans: list[Path], out: Path) -> dict[str, Any]:
    """Run scanloom in a process of its own; return its measurements and labels."""
    measured: dict[str, Any] = json.loads(call("--ours", bundle, name, out, *scans))
    measured["labels"] = np.load(out)
    return measured


def call(*arguments: Any) -> str:
    """Run this script with arguments of its own; return the last line that it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"scanloom, {arguments[0]}: {done.stderr[-1500:]}")
    return done.stdout.strip().rpartition("\n")[2]


def segment(bundle: Path, name: str, out: Path, scans: list[Path]) -> None:
    """Label a scan with scanloom; save the labels, print measurements."""
    import torch

    from scanloom.convert.conversion import load_card
    from scanloom.core import ComputeOptions
    from scanloom.inference.predictor import TorchPredictor

    torch.set_num_threads(2)
    card = load_card(bundle, BUNDLES[name].options)
    first, *others = (volume_of(path) for path in scans)
    predictor = TorchPredictor(card, ComputeOptions(precision="float32"), device="cpu")
    result = predictor.predict(first, further_channels=others)
    labels = np.zeros(first.grid.shape, np.int32)
    for layer in result.layers:
        labels = np.where(layer.labels > 0, layer.labels, labels)
    if name == "vista3d":  # numbers of the prompts, as MONAI writes them
        labels = np.array([0, *card.network.args["classes"]])[labels]
    np.save(out, labels)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}))


def main() -> None:
    """Compare all bundles, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoo", type=Path, nargs="?")
    parser.add_argument("scan", type=Path, nargs="?", default=SAMPLE.with_suffix(".nii.gz"))
    parser.add_argument("--home", default=sys.executable)
    parser.add_argument("--bundle", action="append", choices=sorted(BUNDLES))
    parser.add_argument("--case", action="append", choices=("twice", "oblique"))
    parser.add_argument("--work", type=Path, default=Path("zoo-parity"))
    args = parse(parser, bundle=["spleen_ct_segmentation"], case=["twice"])
    if args.zoo is None:
        unavailable("a checkout of MONAI's Model Zoo: name it")
    work = args.work.resolve()
    failed = False
    for name in args.bundle or BUNDLES:
        for case in args.case or ("twice", "oblique"):
            try:
                row = measure(args.zoo, args.scan, args.home, name, case, work)
            except Exception as exc:  # noqa: BLE001 the next bundle still counts
                row = {"error": f"{type(exc).__name__}: {exc}", "enough": False}
            failed |= "error" in row or (BUNDLES[name].same and not row["enough"])
            print(json.dumps({"bundle": name, "case": case, **row}), flush=True)
    sys.exit(failed)


def measure(zoo: Path, scan: Path, python: str, name: str, case: str, work: Path) -> dict[str, Any]:
    """Run both programs on a case of a bundle; return measurements."""
    work.mkdir(parents=True, exist_ok=True)
    bundle = prepare(zoo, name, work)
    spacing = spacing_of(bundle, name)
    scans = write_scans(scan, work, spacing, case, BUNDLES[name].scans)
    call("--weights", bundle, name, *scans)  # a process of its own, for its memory
    ours = run_ours(bundle, name, scans, work / "ours.npy")
    theirs = run_home(python, bundle, name, scans, work / "home")
    whole = np.rint(theirs.pop("labels").astype(np.float64)).astype(np.int64)
    found = agreement(ours.pop("labels"), whole)
    return {
        "enough": found.enough,
        "equal": found.equal,
        "dice": found.worst_dice,
        "classes": len(found.dice),
        "ours": ours,
        "home": theirs,
    }


def spacing_of(bundle: Path, name: str) -> tuple[float, ...] | None:
    """Return the spacing of the network, from a card with weights that are not read."""
    text = json.dumps(read_config(config_file(bundle)).get("preprocessing"))
    return None if "Spacingd" not in text and name != "vista3d" else _pixdim(bundle)


def _pixdim(bundle: Path) -> tuple[float, ...]:
    from scanloom.convert.monai.config import Config, read_entries

    entries = read_entries(bundle)
    config = Config(entries, lambda target: ("transform", target.rpartition(".")[2]))
    steps = config.get(
        "preprocessing_transforms" if "preprocessing_transforms" in config else "preprocessing"
    )
    steps = steps if isinstance(steps, list) else steps.args["transforms"]
    pixdim = next(step.args["pixdim"] for step in steps if step.name == "Spacingd")
    return tuple(float(p) for p in pixdim)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--weights"]:
        write_weights(Path(sys.argv[2]), sys.argv[3], [Path(p) for p in sys.argv[4:]])
    elif sys.argv[1:2] == ["--ours"]:
        segment(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), [Path(p) for p in sys.argv[5:]])
    else:
        main()
