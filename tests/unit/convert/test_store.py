"""Models are found by name or folder, and a broken one is not lost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from scanloom.cards.card_file import card_digest
from scanloom.convert import store
from scanloom.convert.readers import split_options, variant_name
from scanloom.convert.store import find_model, list_models, shipped_models, user_models
from scanloom.core import ScanError, is_slug
from scanloom.core.paths import shipped
from support.bundles import saved, spleen_config, transform, write_bundle


def sha256(bundle: Path) -> str:
    """Return the SHA-256 of a bundle's weights."""
    return hashlib.sha256((bundle / "models" / "model.pt").read_bytes()).hexdigest()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the folders of models that ship and of the user's own, both empty."""
    ours, theirs = tmp_path / "models", tmp_path / "share" / "scanloom" / "models"
    ours.mkdir()
    theirs.mkdir(parents=True)
    monkeypatch.setattr(store, "shipped_models", lambda: ours)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv("SCANLOOM_MODELS", raising=False)
    monkeypatch.chdir(tmp_path)
    return ours, theirs


def test_model_is_found_by_name(places: tuple[Path, Path]) -> None:
    ours, theirs = places
    write_bundle(ours / "ct_tissue", weights=saved(1.0))
    write_bundle(theirs / "wholeBody_ct", weights=saved(2.0))

    assert find_model("ct_tissue").weights.published == sha256(ours / "ct_tissue")
    assert find_model("wholebody_ct").weights.published == sha256(theirs / "wholeBody_ct")


def test_model_that_ships_goes_before_one_of_the_same_name(places: tuple[Path, Path]) -> None:
    ours, theirs = places
    write_bundle(theirs / "ct_tissue", weights=saved(1.0))
    write_bundle(ours / "ct_tissue", weights=saved(2.0))

    assert find_model("ct_tissue").weights.published == sha256(ours / "ct_tissue")
    assert len(list_models()) == 1


def test_model_is_found_by_folder(places: tuple[Path, Path], tmp_path: Path) -> None:
    write_bundle(tmp_path / "elsewhere" / "My Model")

    assert find_model(str(tmp_path / "elsewhere" / "My Model")).name == "my_model"
    assert find_model("elsewhere/My Model").name == "my_model"


def test_options_after_the_name_make_another_model(places: tuple[Path, Path]) -> None:
    config = spleen_config()
    config["displayable_configs"] = {"highres": True}
    config["pixdim"] = "$[1.5, 1.5, 2.0] if @displayable_configs#highres else [3.0, 3.0, 3.0]"
    transform(config, "Spacingd")["pixdim"] = "@pixdim"
    write_bundle(places[0] / "body", config)

    usual, low = find_model("body"), find_model("body:highres=false")

    assert (usual.name, usual.grid.spacing) == ("body", (1.5, 1.5, 2.0))
    assert (low.name, low.grid.spacing) == ("body-highres-false", (3.0, 3.0, 3.0))
    assert card_digest(usual) != card_digest(low)


@pytest.mark.parametrize(
    "name",
    [
        "https://host/model.zip#sha256=00",
        "https://host:8080/model.zip?download=1",
        "https://host/model.zip?until=2026-01-01T00:00:00Z&signature=00",
    ],
)
def test_an_address_is_no_name_with_options(name: str) -> None:
    assert split_options(name) == (name, {})
    assert split_options(f"{name}:folds=0") == (name, {"folds": "0"})


def test_a_name_with_options_that_is_too_long_ends_in_a_hash() -> None:
    name = "dataset042_organs_3d_fullres"
    options = {"trainer": "nnUNetTrainer", "plans": "nnUNetResEncUNetLPlans"}

    first, second = (variant_name(name, {**options, "folds": folds}) for folds in ("0", "1"))

    assert is_slug(first)
    assert first != second
    assert first.startswith(f"{name}-folds-0-plans-nnunet")


@pytest.mark.parametrize(
    "typed",
    [
        "body:highres=3",
        "body:hires=false",
        "body:highres=",
        "body:x=1,x=2",
        "body:structures=liver",
    ],
)
def test_options_that_a_model_does_not_have_are_refused(
    typed: str, places: tuple[Path, Path]
) -> None:
    config = spleen_config()
    config["highres"] = True
    write_bundle(places[0] / "body", config)

    with pytest.raises(ScanError) as caught:
        find_model(typed)
    assert caught.value.code == "MODEL_UNKNOWN"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("ct_tisue", "did you mean ct_tissue?"),
        ("qqqqq", "there is no model or folder"),
        ("q" * 5000, "there is no model or folder"),
        ("a\x00b", "there is no model or folder"),
    ],
)
def test_unknown_model_names_the_nearest(typed: str, hint: str, places: tuple[Path, Path]) -> None:
    write_bundle(places[0] / "ct_tissue")

    with pytest.raises(ScanError) as caught:
        find_model(typed)

    assert caught.value.code == "MODEL_UNKNOWN"
    assert hint in caught.value.detail


