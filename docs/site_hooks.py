"""Hooks of mkdocs: pages made from the root's README and others, links, and no network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
"""Files of the root, and their pages on the site."""
NOTEBOOK = "docs/tutorial.ipynb"
CODE = re.compile(r"<code>([^<>\s]{1,28})</code>")
SHIM = "https://unpkg.com/iframe-worker/shim"
"""Script that the theme's offline plugin loads from the network; a copy is in `docs/`."""
LINK = re.compile(r"(!?)\[([^][]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's files as pages."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text, name, page)))
    files.append(File.generated(config, "tutorial.md", content=notebook_page()))
    return files


def notebook_page() -> str:
    """Return the tutorial's notebook with its outputs as Markdown."""
    cells = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [notebook_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n\nThe notebook: [tutorial.ipynb](tutorial.ipynb).\n"


def notebook_output(output: Mapping[str, Any]) -> str:
    """Return what a cell printed, or its result, as Markdown."""
    if output["output_type"] == "stream":
        return "```text\n{}\n```".format("".join(output["text"]).rstrip())
    html = output["data"].get("text/html")
    if html is None:
        return "```text\n{}\n```".format("".join(output["data"]["text/plain"]))
    # Markdown ends HTML at an empty line, and reads what is indented as code
    return "\n".join(line.strip() for line in "".join(html).splitlines() if line.strip())


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the site's pages; keep only the text of links to other files."""
    uri = page.file.src_uri
    return markdown if uri in PAGES.values() else site_links(markdown, f"docs/{uri}", uri)


def on_page_content(html: str, **_: Any) -> str:
    """Break reason codes after underscores only, and other short names not at all."""

    def unbroken(match: re.Match[str]) -> str:
        name = match[1]
        if name.isupper() and "_" in name:
            return f"<code>{name.replace('_', '_<wbr>')}</code>"
        return f'<code class="unbroken">{name}</code>'

    return CODE.sub(unbroken, html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the copy of the shim."""
    return output.replace(SHIM, "../" * page.url.count("/") + "iframe-worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Load the copy of the shim from pages without a source, such as 404.html."""
    return output_content.replace(SHIM, "iframe-worker.js")


def site_links(text: str, path: str, page: str) -> str:
    """Return Markdown with links as they are on the site.

    Parameters
    ----------
    text : str
        Markdown of a file.
    path, page : str
        The file, relative to the root; its page, relative to `docs/`.
    """

    def target(match: re.Match[str]) -> str:
        image, label, link, anchor = match.groups(default="")
        file = os.path.normpath(PurePosixPath(path).parent / link)
        if file in PAGES:
            uri = PAGES[file]
        elif file.startswith("docs/"):
            uri = file.removeprefix("docs/")
        else:
            return label
        relative = os.path.relpath(uri, PurePosixPath(page).parent)
        return f"{image}[{label}]({relative}{anchor})"

    return LINK.sub(target, text)
