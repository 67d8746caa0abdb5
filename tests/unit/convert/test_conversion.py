"""A foreign model is converted once, again when its files change, and alike everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from scanloom.cards.card_file import card_digest, read_card
from scanloom.convert.conversion import IMPORTED_ONCE, convert_model, load_card
from scanloom.convert.provenance import file_digest
from scanloom.convert.readers import read_model, readers
from scanloom.convert.store import find_model
from scanloom.convert.weights import NNUNET_KEY
from scanloom.core import ScanError, user_cache_folder
from scanloom.io.system import sandbox
from support.bundles import saved, spleen_config, spleen_metadata, write_bundle
from support.faults import on_small_disk
from support.nnunet_folders import plans, write_model
from support.totalsegmentator_folders import write_task


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of converted models, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache_folder() / "models"


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_a_model_is_converted_once(cache: Path, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")

    first = load_card(folder)
    (entry,) = entries(cache)
    written_ns = (entry / "card.json").stat().st_mtime_ns
    again = load_card(folder)

    assert first == again
    assert (entry / "card.json").stat().st_mtime_ns == written_ns
    read = read_model(folder)
    assert replace(first, weights=read.weights) == read
    assert first.weights.published == read.weights.sha256


def test_a_busy_machine_convicts_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper that starts its process may have to import torch from a slow disk."""
    sandbox._SERVER.stop()
    monkeypatch.setattr(sandbox, "_FORK_TIMEOUT_S", 1e-3)
    with pytest.raises(ScanError) as caught:
        load_card(write_bundle(tmp_path / "spleen"))
    assert caught.value.code == "ENVIRONMENT"


def test_no_conversion_has_to_import_a_reader() -> None:
    assert {reader.read.__module__ for reader in readers()} <= set(IMPORTED_ONCE)


@pytest.mark.parametrize("change", ["weights", "metadata", "licence", "same size and time"])
def test_a_model_that_changed_is_converted_again(change: str, cache: Path, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen", weights=saved(1.0))
    before = load_card(folder)

    file = folder / "models" / "model.pt"
    match change:
        case "weights":
            file.write_bytes(saved(2.0))
        case "same size and time":
            times = file.stat()
            file.write_bytes(saved(2.0))
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        case "metadata":
            text = json.dumps(spleen_metadata() | {"version": "9"})
            (folder / "configs" / "metadata.json").write_text(text)
        case "licence":
            (folder / "LICENSE").write_text("MIT License")

    assert card_digest(load_card(folder)) != card_digest(before)
    assert len(entries(cache)) == 1


def test_touching_a_file_changes_no_digest(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    before = card_digest(load_card(folder))
    os.utime(folder / "models" / "model.pt")

    assert card_digest(load_card(folder)) == before


def test_the_digest_is_that_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (write_bundle(tmp_path / name / "spleen") for name in "ab")
    before = card_digest(load_card(first))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))

    assert card_digest(load_card(second)) == before


def test_a_stage_next_to_the_model_counts(tmp_path: Path) -> None:
    changed = plans()
    base = changed["configurations"]["3d_fullres"]
    changed["configurations"]["3d_lowres"] = base
    changed["configurations"]["3d_cascade_fullres"] = {**base, "previous_stage": "3d_lowres"}
    stage = write_model(tmp_path, changed, configuration="3d_lowres")
    folder = write_model(tmp_path, changed, configuration="3d_cascade_fullres")
    before = card_digest(load_card(folder))

    _change_weights(stage)

    assert card_digest(load_card(folder)) != before


def test_weights_of_a_task_that_arrive_later_count(tmp_path: Path) -> None:
    weights = write_task(tmp_path / "weights", "total_mr")
    assert load_card(weights, {"task": "total_mr"}).fast is None
    write_task(weights, "total_mr_fast")

    assert load_card(weights, {"task": "total_mr"}).fast is not None


def test_safetensors_are_linked(cache: Path, tmp_path: Path) -> None:
    content = save({"weight": np.zeros(3, np.float32)})
    folder = write_bundle(tmp_path / "spleen", weights=content)

    weights = load_card(folder).weights

    assert weights.file.is_symlink()
    assert weights.file.resolve() == folder / "models" / "model.pt"
    assert weights.sha256 == weights.published


def test_a_model_that_holds_its_card_can_be_moved(tmp_path: Path) -> None:
    """Also with weights that are a link within it."""
    content = save({"weight": np.zeros(3, np.float32)})
    folder = write_bundle(tmp_path / "spleen", weights=content)
    (folder / "models" / "model.pt").rename(folder / "models" / "v2.safetensors")
    (folder / "models" / "model.pt").symlink_to("v2.safetensors")
    convert_model(folder, {}, folder)
    shutil.copytree(folder, tmp_path / "moved", symlinks=True)
    shutil.rmtree(folder)

    weights = read_card(tmp_path / "moved").weights

    assert weights.file.read_bytes() == content
    assert not weights.file.is_symlink()


