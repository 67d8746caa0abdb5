"""A recipe becomes a bundle that MONAI trains, that goes on when killed, and that segments."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from scanloom.core import Grid, ScanError, Volume
from scanloom.training.label_sets import open_label_set
from scanloom.training.recipe import TrainingRecipe
from support.commands import scanloom

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("ignite", "fire", "tensorboard"))), reason="needs the extra train"
)

SHAPE = (14, 18, 12)


def write_data(folder: Path, count: int = 8) -> Path:
    """Write bright boxes in noise, with their label maps."""
    generator = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for n in range(count):
        label = np.zeros(SHAPE, np.uint8)
        i, j, k = generator.integers(1, 5, 3)
        label[i : i + 6, j : j + 6, k : k + 5] = 1
        label[i : i + 6, j + 6 : j + 10, k : k + 5] = 2
        image = label * 100.0 + generator.normal(size=SHAPE) * 20 + 300
        for kind, array in (("images", image.astype(np.float32)), ("labels", label)):
            nib.save(nib.Nifti1Image(array, np.eye(4)), folder / kind / f"case_{n}.nii.gz")
    return folder


def recipe(**changes: object) -> TrainingRecipe:
    page = {
        "name": "boxes",
        "modality": "MR",
        "data": {"images": "images", "labels": "labels", "hold_out": 1, "validation": 2},
        "structures": [{"label": "near", "values": 1}, {"label": "far", "values": 2}],
        "spacing": [1, 1, 1],
        "patch": [16, 16, 12],
        "network": {"filters": [4, 4, 8]},
        "augmentation": {"mirror": ["left-right"], "bias": 1.0, "gamma": 1.0, "noise": 1.0},
        "schedule": {
            "steps": 12,
            "batch": 2,
            "epoch": 4,
            "validate_every": 2,
            "warm_up": 2,
            "precision": "float32",
            "learning_rate": 0.01,
        },
    }
    return TrainingRecipe.model_validate({**page, **changes})


def scheduled(**changes: object) -> TrainingRecipe:
    plan = recipe().schedule.model_dump()
    return recipe(schedule={**plan, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that was trained for three epochs of four steps."""
    from scanloom.training.train import prepare, run_training, write_training

    data = write_data(tmp_path_factory.mktemp("data"))
    bundle = tmp_path_factory.mktemp("trained") / "boxes"
    write_training(prepare(recipe(), data), bundle)
    run_training(bundle)
    return bundle


