"""`scanloom.segment` has the command's options, by the same names and with the same defaults."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest

import scanloom
from scanloom.cli.commands.segment import segment
from scanloom.convert.store import shipped
from scanloom.core import Code, Flag, Layer, Structure
from scanloom.core.errors import KEYWORDS, in_python
from scanloom.options import walk_options
from support.bundles import transform
from support.commands import write_tiny_bundle
from support.review_phantoms import trunk

SAMPLE = shipped("data") / "torso_ct"
ROOT = Path(__file__).parents[3]


def test_the_keywords_are_those_of_the_table() -> None:
    """If this fails: python docs/write_api.py, then ruff format."""
    spec = importlib.util.spec_from_file_location("write_api", ROOT / "docs/write_api.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    module = page.MODULE.read_text(encoding="utf-8")

    assert page.written(module) == module


def test_every_option_is_a_keyword_with_its_default_and_an_option_of_the_command() -> None:
    parameters = inspect.signature(scanloom.segment).parameters
    of_command = inspect.signature(segment).parameters
    names = {option.name for _, option, _ in walk_options()}

    assert set(parameters) - {"paths", "model", "progress"} == names - {"models"}
    for _, option, hint in walk_options():
        is_list = get_origin(hint) is tuple
        assert of_command[option.name].default == (None if is_list else option.default)
        if option.name not in ("models", "out"):
            assert parameters[option.name].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[option.name].default == option.default


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gaps": "fill"}, "gaps must be one of"),
        ({"names": "patient"}, "names must be one of"),
        ({"precision": "double"}, "precision must be one of"),
        ({"device": "gpu"}, 'device must be "auto", "cpu", .*, such as cuda:0, got \'gpu\''),
        ({"device": "CUDA"}, "device must be .*, got 'CUDA'"),
        ({"orientation": "up"}, "orientation must be axis codes .*, such as RAS, got 'UP'"),
        ({"also": "pictures"}, "also must be of"),
        ({"structures": ""}, "structures must name at least one"),
        ({"structures": " , "}, "structures must name at least one"),
        ({"memory_limit": "much"}, "a number and a unit"),
        ({"replace": "no"}, "replace must be bool"),
        ({"archives": None}, "archives must be bool"),
        ({"fast": 1}, "fast must be bool"),
        ({"phase": "0"}, "phase must be int"),
        ({"phase": True}, "phase must be int"),
        ({"phase": -1}, "phase must be at least 0"),
        ({"remove_small": -1.0}, "remove_small must be at least 0"),
        ({"overlap": 0.99}, "overlap must be at least 0.0 and at most 0.9"),
        ({"key": " "}, "key must be a path"),
        ({"structures": [""]}, "structures must name at least one"),
    ],
)
def test_unknown_values_are_refused_before_anything_is_written(
    options: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        scanloom.segment(SAMPLE, model="ct_tissue", out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_empty_output_folder_is_not_the_current_one() -> None:
    with pytest.raises(ValueError, match="out must be a path"):
        scanloom.segment(SAMPLE, model="ct_tissue", out="")
    with pytest.raises(ValueError, match="paths must be a path"):
        scanloom.segment(["", SAMPLE], model="ct_tissue", out="out")


def test_a_path_is_a_model_folder_and_never_a_name_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, named = write_tiny_bundle(tmp_path / "tiny"), Path("ct_tissue")
    assert scanloom.load_model(folder, device="cpu").card.name == "tiny"
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: scanloom.load_model(named),
        lambda: scanloom.segment(SAMPLE, model=named, out="out"),
        lambda: scanloom.segment(SAMPLE, model=["ct_tissue", named], out="out"),
    ):
        with pytest.raises(scanloom.ScanError) as caught:
            call()
        assert caught.value.code == "MODEL_UNKNOWN"


def test_a_model_in_memory_checks_a_scan_as_the_command_does(tmp_path: Path) -> None:
    folder = write_tiny_bundle(tmp_path / "tiny")
    model = scanloom.load_model(folder, device="cpu")
    assert model.labels == ("spleen", "liver")
    assert repr(model).startswith("Model(tiny ")
    pickled = pickle.dumps(model)
    assert len(pickled) < 1000  # as Dask sends it, without weights
    assert pickle.loads(pickled).card == model.card
    metadata = folder / "configs/metadata.json"
    metadata.write_text(metadata.read_text().replace("liver", "kidney"))
    with pytest.raises(scanloom.ScanError, match="MODEL_CHANGED"):
        pickle.loads(pickled)  # another model is not taken for it
    array = np.random.default_rng(0).normal(0, 300, (40, 40, 24)).astype(np.int16)
    sheared = np.eye(4)
    sheared[0, 1] = 0.2

    found = model.predict(scanloom.Volume.from_array(array, sheared))
    assert {Flag.SHEARED, Flag.MODALITY_UNKNOWN} <= {*found.flags}
    for foreign in (
        scanloom.Volume.from_array(array, np.eye(4), modality="MR"),
        scanloom.Volume.from_array(np.abs(array) % 3, np.eye(4), modality="CT"),  # a label map
    ):
        with pytest.raises(scanloom.ScanError) as caught:
            model.predict(foreign)
        assert caught.value.code in ("MODALITY", "IMPLAUSIBLE")
    for mistaken in (array, "scan.nii.gz", None):
        with pytest.raises(TypeError, match="predict takes volumes"):
            model.predict(mistaken)
    scan = scanloom.Volume.from_array(array, np.eye(4), modality="CT")
    for mistaken in (scan, None):
        with pytest.raises(TypeError, match="further_channels must be a list of volumes, not"):
            model.predict(scan, further_channels=mistaken)


def test_measurements_in_memory_are_those_of_the_command(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "bundles")
    file = bundle / "configs/metadata.json"
    metadata = json.loads(file.read_text())
    usual = {"structure": "liver", "quantity": "mean_hu", "range": [5000, 6000], "source": "A."}
    lies = [
        {
            "start": ["liver"],
            "end": ["spleen"],
            "direction": [0, 0, z],
            "within": 60,
            "source": "A.",
        }
        for z in (1, -1)  # the structures lie in one direction at most
    ]
    stated = {
        "limitations": [{"text": "No heads.", "where": "head"}],
        "reference_ranges": [usual],
        "reference_directions": lies,
    }
    file.write_text(json.dumps(metadata | {"scanloom": stated}))
    config = json.loads((file := file.with_name("inference.json")).read_text())
    transform(config, "Spacingd")["pixdim"] = [8.0, 8.0, 8.0]
    file.write_text(json.dumps(config))
    scan = tmp_path / "head.nii.gz"
    trunk(skull=True).to_nibabel().to_filename(scan)
    volume = scanloom.load_volume(scan, modality="CT")

    model = scanloom.load_model(bundle, device="cpu")
    measured = model.predict(volume, uncertainty=True).measure(volume)

    [record] = scanloom.segment(
        scan,
        model=bundle,
        out=tmp_path / "out",
        modality="CT",
        also="uncertainty",
        device="cpu",
        key=tmp_path / "key",
    )
    assert measured == record.measurements
    flags = {flag for each in measured for flag in each.flags}
    assert {Flag.OUT_OF_RANGE, Flag.HEAD_IN_VIEW, Flag.DIRECTION_IMPLAUSIBLE} <= flags
    assert Flag.DIRECTION_IMPLAUSIBLE in record.flags
    assert None not in [each.entropy for each in measured if each.voxels]


SCAN = scanloom.Volume.from_array(np.zeros((4, 4, 4), np.int16), np.eye(4), modality="CT")
CODE = Code("10200004", "SCT", "Liver")
LIVER = Structure("liver", 1, "Liver", CODE, CODE, (200, 10, 10))
FOUND = scanloom.Segmentation("a", (Layer(np.zeros((4, 4, 4), np.uint8), (LIVER,)),), SCAN.grid)
OTHERS: list[Any] = [5, ["a"], SCAN.array, SCAN.to_nibabel()]
"""What people give in place of a path, a name, a volume or an image."""


@pytest.mark.parametrize("given", [None, *OTHERS], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (scanloom.load_volume, "path must be a path"),
        (scanloom.measurements, "out must be a path"),
        (scanloom.load_model, "a model must be a name or a path"),
        (lambda given: scanloom.load_model("x", device=given), "device must be text"),
        (lambda given: scanloom.segment("x", out=given), "out must be a path"),
        (FOUND.save, "path must be a path"),
        (lambda given: FOUND.preview(SCAN, given), "path must be a path"),
        (FOUND.measure, "volume must be the scan that was segmented"),
        (lambda given: FOUND.preview(given, "x.png"), "volume must be the scan that was segmented"),
        (scanloom.Volume.from_sitk, "from_sitk takes an image of SimpleITK"),
        (scanloom.Volume.from_metatensor, "from_metatensor takes a MetaTensor"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    call: Callable[[Any], object], expected: str, given: object
) -> None:
    with pytest.raises(TypeError, match=f"^{expected}.*, not {type(given).__name__}$"):
        call(given)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"paths": SCAN}, "paths must be a path or a list of paths .*, not Volume"),
        ({"paths": 5}, "paths must be a path or a list of paths .*, not int"),
        ({"paths": [SCAN.to_nibabel()]}, "paths must be a path, as str or Path, not Nifti1Image"),
        ({"model": SCAN.to_nibabel()}, "model must be a name, a path, or a list of them"),
        ({"model": [5]}, "a model must be a name or a path, not int"),
        ({"also": None}, "also must be a name or a list of names, not NoneType"),
        ({"structures": [5]}, "structures must be a name or a list of names, not int"),
        ({"orientation": 5}, "orientation must be str"),
        ({"max_size": "x"}, "max_size must be a number and a unit.*, got 'x'"),
        ({"memory_limit": []}, "memory_limit must be a number and a unit"),
    ],
    ids=lambda each: each if isinstance(each, str) else ", ".join(each),
)
def test_an_argument_of_segment_of_another_type_is_refused_by_name(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{expected}"):
        scanloom.segment(**{"paths": "x", "model": "ct_tissue", "out": tmp_path / "out", **options})


def test_a_scan_of_another_grid_is_not_measured() -> None:
    """Of the same shape, as scans of a protocol often are."""
    moved = np.eye(4)
    moved[0, 3] = 1.0
    other = scanloom.Volume.from_array(SCAN.array, moved, modality="CT")
    with pytest.raises(ValueError, match="another grid"):
        FOUND.measure(other)


@pytest.mark.parametrize("read", [scanloom.load_volume, scanloom.measurements])
def test_an_empty_path_is_not_the_current_folder(read: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match="the text is empty"):
        read("")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="structure"):
        scanloom.segment(SAMPLE, model="ct_tissue", out="out", structure="bone")


def test_a_series_may_be_given_by_number() -> None:
    assert scanloom.load_volume(SAMPLE, series=1).modality == "CT"
    with pytest.raises(scanloom.ScanError) as caught:
        scanloom.load_volume(SAMPLE, series=2)
    assert caught.value.reason is scanloom.Reason.SERIES_UNKNOWN


def test_options_that_headers_override_are_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"^`orientation=\"RAS\"` was not used: the scan states LPS"
    ):
        scanloom.load_volume(SAMPLE, orientation="RAS", modality="CT")
    with pytest.warns(UserWarning, match=r"^`modality=\"MR\"` was not used: the headers state CT"):
        scanloom.load_volume(SAMPLE, modality="MR")


def test_messages_name_keywords_that_exist() -> None:
    known = {
        name
        for function in (scanloom.segment, scanloom.load_volume)
        for name in inspect.signature(function).parameters
    }
    assert known >= KEYWORDS


@pytest.mark.parametrize(
    ("message", "in_words_of_python"),
    [
        ("Choose with --series: a number", "Choose with `series=`: a number"),
        ("with `segment --orientation RAS`, or", 'with `orientation="RAS"`, or'),
        ("use `segment --memory-limit`", "use `memory_limit=`"),
        ("`--phase 0` was not needed", "`phase=0` was not needed"),
        ("use --archives or its path", "use `archives=` or its path"),
        ("run with --debug", "run with --debug"),
        ("See `--cluster` in the docs", "See `--cluster` in the docs"),
        ("Name them with `dataset --structures`", "Name them with `dataset --structures`"),
    ],
)
def test_errors_speak_of_keywords(message: str, in_words_of_python: str) -> None:
    assert in_python(message) == in_words_of_python


def test_no_results_are_not_an_empty_table(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(scanloom.ScanError) as caught:
        scanloom.measurements(tmp_path)
    assert caught.value.reason is scanloom.Reason.NO_RESULTS
