"""Workflows: their keys and values, and the messages about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scanloom.core import ComputeOptions, Outputs, ReadOptions, Reason, ScanError
from scanloom.core.relations import CropBy, Share, StructuresOf, Unite
from scanloom.engine.workflow.schema import (
    Workflow,
    parse_stored_workflow,
    parse_workflow,
    read_workflow,
)
from scanloom.options import Radiomics

ROOT = Path(__file__).parents[4]
SMALL = "name: small\nmodels: ct_tissue\n"
NESTED = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
"""Ten lists of ten lists: 100 billion words."""


def test_missing_keys_have_defaults() -> None:
    workflow = parse_workflow(SMALL)

    assert workflow.models == ("ct_tissue",)
    assert workflow.select.modality == ()
    assert workflow.output_options == Outputs()
    assert workflow.execution.workers == "auto"


def test_json_says_the_same_as_yaml() -> None:
    yaml = parse_workflow(SMALL + "select: {modality: [CT], min_slices: 20}\n")
    same = {
        "name": "small",
        "models": ["ct_tissue"],
        "select": {"modality": "CT", "min_slices": 20},
    }

    assert parse_workflow(json.dumps(same)) == yaml


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90 s", 90), ("1.5min", 90), ("2 h", 7200)]
)
def test_times_may_have_a_unit(text: str, seconds: float) -> None:
    workflow = parse_workflow(SMALL + f"execution: {{time_limit: {text}}}\n")

    assert workflow.execution.time_limit == seconds


def test_sizes_may_have_a_unit() -> None:
    workflow = parse_workflow(SMALL + "execution: {memory_limit: 1.5 GiB}\n")

    assert workflow.execution.memory_limit == 3 << 29


@pytest.mark.parametrize(
    ("text", "number"), [("020", 20), ("0100", 100), ("100", 100), ("0x100", 256), ("00", 0)]
)
def test_a_number_with_zeros_before_it_is_decimal(text: str, number: int) -> None:
    workflow = parse_workflow(f"{SMALL}select: {{min_spacing: {text}}}\n")

    assert workflow.select.min_spacing == number


def test_names_are_text_whatever_yaml_sees() -> None:
    workflow = parse_workflow(SMALL + "results: {no: {model: a}, 1: {model: b}}\n")

    assert list(workflow.results) == ["no", "1"]


def test_a_workflow_is_frozen() -> None:
    workflow = parse_workflow(SMALL)

    with pytest.raises(ValueError, match="frozen"):
        workflow.name = "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nname: a\n", "line 1: model is not a key here; did you mean models?"),
        (SMALL + "models[0]: b\n", "line 3: models[0] is not a key here; did you mean models?"),
        ("name: a\n", "line 1: models is missing"),
        (SMALL + "select:\n  modality: ct\n", "line 4: select.modality: did you mean CT?"),
        (SMALL + "select: {modalty: CT}\n", "select.modalty is not a key here; did you mean modal"),
        (
            SMALL + "select:\n\n  min_slices: x\n",
            "line 5: select.min_slices: expected a whole number",
        ),
        (SMALL + "execution: {memory_limit: lots}\n", "a number and a unit, such as 8GB"),
        (SMALL + "execution: {memory_limit: no}\n", "such as 8GB, 7.5GiB"),
        (
            SMALL + "execution: {device: gpu}\n",
            "expected auto, cpu, cuda, cuda:N, mps, xpu, xpu:N, such as cuda:0",
        ),
        (SMALL + "policy: {orientation: up}\n", "expected axis codes for files that do not state"),
        (SMALL + "select: {modality: no}\n", "expected one or several of CT, MR, PT, NM"),
        (SMALL + "select: {body_part: no}\n", "expected a word, or a list of them, in quotes"),
        (SMALL + "select: [CT]\n", "line 3: select: expected keys and values"),
        ("name: a\nmodels: &a [ct_tissue, *a]\n", "an alias contains itself"),
        (NESTED, "an alias contains itself or too much"),
        ("name: a\nmodels: &a {b: *a}\n", "an alias contains itself"),
        (SMALL + "select: {kernel: '('}\n", "line 3: select.kernel: expected a regular expression"),
        (SMALL + "execution: {workers: 0}\n", "execution.workers: expected greater than or equal"),
        (
            SMALL + "execution: {workers: many}\n",
            "line 3: execution.workers: expected a whole number or one of auto",
        ),
        (
            SMALL + "outputs: {structures: [1, 2]}\n",
            "outputs.structures: expected text, in quotes where YAML sees yes, no or a number",
        ),
        (
            SMALL + "channels:\n  int: {modalty: MR}\n",
            "line 4: channels.int.modalty is not a key here; did you mean modality?",
        ),
        (
            SMALL + "channels:\n  T1[gd]:\n    modality: mr\n",
            "line 5: channels.T1[gd].modality: did you mean MR?",
        ),
        (SMALL + "1: a\n", "line 3: 1 is not a key here"),
        (SMALL + "yes: a\n", "line 3: yes is not a key here"),
        (SMALL + "execution:\n  no: 1\n", "line 4: execution.no is not a key here"),
        (SMALL + "channels:\n  1: {a: b}\n", "line 4: channels.1.a is not a key here"),
        (SMALL + "execution: {memory_limit: 16}\n", "a number and a unit, such as 8GB"),
        (SMALL + "results: {float: {side: left}}\n", "results.float.model is missing"),
        (SMALL + "crop_by: {tuple: {model: a, margin_mm: -1}}\n", "crop_by.tuple.margin_mm: expec"),
        (SMALL + "execution: {time_limit: 3 parsecs}\n", "one of the units s, min, h"),
        (SMALL + "execution: {precision: halff}\n", "did you mean half?"),
        (SMALL + "select: {min_spacing: 3, max_spacing: 1}\n", "max_spacing at least as large"),
        (
            SMALL + "crop_by:\n  a: {model: b, margin: 2}\n",
            "line 4: crop_by.a.margin is not a key here; did you mean margin_mm?",
        ),
        (SMALL + "crop_by: {a: {model: b, margin_mm: -1}}\n", "expected greater than or equal"),
        (SMALL + "crop_by: {a: {structures: b}}\n", "crop_by.a.model is missing"),
        (SMALL + "restrict_to: {a: b}\n", "restrict_to.a: expected keys and values"),
        (SMALL + "ensembles: {a: b}\n", "ensembles.a: expected at least 2 of them"),
        (SMALL + "unite: {a: {priority: []}}\n", "priority: expected at least 1 of them"),
        (SMALL + "shares: [{of: 3}]\n", "shares.of: expected a word, or a list of them"),
        (
            SMALL + "asymmetries: {left: a, right: b}\n",
            "line 3: asymmetries: expected a list: a - before the keys of each entry",
        ),
        (
            SMALL + "unite:\n  u:\n    priority: {model: a}\n",
            "line 5: unite.u.priority: expected a list: a - before",
        ),
        (
            SMALL + "outputs:\n  also: radiomics\n  radiomics:\n    binwidth: 3\n",
            "line 6: outputs.radiomics.binwidth is not a key here; did you mean bin_width?",
        ),
        (
            SMALL + "outputs:\n  also: radiomics\n  radiomics: {families: [glmc]}\n",
            "line 5: outputs.radiomics.families: did you mean glcm?",
        ),
        (SMALL + "outputs: {radiomics: {families: []}}\n", "families: expected at least one of"),
        (SMALL + "outputs: {radiomics: {spacing: 0}}\n", "radiomics.spacing: expected greater"),
        (SMALL + "outputs: {radiomics: {normalise: 3}}\n", "normalise: expected yes or no"),
        (SMALL + "outputs: {radiomics: {bins: 8}}\n", "line 3: outputs: expected radiomics among"),
        (SMALL + "name: b\n", "line 3: name is given twice"),
        ("name: [\n", "not valid YAML"),
        (SMALL + "outputs: {[labels]: 1}\n", "line 3: not valid YAML: found unhashable key"),
        ("- a\n", "a workflow is a mapping of keys to values"),
        ("", "a workflow is a mapping of keys to values"),
        (SMALL + "outputs: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        (SMALL + "? [a, b]\n: c\n", "line 3: not valid YAML: found unhashable key"),
        (SMALL + "? {a: b}\n: c\n", "line 3: not valid YAML: found unhashable key"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ScanError) as caught:
        parse_workflow(text)

    assert caught.value.reason is Reason.WORKFLOW
    assert message in caught.value.detail
    assert caught.value.detail.count(message) == 1


def test_entries_with_mistakes_are_not_missing() -> None:
    with pytest.raises(ScanError) as caught:
        parse_workflow(SMALL + "unite: {u: {priority: [{modl: ct_tissue}]}}\n")
    assert "at least" not in caught.value.detail


def test_several_mistakes_are_told_at_once() -> None:
    text = "name: A B\nmodels: x\nselect: {modality: ct}\noutputs: {seg: both}\n"

    with pytest.raises(ScanError) as caught:
        parse_workflow(text)

    assert [mistake[:6] for mistake in caught.value.detail.split("; ")] == [
        "line 1",
        "line 3",
        "line 4",
    ]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScanError, match="FileNotFoundError"):
        read_workflow(tmp_path / "none.yaml")


def test_relations_may_name_a_single_structure() -> None:
    sections = """