def weights(bundle: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(bundle / "models" / "model.pt", weights_only=True)
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def rows(bundle: Path) -> list[dict[str, str]]:
    with (bundle / "docs" / "training.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def copy_configs(bundle: Path, to: Path, **changes: Any) -> Path:
    """Copy the configs of a bundle; `changes` replace values of `train.json`."""
    (to / "configs").mkdir(parents=True)
    for file in (bundle / "configs").iterdir():
        (to / "configs" / file.name).write_bytes(file.read_bytes())
    train = to / "configs/train.json"
    train.write_text(json.dumps(json.loads(train.read_text()) | changes))
    return to


def test_the_table_has_a_row_for_each_epoch(trained: Path) -> None:
    table = rows(trained)
    assert [row["epoch"] for row in table] == ["1", "2", "3"]
    assert [bool(row["mean_dice"]) for row in table] == [False, True, True]
    assert float(table[-1]["loss"]) < float(table[0]["loss"])
    for name in ("training.png", "validation.png"):
        assert (trained / "docs" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_training_goes_on_from_a_checkpoint_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    """The last checkpoint is cut, as by a process that was killed while it wrote."""
    from scanloom.training.train import run_training

    other = copy_configs(trained, tmp_path / "other")
    (other / "checkpoints").mkdir()
    for epoch, end in ((2, None), (3, -1000)):
        name = f"checkpoint_epoch={epoch}.pt"
        data = (trained / "checkpoints" / name).read_bytes()[:end]
        (other / "checkpoints" / name).write_bytes(data)
    (other / "docs").mkdir()
    (other / "docs" / "training.csv").write_bytes((trained / "docs/training.csv").read_bytes())
    run_training(other)
    assert same(weights(trained), weights(other))
    assert rows(trained)[2]["loss"] == rows(other)[2]["loss"]
    assert len(rows(other)) == 3


def test_the_bundle_is_a_model_of_scanloom_with_the_averaged_weights(trained: Path) -> None:
    from scanloom.convert.readers import read_model

    card = read_model(trained, {})
    assert [structure.label for structure in card.structures] == ["near", "far"]
    assert card.window.size == (16, 16, 12)
    assert card.network.name == "DynUNet"
    state = torch.load(trained / "checkpoints" / "checkpoint_epoch=3.pt", weights_only=True)
    assert same(weights(trained), state["average"])
    assert not same(weights(trained), state["network"])


def test_the_cases_that_a_training_held_out_are_references(trained: Path, tmp_path: Path) -> None:
    train, cases = (
        json.loads((trained / "configs" / name).read_text())
        for name in ("train.json", "datalist.json")
    )
    [held_out] = cases["testing"]
    file = Path(train["data_root"], held_out["label"])

    opened = open_label_set(trained)

    [case] = opened.cases
    assert (case.path, len(opened.training)) == (file, 7)
    read = case.read(None)
    assert read.names == {"near": (0, (1,)), "far": (0, (2,))}
    np.testing.assert_array_equal(read.layers[0], np.asarray(nib.load(file).dataobj))
    without = copy_configs(trained, tmp_path / "without")
    (without / "configs/datalist.json").write_text(json.dumps(cases | {"testing": []}))
    with pytest.raises(ScanError, match="held out no case"):
        open_label_set(without)
    with pytest.raises(ScanError, match="does not say where"):
        open_label_set(copy_configs(trained, tmp_path / "lost", data_root=None))


def test_what_a_recipe_asks_of_inference_is_that_of_the_bundle(
    trained: Path, tmp_path: Path
) -> None:
    """The network is that of the recipe without it, whose weights it takes."""
    from scanloom.cards.card import Crop, KeepLargest, Normalize
    from scanloom.convert.readers import read_model
    from scanloom.training.train import prepare, write_training

    data = write_data(tmp_path / "data")
    sides = {
        "mirrored_mean": True,
        "foreground": True,
        "largest_component": True,
        "sides": [("near", "far")],
        "augmentation": {"mirror": ["left-right"]},
    }
    write_training(prepare(recipe(**sides), data), tmp_path / "boxes")
    shutil.copytree(trained / "models", tmp_path / "boxes" / "models")

    card = read_model(tmp_path / "boxes", {})

    assert (card.window.mirror, card.window.mirrored_channels) == ((0,), (0, 2, 1))
    assert card.cleaning == (KeepLargest(together=True),)
    assert card.grid.crop == Crop("positive", "network", steps=1)
    assert card.after == (Normalize(), Normalize())


@pytest.mark.parametrize(
    ("every", "steps", "intervals"), [(2, 16, [2]), (2, 12, [2, 3]), (9, 12, [9, 3])]
)
def test_the_last_weights_are_validated_once(every: int, steps: int, intervals: list[int]) -> None:
    from monai.bundle import ConfigParser

    from scanloom.training.bundle import train_config

    plan = {"steps": steps, "epoch": 4, "validate_every": every}
    config = train_config(recipe(schedule=plan), Path("data"), 5)
    parser = ConfigParser(config | {"validation_cases": [{}]})
    handlers = [
        f"trainer#train_handlers#{n}"
        for n, each in enumerate(config["trainer"]["train_handlers"])
        if "ValidationHandler" in str(each)
    ]
    assert [
        parser.get_parsed_content(f"{each}#interval")
        for each in handlers
        if not parser.get_parsed_content(f"{each}#_disabled_")
    ] == intervals


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_half_a_file_of_weights_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a disk that is full, or of a process that was killed."""
    import monai
    from monai.bundle import ConfigParser

    from scanloom.training.bundle import train_config

    model = tmp_path / "model.pt"
    changes = {"model": str(model), "averaged_network": "$torch.nn.Linear(2, 2)"}
    run = [each for each in train_config(recipe(), tmp_path, 5)["run"] if "@model" in each]

    def end() -> None:
        page = {"imports": ["$import os", "$import torch"], "first": True, **changes, "run": run}
        ConfigParser(page).get_parsed_content("run")

    def fail(_: object, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError

    with monkeypatch.context() as full:
        full.setattr(monai.networks, "save_state", fail)
        with pytest.raises(RuntimeError):
            end()
    assert not model.exists()
    end()
    assert torch.load(model, weights_only=True).keys() == {"weight", "bias"}
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_another_recipe_does_not_go_on_in_a_bundle(trained: Path, tmp_path: Path) -> None:
    from scanloom.training.train import prepare, write_training

    data = write_data(tmp_path / "data")
    with pytest.raises(ScanError, match=r"\(batch of train.json\): train into another folder"):
        write_training(prepare(scheduled(batch=1), data), trained)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(ScanError, match=r"other files .*: train into another folder"):
        write_training(prepare(recipe(), data), tmp_path / "full")
    page = data / "recipe.json"
    page.write_text(json.dumps(recipe().model_dump(mode="json", exclude_defaults=True)))
    planned = scanloom("train", page, "-o", tmp_path / "full", "--dry-run")
    assert planned.code != 0
    assert "other files" in planned.err


def test_a_training_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    from scanloom.training.train import prepare, write_training

    data, bundle = write_data(tmp_path / "data"), tmp_path / "bundle"
    for workers in (2, 0):
        write_training(prepare(scheduled(workers=workers), data), bundle)
        config = json.loads((bundle / "configs" / "train.json").read_text())
        assert config["train_loader"]["num_workers"] == workers


def test_a_training_does_not_go_on_with_a_label_map_that_was_corrected(tmp_path: Path) -> None:
    """Nor does one that has ended say that it was trained on the correction."""
    from scanloom.training.train import prepare, write_training

    data, bundle = write_data(tmp_path / "data"), tmp_path / "bundle"
    prepared = prepare(recipe(), data)
    write_training(prepared, bundle)
    file = prepared.cases["training"][0].label
    array = np.asarray(nib.load(file).dataobj).copy()
    nib.save(nib.Nifti1Image(array, np.eye(4)), file)  # the same voxels in another file
    write_training(prepare(recipe(), data), bundle)
    array[np.argwhere(array == 1)[0].tolist()] = 0
    nib.save(nib.Nifti1Image(array, np.eye(4)), file)
    with pytest.raises(ScanError, match=r"RECIPE.*label maps.*another folder"):
        write_training(prepare(recipe(), data), bundle)


def test_a_training_goes_on_where_its_bundle_and_data_were_moved_to(
    trained: Path, tmp_path: Path
) -> None:
    """As from a workstation to a server; weights to start from too."""
    from scanloom.training.train import prepare, write_training

    start = tmp_path / "model.pt"
    shutil.copyfile(trained / "models" / "model.pt", start)
    page = {"filters": [4, 4, 8]}
    data, bundle = write_data(tmp_path / "data"), tmp_path / "bundle"
    write_training(prepare(recipe(network={**page, "start": str(start)}), data), bundle)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    data, bundle = (each.rename(moved / each.name) for each in (data, bundle))
    start = start.rename(moved / "start.pt")
    prepared = prepare(recipe(network={**page, "start": str(start)}), data)

    write_training(prepared, bundle)

    config = json.loads((bundle / "configs" / "train.json").read_text())
    assert (config["data_root"], config["start"]) == (str(data), str(start))
    assert [case.path.parent for case in open_label_set(bundle).cases] == [data / "labels"]
    other = {**torch.load(start, weights_only=True)}
    torch.save({name: value + 1 for name, value in other.items()}, start)
    with pytest.raises(ScanError, match=r"weights to start from are not those"):
        write_training(prepare(prepared.recipe, data), bundle)


def test_a_second_process_does_not_train_the_same_bundle(tmp_path: Path) -> None:
    from scanloom.core.process import lock_file
    from scanloom.training.train import LOCK, run_training

    with (tmp_path / LOCK).open("wb") as holder:
        assert lock_file(holder.fileno(), 0)
        with pytest.raises(ScanError, match="LOCKED"):
            run_training(tmp_path)


def test_a_structure_that_no_case_has_is_refused(tmp_path: Path) -> None:
    """As by a wrong number in the recipe: the model would never find it."""
    from scanloom.training.train import prepare

    data = write_data(tmp_path, 5)
    structures = [{"label": name, "values": n} for n, name in enumerate(("near", "far", "gone"), 1)]
    with pytest.raises(ScanError, match=r"TRAINING_DATA.*no case for training has .* gone"):
        prepare(recipe(structures=structures), data)


def test_a_structure_that_no_case_for_validation_has_is_named(tmp_path: Path) -> None:
    from scanloom.cli.commands.train import data_lines
    from scanloom.training.train import prepare

    data = write_data(tmp_path)
    assert len(data_lines(prepare(recipe(), data))) == 1
    for pair in prepare(recipe(), data).cases["validation"]:
        array = np.asarray(nib.load(pair.label).dataobj)
        nib.save(nib.Nifti1Image(np.where(array == 2, 0, array), np.eye(4)), pair.label)
    _, line = data_lines(prepare(recipe(), data))
    assert "no case for validation has far" in line
    alone = recipe(data={"images": "images", "labels": "labels"})
    assert len(data_lines(prepare(alone, data))) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_pictures_of_long_voxels_have_the_shape_of_the_body() -> None:
    """A cube of 40 mm, in slices of 5 mm."""
    from scanloom.training.handlers import PANEL, draw_case

    label = torch.zeros(2, 40, 40, 8)
    label[1, 10:30, 10:30, 2:6], label[0] = 1, 1 - label[1]
    image = torch.rand(1, 40, 40, 8)
    strip = draw_case(image, label, label, (1.0, 1.0, 5.0))
    assert strip.shape == (PANEL, 6 * PANEL, 3)
    for plane in range(3):
        panel = strip[:, 2 * plane * PANEL : (2 * plane + 1) * PANEL].max(axis=2)
        assert panel.any(axis=0).sum() == panel.any(axis=1).sum() == PANEL - 8


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ({"msd": "."}, "dataset.json"),
        ({"datalist": "list.json"}, "list.json"),
        ({"images": "images", "labels": "labels"}, "dataset.json"),
    ],
)
def test_a_name_that_the_data_have_for_another_value_is_refused(
    tmp_path: Path, source: dict[str, str], file: str
) -> None:
    """As after another order of `scanloom dataset --structures`: the model would swap names."""
    from scanloom.training.train import prepare

    data = write_data(tmp_path, 4)
    pairs = [{k: f"{k}s/case_{n}.nii.gz" for k in ("image", "label")} for n in range(4)]
    page = recipe(data={**source, "validation": 1})
    # another name is no contradiction, nor a value among several
    for labels in ({"1": "Near", "2": "remote"}, {"near": [1, 2], "far": 2}, "none"):
        (data / file).write_text(json.dumps({"labels": labels, "training": pairs}))
        prepare(page, data)
    swapped = {"0": "background", "2": "near", "1": "far"}
    (data / file).write_text(json.dumps({"labels": swapped, "training": pairs}))
    with pytest.raises(ScanError, match=rf"TRAINING_DATA: near is 2 in {file}, and 1 in the"):
        prepare(page, data)


def test_a_full_disk_is_the_reason_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch says nothing of it."""
    from scanloom.training import train

    monkeypatch.setattr(train, "own_python", lambda *_: ["false"])
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(train.shutil, "disk_usage", lambda _: full)
    with pytest.raises(ScanError, match="DISK_FULL"):
        train.run_training(tmp_path)


@pytest.mark.parametrize("name", ["a,b", "x#y", "501"])
def test_a_relative_folder_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Fire, which reads MONAI's command line, takes these for a list, a part and a number."""
    from fire.parser import DefaultParseValue

    from scanloom.training import train

    program = "import sys; print('epoch', *sys.argv[1:], sep='\\nepoch ', file=sys.stderr)"
    monkeypatch.setattr(train, "own_python", lambda *_: [sys.executable, "-SEc", program])
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    lines: list[str] = []
    train.run_training(Path(name), lines.append)
    assert DefaultParseValue(lines[-1].removeprefix("epoch ")) == str(tmp_path / name)


# torch's own, when Ignite imports it
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_training_before_a_checkpoint(
    tmp_path: Path, loss: float
) -> None:
    from ignite.engine import Engine, Events

    from scanloom.training.handlers import LossNotFiniteError, TrainingRecord

    losses = [1.0, 1.0, 1.0, loss]
    saved: list[int] = []
    trainer = Engine(lambda engine, _: {"loss": torch.tensor(losses[engine.state.iteration - 1])})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: saved.append(trainer.state.epoch))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    TrainingRecord(str(tmp_path), 2, Engine(lambda *_: None), optimizer).attach(trainer)
    with pytest.raises(LossNotFiniteError, match="epoch 2"):
        trainer.run([0, 1], max_epochs=2)
    assert saved == [1]


@pytest.mark.slow
def test_a_failure_is_told_without_its_text(trained: Path, tmp_path: Path) -> None:
    from scanloom.training.train import run_training

    other = copy_configs(trained, tmp_path / "other", data_root=str(tmp_path / "gone"))
    with pytest.raises(ScanError, match=r"TRAINING.*\(\w+Error\)") as caught:
        run_training(other)
    assert "gone" not in str(caught.value)


@pytest.mark.slow
def test_a_measurement_says_steps_and_time_and_leaves_nothing(tmp_path: Path) -> None:
    from scanloom.training.train import measure, prepare

    data = write_data(tmp_path / "data", 5)
    before = sorted(tmp_path.rglob("*"))
    measured = measure(prepare(recipe(), data))
    assert (measured.steps, measured.epochs, measured.validations) == (12, 3, 2)
    assert measured.seconds > 12 * measured.step_s > 0
    assert measured.memory > 100 << 20
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "problem",
    ["unreadable", "label map", "grid", "number", "almost 1", "constant", "spacing", "brightness"],
)
def test_a_case_with_a_problem_is_left_out_and_named(tmp_path: Path, problem: str) -> None:
    from scanloom.training.train import prepare

    data = write_data(tmp_path, 14)
    image, label = data / "images/case_3.nii.gz", data / "labels/case_3.nii.gz"
    array, numbers = (np.asarray(nib.load(file).dataobj) for file in (image, label))
    affine = np.eye(4)
    match problem:
        case "label map":
            label.unlink()
        case "unreadable":
            image.write_bytes(image.read_bytes()[:300])
        case "grid":
            affine[0, 3] = 0.3
            nib.save(nib.Nifti1Image(numbers, affine), label)
        case "almost 1":
            numbers = numbers * np.float32(1.0000001)
            nib.save(nib.Nifti1Image(numbers, affine), label)
        case "number":
            nib.save(nib.Nifti1Image(np.where(numbers == 2, 7, numbers), affine), label)
        case "constant":
            nib.save(nib.Nifti1Image(np.full_like(array, 5), affine), image)
        case "spacing":
            for file, values in ((image, array), (label, numbers)):
                nib.save(nib.Nifti1Image(values, np.diag([10.0, 10, 10, 1])), file)
        case "brightness":
            nib.save(nib.Nifti1Image(np.where(numbers == 1, -500, array), affine), image)
    prepared = prepare(recipe(), data)
    assert [each.case for each in prepared.left_out] == ["case_3"]
    words = {"unreadable": "read", "spacing": "extent", "constant": "one value"}
    words |= {"number": "has 7", "almost 1": "has 1.0000001"}
    assert words.get(problem, problem) in prepared.left_out[0].problem
    assert sum(map(len, prepared.cases.values())) == 13


def test_a_label_map_may_have_its_axes_in_another_order(tmp_path: Path) -> None:
    """As of a program that writes LPS or turns the slices."""
    from scanloom.training.train import prepare
    from scanloom.training.transforms import LoadVolumed

    data = write_data(tmp_path, 10)
    before = prepare(recipe(), data)
    pair = before.cases["training"][0]
    keys = {"image": pair.image, "label": pair.label}
    loading = LoadVolumed(list(keys), "MR")
    expected = loading(keys)
    stored = nib.Nifti1Image.from_bytes(nib.load(pair.label).to_bytes())
    for codes in ("LPS", "SAL"):
        to = nib.orientations.axcodes2ornt(codes)
        turned = stored.as_reoriented(
            nib.orientations.ornt_transform(nib.io_orientation(stored.affine), to)
        )
        nib.save(nib.Nifti1Image(np.asarray(turned.dataobj), turned.affine), pair.label)
        assert prepare(recipe(), data).cases == before.cases
        loaded = loading(keys)
        for key in keys:
            assert torch.equal(loaded[key].as_tensor(), expected[key].as_tensor())
            assert torch.equal(loaded[key].affine, expected[key].affine)


def test_an_oblique_grid_may_be_rounded() -> None:
    """By 45 degrees, where rounding decides which axis of the body is the nearest."""
    from scanloom.training.cases import on_axes_of

    array, volumes = np.arange(60.0).reshape(3, 4, 5), []
    for degrees in (44.99999, 45.00001):
        affine = np.eye(4)
        affine[:3, :3] = Rotation.from_euler("z", degrees, degrees=True).as_matrix()
        volumes.append(Volume(array, Grid(array.shape, affine), "a.u.", "MR"))
    image, label = volumes
    assert nib.aff2axcodes(image.grid.affine) != nib.aff2axcodes(label.grid.affine)
    turned = on_axes_of(image.grid, label)
    assert image.grid.matches(turned.grid)
    np.testing.assert_array_equal(turned.array, array)


def test_an_umlaut_of_two_characters_is_that_of_one(tmp_path: Path) -> None:
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 3)
    for folder, form in (("images", "NFC"), ("labels", "NFD")):
        case = data / folder / "case_1.nii.gz"
        case.rename(case.with_name(unicodedata.normalize(form, "Ümlaut.nii.gz")))
    assert (
        sum(
            map(
                len,
                find_cases(
                    recipe(data={"images": "images", "labels": "labels"}).data, data
                ).values(),
            )
        )
        == 3
    )


