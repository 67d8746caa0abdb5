"""The project's papers agree with one another and with the code."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

import scanloom
from scanloom.cards.networks import NETWORKS
from scanloom.cli.main import app
from scanloom.core import Flag, Reason
from scanloom.io.dicom.slice_attributes import SLICE_ATTRIBUTES
from support.real_scans import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE = ROOT / "pipeline" / "scanloom"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE_COLUMNS = 102
"""Characters of a line of code that the pages of the documentation show without scrolling."""
PAGES_OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]
NAME_IN_CAPITALS = r"[A-Z][A-Z0-9.]*(?:_+[A-Z0-9.]*[A-Z0-9])+"
"""A code, a flag, a constant or a variable. The dot is for codes that a figure was put into."""

VARIABLES_OF_OTHERS = {
    "AVX512_CORE_FP16",
    "CODE_OF_CONDUCT",
    "CUDA_VISIBLE_DEVICES",
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE",
    "DASK_WORKER_NAME",
    "HTTPS_PROXY",
    "MALLOC_ARENA_MAX",
    "NO_PROXY",
    "SLURM_ARRAY_TASK_ID",
    "TRITON_CACHE_DIR",
}
OPTIONS_OF_OTHERS = {
    "dask": {"--local-directory", "--nthreads", "--rmm-pool-size", "--scheduler-file"}
    | {"--tls-ca-file", "--tls-cert", "--tls-key"},
    "docker": {"--gpus", "--group-add", "--rm", "--shm-size"}
    | {"--build-arg", "--network", "--read-only", "--tmpfs"},
    "monai.bundle": {"--batch", "--config_file", "--steps"},
    "nnU-Net": {"--disable_tta", "--save_probabilities", "--verify_dataset_integrity"},
    "pip": {"--extra-index-url", "--find-links", "--no-index", "--require-hashes", "--upgrade"},
    "sbatch": {"--array", "--constraint", "--cpus-per-task", "--gres", "--mem", "--nice"},
    "sha256sum": {"--check"},
    "torchrun": {"--nproc_per_node"},
    "TotalSegmentator": {"--ml", "--output_type", "--preview", "--radiomics"}
    | {"--remove_small_blobs", "--roi_subset", "--statistics", "--task"},
    "scanloom before 0.1": {"--body-box", "--fused-restore", "--output", "--price"},
}


def reasons_writer() -> ModuleType:
    return writer_of("write_reasons")


def writer_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_of_reasons_is_current() -> None:
    """If this fails: python docs/write_reasons.py."""
    writer = reasons_writer()

    assert (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8") == writer.page()


def test_table_of_attributes_is_current() -> None:
    """If this fails: python docs/write_attributes.py."""
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")

    assert text == writer_of("write_attributes").page(text)
    for attribute in SLICE_ATTRIBUTES:
        assert f"\n| {attribute.name} | " in text


@pytest.mark.thorough
def test_table_of_device_memory_is_current() -> None:
    """If this fails: python docs/write_gpu.py."""
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")

    assert text == writer_of("write_gpu").page(text)


def test_page_of_reasons_has_all() -> None:
    codes = re.findall(r"^\| `([A-Z0-9_]+)` \|", reasons_writer().page(), flags=re.MULTILINE)

    assert codes == [r.code for r in Reason] + [f.code for f in Flag]


def test_every_dependency_has_a_tested_version_within_its_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    tested = {canonicalize_name(name): version for name, version in pins.items()}

    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *extras["test"], *extras["docs"]]
    for requirement in map(Requirement, listed):
        version = tested[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(rf"^## \[{re.escape(scanloom.__version__)}\]", changelog, flags=re.MULTILINE)


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
    assert sorted(listed) == names


def test_lines_of_the_changelog_are_short() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    for line in changelog.splitlines():
        assert len(line.split()) <= 21 or not line.startswith("- "), line


def test_code_in_the_papers_fits_a_page_of_1400_pixels() -> None:
    """But for two copies by rsync that a test generates."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        blocks = re.findall(
            r"^```.*?^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        long = [line for block in blocks for line in block.splitlines() if len(line) > CODE_COLUMNS]
        assert [line for line in long if not line.startswith("rsync")] == [], page.name


def test_package_is_the_checkouts() -> None:
    """The suite judges this source, not another installed one."""
    assert scanloom.__file__ == str(ROOT / "pipeline" / "scanloom" / "__init__.py")


def words_of(folders: list[Path], pattern: str) -> set[str]:
    """Return the matches of a pattern in the Python files of folders."""
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return {match for file in files for match in re.findall(pattern, file.read_text("utf-8"))}


