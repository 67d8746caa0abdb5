"""Cards of folders with weights of TotalSegmentator."""

from __future__ import annotations

import json
import shutil

import pytest

from scanloom.cards.card import KeepLargest, ModelCard, RemoveSmall, Truncate
from scanloom.cards.graph import needed_parts, networks, numbers_in
from scanloom.cards.requested import describe_changes, requested_card
from scanloom.convert.files import NO_OPTIONS
from scanloom.convert.readers import find_reader, read_model
from scanloom.convert.store import find_model
from scanloom.convert.totalsegmentator import modes
from scanloom.core import ComputeOptions, Reason, ScanError
from support.nnunet_folders import DATASET, plans, write_model
from support.totalsegmentator_folders import write_part, write_task


def refused(folder, options=NO_OPTIONS) -> ScanError:
    """Return the error of reading a folder."""
    with pytest.raises(ScanError) as caught:
        read_model(folder, options)
    return caught.value


def test_task_in_one_part(tmp_path):
    """A task's structures have its names and codes; labels are decided on its own grid."""
    card = read_model(write_task(tmp_path, "total_fast"))

    assert card.name == "totalsegmentator_total_fast"
    assert len(card.structures) == 117
    assert card.structures[91].type.meaning == "First rib"
    assert card.grid.spacing == (3.0, 3.0, 3.0)
    assert (card.grid.alignment, card.grid.orientation) == ("ends", "RAS")
    assert card.after == (Truncate(),)
    (submodel,) = card.parts
    assert submodel.window.overlap == pytest.approx(0.2)
    assert submodel.window.mirror == ()
    assert submodel.grid.orientation is None
    assert not submodel.grid.as_nifti


def test_task_in_five_parts(tmp_path):
    """Labels of parts are numbered by name in the whole model."""
    card = read_model(write_task(tmp_path, "total"))

    assert [submodel.name for submodel in card.parts] == [f"dataset{n}" for n in range(291, 296)]
    assert numbers_in(card, card.parts[3])[22] == 90  # the brain
    by_number = {s.number: s.label for s in card.structures}
    union = {by_number[int(n)] for submodel in card.parts for n in numbers_in(card, submodel) if n}
    assert len(union) == 117


def test_only_parts_with_requested_structures_are_needed(tmp_path):
    """A request for ribs needs one of five networks; one for nothing needs all."""
    card = read_model(write_task(tmp_path, "total"))

    assert [p.name for p in needed_parts(card, ["rib_left_1", "sternum"]).parts] == ["dataset295"]
    assert needed_parts(card, ()) is card
    assert needed_parts(card, ["brain"]).structures == card.structures


def test_requested_structures_crop_the_scan_by_the_rough_model(tmp_path):
    """The crop is `roi_subset`: total at 6 mm, 20 mm around the structures, if it is there."""
    write_task(tmp_path / "weights", "total_mr")
    alone = read_model(tmp_path / "weights", {"task": "total_mr"})
    assert needed_parts(alone, ["spleen"]).stage is None
    write_task(tmp_path / "weights", "total_mr_fastest")
    card = read_model(tmp_path / "weights", {"task": "total_mr"})
    assert needed_parts(card).stage is None
    needed = needed_parts(card, ["spleen", "brain"])
    assert needed.stage.card.name == "totalsegmentator_total_mr_fastest"
    assert set(needed.stage.labels) == {"spleen", "brain"}
    assert (needed.stage.margin, needed.stage.use) == (20.0, "crop")
    assert needed.stage.steps == (Truncate(),)
    assert needed.stage.card.subset is None


def test_cropped_task(tmp_path):
    """The rough model, its structures and the margin are TotalSegmentator's: 20 mm."""
    write_task(tmp_path, "liver_segments")

    card = read_model(tmp_path, {"task": "liver_segments"})

    assert card.stage is not None
    assert card.stage.card.name == "totalsegmentator_total_fastest"
    assert (card.stage.use, card.stage.labels, card.stage.margin) == ("crop", ("liver",), 20.0)
    assert card.stage.steps == (Truncate(),)
    assert [network.name for network in networks(card)] == ["dataset298", "dataset570"]


def test_task_that_leaves_resampling_to_nnunet(tmp_path):
    """The grid is the scan's; the part resamples as nnU-Net does."""
    card = read_model(write_task(tmp_path, "liver_vessels"))

    assert card.grid.spacing is None
    assert card.after == ()
    assert card.parts[0].grid.spacing == (6.0, 6.0, 6.0)


def test_labels_that_the_task_lacks_are_no_structures(tmp_path):
    """Auxiliary labels of a network are in its part only."""
    mode = modes()["vertebrae_mr"]
    write_part(tmp_path, mode, mode.parts[0], further_labels=("liver", "spleen"))

    card = read_model(tmp_path)

    assert len(card.structures) == len(mode.classes)
    assert card.parts[0].n_outputs == len(mode.classes) + 3
    assert numbers_in(card, card.parts[0])[-2:].tolist() == [0, 0]


def test_less_work_is_the_model_of_3_mm_if_it_is_there(tmp_path):
    """The preset is TotalSegmentator's `--fast`; without its weights, the card has no preset."""
    write_task(tmp_path, "total")
    assert read_model(tmp_path).fast is None
    write_task(tmp_path, "total_fast")

    card = find_model(f"{tmp_path}:task=total")
    requested = requested_card(card, ComputeOptions(fast=True))

    assert (requested.name, requested.grid.spacing) == (card.name, (3.0,) * 3)
    assert [submodel.name for submodel in requested.parts] == ["dataset297"]
    assert describe_changes(card, requested) == "totalsegmentator_total_fast instead"