@pytest.mark.parametrize(
    ("folder", "name"),
    [("images", "case_1.nii"), ("images", "case_1_0000.nii.gz"), ("labels", "case_1.nii")],
)
def test_two_files_of_one_case_are_refused(tmp_path: Path, folder: str, name: str) -> None:
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 3)
    nib.save(nib.Nifti1Image(np.zeros(SHAPE, np.uint8), np.eye(4)), data / folder / name)
    with pytest.raises(ScanError, match="two files of a folder"):
        find_cases(recipe().data, data)


def test_parts_follow_names_in_whatever_order_they_are_listed(tmp_path: Path) -> None:
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 14)
    held = {pair.name for pair in find_cases(recipe().data, data)["testing"]}
    folds = [
        find_cases(recipe(data={"images": "images", "labels": "labels", "folds": 3}).data, data, n)
        for n in range(3)
    ]
    validated = [{pair.name for pair in fold["validation"]} for fold in folds]
    assert set.union(*validated) == {f"case_{n}" for n in range(14)}
    assert sum(map(len, validated)) == 14
    assert all(
        not seen & {p.name for p in f["training"]} for seen, f in zip(validated, folds, strict=True)
    )
    listed = {"training": [{"image": "images/case_1.nii.gz", "label": "labels/case_1.nii.gz"}]}
    (data / "dataset.json").write_text(json.dumps(listed))
    assert len(find_cases(recipe(data={"msd": "."}).data, data)["training"]) == 1
    assert len(held) == 1