crop_by: {structures: {model: a, structures: liver}}
unite: {u: {priority: [{model: a, structures: [liver, spleen]}, {model: b, structures: liver}]}}
shares: [{of: liver, structures: spleen}]
"""
    relations = parse_workflow(SMALL + sections).relations

    assert relations.crop_by == {"structures": CropBy("a", ("liver",))}
    priority = (StructuresOf("a", ("liver", "spleen")), StructuresOf("b", ("liver",)))
    assert relations.unite == {"u": Unite(priority)}
    assert relations.shares == (Share(("liver",), ("spleen",)),)


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_workflows_are_valid(path: Path) -> None:
    assert read_workflow(path).name == path.stem


def test_the_published_schema_is_that_of_the_code() -> None:
    published = json.loads((ROOT / "docs" / "workflow.schema.json").read_text())

    assert published == Workflow.model_json_schema(), "run docs/write_schema.py"


def test_a_stored_workflow_is_read_as_it_was() -> None:
    workflow = parse_workflow(
        SMALL + "outputs: {also: [masks, image]}\nexecution: {skip_air: false}"
    )
    assert parse_stored_workflow(workflow.model_dump_json()) == workflow
    with pytest.raises(ScanError, match="WORKFLOW"):
        parse_stored_workflow("[]")


def test_sections_have_the_defaults_of_their_options() -> None:
    workflow = parse_workflow(SMALL)
    assert workflow.read_options == ReadOptions()
    assert workflow.compute_options == ComputeOptions()
    read = parse_workflow(SMALL + "policy: {gaps: interpolate, max_size: 1 GiB}").read_options
    assert read == ReadOptions(gaps="interpolate", max_size=1 << 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("execution: {remove_small: .inf}", "remove_small"),
        ("policy: {orientation: RRA}", "orientation"),
        ("outputs: {structures: ''}", "at least one name"),
    ],
)
def test_values_that_the_command_refuses_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScanError, match=message):
        parse_workflow(SMALL + text)


def test_settings_of_features_are_those_of_their_class() -> None:
    assert parse_workflow(SMALL).output_options == Outputs()
    section = "outputs: {also: radiomics, radiomics: {families: 'glcm, statistics', spacing: 1}}"
    workflow = parse_workflow(SMALL + section)
    expected = Radiomics(families=("statistics", "glcm"), spacing=1.0)
    assert workflow.output_options == Outputs(also=("radiomics",), radiomics=expected)
    assert parse_stored_workflow(workflow.model_dump_json()).output_options.radiomics == expected


def test_structures_are_a_set_of_names() -> None:
    quoted = parse_workflow(SMALL + "outputs: {structures: 'spleen, liver'}").output_options
    listed = parse_workflow(SMALL + "outputs: {structures: [liver, spleen, liver]}").output_options
    assert quoted == listed == Outputs(structures=("liver", "spleen"))