@pytest.mark.parametrize("damage", ["card", "lost weights", "empty weights", "other weights"])
def test_a_damaged_cache_is_made_again(damage: str, cache: Path, tmp_path: Path) -> None:
    """Also if another conversion has the same weights, and so the same file."""
    folder = write_bundle(tmp_path / "spleen")
    before = load_card(folder)
    (entry,) = entries(cache)
    load_card(write_bundle(tmp_path / "twin"))

    match damage:
        case "card":
            (entry / "card.json").write_text("{")
        case "lost weights":
            before.weights.file.unlink()
        case "empty weights":
            before.weights.file.write_bytes(b"")
        case "other weights":
            before.weights.file.write_bytes(before.weights.file.read_bytes()[::-1])

    assert load_card(folder) == before
    assert file_digest(before.weights.file) == before.weights.sha256


def test_hidden_files_count(tmp_path: Path) -> None:
    """A config may name them."""
    config = spleen_config()
    config["checkpointloader"]["load_path"] = "$@bundle_root + '/models/.model.pt'"
    folder = write_bundle(tmp_path / "spleen", config)
    file = (folder / "models" / "model.pt").rename(folder / "models" / ".model.pt")
    before = load_card(folder)
    file.write_bytes(saved(2.0))

    assert load_card(folder).weights.published == file_digest(file) != before.weights.published


def test_a_card_that_came_with_a_foreign_model_does_not_count(tmp_path: Path) -> None:
    """Neither does one that was written after all other files."""
    folder, other = (write_bundle(tmp_path / name) for name in ("spleen", "other"))
    convert_model(other, {}, other)
    text = (other / "card.json").read_text()
    shutil.copytree(other / "weights", folder / "weights")
    (folder / "card.json").write_text(text.replace('"spleen"', '"liver"'))

    assert [structure.label for structure in load_card(folder).structures] == ["spleen"]


def test_links_to_folders_elsewhere_are_not_followed(cache: Path, tmp_path: Path) -> None:
    """No reader reads files behind them, and they may hold an archive of scans."""
    folder, scans = write_bundle(tmp_path / "spleen"), tmp_path / "scans"
    scans.mkdir()
    (folder / "scans").symlink_to(scans)
    load_card(folder)
    (entry,) = entries(cache)
    inode = (entry / "card.json").stat().st_ino
    (scans / "scan.nii").write_bytes(b"")

    load_card(folder)

    assert (entry / "card.json").stat().st_ino == inode


def test_links_to_models_elsewhere_are_followed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "elsewhere" / "Dataset001_Organ")
    folder = tmp_path / "results" / "Dataset001_Organ"
    folder.mkdir(parents=True)
    (folder / model.name).symlink_to(model)
    before = card_digest(load_card(folder))
    _change_weights(model)

    assert card_digest(load_card(folder)) != before


@pytest.mark.parametrize("name", ["Dataset850_TotalSegMRI_part1_organs_1088subj", "link"])
def test_links_to_datasets_of_a_task_are_followed(name: str, tmp_path: Path) -> None:
    weights = write_task(tmp_path / "weights", "total_mr")
    (dataset,) = weights.glob("Dataset850*")
    dataset = dataset.rename(tmp_path / dataset.name)
    (weights / name).symlink_to(dataset)
    before = card_digest(load_card(weights, {"task": "total_mr"}))
    _change_weights(next(dataset.glob("*__*")))

    assert card_digest(load_card(weights, {"task": "total_mr"})) != before


