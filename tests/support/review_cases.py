"""Output folders with published cases, for the tests of reviews."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np

from scanloom.core import (
    Case,
    Layer,
    Outputs,
    ReadOptions,
    Relations,
    Segmentation,
    StepTimer,
    Volume,
)
from scanloom.engine.prepare import OutputTarget, prepare
from scanloom.engine.steps import run_case
from scanloom.io.identity import case_id
from scanloom.io.index.series import find_series
from scanloom.io.output.crosswalk import source_from_series
from scanloom.options import Modality
from scanloom.review.verdicts.verdict import Seen, seen_of
from support.case_folders import directions, turned
from support.engine_models import Threshold
from support.model_cards import structures

KEY = b"k" * 32
RECIPE = "r" * 64
SHAPE = (14, 11, 9)
SPACING = (1.25, 1.5, 2.5)
NAME = "0"
"""Stands for any case where only its place in a list matters."""


def judged(case: dict[str, Any], decision: str = "accept", **more: Any) -> dict[str, Any]:
    """Return a verdict about a case as it was shown."""
    shown = {name: case[name] for name in ("version", "last")}
    return {"decision": decision, **shown, **more}


class Bands(Threshold):
    """Labels intensities by bands: from 300 on the first structure, 600, 900; in two layers."""

    def __init__(self, weights: Path, first: int = 1, layers: int = 1) -> None:
        super().__init__(weights, None, 0.0)
        kinds = tuple(
            replace(each, number=each.number + first - 1) for each in structures(3 * layers)
        )
        self.card = replace(self.card, structures=kinds)
        self._first, self._layers = first, layers

    def predict(self, volume: Volume, clock: StepTimer | None = None, **_: object) -> Segmentation:
        with (clock or StepTimer()).step("network"):
            band = np.digitize(volume.array, (300, 600, 900))
        layers = []
        for n in range(self._layers):
            first = self._first + 3 * n
            labels = np.where(band > 0, band + first - 1, 0)[:: -1 if n else 1]
            dtype = np.uint8 if first + 2 < 256 else np.uint16
            layers.append(
                Layer(np.asfortranarray(labels, dtype), self.card.structures[3 * n : 3 * n + 3])
            )
        return Segmentation("threshold", tuple(layers), volume.grid, "1")


def scan_array(seed: int = 0, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    """Return noise with blobs of three intensities, and no symmetry."""
    rng = np.random.default_rng(seed)
    array = rng.integers(-900, 0, shape).astype(np.int16)
    i, j, k = np.indices(shape)
    for n, value in enumerate((400, 700, 1000)):
        centre = [rng.uniform(0.25, 0.75) * size for size in shape]
        radius = [rng.uniform(0.15, 0.3) * size for size in shape]
        inside = sum(((x - c) / r) ** 2 for x, c, r in zip((i, j, k), centre, radius, strict=True))
        array[inside < 1] = value + n
    return array


def affine_of(codes: str = "RAS", oblique: float = 0.0, shear: float = 0.0) -> np.ndarray:
    """Return an affine (RAS mm) with axes of these codes, turned, and sheared along J."""
    axes = turned(directions(codes), oblique)
    affine = np.eye(4)
    affine[:3, :3] = axes * SPACING
    affine[:3, 2] += shear * axes[:, 1]
    affine[:3, 3] = (-31.5, 12.25, -40.75)
    return affine


def publish(
    folder: Path,
    array: np.ndarray,
    affine: np.ndarray,
    name: str = "scan",
    *,
    also: Sequence[str] = (),
    first: int = 1,
    layers: int = 1,
    recipe: str = RECIPE,
) -> Path:
    """Publish a case of a NIfTI file in `folder/out`; return its folder."""
    (folder / "scans").mkdir(exist_ok=True)
    path = folder / "scans" / f"{name}.nii.gz"
    nib.save(nib.Nifti1Image(array, affine), path)
    return publish_scan(folder, path, also=also, first=first, layers=layers, recipe=recipe)


def publish_scan(
    folder: Path,
    path: Path,
    *,
    also: Sequence[str] = (),
    first: int = 1,
    layers: int = 1,
    kind: type[Bands] = Bands,
    modality: Modality = "CT",
    recipe: str = RECIPE,
    relations: Relations | None = None,
) -> Path:
    """Publish a case of the scan at a path in `folder/out`; return its folder.

    That of another recipe replaces a result that is there.
    """
    weights, key = folder / "weights", folder / "key"
    weights.touch()
    key.write_bytes(KEY)
    key.chmod(0o600)
    [series] = find_series(path)
    number = case_id(series, KEY)
    read = ReadOptions(modality=modality)
    outputs = Outputs(also=tuple(also))
    relations = relations or Relations()
    case = Case(number, series, outputs, "", recipe, read, relations=relations)
    replace = recipe != RECIPE
    target = OutputTarget(folder / "out", KEY, replace)
    model = kind(weights, first, layers)
    prepared = prepare(case, [model.card], target)
    record = prepared.ended() or run_case(
        prepared,
        lambda: [model],
        target,
        source=source_from_series(series, number),
    )
    assert record.folder is not None, record
    return record.folder


def seen(case: Path) -> Seen:
    """Return the result that a reviewer of a case sees."""
    return seen_of(case)


def version_of(client: Any, name: str) -> str:
    """Return the version of a reviewer's correction of a case."""
    return str(client.get(f"/api/case/{name}/draft").json()["version"])


def change(client: Any, name: str, path: str, version: str | None = None, **body: Any) -> Any:
    """Change the correction that there is now, or that of a version."""
    version = version_of(client, name) if version is None else version
    return client.post(f"/api/case/{name}/{path}", json={**body, "version": version})


def enter(client: Any, link: str) -> str:
    """Use a reviewer's link as its page does: the client sends the session from then on."""
    address, _, token = link.partition("#")
    body = {"token": token, "reviewer": address.rstrip("/").rpartition("/")[2]}
    answer = client.post("/api/session", json=body)
    assert answer.status_code == 200, answer.text
    session = str(answer.json()["session"])
    client.headers["authorization"] = f"Bearer {session}"
    return session


def origin_of(link: str) -> str:
    """Return the address of the server of a link."""
    return "/".join(link.split("/")[:3])


class Serving:
    """`scanloom review` as a program."""

    def __init__(self, out: Path, key: Path, reviewer: str = "anna") -> None:
        command = [sys.executable, "-m", "scanloom", "review", str(out), "--key"]
        command += [str(key), "--reviewers", f"{reviewer},ben"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.links = []
        for line in self.process.stdout:
            if "/#" in line:
                self.links.append(line.split()[-1])
            if line.startswith("Each link"):
                break

    def client(self, reviewer: int = 0) -> Any:
        origin = origin_of(self.links[reviewer])
        client = httpx.Client(base_url=origin, headers={"origin": origin}, timeout=60)
        enter(client, self.links[reviewer])
        return client

    def close(self, by: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(by)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        assert self.process.stdout is not None
        self.said = self.process.stdout.read()
        self.process.stdout.close()
