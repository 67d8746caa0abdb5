"""Values of options from variables and files, and which of them counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from scanloom.cli.command import Command, variable_of
from scanloom.cli.main import app
from support.commands import scanloom
from support.write_dicom import noise, write_series


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_series(tmp_path / "study", noise())
    return tmp_path / "study"


def planned(study: Path, *options: str | Path) -> str:
    """Return where a result of `segment` would be written."""
    ended = scanloom("segment", study, "--dry-run", "--json", *options)
    assert ended.code == 0, ended.err
    return str(Path(ended.document["planned"][0]["result"].split(" (")[0]).parents[1])


def test_command_line_before_variable_before_file_before_user_file(
    study: Path,
    tiny_model: Path,
    tmp_path: Path,
    no_defaults_of_the_user: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCANLOOM_MODEL", str(tiny_model))
    assert planned(study) == "scanloom-out"
    mine = no_defaults_of_the_user / "scanloom" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text("out: mine\n")
    assert planned(study) == "mine"
    config = tmp_path / "options.toml"
    config.write_text('out = "project"\n')
    assert planned(study, "--config", config) == "project"
    monkeypatch.setenv("SCANLOOM_OUT", "variable")
    assert planned(study, "--config", config) == "variable"
    assert planned(study, "--config", config, "-o", "typed") == "typed"


def test_a_section_is_for_one_command(study: Path, tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "options.yaml"
    config.write_text(
        f"out: everywhere\nmodel: [{tiny_model}]\nindex: {{strict: yes}}\n"
        "segment: {out: here, structures: [liver, spleen], mirror: no, skip-air: no}\n"
    )
    assert planned(study, "--config", config) == "here"


def test_a_flag_of_a_default_is_unset_by_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "options.yaml"
    config.write_text("json: yes\n")
    of_file = ["models", "show", "ct_tissue", "--config", str(config)]
    assert scanloom(*of_file).out.startswith("{")
    assert not scanloom(*of_file, "--no-json").out.startswith("{")
    monkeypatch.setenv("SCANLOOM_JSON", "1")
    assert not scanloom(*of_file, "--no-json").out.startswith("{")
    assert "--no-json" not in scanloom("models", "show", "--help").out
    refused = scanloom("models", "show", "ct_tissue", "--no-config")
    assert refused.code == 2


def test_a_value_of_a_default_is_unset_by_no(
    study: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCANLOOM_LOG", str(tmp_path / "variable.log"))
    monkeypatch.setenv("SCANLOOM_STRUCTURES", "kidney")
    config = tmp_path / "options.yaml"
    config.write_text(f"model: [{tiny_model}]\nout: mine\nlog: file.log\nprofile: trace.json\n")
    refused = scanloom("segment", study, "--dry-run", "--config", config)
    assert "kidney" in refused.err
    Path("variable.log").unlink()

    unset = ["--no-log", "--no-structures", "--no-out", "--no-profile"]
    assert planned(study, "--config", config, *unset) == "scanloom-out"
    assert not list(tmp_path.rglob("*.log"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devise: cpu\n", "no command has an option devise; did you mean device?"),
        ("zzzz: cpu\n", "(`scanloom COMMAND --help` lists all)"),
        ("segment: {zzzz: 1}\n", "known names is like it (`scanloom segment --help` lists all)"),
        ("segment: {sttrict: yes}\n", "segment has no option sttrict; did you mean strict?"),
        ("device: {name: cpu}\n", "device: expected a value"),
        ('out: ""\n', "out: expected a value, but the text is empty"),
        ("device: gpu\n", "options.yaml"),
        ("precision: double\n", "options.yaml"),
        ("- cpu\n", "must hold keys and values"),
        ("a: [\n", "not valid YAML (line 2)"),
        ("device: 2020-13-45\n", "not valid YAML"),
        ("device: cpu\nalso: image\ndevice: cuda\n", "line 3: device is given twice"),
        ("segment: {device: cpu}\nsegment: {also: image}\n", "line 2: segment is given twice"),
        ("segment: {device: cpu, device: cuda}\n", "line 1: device is given twice"),
        ("remove-small: 3\nremove_small: 5\n", "remove_small is given twice"),
        ("segment: {remove-small: 3, remove_small: 5}\n", "remove_small is given twice"),
        ("strict: maybe\n", "expected yes or no"),
    ],
)
def test_a_wrong_file_is_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("options.yaml").write_text(text)
    ended = scanloom("segment", "scan.nii", "--config", "options.yaml")

    assert ended.code == 2
    assert message in ended.err
    assert "price_per_hour" not in ended.err
    assert not Path("scanloom-out").exists()


def test_a_wrong_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SCANLOOM_PRECISION", "double")
    ended = scanloom("segment", tmp_path)

    assert ended.code == 2
    assert "SCANLOOM_PRECISION" in ended.err


def test_a_variable_that_is_nearly_one_of_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCANLOOM_DEVIC", "cuda")
    monkeypatch.setenv("SCANLOOM_OFFLINE", "1")
    monkeypatch.setenv("SCANLOOM_SITE_FOLDER", "/data")
    monkeypatch.setenv("SCANLOOM_DATASET_MODEL", "ct_tissue")
    ended = scanloom("models", "show", "ct_tissue")

    assert ended.code == 0
    told = "scanloom: no option has the variable SCANLOOM_DEVIC; did you mean SCANLOOM_DEVICE?\n"
    assert ended.err == told


def test_two_files_of_the_user_are_refused(no_defaults_of_the_user: Path, tmp_path: Path) -> None:
    folder = no_defaults_of_the_user / "scanloom"
    folder.mkdir()
    (folder / "config.yaml").write_text("device: cpu\n")
    (folder / "config.toml").write_text('device = "cpu"\n')

    assert scanloom("segment", tmp_path).code == 2


def test_a_file_that_may_be_there_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ("x" * 300)))
    ended = scanloom("models", "list")

    assert ended.code == 2
    assert "can't be read (OSError): set XDG_CONFIG_HOME to a folder of your own" in ended.err


@pytest.fixture
def many_defaults(
    no_defaults_of_the_user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the user have defaults for all commands."""
    mine = no_defaults_of_the_user / "scanloom" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text(
        "out: mine\nmodality: CT\nmodel: theirs\nstructures: liver\nfrom: pacs\nto: pacs\n"
        "site: site.yaml\nalso: image\nnames: source\nevaluate: {out: figures}\n"
    )
    monkeypatch.setenv("SCANLOOM_STRUCTURES", "spleen")
    monkeypatch.setenv("SCANLOOM_DATASET_STRUCTURES", "fat")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)


