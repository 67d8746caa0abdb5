"""Accuracy of brain_anatomy where truth is known, and its sense on real heads.

    python brain_anatomy.py drawn MAPS [--count 50]     images drawn of the maps set aside: Dice
    python brain_anatomy.py t1 MAPS                     T1-weighted heads drawn of them: Dice
    python brain_anatomy.py heads SCAN...               volumes, sides, adult ranges
    python brain_anatomy.py axes SCAN                   24 orders of axes; 1, 2 and 4 mm
    python brain_anatomy.py colin TEMPLATES             Colin27 against AAL (Debian: mricron-data)

MAPS is a folder with `synthseg_label_maps`, TEMPLATES holds `ch2.nii.gz` and `aal.nii.gz`.
`--model FOLDER` takes another model than models/brain_anatomy; its recipe stays the same.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
from meter import parse, table, unavailable
from nibabel.orientations import ornt_transform
from nibabel.processing import resample_to_output, smooth_image
from numpy.typing import ArrayLike, NDArray

import scanloom

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "brain_anatomy"
SEED = 50
"""Of the drawn images; no training has it."""
HEAD = (192, 240, 240)
"""Voxels of 1 mm of a drawn image: the largest head of the maps, less neck."""
SIDED = (
    *("cerebral_white_matter", "cerebral_cortex", "cerebellum_cortex"),
    *("thalamus", "putamen", "hippocampus"),
)
RANGES: Mapping[str, tuple[float, float]] = {
    "cerebral_white_matter": (150, 320),
    "cerebral_cortex": (140, 330),
    "cerebellum_white_matter": (7, 24),
    "cerebellum_cortex": (35, 75),
    "lateral_ventricle": (2, 55),
    "thalamus": (5, 11),
    "caudate": (2.3, 5.5),
    "putamen": (3.2, 7.5),
    "pallidum": (0.8, 2.6),
    "hippocampus": (2.0, 5.5),
    "amygdala": (0.7, 2.6),
    "brain_stem": (15, 30),
}
"""ml of a side in adults as FreeSurfer, whose labels the maps have, measures them: limits that
find what is grossly wrong. Norms by age, sex and size of head: doi 10.1016/j.dib.2016.10.001."""


def volumes(found: scanloom.Segmentation) -> dict[str, float]:
    """Return ml of each structure."""
    return {
        label: np.count_nonzero(found[label]) * found.grid.voxel_volume / 1000
        for label in found.labels
    }


def dice(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Return Dice of two masks, NaN if both are empty."""
    size = np.count_nonzero(one) + np.count_nonzero(other)
    return 2 * np.count_nonzero(one & other) / size if size else float("nan")


def drawn(model: scanloom.Model, options: argparse.Namespace) -> None:
    """Print Dice of each structure over images drawn with fixed seeds from maps set aside."""
    from monai.bundle import ConfigParser

    from scanloom.training.bundle import drawing
    from scanloom.training.cases import find_cases
    from scanloom.training.recipe import read_recipe
    from scanloom.training.transforms import SeededDataset

    recipe = read_recipe(MODEL / "training" / "recipe.yaml")
    whole_map = {"map_spacing": 1.0, "centred": 0.0, "partial": 0.0}
    page = recipe.drawing.model_copy(update=whole_map)
    whole = {"spacing": (1.0, 1.0, 1.0), "patch": HEAD, "drawing": page}
    kept, random = drawing(recipe.model_copy(update=whole))
    parser = ConfigParser(
        {
            "imports": ["$import numpy as np"],
            "device": "cpu",
            "t": {"_target_": "Compose", "transforms": kept + random},
        }
    )
    maps = find_cases(recipe.data, Path(options.scans[0]))["testing"]
    images = SeededDataset(
        [{"label": str(each.label)} for each in maps],
        parser.get_parsed_content("t"),
        seed=SEED,
        patches=options.count,
        copy_cache=False,
        progress=False,
        num_workers=1,
    )
    rows, intracranial = [], []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(options.count):
            case = images[n]
            file = Path(folder) / "drawn.nii.gz"
            nib.save(nib.Nifti1Image(case["image"][0].numpy(), np.eye(4)), file)
            found = model.predict(scanloom.load_volume(file, modality="MR"))
            truth = case["label"][0].numpy()
            rows.append(
                [
                    dice(found[each.label], truth == number)
                    for number, each in enumerate(recipe.structures, 1)
                ]
            )
            true = np.count_nonzero(truth) / 1000
            intracranial.append(sum(volumes(found).values()) / true - 1)
            volume = 100 * intracranial[-1]
            print(f"image {n + 1}: {np.nanmean(rows[-1]):.3f}, volume {volume:+.1f} %", flush=True)
    means = np.nanmean(rows, axis=0)
    lowest = np.nanmin(rows, axis=0)
    labels = [each.label for each in recipe.structures]
    rounded = [(f"{a:.3f}", f"{b:.3f}") for a, b in zip(means, lowest, strict=True)]
    body = [(label, *pair) for label, pair in zip(labels, rounded, strict=True)]
    print(table(("structure", "mean", "lowest"), body))
    print(f"mean over structures: {means.mean():.3f}, of {options.count} images")
    print_intracranial(intracranial)


