"""Run the commands of `docs/better-model.md`, and write what they print and its pictures.

    pip install playwright
    python docs/write_better_model.py [--from HEADING] [FOLDER]

The page is the script: its YAML blocks with a title are written to files, its lines that begin with
`$` are run, and the lines below them are replaced. An image is made where the page shows it. With
--from, what was made in FOLDER before that heading is kept.
`tests/integration/test_training_loop.py` runs the same page, without pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "better-model.md"
BLOCK = re.compile(r'^```(console|yaml title="([\w.]+)")\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^!\[[^]]*\]\((better-model-\w+\.png)\)$", re.MULTILINE)
LINK = re.compile(r"(http://127\.0\.0\.1:\d+/\w+/)#\S+")
PROGRESS = re.compile(r"^(indexing|running): .*\n", re.MULTILINE)
"""What a terminal shows in one line that changes."""
COLUMNS = 100
COLOURS = 128
"""Colours of a picture."""
PATIENCE_MS = 600_000
SCAN = "sub-02_ses-1_ct.nii.gz"
"""The scan whose preview and review the page shows: of a subject who is set aside for testing."""
KEY = b"tutorial key 007................"
"""A key of the case ids that is always the same, so that the ids and the split on the page are."""


def commands_of(block: str) -> list[str]:
    """Return the commands of a console block."""
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def broken(line: str) -> str:
    """Return a line in lines of the terminal's width."""
    return line if len(line) <= COLUMNS else textwrap.fill(line, COLUMNS)