def values_of(words: str) -> dict[str, Any]:
    """Return the values of a command's options and arguments."""
    command, rest = get_command(app), words.split()
    context = command.make_context("scanloom", list(rest))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)
    return dict(context.params)


@pytest.mark.usefixtures("many_defaults")
@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("index study", "out", Path("mine")),
        ("fetch", "source", "pacs"),
        ("demo", "out", Path("scanloom-demo")),
        ("evaluate a -r b", "out", Path("figures")),
        ("dataset results -o b", "model", None),
        ("dataset results -o b", "structures", "fat"),
        ("review results", "model", None),
        ("fetch", "modality", None),
        ("models new a", "like", None),
        ("join table.csv", "to", None),
    ],
)
def test_an_option_of_another_meaning_takes_no_default_of_other_commands(
    words: str, name: str, value: object
) -> None:
    assert values_of(words)[name] == value


@pytest.mark.usefixtures("many_defaults")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("status results", 65, "results: this path does not exist"),
        ("status results -o other", 2, "OUT is results, but --out is other: give one"),
        ("status results -o scanloom-out", 2, "OUT is results, but --out is scanloom-out"),
        ("train recipe.yaml", 2, "Missing option '--out'"),
        ("models bundle ct_tissue", 2, "Missing option '--out'"),
        ("run ct_tissue archive", 65, "archive: "),
        ("run ct_tissue -i archive", 65, "archive: "),
        ("run ct_tissue archive --words liver", 2, "missing: name a source of SITE"),
        ("run ct_tissue archive --from pacs", 2, "give it without PATH and --shard"),
        ("segment scan.nii -m ct_tissue -o a.nii.gz --also image", 65, "would be further files"),
        ("segment scan.nii -m ct_tissue -o a.nii.gz --names source", 65, "for the folders"),
        ("segment scan.nii -m ct_tissue -o a.nii.gz --structures bone", 65, "scan.nii: "),
    ],
)
def test_what_is_typed_does_not_contradict_a_default(words: str, code: int, message: str) -> None:
    ended = scanloom(*words.split())

    assert (ended.code, message in ended.err) == (code, True), ended.err
    assert not Path("mine").exists()


def test_every_option_has_a_variable_and_one_meaning_each() -> None:
    commands = get_command(app).commands
    flat = [*commands.values(), *commands["models"].commands.values()]
    for command in flat:
        if isinstance(command, Command):
            for option in command.params:
                if option.param_type_name == "option" and option.name != "key":
                    general = variable_of(option)
                    # Of another meaning than in other commands; `run` fetches as `fetch` does
                    names = (command.name or "", "fetch")
                    own = [general.replace("_", f"_{name.upper()}_", 1) for name in names]
                    assert option.envvar in (general, *own)
