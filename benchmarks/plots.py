"""Draw the figures of docs/performance.md as bars, from figures.json beside this script.

    python benchmarks/plots.py [--picture docs/performance.svg]

A figure that was measured anew is entered in figures.json by hand, with its table in docs/.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meter import parse

HERE = Path(__file__).parent
COLOURS = {"ours": "#0b6e8a", "peer": "#9aa3ab"}


def draw(panels: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel of horizontal bars for each entry."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "scanloom"  # equal figures give an equal file
    import matplotlib.pyplot as plt

    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(10, 2.3 * rows), facecolor="white")
    for axis, panel in zip(axes.flat, panels, strict=False):
        names, values, kinds = zip(*panel["bars"], strict=True)
        bars = axis.barh(names, values, color=[COLOURS[kind] for kind in kinds], height=0.65)
        axis.bar_label(bars, [f"{value:g}" for value in values], padding=3, fontsize=9)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
        axis.set_xlabel(panel["axis"], fontsize=9)
        axis.tick_params(labelsize=9, length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout(h_pad=2.0)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=100)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "performance.svg")
    options = parse(parser)
    panels = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))["panels"]
    draw(panels, options.picture)
    print(f"{options.picture}: {sum(len(panel['bars']) for panel in panels)} figures")


if __name__ == "__main__":
    main()