@pytest.mark.parametrize("options", [{}, {"dataset": "1"}])
def test_datasets_next_to_a_model_do_not_count(
    options: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    """They may be trained at this moment."""
    results = tmp_path / "results"
    dataset = write_model(results / "Dataset001_Organ").parent
    folder = results if options else dataset
    load_card(folder, options)
    (entry,) = entries(cache)
    inode = (entry / "card.json").stat().st_ino
    write_model(results / "Dataset002_Other")

    load_card(folder, options)

    assert (entry / "card.json").stat().st_ino == inode


def test_a_second_dataset_of_the_same_number_counts(tmp_path: Path) -> None:
    write_model(tmp_path / "Dataset001_Organ")
    load_card(tmp_path, {"dataset": "1"})
    write_model(tmp_path / "Dataset001_Other")

    with pytest.raises(ScanError, match="there are 2 models"):
        load_card(tmp_path, {"dataset": "1"})


def _change_weights(model: Path) -> None:
    """Change the weights of the first fold."""
    file = model / "fold_0" / "checkpoint_final.pth"
    content = torch.load(file, weights_only=False)
    next(iter(content[NNUNET_KEY].values())).add_(1.0)
    torch.save(content, file)


@pytest.mark.thorough
def test_a_full_disk_is_named_or_avoided(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen", weights=saved(0.0, 1 << 20))
    script = """
    mount -t tmpfs -o size=1m none "$1"
    XDG_CACHE_HOME="$1" scanloom models show "$2"
    XDG_CACHE_HOME="$1" TMPDIR="$1" scanloom models show "$2"
    """
    shown = on_small_disk(script, [tmp_path / "disk", folder])

    assert shown.count("UNet") == 1
    assert "no space left for the converted model (DISK_FULL)" in shown


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_parent_folder_that_cannot_be_listed_is_no_obstacle(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "closed" / "Dataset_of_mine")
    folder.parent.chmod(0o311)
    try:
        card = load_card(folder)
    finally:
        folder.parent.chmod(0o755)

    assert card.name == "dataset_of_mine"


def test_a_folder_may_have_a_name_like_options(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "scan:size=2")

    assert find_model(str(folder)).name == "scan_size_2"


def test_a_cache_that_others_may_write_is_not_used(cache: Path, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    load_card(folder)
    cache.chmod(0o777)

    assert not load_card(folder).weights.file.is_relative_to(cache)


def test_without_a_cache_models_are_converted_for_the_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    folder = write_bundle(tmp_path / "spleen")

    first = load_card(folder)

    assert first == load_card(folder)
    assert first.weights.file.is_file()


def test_errors_are_not_kept(cache: Path, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen", weights=b"text")

    for _ in range(2):
        with pytest.raises(ScanError, match="MODEL_DAMAGED"):
            load_card(folder)
    assert entries(cache) == []


@pytest.mark.thorough
def test_two_processes_convert_a_model_at_once(cache: Path, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    code = (
        "import sys; from pathlib import Path\n"
        "from scanloom.convert.conversion import convert_model, load_card\n"
        "card = load_card(Path(sys.argv[1])); print(card.weights.file.stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    inodes = {process.communicate()[0] for process in processes}

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(inodes) == 1
    assert len(entries(cache)) == 1


def test_options_make_another_conversion(cache: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path, folds=("0", "1"))

    both, first = load_card(folder), load_card(folder, {"folds": "0"})

    assert (len(both.folds), len(first.folds)) == (1, 0)
    assert first.name == f"{both.name}-folds-0"
    assert first.weights.file.samefile(both.weights.file)  # on disk once
    assert load_card(folder) == both


def test_conversions_of_models_that_are_gone_are_removed(cache: Path, tmp_path: Path) -> None:
    first, second = (write_bundle(tmp_path / name) for name in ("first", "second"))
    load_card(first)
    shutil.rmtree(first)

    load_card(second)

    assert len(entries(cache)) == 1
    assert load_card(second).name == "second"


@pytest.mark.parametrize("next_model", ["spleen", "other"])
def test_a_conversion_that_was_killed_leaves_nothing(
    next_model: str, cache: Path, tmp_path: Path
) -> None:
    folder = write_bundle(tmp_path / "spleen")
    load_card(folder)
    (entry,) = entries(cache)
    entry.rename(f"{entry}.draft")
    other = folder if next_model == "spleen" else write_bundle(tmp_path / next_model)

    load_card(other)

    assert [path.suffix for path in entries(cache)] == [""]


def test_conversions_of_earlier_readers_are_removed(cache: Path, tmp_path: Path) -> None:
    load_card(write_bundle(tmp_path / "spleen"))
    (entry,) = entries(cache)
    record = json.loads((entry / "sources.json").read_text())
    (entry / "sources.json").write_text(json.dumps({**record, "schema": 0}))

    load_card(write_bundle(tmp_path / "other"))

    assert len(entries(cache)) == 1


@pytest.mark.thorough
def test_a_killed_process_without_a_cache_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    code = (
        "import os, sys; from pathlib import Path\n"
        "from scanloom.convert.conversion import load_card\n"
        "load_card(Path(sys.argv[1])); os.kill(os.getpid(), 9 * (sys.argv[2] == 'killed'))"
    )
    for end in ("killed", "ends"):
        command = [sys.executable, "-c", code, str(write_bundle(tmp_path / end)), end]
        subprocess.run(command, check=False)
        assert bool(list(temporary.iterdir())) == (end == "killed")
