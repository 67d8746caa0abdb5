"""Restoring alone: scores of 200 x 239 x 239 voxels to labels of 512 x 512 x 300.

    python benchmarks/restore.py [--classes 25] [--rounds 3] [--peers nnunet] [--nnunet-env FOLDER]

scanloom's kernel, its torch reference and nnU-Net's own functions on the same half-precision
scores, each in a process of its own; labels compared. `--classes 118` for many (without nnU-Net,
which would need some 30 GB).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from meter import Watch, cache, machine, median, parse, peer_python, run, table
from model import SPACING
from phantom import draw_scores, phantom

HERE = Path(__file__).parent
PLANE, SOURCE_PLANE = (239, 239), (512, 512)
SLICES = 300
AT_ONCE = 32  # planes that are handed over together, as windows finish them


def grids(slices: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of the network's and the source's grid."""
    return (*PLANE, round(slices / SPACING[2])), (*SOURCE_PLANE, slices)


def scores(structures: int, slices: int) -> Path:
    """Return the file with the scores (Z, C, X, Y), half; it is drawn if it is not there."""
    path, (network, _) = cache("scores", f"{structures}-{slices}.npy"), grids(slices)
    if not path.is_file():
        extent = tuple(n * s for n, s in zip(network, SPACING, strict=True))
        drawn = phantom((extent[0], extent[1], extent[2]), structures)
        whole = path.with_suffix(".part.npy")
        np.save(whole, draw_scores(drawn, SPACING, network))
        whole.rename(path)
    return path


def plan(slices: int) -> Any:
    """Return the way between the grids as nnU-Net (scikit-image) lays it: corners on corners."""
    from scanloom.cards.card import NetworkGrid
    from scanloom.core import Grid
    from scanloom.inference.geometry import plan_grid

    small, large = grids(slices)
    spacing = [mm * n / s for mm, n, s in zip(SPACING, small, large, strict=True)]
    source = Grid(large, np.diag((*spacing, 1.0)))
    return plan_grid(source, NetworkGrid(None, SPACING, alignment="edges"))


def ours(path: Path, slices: int, way: str, rounds: int, out: Path) -> dict[str, Any]:
    """Restore `rounds` times; return seconds of each, and the bytes added to memory."""
    import torch

    from scanloom.cards.card import Argmax
    from scanloom.inference.restore.restorers import RestoreBackend, ScoreRestorer, restore_torch
    from scanloom.inference.sliding_window import ScorePlanes

    held = torch.from_numpy(np.load(path))
    walls, cpus, added, why = [], [], [], ""
    restorer: Any = None
    for n in range(rounds + 1):  # the first warms up
        restorer = None  # so that its labels count anew
        with Watch() as watch, torch.inference_mode():
            wall, cpu = time.perf_counter(), time.process_time()
            restorer = ScoreRestorer(plan(slices), Argmax(), held.shape[1])
            if way == "torch":
                restorer.backend = RestoreBackend(restore_torch, "asked for")
            for first in range(0, len(held), AT_ONCE):
                restorer.add(ScorePlanes(first, held[first : first + AT_ONCE]))
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        added.append(watch.peak - watch.start)
        why = restorer.backend.why if restorer.backend else ""
        if n == 0 and rounds > 0:
            walls, cpus = [], []
    np.save(out, restorer.labels[0].transpose(2, 0, 1))
    return {"walls": walls, "cpus": cpus, "added": added[-1], "first": added[0], "why": why}


def main() -> None:
    """Run everybody, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--classes", type=int, default=25, help="structures beside the background")
    parser.add_argument("--slices", type=int, default=SLICES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=["torch", "nnunet"])
    parser.add_argument("--nnunet-env", type=Path, help="an environment that has nnU-Net")
    parser.add_argument("--one", nargs=4, metavar=("SCORES", "WAY", "ROUNDS", "OUT"))
    options = parse(parser, classes=4, slices=20, rounds=1, peers=["torch"])
    if options.one:
        path, way, rounds, out = options.one
        print(json.dumps(ours(Path(path), options.slices, way, int(rounds), Path(out))))
        return
    path = scores(options.classes, options.slices)
    print(machine("scanloom", "torch", "numpy", "numba"), "\n")
    rows: list[list[Any]] = []
    labels: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("kernel", *(["torch"] if "torch" in options.peers else [])):
            out = Path(folder) / f"{way}.npy"
            rounds = options.rounds if way == "kernel" else 0
            command = [sys.executable, HERE / "restore.py", "--slices", str(options.slices)]
            command += ["--one", path, way, str(rounds), out]
            answer = run(command).answer
            name = f"scanloom ({answer['why']})" if way == "kernel" else "torch reference"
            added = answer["added"] / 2**20
            rows.append([name, median(answer["walls"]), median(answer["cpus"]), added])
            labels[name] = np.load(out)
        if "nnunet" in options.peers and options.classes < 50:
            out = Path(folder) / "nnunet.npy"
            python = peer_python("nnunet", options.nnunet_env)
            shape = ",".join(str(n) for n in grids(options.slices)[1])
            spent = run([python, HERE / "peer_nnunet.py", "restore", path, shape, out])
            wall, cpu = spent.answer["steps"]["restore"]
            rows.append(["nnU-Net's functions", wall, cpu, spent.peak / 2**20])
            labels["nnU-Net's functions"] = np.load(out)
    mine = labels[rows[0][0]]
    for row in rows:
        unlike = int(np.count_nonzero(labels[row[0]] != mine))
        row += [row[1] / rows[0][1], row[2] / rows[0][2], f"{unlike:,} of {mine.size:,}"]
    head = ["way", "wall s", "cpu s", "+ MiB (peers: whole)", "wall x", "cpu x", "labels unlike"]
    print(f"{options.classes} structures and background, half precision\n")
    print(table(head, rows))


if __name__ == "__main__":
    main()