def options_of(command: Any) -> Iterator[str]:
    """Yield the options of a command and of its commands."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


def names_in_capitals(text: str) -> list[str]:
    return re.findall(rf"\b{NAME_IN_CAPITALS}\b", text)


def test_codes_that_a_replacement_broke_are_seen() -> None:
    assert names_in_capitals("`MODEL_NE0.83RK`, `STALE`") == ["MODEL_NE0.83RK"]


def test_codes_and_variables_in_the_papers_exist() -> None:
    known = {reason.code for reason in Reason} | {flag.code for flag in Flag}
    known |= words_of([PACKAGE], rf"\b{NAME_IN_CAPITALS}\b") | VARIABLES_OF_OTHERS
    options = (option.lstrip("-") for option in options_of(get_command(app)))
    known |= {f"SCANLOOM_{option.upper().replace('-', '_')}" for option in options}
    known |= {"SCANLOOM_SCANS", *names_in_capitals((ROOT / "Makefile").read_text("utf-8"))}
    for page in PAGES_OF_TODAY:
        for name in names_in_capitals(page.read_text("utf-8")):
            assert name in known, f"{page.name}: {name}"


def test_codes_in_tables_of_the_papers_exist() -> None:
    """A code in the first column of a table whose head says so is a reason or a flag."""
    known = {reason.code for reason in Reason} | {flag.code for flag in Flag}
    for page in PAGES_OF_TODAY:
        for head, rows in re.findall(
            r"^\| (code|reason) \|.*\n((?:\|.*\n)+)", page.read_text("utf-8"), flags=re.MULTILINE
        ):
            for code in re.findall(r"^\| `([^`]+)`", rows, flags=re.MULTILINE):
                assert code in known, f"{page.name}, {head}: {code}"


def test_options_in_the_papers_exist() -> None:
    pattern = r"(?<![\w-])--[a-z][\w-]*"
    known = set(options_of(get_command(app))).union(*OPTIONS_OF_OTHERS.values(), {"--help"})
    known |= {f"--no-{option[2:]}" for option in known}
    scripts = [
        ROOT / name for name in ("benchmarks", "docs", "tests/stress", "tests/reference/parity")
    ]
    known |= words_of(scripts, pattern)
    for page in PAGES_OF_TODAY:
        for option in re.findall(pattern, page.read_text("utf-8")):
            assert option in known, f"{page.name}: {option}"


def commands_in(page: Path, names: str) -> Iterator[list[str]]:
    """Yield the arguments of each `scanloom NAME` on a line of code of a page, or of a script."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks) if page.suffix == ".md" else text
    lines = re.sub(r"\\\n\s*", " ", code).splitlines()
    for line in lines:
        found = re.search(rf"\b(?:scanloom|inside) ((?:{names})\b[^>|&]*)", line)
        if found is not None:
            yield shlex.split(found[1], comments=True)


def test_command_lines_in_the_papers_are_accepted() -> None:
    """Each has only options of its own command, with their values, and no argument too many."""
    seen = 0
    program: Any = get_command(app)
    names = "|".join(program.commands)
    for page in [*PAGES_OF_TODAY, *(ROOT / "deploy").glob("*.sh"), *ROOT.glob("workflows/*.yaml")]:
        for words in commands_in(page, names):
            command = program
            rest = list(words)
            while rest and rest[0] in getattr(command, "commands", {}):
                command = command.commands[rest.pop(0)]
            parser = command.make_parser(command.context_class(command, info_name="scanloom"))
            _, left, _ = parser.parse_args(rest)  # raises for an option that is not its own
            assert not left, f"{page.name}: {words}"
            seen += 1
    assert seen > 100


def source(path: str) -> Path | None:
    """Return the file or folder that a page names, relative to the root, the package or others."""
    roots = (ROOT, PACKAGE, ROOT / "benchmarks")
    return next((root / path for root in roots if (root / path).exists()), None)


def test_python_files_in_the_papers_exist() -> None:
    for page in PAGES_OF_TODAY:
        for path in re.findall(r"`(?:python )?([\w/.]+/\w+\.py)", page.read_text("utf-8")):
            assert source(path), f"{page.name}: {path}"


def test_page_of_models_lists_the_networks() -> None:
    row = re.search(
        r"^\| network \| one of.*", (ROOT / "docs/models.md").read_text("utf-8"), re.MULTILINE
    )
    assert row is not None
    listed = set(re.findall(r"`([^`]*)`", row[0])[0].split())
    in_bundles = {name for name, network in NETWORKS.items() if network.in_bundles}
    assert listed == in_bundles - {"Vista3d"} | {"vista3d132"}  # bundles name the function


def test_places_in_the_code_exist() -> None:
    """CONTRIBUTING tells the way of a case, and how to add to it, by folders and names in files."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for section in ("The way of a case", "How to add"):
        text = page.partition(f"\n## {section}")[2].partition("\n## ")[0]
        names = re.findall(r"`(\w+)` of `([\w/]+\.py)`", text)
        assert len(names) > 10
        for name, path in names:
            file = source(path)
            assert file is not None, path
            assert re.search(rf"\b{name}\b", file.read_text("utf-8")), f"{name} of {path}"
        for folder in re.findall(r"`((?:\w+/)+)`", text):
            assert source(folder), folder