def t1(model: scanloom.Model, options: argparse.Namespace) -> None:
    """Print Dice and volumes of each structure in T1-weighted heads of the maps set aside."""
    from scanloom.training.cases import find_cases
    from scanloom.training.recipe import read_recipe

    sys.path.insert(0, str(ROOT / "data"))
    import draw_head

    recipe = read_recipe(MODEL / "training" / "recipe.yaml")
    maps = find_cases(recipe.data, Path(options.scans[0]))["testing"]
    found, known, agreement = ([] for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        for each in maps:
            image = nib.as_closest_canonical(nib.load(each.label))
            numbers = np.asarray(image.dataobj).astype(np.int64)
            scan = draw_head.draw(numbers, image.affine)
            truth = draw_head.on_grid_of(scan, numbers, image.affine)
            file = Path(folder) / "head.nii.gz"
            nib.save(scan, file)
            result = model.predict(scanloom.load_volume(file, modality="MR"))
            ml = float(np.prod(scan.header.get_zooms())) / 1000
            masks = [np.isin(truth, structure.values) for structure in recipe.structures]
            known.append([np.count_nonzero(mask) * ml for mask in masks])
            found.append([*volumes(result).values()])
            pairs = zip(recipe.structures, masks, strict=True)
            agreement.append([dice(result[s.label], mask) for s, mask in pairs])
    columns = (np.mean(agreement, 0), np.min(agreement, 0), np.mean(found, 0), np.mean(known, 0))
    rows = [
        (each.label, f"{mean:.3f}", f"{low:.3f}", f"{ml:.1f}", f"{true:.1f}")
        for each, mean, low, ml, true in zip(recipe.structures, *columns, strict=True)
    ]
    print(table(("structure", "mean Dice", "lowest", "ml", "true ml"), rows))
    print(f"mean over structures: {np.mean(agreement):.3f}, of {len(maps)} heads")
    print_intracranial(np.sum(found, 1) / np.sum(known, 1) - 1)


def print_intracranial(errors: ArrayLike) -> None:
    """Print by how much the volume of all structures together is off, of each image."""
    share = 100 * np.asarray(errors)
    print(
        f"all structures together: {share.mean():+.1f} %, at most {np.abs(share).max():.1f} % off"
    )


def heads(model: scanloom.Model, options: argparse.Namespace) -> None:
    """Print volumes of real heads, with what is out of the range of adults or uneven."""
    for path in options.scans:
        ml = volumes(model.predict(scanloom.load_volume(path, modality="MR")))
        rows = []
        for name in dict.fromkeys(
            label.removesuffix("_left").removesuffix("_right") for label in ml
        ):
            sides = [ml[label] for label in (f"{name}_left", f"{name}_right") if label in ml]
            sides = sides or [ml[name]]
            low, high = RANGES.get(name, (0.0, np.inf))
            marks = [] if low <= min(sides) and max(sides) <= high else ["out of range"]
            if name in SIDED and abs(sides[0] - sides[1]) > 0.15 * np.mean(sides):
                marks.append("uneven")
            rows.append((name, " ".join(f"{each:.2f}" for each in sides), ", ".join(marks)))
        print(Path(path).name)
        print(table(("structure", "ml, left and right", ""), rows))


def axes(model: scanloom.Model, options: argparse.Namespace) -> None:
    """Print the largest change of a volume above 3 ml, in other orders of axes and voxel sizes."""
    head = nib.as_closest_canonical(nib.load(options.scans[0]))
    with tempfile.TemporaryDirectory() as folder:

        def segmented(image: nib.Nifti1Image) -> scanloom.Segmentation:
            file = Path(folder) / "head.nii.gz"
            nib.save(image, file)
            return model.predict(scanloom.load_volume(file, modality="MR"))

        def report(name: str, ml: Mapping[str, float], base: Mapping[str, float]) -> None:
            changes = {k: ml[k] / v - 1 for k, v in base.items() if v > 3}
            worst = max(changes, key=lambda k: abs(changes[k]))
            print(f"{name}: {100 * changes[worst]:+.2f} % ({worst})", flush=True)

        base = volumes(segmented(head))
        plain = nib.io_orientation(np.eye(4))
        # the even ones of 48, as scanners turn and never mirror
        for order in itertools.permutations(range(3)):
            for flips in itertools.product((1, -1), repeat=3):
                turned = np.array(list(zip(order, flips, strict=True)))
                if np.linalg.det(np.eye(3)[list(order)] * np.array(flips)) > 0:
                    image = head.as_reoriented(ornt_transform(plain, turned))
                    report("".join(nib.aff2axcodes(image.affine)), volumes(segmented(image)), base)
        fine = resample_to_output(head, 1.0)
        found = segmented(fine)
        base = volumes(found)
        for spacing in (2, 4):
            # what the coarse grid alone changes: the volumes of a network without an error
            kept = {name: found[name][::spacing, ::spacing, ::spacing] for name in base}
            ml = {name: float(mask.sum()) * spacing**3 / 1000 for name, mask in kept.items()}
            report(f"its own labels at {spacing} mm", ml, base)
            # a scanner's voxel is a mean of what lies in it; a point of each has more noise
            blurred = smooth_image(fine, spacing)
            for name, image in (("points of", fine), ("blurred to", blurred)):
                coarse = resample_to_output(image, spacing)
                report(f"{name} {spacing} mm", volumes(segmented(coarse)), base)


def colin(model: scanloom.Model, options: argparse.Namespace) -> None:
    """Print Dice of deep structures of Colin27 with the labels of AAL, drawn by hand."""
    folder = Path(options.scans[0])
    numbers = {
        words[1]: int(words[0])
        for words in map(str.split, (folder / "aal.nii.txt").read_text().splitlines())
        if len(words) > 1
    }
    truth = np.asarray(nib.load(folder / "aal.nii.gz").dataobj)
    found = model.predict(scanloom.load_volume(folder / "ch2.nii.gz", modality="MR"))
    rows = [
        (
            name,
            *(
                f"{dice(found[f'{name}_{side}'], truth == numbers[aal + mark]):.3f}"
                for side, mark in (("left", "_L"), ("right", "_R"))
            ),
        )
        for name, aal in (
            *(("thalamus", "Thalamus"), ("caudate", "Caudate"), ("putamen", "Putamen")),
            *(("pallidum", "Pallidum"), ("hippocampus", "Hippocampus"), ("amygdala", "Amygdala")),
        )
    ]
    print(table(("structure", "left", "right"), rows))


def main() -> None:
    """Load the model, and do what is asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("drawn", "t1", "heads", "axes", "colin"), nargs="?")
    parser.add_argument("scans", nargs="*")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--count", type=int, default=50)
    options = parse(parser, what="heads", scans=[str(ROOT / "data" / "head_mr.nii.gz")])
    if not (Path(options.model) / "models").is_dir():
        unavailable(f"weights of brain_anatomy in {options.model}")
    if not options.scans:
        parser.error("what, and where?")
    model = scanloom.load_model(options.model, device="cpu")
    measures = {"drawn": drawn, "t1": t1, "heads": heads, "axes": axes, "colin": colin}
    measures[options.what](model, options)


if __name__ == "__main__":
    main()