@pytest.mark.parametrize("source", [{"msd": "."}, {"datalist": "dataset.json"}])
def test_the_folds_of_a_list_keep_patients_on_one_side(
    tmp_path: Path, source: dict[str, str]
) -> None:
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 9)
    cases = [
        {"image": f"images/case_{n}.nii.gz", "label": f"labels/case_{n}.nii.gz", "fold": n // 3}
        for n in range(9)
    ]
    split = {"training": cases[3:], "validation": cases[:3]}  # as `scanloom dataset` has them
    # as Auto3DSeg has test images
    for document in ({"training": cases, "testing": [{"image": "images/new.nii.gz"}]}, split):
        (data / "dataset.json").write_text(json.dumps(document))
        for fold in range(3):
            found = find_cases(recipe(data=source).data, data, fold)
            assert [int(pair.name[-1]) // 3 for pair in found["validation"]] == [fold] * 3
            assert len(found["training"]) == 6
    with pytest.raises(ScanError, match="the folds of the dataset are 0, 1, 2"):
        find_cases(recipe(data=source).data, data, 3)
    for parts in ({"validation": 2}, {"hold_out": 1}, {"folds": 3}):
        with pytest.raises(ScanError, match="the dataset has the fold"):
            find_cases(recipe(data={**source, **parts}).data, data)
    cases[4]["fold"] = "1"
    (data / "dataset.json").write_text(json.dumps({"training": cases}))
    with pytest.raises(ScanError, match="fold of a listed case is not"):
        find_cases(recipe(data=source).data, data)


@pytest.mark.parametrize(
    "source", [{"images": "images", "labels": "labels"}, {"label_maps": "labels"}]
)
def test_folders_of_a_dataset_of_scanloom_keep_its_folds(
    tmp_path: Path, source: dict[str, str]
) -> None:
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 6)
    cases = [{"case": f"case_{n}", "fold": n // 2} for n in range(6)]
    (data / "scanloom.json").write_text(json.dumps({"cases": cases}))
    found = find_cases(recipe(data=source).data, data, 1)
    assert [pair.name for pair in found["validation"]] == ["case_2", "case_3"]
    with pytest.raises(ScanError, match="the dataset has the fold"):
        find_cases(recipe(data={**source, "validation": 2}).data, data)


def test_a_fold_without_a_case_is_refused(tmp_path: Path) -> None:
    from scanloom.training.cases import find_cases

    page = recipe(data={"images": "images", "labels": "labels", "hold_out": 1, "folds": 5})
    with pytest.raises(ScanError, match="5 folds need as many cases, there are 4"):
        find_cases(page.data, write_data(tmp_path, 5), 4)


@pytest.mark.parametrize("with_second", [slice(None), slice(1, 2)])
def test_a_second_channel_is_not_left_out_in_silence(tmp_path: Path, with_second: slice) -> None:
    """Nor where some cases lack it."""
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 2)
    images = sorted((data / "images").iterdir())
    for image in images:
        for channel in ("0000", "0001") if image in images[with_second] else ("0000",):
            shutil.copy(image, image.with_name(f"{image.name[:6]}_{channel}.nii.gz"))
        image.unlink()
    with pytest.raises(ScanError, match="several channels"):
        find_cases(recipe().data, data)


def test_a_case_may_have_the_number_of_a_channel(tmp_path: Path) -> None:
    """With a label map of its own, it is no channel of another case."""
    from scanloom.training.cases import find_cases

    data = write_data(tmp_path, 5)
    for folder in ("images", "labels"):
        (file,) = (data / folder).glob("case_1.*")
        file.rename(file.with_name(file.name.replace("case_1", "case_0_0001")))
    pairs = [pair for of_split in find_cases(recipe().data, data).values() for pair in of_split]
    assert len(pairs) == 5


def test_a_list_without_labels_is_told_from_one_with_too_few_cases(tmp_path: Path) -> None:
    """The `dataset.json` of nnU-Net lists no case."""
    from scanloom.training.cases import find_cases

    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "near": 1}}))
    with pytest.raises(ScanError, match="name the folders, images and labels"):
        find_cases(recipe(data={"msd": "."}).data, tmp_path)


