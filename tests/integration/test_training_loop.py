"""Train, segment an archive, review and correct it, train on that: the new model is better."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml

from scanloom.io.output.crosswalk import find_sources, latest_by_id
from support.commands import scanloom
from support.review_cases import KEY, Serving, change, judged, version_of

SIZE, SPACING = 32, 1.5
"""Voxels along an axis, and their size in mm."""
SHAPE = (SIZE, SIZE, SIZE)
SCANS, SUBJECTS = 30, 25
"""Scans of the archive and their subjects, some of whom were scanned twice."""
GOOD = 0.9
"""Least Dice of each structure that the reviewer accepts; other results are corrected."""
STRUCTURES = {"organ": 1, "lesion": 2}


@dataclass(frozen=True)
class Ball:
    """A structure; centre in voxels, radius in mm."""

    label: int
    centre: np.ndarray
    radius: float

    @property
    def mask(self) -> np.ndarray:
        squares = [(n - c) ** 2 for n, c in zip(np.indices(SHAPE), self.centre, strict=True)]
        return np.asarray(sum(squares) * SPACING**2 <= self.radius**2)


@dataclass(frozen=True)
class Phantom:
    """A CT and its truth: an organ, in which there may be a brighter lesion."""

    image: np.ndarray
    balls: tuple[Ball, ...]

    @property
    def truth(self) -> np.ndarray:
        labels = np.zeros(SHAPE, np.uint8)
        for ball in self.balls:
            labels[ball.mask] = ball.label
        return labels


def phantom(seed: int) -> Phantom:
    """Return balls of random size, position and HU, in noise, near a vessel as bright as lesions.

    Each third one has no lesion.
    """
    rng = np.random.default_rng(seed)
    image = np.full(SHAPE, rng.uniform(-40, 0))
    column, row = rng.integers(2, SIZE - 4, 2)
    image[column : column + 3, row : row + 3] = rng.uniform(180, 240)
    organ = Ball(1, rng.uniform(11, SIZE - 12, 3), rng.uniform(9, 14))
    inside = organ.centre + rng.uniform(-0.3, 0.3, 3) * organ.radius / SPACING
    lesion = Ball(2, inside, rng.uniform(4.5, 6.0))
    balls = (organ, lesion) if seed % 3 else (organ,)
    for ball, value in zip(balls, (rng.uniform(60, 110), rng.uniform(180, 240)), strict=False):
        image[ball.mask] = value
    return Phantom((image + rng.normal(0, 25, SHAPE)).astype(np.int16), balls)


def save(array: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([SPACING, SPACING, SPACING, 1.0])), path)


def read_labels(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def write_recipe(path: Path, name: str, data: dict[str, Any], steps: int) -> Path:
    page = {
        "name": name,
        "modality": "CT",
        "data": data,
        "structures": [{"label": label, "values": n} for label, n in STRUCTURES.items()],
        "spacing": [SPACING] * 3,
        "intensity": [-150, 350],
        "patch": [SIZE] * 3,
        "network": {"filters": [8, 16, 32]},
        "schedule": {
            "steps": steps,
            "epoch": 20,
            "warm_up": 5,
            "learning_rate": 0.01,
            "average": 0.05,
            "precision": "float32",
            "seed": 1,
        },
    }
    path.write_text(yaml.safe_dump(page))
    return path


def is_good(labels: np.ndarray, truth: np.ndarray) -> bool:
    for label in STRUCTURES.values():
        one, other = labels == label, truth == label
        if 2 * (one & other).sum() < GOOD * (one.sum() + other.sum()):
            return False
    return True


def correct(client: Any, case: str, balls: tuple[Ball, ...]) -> None:
    """Erase the labels of a case with the brush, and draw balls slice by slice."""
    version = version_of(client, case)

    def paint(index: int, centre: tuple[float, float], radius: float, label: int) -> None:
        nonlocal version
        stroke = {"plane": "axial", "index": index, "points": [centre], "radius_mm": radius}
        answer = change(client, case, "stroke", version, layer=0, label=label, **stroke)
        assert answer.status_code == 200, answer.text
        version = answer.json()["version"]

    for index in range(SIZE):
        paint(index, (SIZE / 2, SIZE / 2), SIZE * SPACING, 0)
    # slices are drawn on axes of their own, not on those of the file
    to_lps = np.array(client.get(f"/api/case/{case}").json()["affine"])
    for ball in balls:
        lps = np.array([-1, -1, 1]) * SPACING * ball.centre
        x, y, z = np.linalg.solve(to_lps, [*lps, 1])[:3]
        for index in range(SIZE):
            height = (index - z) * SPACING
            if abs(height) < ball.radius:
                paint(index, (x, y), float(np.sqrt(ball.radius**2 - height**2)), ball.label)
    assert change(client, case, "draft/save", version).json() == {"revision": 1}


def accept(client: Any, case: str) -> None:
    body = judged(client.get(f"/api/case/{case}").json())
    assert client.post(f"/api/case/{case}/verdict", json=body).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("ignite", "fire", "tensorboard"))), reason="needs the extra train"
)
def test_a_model_trained_on_corrected_results_is_better(tmp_path: Path) -> None:
    archive, first, out, data = (tmp_path / name for name in ("archive", "first", "out", "data"))
    old, new, key = (tmp_path / name for name in ("old", "new", "key"))
    key.write_bytes(KEY)
    key.chmod(0o600)

    def run(*arguments: str | Path) -> Any:
        ended = scanloom(*arguments, "--json")
        assert ended.code == 0, ended.err
        return ended.document

    # --- a poor model, of six scans and few steps
    for seed in range(6):
        drawn = phantom(seed)
        save(drawn.image, first / "images" / f"{seed}.nii.gz")
        save(drawn.truth, first / "labels" / f"{seed}.nii.gz")
    folders = {"images": "images", "labels": "labels"}
    run("train", write_recipe(first / "recipe.yaml", "old", folders, 40), "-o", old)

    # --- an archive, segmented by it
    phantoms, subjects = {}, {}
    for n in range(SCANS):
        subject, session = f"sub-{n % SUBJECTS:02}", f"ses-{n // SUBJECTS}"
        name = f"{subject}_{session}_ct.nii.gz"
        phantoms[name], subjects[name] = phantom(100 + n), subject
        save(phantoms[name].image, archive / subject / session / "anat" / name)
    workflow = tmp_path / "workflow.yaml"
    execution = {"device": "cpu", "precision": "float32"}
    page = {"name": "loop", "models": [str(old)], "execution": execution}
    workflow.write_text(yaml.safe_dump({**page, "policy": {"modality": "CT"}}))
    run("run", workflow, archive, "-o", out, "--cluster", "none", "--key", key)
    cases = [folder.name for folder in (out / "cases").iterdir()]
    sources = latest_by_id(find_sources(out, cases))
    names = {case: Path(sources[case].path).name for case in cases}
    assert set(names.values()) == phantoms.keys()

    # --- reviewed: what is good is accepted, the rest corrected
    corrected = set()
    with closing(Serving(out, key)) as server, closing(server.client()) as client:
        for case in cases:
            scan = phantoms[names[case]]
            if not is_good(read_labels(out / "cases" / case / "segmentation.nii.gz"), scan.truth):
                correct(client, case, scan.balls)
                corrected.add(case)
            accept(client, case)
    assert 0 < len(corrected) < SCANS

    # --- a dataset, with the labels of the reviewer
    command = ("dataset", out, "-o", data, "--format", "monai", "--test-share", "60%")
    written = run(*command, "--key", key)
    aside = {each["case"] for each in written["cases"] if each["set"] == "test"}
    assert {each["case"] for each in written["cases"]} == set(cases)
    assert sum(written["patients"].values()) == SUBJECTS
    for case in corrected:
        [file] = data.glob(f"labels*/{case}.nii.gz")
        np.testing.assert_array_equal(read_labels(file), phantoms[names[case]].truth)

    # --- a new model, that never saw the subjects who were set aside
    listed = {"datalist": "data/datalist.json"}
    run("train", write_recipe(tmp_path / "recipe.yaml", "new", listed, 400), "-o", new)
    used = json.loads((new / "configs" / "datalist.json").read_text())
    seen = {
        split: {Path(each["image"]).name.removesuffix(".nii.gz") for each in used[split]}
        for split in ("training", "validation", "testing")
    }
    assert seen["testing"] == aside
    assert seen["training"] | seen["validation"] == set(cases) - aside
    of_splits = [{subjects[names[case]] for case in each} for each in seen.values()]
    assert sum(map(len, of_splits)) == len(set.union(*of_splits)) == SUBJECTS

    # --- both models on what was set aside, by the reviewer's labels and by the truth
    for model in (old, new):
        command = ("segment", data / "imagesTs", "-m", model, "--series", "all", "--modality", "ct")
        run(*command, "-o", tmp_path / f"by_{model.name}", "--key", key)
    for case in aside:
        save(phantoms[names[case]].truth, tmp_path / "truth" / f"{case}.nii.gz")
    for reference in (data, tmp_path / "truth"):
        command = ("evaluate", tmp_path / "by_new", "-r", reference, "--key", key)
        compared = (*command, "--against", tmp_path / "by_old")
        document = run(*compared, "-o", tmp_path / f"evaluation_{reference.name}")
        assert document["cases"] == {"first": len(aside), "second": len(aside)}
        if reference == data:  # which knows them
            assert document["patients"] == written["patients"]["test"] < len(aside)
        gains = {
            each["structure"]: each["low"]
            for each in document["differences"]
            if each["figure"] == "dice"
        }
        assert gains[None] > 0  # the mean of structures
        if reference != data:  # whose labels are those of the old model where it was accepted
            assert gains["organ"] > 0
