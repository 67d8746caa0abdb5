"""Completion of the command line in real shells, each where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = f"""#!{sys.executable}
from scanloom.cli.main import main
main()
"""


SCRIPTS: dict[str, str] = {}
"""Completion scripts that were printed, by shell."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with `scanloom` on the path and an empty home."""
    tmp_path = tmp_path_factory.mktemp("shell")
    program = tmp_path / "bin" / "scanloom"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    package = str(Path(sys.modules["scanloom"].__file__ or "").parents[1])
    return {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": package,
        "HOME": str(home),
        "TERM": "dumb",
    }


def script(shell: str, environment: dict[str, str]) -> str:
    """Return the completion script that the program prints for a shell."""
    if shell not in SCRIPTS:
        SCRIPTS[shell] = printed_script(shell, environment)
    return SCRIPTS[shell]


def printed_script(shell: str, environment: dict[str, str]) -> str:
    variables = {**environment, "_SCANLOOM_COMPLETE": f"source_{shell}"}
    done = subprocess.run(["scanloom"], env=variables, capture_output=True, text=True, check=True)
    return done.stdout


def bash(line: str, environment: dict[str, str]) -> list[str]:
    typed = line.split(" ")
    listed = " ".join(f"'{text}'" for text in typed)
    program = (
        f"{script('bash', environment)}\n"
        f"COMP_WORDS=({listed}); COMP_CWORD={len(typed) - 1}; COMP_LINE='{line}'\n"
        "_scanloom_completion scanloom; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    )
    return run(["bash", "--norc", "-c", program], environment)


def fish(line: str, environment: dict[str, str]) -> list[str]:
    program = f"{script('fish', environment)}\ncomplete --do-complete '{line}'"
    completed = run(["fish", "--no-config", "-c", program], environment)
    return [each.split("\t")[0] for each in completed]


ZSH = """
zmodload zsh/zpty
zpty -b shell zsh -f -i
zpty -w shell "PROMPT= ; stty cols 200; autoload -Uz compinit; compinit -u"
zpty -w shell "fpath+=({folder})"
zpty -w shell "LISTMAX=0; zstyle ':completion:*' list-separator ' '"
zpty -w shell "source {folder}/scanloom.zsh; print READY"
zpty -r shell text '*READY*READY*'
zpty -w -n shell "{line}"$'\\t\\t'
sleep 0.1
zpty -r -m shell text '*({wanted})*'
print -r -- "$text"
zpty -d shell
"""


def zsh(line: str, environment: dict[str, str], expected: str) -> str:
    folder = Path(environment["HOME"])
    (folder / "scanloom.zsh").write_text(script("zsh", environment))
    program = ZSH.format(folder=folder, line=line, wanted=expected)
    return "\n".join(run(["zsh", "-f", "-c", program], environment))


def run(command: list[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    return [line for line in done.stdout.splitlines() if line]


FURTHER = [
    ("scanloom seg", "segment"),
    ("scanloom segment x --precision fl", "float32"),
    ("scanloom segment x -m ct_", "ct_tissue"),
    ("scanloom run ct_tissue_r", "ct_tissue_research"),
    ("scanloom models show ct", "ct_tissue"),
    ("scanloom segment x --also masks,rt", "masks,rtstruct"),
]
CASES = [
    ("scanloom segment --prec", "--precision"),
    ("scanloom segment x -m ct_tissue --structures bone,soft", "bone,soft_tissue"),
    ("scanloom segment --no-prec", "--no-precision"),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in FURTHER),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_completion(shell: str, line: str, expected: str, environment: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    completed = {"bash": bash, "fish": fish}[shell](line, environment)
    assert expected in completed


def test_completion_in_zsh(environment: dict[str, str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert "float32" in zsh("scanloom segment x --precision fl", environment, "float32")


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_paths_are_left_to_the_shell(shell: str, environment: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    home = Path(environment["HOME"])
    (home / "study_of_today").mkdir(exist_ok=True)
    line = f"scanloom segment {home}/study_of"
    completed = {"bash": bash, "fish": fish}[shell](line, environment)
    # bash's `complete -o default` completes files itself when a function returns nothing
    assert (
        completed == [] if shell == "bash" else any("study_of_today" in each for each in completed)
    )