class Terminal:
    """Runs commands in a folder beside the checkout's `data`, with a key and models of its own."""

    def __init__(self, workplace: Path) -> None:
        self.folder = workplace / "tutorial"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (workplace / "data").exists():
            (workplace / "data").symlink_to(ROOT / "data")
        key = workplace / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SCANLOOM_KEY": str(key),
            "XDG_DATA_HOME": str(workplace / "data-home"),
            "XDG_CONFIG_HOME": str(workplace / "config-home"),
            "COLUMNS": str(COLUMNS),
            "NO_COLOR": "1",
        }
        self.links = list[str]()
        self._server: subprocess.Popen[str] | None = None

    def run(self, command: str) -> str:
        """Run a command and return what it prints; RuntimeError if a program fails unexpectedly."""
        if command.startswith("scanloom review"):
            return self._serve(command)
        done = subprocess.run(
            ["bash", "-c", command.replace("LINK", f"'{self.links[-1]}'" if self.links else "")],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if "Traceback" in done.stdout or done.returncode not in (0, 1):
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}")
        if "LINK" in command:
            self.stop()
        lines = PROGRESS.sub("", done.stdout).splitlines()
        return "".join(f"{broken(line)}\n" for line in lines)

    def _serve(self, command: str) -> str:
        self._server = subprocess.Popen(
            command.split(),
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._server.stdout is not None
        shown = ""
        for line in self._server.stdout:
            self.links += [match[0] for match in LINK.finditer(line)]
            shown += LINK.sub(r"\1#...", line)
            if line.startswith("Each link"):
                return shown
        raise RuntimeError(shown)

    def stop(self) -> None:
        """Stop the server of the review, if there is one."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.communicate(timeout=120)
            self._server = None

    def write(
        self,
        text: str,
        start: int = 0,
        picture: Callable[[str], None] = lambda name: None,
        store: Callable[[str], object] = lambda page: None,
    ) -> str:
        """Run what a page holds from a place on; return it with the new outputs.

        Files of YAML blocks are written from the page's beginning. After each block, the page is
        stored: with the new outputs up to there.
        """
        places = sorted([*BLOCK.finditer(text), *IMAGE.finditer(text)], key=lambda m: m.start())
        done, end = "", 0
        try:
            for match in places:
                done, end = done + text[end : match.start()], match.end()
                if match.re is BLOCK and match[2]:
                    (self.folder / match[2]).write_text(match[3])
                if match.start() < start or (match.re is BLOCK and match[2]):
                    done += match[0]
                elif match.re is IMAGE:
                    picture(match[1])
                    done += match[0]
                else:
                    shown = (f"$ {each}\n{self.run(each)}" for each in commands_of(match[3]))
                    done += "```console\n{}```\n".format("".join(shown))
                    store(done + text[end:])
        finally:
            self.stop()
        return done + text[end:]


# --- pictures -------------------------------------------------------------------------------------


class Pictures:
    """Makes the pictures of the page, in colours and sizes of a small file."""

    def __init__(self, terminal: Terminal, browser: Any) -> None:
        self.terminal, self.browser = terminal, browser

    def make(self, name: str) -> None:
        """Make the picture of a name."""
        getattr(self, name.removeprefix("better-model-").removesuffix(".png"))(name)

    def before(self, name: str) -> None:
        """Copy the preview of the case, as the first model has it."""
        shrink(self._case / "preview.png", name)

    after = before

    def review(self, name: str) -> None:
        """Draw one polygon of a correction, and drop it again."""
        player = self._player()
        browser = player.Browser(self.terminal.links[0])
        case = browser.ask(f"case/{self._case.name}")
        result = self._case / "segmentation.nii.gz"
        wrong = player.wrong_bone(result, self.terminal.folder / "archive-truth" / SCAN)
        mask = player.on_slices(case, wrong, result)
        index = int(mask.sum(axis=(0, 1)).argmax())
        line = max(player.polygons(mask[:, :, index]), key=len)
        context = self.browser.new_context(viewport={"width": 1280, "height": 820})
        stored = json.dumps(["scanloom session r1", browser.session])
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(f"localStorage.setItem(...{stored})")
        tab = context.new_page()
        tab.goto(f"{browser.origin}/r1/case/{case['id']}")
        tab.wait_for_selector("body[data-opened]")
        tab.keyboard.press("o")
        tab.locator("#axial input[type=range]").fill(str(index))
        tab.click("#correct")
        tab.select_option("#shape", "polygon")
        tab.select_option("#brush-label", label="Soft tissue")
        box = tab.locator("#axial canvas").first.bounding_box()
        steps = box["width"] / case["shape"][0], box["height"] / case["shape"][1]
        for x, y in line:
            tab.mouse.click(box["x"] + (x + 0.5) * steps[0], box["y"] + (y + 0.5) * steps[1])
        tab.keyboard.press("Enter")
        tab.wait_for_selector("text=voxels changed")
        tab.wait_for_timeout(1000)
        self._store(tab.screenshot(), name)
        tab.click("#discard")
        tab.wait_for_timeout(1000)
        context.close()

    def training(self, name: str) -> None:
        """Copy the curves."""
        shrink(self.terminal.folder / "bone_contrast" / "docs" / "training.png", name)

    def validation(self, name: str) -> None:
        """Copy the cases of the last validation."""
        shrink(self.terminal.folder / "bone_contrast" / "docs" / "validation.png", name)

    def evaluation(self, name: str) -> None:
        """Show the tables and distributions of the page of the evaluation."""
        self._sections(name, "Agreement", "Distributions", 1320)

    def worst(self, name: str) -> None:
        """Show the first of its worst cases."""
        self._sections(name, "Worst cases", "Worst cases", 1080)

    @property
    def _case(self) -> Path:
        results = self.terminal.folder / "results"
        return results / "cases" / case_of(results, SCAN)

    def _player(self) -> Any:
        sys.path.insert(0, str(ROOT / "data"))
        import play_reviewer

        return play_reviewer

    def _sections(self, name: str, first: str, last: str, width: int) -> None:
        context = self.browser.new_context(viewport={"width": width, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        tab = context.new_page()
        tab.goto((self.terminal.folder / "evaluation" / "evaluation.html").as_uri())
        boxes = [
            tab.locator("section", has=tab.locator(f"h2:has-text('{title}')")).first.bounding_box()
            for title in (first, last)
        ]
        top = boxes[0]["y"]
        height = boxes[1]["y"] + boxes[1]["height"] - top
        if first == last:  # up to the second case
            height = tab.locator("h3").nth(1).bounding_box()["y"] - top
        clip = {"x": 0, "y": top, "width": width, "height": height}
        self._store(tab.screenshot(full_page=True, clip=clip), name)
        context.close()

    def _store(self, png: bytes, name: str) -> None:
        file = self.terminal.folder / name
        file.write_bytes(png)
        shrink(file, name, 1000)


def shrink(picture: Path, name: str, width: int = 760) -> None:
    """Store a picture beside the page, no wider than it is shown, in few colours."""
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB")
    small.thumbnail((width, 4000), Image.Resampling.LANCZOS)
    # the octree keeps rare colours, such as those of a legend
    few = small.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(PAGE.with_name(name), optimize=True)


def case_of(results: Path, scan: str) -> str:
    """Return the id of the case that was made of a file."""
    from scanloom.io.output.crosswalk import find_sources, latest_by_id

    cases = [folder.name for folder in (results / "cases").iterdir()]
    sources = latest_by_id(find_sources(results, cases))
    return next(case for case in cases if Path(sources[case].path).name == scan)


def main() -> None:
    """Write the page and its pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser()
    parser.add_argument("--from", dest="heading", default="")
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    workplace = arguments.folder or Path(tempfile.mkdtemp())
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"\n## {arguments.heading}\n") if arguments.heading else 0
    terminal = Terminal(workplace.absolute())
    program = os.environ.get("SCANLOOM_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        pictures = Pictures(terminal, browser)
        terminal.write(text, start, pictures.make, lambda page: PAGE.write_text(page, "utf-8"))


if __name__ == "__main__":
    main()