def test_broken_bundle_is_listed_with_its_error(places: tuple[Path, Path]) -> None:
    ours, theirs = places
    write_bundle(ours / "whole")
    (write_bundle(theirs / "broken") / "models" / "model.pt").unlink()
    (theirs / "no_bundle").mkdir()

    broken, whole = list_models()

    assert (whole.name, whole.card is not None, whole.error) == ("whole", True, None)
    assert (broken.name, broken.card) == ("broken", None)
    assert broken.error is not None
    assert broken.error.code == "MODEL_DAMAGED"


def test_user_folder_follows_the_xdg_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative XDG_DATA_HOME is to be ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/place"):
        monkeypatch.setenv("XDG_DATA_HOME", value)
        assert user_models() == tmp_path / ".local" / "share" / "scanloom" / "models"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert user_models() == Path("/data/scanloom/models")


def test_shipped_files_are_found_in_the_checkout_and_in_the_installed_package(
    tmp_path: Path,
) -> None:
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    (checkout / "models").mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    (checkout / "pipeline" / "scanloom").mkdir(parents=True)
    (installed / "scanloom" / "_shipped" / "models").mkdir(parents=True)

    assert shipped("models", checkout / "pipeline" / "scanloom") == checkout / "models"
    assert (
        shipped("models", installed / "scanloom") == installed / "scanloom" / "_shipped" / "models"
    )
    for package in (installed / "scanloom", tmp_path / "a" / "b"):
        with pytest.raises(ScanError) as caught:
            shipped("workflows", package)
        assert caught.value.code == "NOT_FOUND"


def test_a_folder_called_models_beside_an_installed_package_does_not_count(tmp_path: Path) -> None:
    """lib/models is not ours where lib/python3.12/site-packages/scanloom is."""
    (tmp_path / "models").mkdir()
    (tmp_path / "site-packages" / "scanloom").mkdir(parents=True)

    with pytest.raises(ScanError):
        shipped("models", tmp_path / "site-packages" / "scanloom")


def test_folder_can_be_used_where_nothing_ships(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "elsewhere" / "mine")
    monkeypatch.setattr(store, "shipped_models", lambda: shipped("models", tmp_path / "a" / "b"))

    assert find_model("elsewhere/mine").name == "mine"
    assert list_models() == ()


def test_models_that_ship_can_be_read() -> None:
    """Each bundle of this checkout or package gives a card whose weights are pinned."""
    for folder in shipped_models().iterdir():
        if (folder / "configs").is_dir():
            fields = json.loads((folder / "configs" / "metadata.json").read_text())
            card = find_model(str(folder))
            assert fields["scanloom"]["weights_sha256"] == card.weights.published


def test_shared_models_go_before_own_ones_and_may_be_read_only(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name means the same model for all users of a shared folder."""
    ours, theirs = places
    group, second = tmp_path / "group", tmp_path / "other"
    monkeypatch.setenv("SCANLOOM_MODELS", f"{group}:{tmp_path / 'none'}::{second}")
    stores = ((ours, "a"), (group, "ab"), (second, "abc"), (theirs, "abcd"))
    for number, (root, names) in enumerate(stores):
        for name in names:
            write_bundle(root / name, weights=saved(float(number)))
    for path in [group, *group.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    published = {name: find_model(name).weights.published for name in "abcd"}
    entries = [(entry.name, entry.section) for entry in list_models()]

    for path in [group, *group.rglob("*")]:
        path.chmod(0o755)
    first = {"a": ours, "b": group, "c": second, "d": theirs}
    assert published == {name: sha256(root / name) for name, root in first.items()}
    assert entries == [("a", "ships"), ("b", "shared"), ("c", "shared"), ("d", "own")]


def test_missing_shared_folder_is_named(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCANLOOM_MODELS", str(tmp_path / "unmounted"))

    with pytest.raises(ScanError, match=r"SCANLOOM_MODELS names .*unmounted"):
        find_model("spleen")


def test_unfinished_models_are_not_listed(places: tuple[Path, Path]) -> None:
    write_bundle(places[1] / ".adding" / "spleen")
    write_bundle(places[1] / ".spleen")

    assert list_models() == ()
