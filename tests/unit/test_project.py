"""The project's papers agree with one another and with the code."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import scanloom
from scanloom.core import Flag, Reason
from support.real_scans import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def reasons_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_reasons", ROOT / "docs/write_reasons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_reasons_is_current() -> None:
    """If this fails: python docs/write_reasons.py."""
    writer = reasons_writer()

    assert (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8") == writer.page()


def test_page_of_reasons_has_all() -> None:
    codes = re.findall(r"^\| `([A-Z0-9_]+)` \|", reasons_writer().page(), flags=re.MULTILINE)

    assert codes == [r.code for r in Reason] + [f.code for f in Flag]


def test_every_dependency_has_a_tested_version_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    tested = {canonicalize_name(name): version for name, version in pins.items()}

    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *extras["test"], *extras["docs"]]
    for wanted in map(Requirement, listed):
        version = tested[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), wanted


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(rf"^## \[{re.escape(PROJECT['version'])}\]", changelog, flags=re.MULTILINE)


def test_readme_says_what_it_is_not() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert "not a medical device" in readme
    assert PROJECT["license"] in readme


def test_links_in_the_papers_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_decisions_are_numbered_and_listed() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    listed = re.findall(r"\(decisions/([^)]+)\)", (ROOT / "docs/decisions.md").read_text())

    assert all(re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", name) for name in names)
    assert len({name[:4] for name in names}) == len(names)
    assert listed == names


def test_lines_of_the_changelog_are_short() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    for line in changelog.splitlines():
        assert len(line.split()) <= 21 or not line.startswith("- "), line


def test_package_is_the_checkouts() -> None:
    """The suite judges this source, not another installed one."""
    assert scanloom.__file__ == str(ROOT / "pipeline" / "scanloom" / "__init__.py")