def test_what_would_be_no_model_is_refused_before_the_training(tmp_path: Path) -> None:
    """The reader of bundles takes a channel of this name for background."""
    from scanloom.training.train import prepare

    structures = [{"label": "near", "values": 1}, {"label": "others", "values": 2}]
    with pytest.raises(ScanError, match=r"RECIPE: the bundle would be no model: .*'others'"):
        prepare(recipe(structures=structures), write_data(tmp_path, 4))


def test_no_scan_is_trained_on_that_judges_the_training(tmp_path: Path) -> None:
    """A copy of it, whose label map another reader drew, has another name, and so another part."""
    from scanloom.training.train import prepare

    data = write_data(tmp_path, 4)
    shutil.copy(data / "images/case_1.nii.gz", data / "images/copy.nii.gz")
    shutil.copy(data / "labels/case_2.nii.gz", data / "labels/copy.nii.gz")
    pairs = {
        name: {"image": f"images/{name}.nii.gz", "label": f"labels/{name}.nii.gz"}
        for name in ("case_0", "case_1", "case_2", "case_3", "copy")
    }
    for part in ("validation", "testing"):
        names = [name for name in pairs if name != "case_1"]
        listed = {"training": [pairs[name] for name in names], part: [pairs["case_1"]]}
        (data / "list.json").write_text(json.dumps(listed))
        prepared = prepare(recipe(data={"datalist": "list.json"}), data)
        assert [(each.case, each.problem) for each in prepared.left_out] == [
            ("copy", f"its scan is also one for {part}")
        ]
        assert len(prepared.cases["training"]) == 3


