"""Write the table of MONAI's Model Zoo in `models.md` from a run over a checkout of it.

python docs/write_zoo.py ZOO DATE

ZOO is a checkout of github.com/Project-MONAI/model-zoo of that date. Weights are not needed: empty
files take their places.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from scanloom.cards.card import ModelCard
from scanloom.convert.monai.allow_list import KNOWN
from scanloom.convert.monai.bundle import read_bundle
from scanloom.core import ScanError

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- zoo: written by docs/write_zoo.py -->\n", "<!-- end of zoo -->\n"
MAX_OBSTACLE_CHARS = 60


def read(folder: Path, copy: Path) -> ModelCard | ScanError:
    """Return the card of a bundle, or the error that refuses it."""
    shutil.copytree(folder, copy)
    models = copy / "models"
    models.mkdir(exist_ok=True)
    text = "\n".join(f.read_text() for f in sorted((copy / "configs").glob("inference.*")))
    for name in {"model.pt", *re.findall(r"models/([\w.]+\.pt)", text)}:
        (models / name).write_bytes(b"-")
    code = {name: np.zeros((2, 2)) for name in ("node_a", "arch_code_a", "arch_code_c")}
    for name in re.findall(r"models/(search_code\w*\.pt)", text):
        torch.save(code, models / name)
    try:
        return read_bundle(copy)
    except ScanError as exc:
        return exc


def own_modules(folder: Path) -> str:
    """Return the classes of the bundle's scripts in whose place scanloom has its own."""
    text = "\n".join(f.read_text() for f in sorted((folder / "configs").glob("inference.*")))
    names = [target.rpartition(".")[2] for target in KNOWN if re.search(rf"\b{target}\b", text)]
    return ", ".join(f"`{name}`" for name in names)


def obstacles(error: ScanError) -> str:
    """Return the parts for which a bundle is refused."""
    parts = [re.sub(r", SHA-256 [0-9a-f]+", "", part) for part in error.detail.split("; ")]
    short = [p if len(p) <= MAX_OBSTACLE_CHARS else p[:MAX_OBSTACLE_CHARS] + "..." for p in parts]
    listed = "; ".join(part.replace("|", "\\|").replace("_", "\\_") for part in short[:3])
    return listed + ("; ..." if len(short) > 3 else "")


def table(zoo: Path, date: str) -> str:
    """Return the text between the marks."""
    models = zoo / "models" if (zoo / "models").is_dir() else zoo
    accepted, refused = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in sorted(p for p in models.iterdir() if (p / "configs").is_dir()):
            card = read(folder, Path(scratch) / folder.name)
            if isinstance(card, ScanError):
                refused.append(f"| `{folder.name}` | `{card.code}` | {obstacles(card)} |")
                continue
            flags = ", ".join(f"`{flag.code}`" for flag in card.flags)
            row = (folder.name, card.network.name, str(len(card.structures)), flags)
            modules = own_modules(folder)
            accepted.append(f"| `{row[0]}` | {row[1]} | {row[2]} | {modules} | {row[3]} |")
    return "\n".join(
        [
            f"Of {len(accepted) + len(refused)} bundles of {date}, {len(accepted)} give a card:",
            "",
            "| bundle | network | structures | in the place of its scripts | flags |",
            "|-|-|-|-|-|",
            *accepted,
            "",
            "The others are refused. They do not segment volumes, or each needs what is named:",
            "",
            "| bundle | code | needs |",
            "|-|-|-|",
            *refused,
            "",
        ]
    )


def main() -> None:
    """Replace the table in the page."""
    zoo, date = Path(sys.argv[1]), sys.argv[2]
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + table(zoo, date) + "\n" + END + after)


if __name__ == "__main__":
    main()