def test_body_is_cleaned(tmp_path):
    """The trunk is one component; small parts of extremities are removed."""
    card = read_model(write_task(tmp_path, "body_fast"))

    trunk, extremities = card.cleaning
    assert trunk == KeepLargest((1,), connectivity=6, when="before")
    assert extremities == RemoveSmall((2,), 50_000.0)


@pytest.mark.parametrize("naming", ["marker", "name", "prefixed", "dataset", "option"])
def test_task_is_told_by_the_folder(tmp_path, naming):
    """A file, the folder's name, its only dataset, or an option names the task."""
    folder = tmp_path / {"name": "total_fastest", "prefixed": "totalsegmentator_total_fastest"}.get(
        naming, "weights"
    )
    write_task(folder, "total_fastest")
    if naming != "dataset":
        write_task(folder, "total_fast")
    if naming == "marker":
        (folder / "totalsegmentator.json").write_text(json.dumps({"task": "total_fastest"}))
    if naming == "dataset":
        folder = folder / modes()["total_fastest"].parts[0].dataset.folder
    options = ":task=total_fastest" if naming == "option" else ""

    card = find_model(f"{folder}{options}")

    assert card.name == "totalsegmentator_total_fastest"


def test_several_tasks_are_refused(tmp_path):
    """The message says how to give one of them."""
    write_task(tmp_path, "total_fast")
    write_task(tmp_path, "trunk_cavities")

    error = refused(tmp_path)

    assert error.reason is Reason.MODEL_UNKNOWN
    assert "NAME:task=total_fast (total_fast, trunk_cavities)" in error.detail


@pytest.mark.parametrize(
    ("options", "message"),
    [({"task": "total_fat"}, "did you mean total_fast?"), ({"folds": "0"}, "option")],
)
def test_unknown_options_are_refused(tmp_path, options, message):
    """The message names the nearest task, or the option that there is."""
    with pytest.raises(ScanError, match=message) as caught:
        read_model(write_task(tmp_path, "total_fast"), options)
    assert caught.value.reason is Reason.MODEL_UNKNOWN


def test_missing_part_is_named(tmp_path):
    """A task lacks one of its datasets."""
    write_task(tmp_path, "total")
    shutil.rmtree(tmp_path / modes()["total"].parts[2].dataset.folder)

    error = refused(tmp_path)

    assert error.reason is Reason.MODEL_DAMAGED
    assert "Dataset293_TotalSegmentator_part3_cardiac_1559subj" in error.detail


def test_missing_rough_model_is_named(tmp_path):
    """A cropped task needs the rough model's weights."""
    write_task(tmp_path, "liver_segments")
    shutil.rmtree(tmp_path / modes()["total_fastest"].parts[0].dataset.folder)

    assert "Dataset298" in refused(tmp_path, {"task": "liver_segments"}).detail


@pytest.mark.parametrize("name", ["vertebrae_pp", "heartchambers_highres"])
def test_tasks_with_rules_of_their_own_are_refused(tmp_path, name):
    """A card can't express them."""
    write_task(tmp_path, name)

    assert refused(tmp_path, {"task": name}).reason is Reason.MODEL_UNSUPPORTED


def test_fewer_labels_are_refused(tmp_path):
    """The dataset has fewer labels than the task."""
    mode = modes()["total_fast"]
    target = write_part(tmp_path, mode, mode.parts[0])
    file = next(target.glob("*/dataset.json"))
    dataset = json.loads(file.read_text())
    del dataset["labels"]["costal_cartilages"]
    file.write_text(json.dumps(dataset))

    assert refused(tmp_path).reason is Reason.MODEL_DAMAGED


def test_unknown_task_is_refused(tmp_path):
    """The file with the task's name has another one."""
    write_task(tmp_path, "total_fast")
    (tmp_path / "totalsegmentator.json").write_text('{"task": ["total"]}')

    assert refused(tmp_path).reason is Reason.MODEL_DAMAGED


def test_licence_of_a_licensed_task(tmp_path):
    """Weights of a licensed task are read from a folder; the card says so."""
    card = read_model(write_task(tmp_path, "tissue_types"))

    assert "TotalSegmentator licence" in card.license


def flat(folder) -> ModelCard:
    """Return the card of a folder that is plain nnU-Net."""
    reader = find_reader(folder)
    assert reader is not None
    assert reader.name.startswith("nnU-Net")
    card = reader.read(folder)
    assert not card.parts
    return card


def test_folder_of_moose(tmp_path):
    """MOOSE: a dataset with a trainer of fixed length, in a folder of its own."""
    model = write_model(tmp_path / "Dataset123_Organs", plans(), DATASET)
    model.rename(model.with_name("nnUNetTrainer_2000epochs_NoMirroring__nnUNetPlans__3d_fullres"))

    assert flat(tmp_path).channels[0].modality == "CT"


def test_folder_of_hd_bet(tmp_path):
    """HD-BET 2: plans and one fold of all data, without folders of dataset and trainer."""
    model = write_model(tmp_path / "made", plans(), DATASET, folds=("all",))
    model.rename(tmp_path / "release_2.0.0")

    assert flat(tmp_path / "release_2.0.0").weights.file.parent.name == "fold_all"


def test_folder_of_totalspineseg(tmp_path):
    """TotalSpineSeg: its first step by its dataset's folder, if the second is there."""
    for n in (1, 2):
        dataset = tmp_path / f"Dataset10{n}_TotalSpineSeg_step{n}"
        model = write_model(dataset, plans(), DATASET)
        model.rename(
            model.with_name("nnUNetTrainer_DASegOrd0_NoMirroring__nnUNetPlans__3d_fullres")
        )

    assert "dataset=Dataset101_TotalSpineSeg_step1" in refused(tmp_path).detail
    assert flat(tmp_path / "Dataset101_TotalSpineSeg_step1").structures