def test_a_fold_of_cases_without_folds_is_refused(tmp_path: Path) -> None:
    from scanloom.training.cases import find_cases

    with pytest.raises(ScanError, match="has folds"):
        find_cases(recipe().data, write_data(tmp_path), 1)


def monai(bundle: Path, *arguments: str, files: str = "configs/train.json") -> list[str]:
    return [
        *(sys.executable, "-W", "ignore", "-m", "monai.bundle", "run", "--config_file", files),
        *arguments,
    ]


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_monais_own_command_trains_and_a_killed_run_goes_on(trained: Path, tmp_path: Path) -> None:
    bundle = copy_configs(trained, tmp_path / "killed")
    command = monai(bundle, "--steps", "200")
    whole = copy_configs(trained, tmp_path / "whole")
    subprocess.run(command, cwd=whole, env=ENVIRONMENT, check=True, capture_output=True)
    for _ in range(2):  # killed twice, in a step or while a checkpoint is written
        with subprocess.Popen(
            command, cwd=bundle, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            lines = 0
            for line in process.stderr or ():
                lines += line.startswith(b"epoch ")
                if lines == 5:
                    time.sleep(0.03)
                    process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    assert not (bundle / "models" / "model.pt").exists()
    subprocess.run(command, cwd=bundle, env=ENVIRONMENT, check=True, capture_output=True)
    assert same(weights(whole), weights(bundle))
    assert [row["loss"] for row in rows(whole)] == [row["loss"] for row in rows(bundle)]
    files = sorted(file.name for file in (bundle / "checkpoints").iterdir())
    assert files == ["checkpoint_epoch=49.pt", "checkpoint_epoch=50.pt"]


@pytest.mark.slow
def test_processes_that_augment_change_no_weight(trained: Path, tmp_path: Path) -> None:
    from scanloom.training.train import run_training

    loader = json.loads((trained / "configs/train.json").read_text())["train_loader"]
    other = copy_configs(trained, tmp_path / "other", train_loader={**loader, "num_workers": 2})
    run_training(other)
    assert same(weights(trained), weights(other))


@pytest.mark.slow
def test_a_training_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    """Else it would go on beside the one that the same command starts again."""
    page = recipe().model_dump(mode="json", exclude_defaults=True)
    data = write_data(tmp_path / "data")
    page["schedule"] = {"steps": 1_000_000, "epoch": 1_000_000}  # it writes nothing meanwhile
    (data / "recipe.json").write_text(json.dumps(page))
    command = [sys.executable, "-m", "scanloom", "train", data / "recipe.json", "-o", data / "out"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not list(data.glob("out/logs/*")):
            assert process.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 60
    while left := [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_with_twice_the_batch(
    trained: Path, tmp_path: Path
) -> None:
    one, two = (copy_configs(trained, tmp_path / name) for name in ("one", "two"))
    # AdamW makes a step of any gradient equally long: it does not show whether gradients are summed
    # or averaged, and lets grow what rounding changes where an activation crosses 0
    optimizer = ("--optimizer#_target_", "torch.optim.SGD", "--optimizer#lr", "0.1")
    arguments = ("--steps", "20", "--epoch_length", "1", *optimizer)
    command = monai(one, *arguments, "--batch", "4")
    subprocess.run(command, cwd=one, env=ENVIRONMENT, check=True, capture_output=True)
    files = "['configs/train.json','configs/multi_gpu_train.json']"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    rest = monai(two, *arguments, files=files)[3:]
    command = [sys.executable, *launcher, *rest]
    # processes that wait for each other never end
    done = subprocess.run(
        command, cwd=two, env=ENVIRONMENT, check=False, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    losses = [np.array([float(row["loss"]) for row in rows(each)]) for each in (one, two)]
    assert len(losses[0]) == 20
    assert np.allclose(losses[0], losses[1], rtol=1e-4, atol=0)


@pytest.mark.slow
def test_monais_evaluation_is_the_dice_of_scanlooms_labels(trained: Path) -> None:
    from scanloom import load_volume
    from scanloom.convert.conversion import load_card
    from scanloom.core import ComputeOptions
    from scanloom.inference.predictor import TorchPredictor

    files = "['configs/train.json','configs/evaluate.json']"
    program = (
        "from monai.bundle import ConfigWorkflow\n"
        f"w = ConfigWorkflow({files}, workflow_type='train', logging_file=False)\n"
        "w.initialize(); w.run()\n"
        "print('dice', w.parser.get_parsed_content('evaluator').state.metrics['val_mean_dice'])\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, cwd=trained, env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    root = Path(json.loads((trained / "configs/train.json").read_text())["data_root"])
    cases = json.loads((trained / "configs/datalist.json").read_text())["validation"]
    exact = ComputeOptions(precision="float32")
    predictor, dice = TorchPredictor(load_card(trained), exact, device="cpu"), []
    for case in cases:
        image, label = (load_volume(root / case[key], modality="MR") for key in ("image", "label"))
        ours = predictor.predict(image).layers[0].labels
        for number in (1, 2):
            one, other = ours == number, label.array == number
            dice.append(2 * (one & other).sum() / (one.sum() + other.sum()))
    assert float(done.stdout.split("dice")[1]) == pytest.approx(np.mean(dice), abs=1e-5)
    assert np.mean(dice) > 0.1


@pytest.mark.slow
def test_scanloom_and_monais_runner_give_the_same_labels(trained: Path, tmp_path: Path) -> None:
    from scanloom import load_volume
    from scanloom.convert.conversion import load_card
    from scanloom.core import ComputeOptions
    from scanloom.inference.predictor import TorchPredictor

    data = write_data(tmp_path / "data", 3)
    images = sorted((data / "images").iterdir())
    command = [
        *monai(
            trained, "--bundle_root", str(trained), files=str(trained / "configs/inference.json")
        ),
        *("--output_dir", str(tmp_path / "out"), "--datalist", str([str(file) for file in images])),
    ]
    subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True)
    exact = ComputeOptions(precision="float32")
    predictor = TorchPredictor(load_card(trained), exact, device="cpu")
    for file in images:
        name = file.name.removesuffix(".nii.gz")
        theirs = np.asarray(nib.load(tmp_path / "out" / f"{name}_seg.nii.gz").dataobj)
        ours = predictor.predict(load_volume(file, modality="MR")).layers[0].labels
        assert len(np.unique(ours)) > 1
        np.testing.assert_array_equal(ours, theirs)


def write_maps(folder: Path, count: int = 6) -> Path:
    """Write label maps of two boxes in a third, as of a head."""
    generator = np.random.default_rng(0)
    (folder / "maps").mkdir(parents=True)
    for n in range(count):
        label = np.zeros(SHAPE, np.uint8)
        label[1:-1, 1:-1, 1:-1] = label[0, 0, n] = 30  # no two maps are equal
        i, j, k = generator.integers(1, 4, 3)
        label[i : i + 8, j : j + 5, k : k + 7] = 1
        label[i : i + 8, j + 5 : j + 12, k : k + 7] = 2
        nib.save(nib.Nifti1Image(label, np.eye(4)), folder / "maps" / f"map_{n}.nii.gz")
    return folder


def drawn_recipe(**changes: object) -> TrainingRecipe:
    page = {
        "data": {"label_maps": "maps", "hold_out": 1, "validation": 1},
        "drawing": {"others": [30], "validation_images": 3},
        "augmentation": {"mirror": ["left-right"], "rotate": 10, "elastic": 0.3},
    }
    return recipe(**{**page, **changes})


def train_on_maps(folder: Path, **changes: object) -> Path:
    from scanloom.training.train import prepare, run_training, write_training

    data = write_maps(folder / "data")
    write_training(prepare(drawn_recipe(**changes), data), folder / "boxes")
    run_training(folder / "boxes")
    return folder / "boxes"


@pytest.mark.thorough
def test_a_model_is_trained_of_label_maps_alone(tmp_path: Path) -> None:
    from scanloom.convert.readers import read_model

    bundle = train_on_maps(tmp_path)
    assert [bool(row["mean_dice"]) for row in rows(bundle)] == [False, True, True]
    assert len(read_model(bundle, {}).structures) == 2
    listed = json.loads((bundle / "configs" / "datalist.json").read_text())
    assert len(listed.pop("content")) == 64  # a SHA-256
    assert listed.pop("labels") == {"near": [1], "far": [2]}
    assert {name: len(cases) for name, cases in listed.items()} == {
        "training": 4,
        "validation": 1,
        "testing": 1,
    }
    assert all(case.keys() == {"label"} for cases in listed.values() for case in cases)


@pytest.mark.slow
def test_a_training_of_label_maps_learns_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    from scanloom.training.train import run_training

    plan = {"steps": 300, "batch": 1, "epoch": 100, "validate_every": 3, "precision": "float32"}
    changes = {"schedule": {**plan, "learning_rate": 0.01}, "network": {"filters": [8, 16, 16]}}
    bundle = train_on_maps(tmp_path, **changes)
    assert float(rows(bundle)[-1]["mean_dice"]) > 0.5  # the boxes' contrast is never the same
    other = copy_configs(bundle, tmp_path / "other")
    (other / "checkpoints").mkdir()
    name = "checkpoint_epoch=2.pt"
    (other / "checkpoints" / name).write_bytes((bundle / "checkpoints" / name).read_bytes())
    run_training(other)
    assert same(weights(bundle), weights(other))


def test_label_maps_with_problems_are_left_out_and_named(tmp_path: Path) -> None:
    from scanloom.training.train import prepare

    data = write_maps(tmp_path, 8)
    for name, value in (("unknown", 77), ("empty", 0)):
        label = np.full(SHAPE, value, np.uint8)
        nib.save(nib.Nifti1Image(label, np.eye(4)), data / "maps" / f"{name}.nii.gz")
    left_out = {each.case: each.problem for each in prepare(drawn_recipe(), data).left_out}
    assert left_out == {
        "unknown": "the label map has 77, which no structure has",
        "empty": "the label map is empty",
    }


def test_weights_to_start_from_are_those_of_a_file(trained: Path, tmp_path: Path) -> None:
    from scanloom.training.bundle import train_config
    from scanloom.training.train import prepare

    network = {"filters": [4, 4, 8], "start": "../model.pt"}
    data = write_data(tmp_path / "data")
    with pytest.raises(ScanError, match=r"RECIPE.*no file of weights"):
        prepare(recipe(network=network), data)
    (tmp_path / "model.pt").write_bytes((trained / "models" / "model.pt").read_bytes())
    wider = {**network, "filters": [4, 8, 8]}
    with pytest.raises(ScanError, match=r"RECIPE.*of another network"):
        prepare(recipe(network=wider), data)
    page = prepare(recipe(network=network), data).recipe
    start = train_config(page, data, 5)["start"]
    assert Path(start).read_bytes() == (trained / "models" / "model.pt").read_bytes()


def test_weights_of_structures_are_those_of_the_loss(tmp_path: Path) -> None:
    from monai.bundle import ConfigParser

    from scanloom.training.bundle import train_config

    structures = [{"label": "near", "values": 1, "weight": 3}, {"label": "far", "values": 2}]
    losses = []
    for page in (recipe(), recipe(structures=structures)):
        config = train_config(page, tmp_path, 5)
        parts = {"imports": ["$import torch"], "device": "cpu", "loss": config["loss"]}
        losses.append(ConfigParser(parts).get_parsed_content("loss"))
    scores = torch.zeros(1, 3, 4, 4, 4)
    far, near = torch.full((1, 1, 4, 4, 4), 2), torch.full((1, 1, 4, 4, 4), 2)
    near[0, 0, 0] = 1
    scores[:, 2] = 3  # all is said to be far
    plain, weighted = ([float(loss(scores, label)) for label in (far, near)] for loss in losses)
    assert weighted[1] - weighted[0] > 1.5 * (plain[1] - plain[0])


def test_with_little_weight_of_dice_the_loss_is_cross_entropy(tmp_path: Path) -> None:
    from monai.bundle import ConfigParser

    from scanloom.training.bundle import train_config

    config = train_config(recipe(schedule={"dice": 1e-9}), tmp_path, 5)
    loss = ConfigParser({"loss": config["loss"]}).get_parsed_content("loss")
    scores = torch.randn(1, 3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    label = scores.flip(1).argmax(1, keepdim=True)
    entropy = torch.nn.functional.cross_entropy(scores, label[:, 0])
    assert float(loss(scores, label)) == pytest.approx(float(entropy), rel=1e-4)
