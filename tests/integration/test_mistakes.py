"""Mistakes of users: message and exit code; no file is left behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.uid import (
    DigitalXRayImageStorageForPresentation,
    RTStructureSetStorage,
    SegmentationStorage,
)

from scanloom.io.identity import load_key
from support.commands import scanloom, write_tiny_bundle
from support.write_dicom import Words, noise, write_series

USAGE, UNUSABLE, OUTPUT = 2, 65, 74
SEGMENT = ("segment", "--model", "ct_tissue", "--out", "out", "--device", "cpu")
RUN = ("run", "--out", "out", "--cluster", "none", "ct_tissue")


@dataclass(frozen=True)
class Mistake:
    """A command line, with its exit code and messages.

    Parameters
    ----------
    command : tuple of str
        Paths are relative to the folder that `make` filled.
    messages : tuple of str
        Parts of the message, in any order.
    code : int
        Exit code.
    make : callable, optional
        Fills the folder.
    """

    command: tuple[str, ...]
    messages: tuple[str, ...]
    code: int = UNUSABLE
    make: Callable[[Path], Any] = lambda folder: None


def nifti(name: str, array: NDArray[Any] | None = None, code: int = 1) -> Callable[[Path], None]:
    """Return a function that writes a NIfTI; without an array, one in Hounsfield units."""

    def write(folder: Path) -> None:
        values = noise() - 1024 if array is None else array
        image = nib.Nifti1Image(values, np.diag([2.0, 2.0, 3.0, 1.0]))
        image.set_sform(image.affine, code)
        image.set_qform(image.affine, code)
        nib.save(image, folder / name)

    return write


def ct(folder: Path) -> None:
    write_series(folder / "ct", noise())


def mr(folder: Path) -> None:
    write_series(folder / "mr", noise(), words=Words(modality="MR", name="mr"))


def objects(sop_class: str, modality: str) -> Callable[[Path], None]:
    """Return a function that writes an object of a class, without geometry or frames."""

    def edit(index: int, dataset: Dataset) -> None:
        dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = sop_class
        del dataset.ImagePositionPatient, dataset.ImageOrientationPatient

    return lambda folder: write_series(
        folder / "scan", noise((8, 8, 1)), words=Words(modality=modality), edit=edit
    )


def cut_zip(folder: Path) -> None:
    ct(folder)
    with zipfile.ZipFile(folder / "s.zip", "w") as archive:
        for file in (folder / "ct").iterdir():
            archive.write(file, file.name)
    whole = (folder / "s.zip").read_bytes()
    (folder / "s.zip").write_bytes(whole[: len(whole) // 2])


def cut_gzip(folder: Path) -> None:
    nifti("scan.nii.gz")(folder)
    whole = (folder / "scan.nii.gz").read_bytes()
    (folder / "scan.nii.gz").write_bytes(whole[: len(whole) // 2])


def cut_nifti(folder: Path) -> None:
    nifti("whole.nii")(folder)
    packed = gzip.compress((folder / "whole.nii").read_bytes()[:1000])
    (folder / "scan.nii.gz").write_bytes(packed)


def text(name: str, content: str | bytes = b"") -> Callable[[Path], Any]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def both(*makes: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for fill in makes:
            fill(folder)

    return make


def folder_of_nifti(folder: Path) -> None:
    (folder / "archive").mkdir()
    for name in ("one.nii.gz", "two.nii.gz"):
        nifti(f"archive/{name}")(folder)


SHIFTED = np.where(noise() > 1000, 1000, 20).astype(np.int16) + noise(seed=1) % 100
"""A CT without its RescaleIntercept: air near 24, soft tissue near 1050."""
LABELS = (np.indices((24, 20, 6)).sum(0) // 10).astype(np.uint8)
TYPO = "name: x\nmodls: [ct_tissue]\nselect: {modality: CT, max_spacing: -3}\n"
NO_FILE = ("this path does not exist", "NOT_FOUND", "Check the spelling")
OUT_IS_FILE = ("out: the output folder can't be written", "a file is where a folder is needed")

MISTAKES = {
    # --- names and paths -----------------------------------------------------------------------
    "model typo": Mistake(
        ("segment", "ct", "--model", "ct_tisue"), ("'ct_tisue'; did you mean ct_tissue?",), make=ct
    ),
    "path typo of segment": Mistake((*SEGMENT, "tc"), ("tc: this path", *NO_FILE)),
    "path typo of index": Mistake(("index", "tc"), ("tc: this path", *NO_FILE)),
    "path typo of run": Mistake((*RUN, "tc"), ("tc: this path", *NO_FILE)),
    "one of two paths wrong, index": Mistake(("index", "ct", "tc"), ("tc: this path",), make=ct),
    "one of two paths wrong, run": Mistake((*RUN, "ct", "tc"), ("tc: this path",), make=ct),
    "quoted ~": Mistake((*SEGMENT, "~/scans"), ("~/scans: this path", "quotes keep the shell")),
    "path of Windows": Mistake((*SEGMENT, r"C:\scans\ct"), (r"C:\scans\ct", "separated by /")),
    "pattern without files": Mistake((*SEGMENT, "ct/*.nii"), ("no file matches this pattern",)),
    "empty path": Mistake((*SEGMENT, ""), ("text is empty",), USAGE),
    "empty OUT": Mistake(("segment", "ct", "-o", ""), ("'-o'", "text is empty"), USAGE, ct),
    "empty OUT behind =": Mistake(
        ("segment", "ct", "--out="), ("'--out'", "text is empty"), USAGE, ct
    ),
    "no path": Mistake(SEGMENT, ("name a folder or a file with scans",), USAGE),
    "unknown option": Mistake((*SEGMENT, "ct", "--modle", "x"), ("--modle",), USAGE, ct),
    "unknown command": Mistake(("segmnt", "ct"), ("Did you mean 'segment'",), USAGE),
    "option before the command": Mistake(("--out", "x", "segment"), ("--out",), USAGE),
    # --- files ---------------------------------------------------------------------------------
    "PDF": Mistake(
        (*SEGMENT, "a.pdf"), ("a.pdf: neither a DICOM file",), make=text("a.pdf", "%PDF")
    ),
    "empty folder": Mistake(
        (*SEGMENT, "e"), ("e: no scan here", "NO_IMAGES"), make=lambda f: (f / "e").mkdir()
    ),
    "cut zip": Mistake(
        (*SEGMENT, "s.zip"), ("s.zip: this zip archive is incomplete",), make=cut_zip
    ),
    "cut zip of index": Mistake(("index", "s.zip"), ("DAMAGED", "s.zip"), make=cut_zip),
    "text as zip": Mistake((*SEGMENT, "s.zip"), ("zip archive",), make=text("s.zip", "hello" * 99)),
    "empty NIfTI": Mistake((*SEGMENT, "a.nii"), ("a.nii: the file is empty",), make=text("a.nii")),
    "cut NIfTI": Mistake((*SEGMENT, "scan.nii.gz"), ("scan.nii.gz", "TRUNCATED"), make=cut_nifti),
    "cut gzip": Mistake((*SEGMENT, "scan.nii.gz"), ("scan.nii.gz",), make=cut_gzip),
    "empty DICOM": Mistake((*SEGMENT, "a.dcm"), ("a.dcm: the file is empty",), make=text("a.dcm")),
    "RTSTRUCT": Mistake(
        (*SEGMENT, "scan"),
        ("not a slice of a volume, but: RT Structure Set",),
        make=objects(RTStructureSetStorage, "RTSTRUCT"),
    ),
    "SEG": Mistake(
        (*SEGMENT, "scan"), ("volume, but: Segmentation",), make=objects(SegmentationStorage, "SEG")
    ),
    "X-ray": Mistake(
        (*SEGMENT, "scan"),
        ("volume, but: Digital X-Ray Image", "PROJECTION"),
        make=objects(DigitalXRayImageStorageForPresentation, "DX"),
    ),
    "4D": Mistake(
        (*SEGMENT, "t.nii"),
        ("t.nii", "3 volumes", "--phase"),
        make=nifti("t.nii", np.zeros((8, 8, 6, 3), np.int16)),
    ),
    "no orientation": Mistake(
        (*SEGMENT, "s.nii"), ("s.nii", "--orientation RAS"), make=nifti("s.nii", code=0)
    ),
    # --- models --------------------------------------------------------------------------------
    "MR for a model of CT": Mistake((*SEGMENT, "mr"), ("for CT, the scan is MR",), make=mr),
    "label map as CT": Mistake(
        (*SEGMENT, "l.nii"), ("IMPLAUSIBLE", "Hounsfield"), make=nifti("l.nii", LABELS)
    ),
    "CT without RescaleIntercept": Mistake(
        (*SEGMENT, "s.nii", "--modality", "CT"), ("IMPLAUSIBLE",), make=nifti("s.nii", SHIFTED)
    ),
    "a structure of another model": Mistake(
        (*SEGMENT, "ct", "--structures", "liver"), ("has no liver; expected one of lung",), make=ct
    ),
    "scan as model": Mistake(
        ("segment", "--model", "ct", "ct_tissue"), ("ct: this folder is not a model",), make=ct
    ),
    "the same model twice": Mistake(
        (*SEGMENT, "--model", "ct_tissue", "ct"), ("have the name ct_tissue",), make=ct
    ),
    "no GPU": Mistake((*SEGMENT, "ct", "--device", "cuda:77"), ("cuda:77",), make=ct),
    "device typo": Mistake((*SEGMENT, "ct", "--device", "gpu"), ("--device",), USAGE, ct),
    # --- choices -------------------------------------------------------------------------------
    "--series 7": Mistake((*SEGMENT, "ct", "--series", "7"), ("there is 1 series here",), make=ct),
    "--series bset": Mistake(
        (*SEGMENT, "ct", "--series", "bset"), ("did you mean best?",), make=ct
    ),
    "two series": Mistake(
        (*SEGMENT, "."), ("there are 2 series", "--series", "mr"), make=both(ct, mr)
    ),
    "word of an option": Mistake(
        (*SEGMENT, "ct", "--gaps", "fill"), ("'--gaps': 'fill' is not",), USAGE, ct
    ),
    "--shard 5/4": Mistake((*RUN, "ct", "--shard", "5/4"), ("'--shard'", "K/N"), USAGE, ct),
    # --- workflows -----------------------------------------------------------------------------
    "swapped words of run": Mistake(("run", "ct", "ct_tissue"), ("swap them",), make=ct),
    "swapped words with NIfTI": Mistake(
        ("run", "s.nii.gz", "ct_tissue"), ("swap them",), make=nifti("s.nii.gz")
    ),
    "run without workflow": Mistake(("run", "ct"), ("ct_tissue ct",), USAGE, ct),
    "no workflow file": Mistake(("run", "w.yaml", "ct"), ("w.yaml: this file does not",), make=ct),
    "errors of a workflow": Mistake(
        ("run", "w.yaml", "ct"),
        ("line 1: models is missing", "line 3", "did you mean models?"),
        make=both(ct, text("w.yaml", TYPO)),
    ),
    "empty archive": Mistake(
        (*RUN, "e"), ("e: there is no file at this path",), make=lambda f: (f / "e").mkdir()
    ),
    # --- output and keys -----------------------------------------------------------------------
    "OUT is a file": Mistake((*SEGMENT, "ct"), OUT_IS_FILE, OUTPUT, both(ct, text("out"))),
    "OUT is a file, run": Mistake((*RUN, "ct"), ("out",), OUTPUT, both(ct, text("out"))),
    "OUT below a file": Mistake(
        ("segment", "ct", "-o", "f/out"), ("f/out: the output folder",), OUTPUT, both(ct, text("f"))
    ),
    "key of three bytes": Mistake(
        (*SEGMENT, "ct", "--key", "k"),
        ("k: the key file holds 3",),
        make=both(ct, text("k", "abc")),
    ),
    "index, OUT is a file": Mistake(
        ("index", "ct", "-o", "out"), ("out: ", "a file is where"), OUTPUT, both(ct, text("out"))
    ),
    "plan, OUT is a file": Mistake(
        ("plan", "ct_tissue", "ct", "-o", "out"),
        ("out: ", "a file is where"),
        OUTPUT,
        both(ct, text("out")),
    ),
    **{
        f"{command} of {name}": Mistake((command, *more, name), messages, make=make)
        for command, *more in (
            ("report",),
            ("verify",),
            ("review",),
            ("status",),
            ("where", "ID", "-o"),
        )
        for name, messages, make in (
            ("ct", ("ct: there are no", "no output folder of scanloom", "NO_RESULTS"), ct),
            ("e", ("e: there are no", "this folder is empty"), lambda f: (f / "e").mkdir()),
            ("f", ("f: this is a file, not an output folder", "NO_RESULTS"), text("f")),
            ("tc", ("tc: this path does not exist", "NOT_FOUND"), ct),
        )
    },
    "join with a typo in the table": Mistake(
        ("join", "t.csv", "-o", "ct"), ("ct: there are no sources of results",), make=ct
    ),
    # --- models that are not there -------------------------------------------------------------
    "folder of models add": Mistake(
        ("models", "add", "Dataset042"),
        ("there is no folder or zip file 'Dataset042', and no model of that name is known",),
    ),
    "typo of models add": Mistake(
        ("models", "add", "spleen_ct_segmentatoin"), ("did you mean spleen_ct_segmentation",)
    ),
    "path of models add": Mistake(
        ("models", "add", "nnUNet/Dataset042"), ("no folder or zip file 'nnUNet/Dataset042'",)
    ),
    "scan for models add": Mistake(
        ("models", "add", "ct"), ("holds no model", "or give its folder"), make=ct
    ),
    "file as model": Mistake(
        ("segment", "ct", "--model", "f"),
        ("f: a file is not a model's folder",),
        make=both(ct, text("f")),
    ),
    "model that can be got": Mistake(
        ("segment", "ct", "--model", "mindgrab"),
        ("`scanloom models add brainchop/mindgrab` gets it",),
        make=ct,
    ),
    "workflow that is none": Mistake(
        ("run", "f", "ct", "-o", "out"),
        ("f: a workflow is a mapping",),
        make=both(ct, text("f", "x")),
    ),
    # --- work without end ----------------------------------------------------------------------
    "overlap of the command": Mistake(
        (*SEGMENT, "ct", "--overlap", "0.9999"), ("a number from 0 to 0.9",), USAGE, ct
    ),
    "overlap of a workflow": Mistake(
        ("run", "w.yaml", "ct"),
        ("overlap", "0.9"),
        make=both(ct, text("w.yaml", "name: w\nmodels: [ct_tissue]\nexecution: {overlap: 0.95}\n")),
    ),
}


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Put a second model for CT into the store, so that a scan does not decide between them."""
    models = tmp_path_factory.mktemp("shared") / "models"
    write_tiny_bundle(models)
    monkeypatch.setenv("SCANLOOM_MODELS", str(models))


@pytest.mark.usefixtures("two_models")
@pytest.mark.parametrize(
    ("path", "messages", "make"),
    [
        ("tc", ("tc: this path does not exist", "NOT_FOUND"), ct),
        ("e", ("e: there is no file at this path",), lambda f: (f / "e").mkdir()),
        ("a.pdf", ("a.pdf: neither a DICOM file",), text("a.pdf", "%PDF")),
        ("ct", ("2 models fit CT: ct_tissue, tiny; name one with --model",), ct),
    ],
)
def test_a_path_is_wrong_before_a_model_is_missing(
    path: str, messages: tuple[str, ...], make: Callable[[Path], Any], workplace: Path
) -> None:
    make(workplace)

    code, message = run_command("segment", path, "--out", "out")

    assert code == UNUSABLE
    for message_part in messages:
        assert message_part in message
    assert not (workplace / "out").exists()


@pytest.fixture(autouse=True)
def workplace(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Work in an empty folder; key, settings and caches lie elsewhere."""
    home = tmp_path_factory.mktemp("home")
    load_key(home / "key")
    monkeypatch.setenv("SCANLOOM_KEY", str(home / "key"))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes | None]:
    """Return the files in a folder with their bytes; None for folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def run_command(*command: str) -> tuple[int, str]:
    """Return exit code and messages of a command, without frames and line breaks."""
    ended = scanloom(*command)
    return ended.code, " ".join(re.sub("[│╭╮╰╯─]", " ", ended.out + ended.err).split())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_leaves_no_file(name: str, workplace: Path) -> None:
    mistake = MISTAKES[name]
    mistake.make(workplace)
    before = content(workplace)

    code, message = run_command(*mistake.command)

    assert code == mistake.code, message
    for text in mistake.messages:
        assert text in message
    assert content(workplace) == before


def test_archive_of_nifti_is_told_how_to_be_selected(workplace: Path) -> None:
    """A record of the run stays: its report lists each file with the reason."""
    folder_of_nifti(workplace)

    code, message = run_command(*RUN, "archive")

    assert code == UNUSABLE
    assert "2 series state no modality" in message
    assert "policy: {modality: CT}" in message
    assert "scanloom segment --modality CT" in message
    assert not (workplace / "out" / "cases").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["plan", "run"])
def test_archive_of_nifti_is_selected_as_advised(command: str, workplace: Path) -> None:
    """The workflow selects MR by its description, which a NIfTI file does not have either."""
    folder_of_nifti(workplace)
    bundle = mr_bundle(workplace)
    page = workplace / "w.yaml"
    select = "select: {modality: MR, description: [t1]}\n"
    page.write_text(f"name: w\nmodels: [{bundle}]\n{select}")
    where = ("w.yaml", "archive", "--out", "out", *(("--cluster", "none") * (command == "run")))

    code, message = run_command(command, *where)

    assert code == UNUSABLE
    advice = "If they are MR, add `policy: {modality: MR}` to the workflow and remove `description`"
    assert f"{advice} from its `select`, or use `scanloom segment --modality MR" in message
    assert "modality: CT" not in message
    page.write_text(
        f"name: w\nmodels: [{bundle}]\nselect: {{modality: MR}}\npolicy: {{modality: MR}}\n"
    )
    ended = scanloom("plan", "w.yaml", "archive", "--out", "other", "--json")
    assert ended.document["plan"]["selected"] == 1  # their content is equal


def mr_bundle(folder: Path) -> Path:
    """Write a bundle for MR."""
    bundle = write_tiny_bundle(folder / "bundles")
    file = bundle / "configs" / "metadata.json"
    metadata = json.loads(file.read_text())
    metadata["network_data_format"]["inputs"]["image"]["modality"] = "MR"
    file.write_text(json.dumps(metadata))
    return bundle


def test_plan_of_files_that_are_no_scans_says_so(workplace: Path) -> None:
    text("notes.txt", "hello")(workplace)

    code, message = run_command("plan", "ct_tissue", "notes.txt", "--out", "out")

    assert code == UNUSABLE
    assert "files were found, but no case (none of them belongs to a scan)" in message


def test_home_that_is_no_folder_is_named_with_the_option(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(ct, text("home"))(workplace)
    monkeypatch.delenv("SCANLOOM_KEY")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(workplace / "home"))
    before = content(workplace)

    code, message = run_command(*SEGMENT, "ct")

    assert code == UNUSABLE
    assert "scanloom/key: the key file" in message
    assert "--key or SCANLOOM_KEY" in message
    assert content(workplace) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everywhere")
@pytest.mark.parametrize(
    ("locked", "mode", "command", "text"),
    [
        ("ro", 0o500, ("segment", "ct", "-o", "ro/out"), "ro/out: the output folder can't be"),
        (
            "ro",
            0o500,
            (*RUN[:1], "--out", "ro/out", "ct_tissue", "ct"),
            "ro/out: the results can't",
        ),
        ("ct", 0o000, (*SEGMENT, "ct"), "is not readable"),
        ("ro", 0o000, ("index", "ct", "-o", "ro/out"), "ro/out: permission to read private/"),
        ("ro", 0o000, ("models", "add", "ro"), "can't be read (UNREADABLE). Check the permissions"),
    ],
)
def test_missing_permission_is_told(
    locked: str, mode: int, command: tuple[str, ...], text: str, workplace: Path
) -> None:
    ct(workplace)
    (workplace / "ro").mkdir()
    (workplace / locked).chmod(mode)
    try:
        code, message = run_command(*command)
    finally:
        (workplace / locked).chmod(0o700)

    assert code in (USAGE, UNUSABLE, OUTPUT)
    assert text in message
    assert not list((workplace / "ro").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_slice_without_permission_is_told_by_permission(workplace: Path) -> None:
    third = write_series(workplace / "ct", noise())[2]
    third.chmod(0)

    code, message = run_command(*SEGMENT, "ct")

    assert code == UNUSABLE
    assert "1 file next to its slices can't be read: check its permissions" in message


def test_models_of_two_modalities_are_not_both_assumed(workplace: Path, model: Path) -> None:
    from support.bundles import spleen_metadata, write_bundle

    nifti("scan.nii.gz")(workplace)
    metadata = spleen_metadata()
    metadata["network_data_format"]["inputs"]["image"]["modality"] = "MR"
    mr_model = write_bundle(workplace / "of_mr", metadata=metadata)
    before = content(workplace)

    models = ("--model", str(model), "--model", str(mr_model))
    code, message = run_command("segment", "scan.nii.gz", *models, "--out", "out")

    assert code == UNUSABLE
    assert "of_mr is for MR" in message
    assert "segment --modality" in message
    assert content(workplace) == before


def test_status_of_results_without_a_run(
    workplace: Path, result: tuple[Path, tuple[str, ...]]
) -> None:
    """`segment` keeps no status: that is no error, and no disk is missing."""
    code, message = run_command("status", "out")

    assert code == 0
    assert "1 result of `scanloom segment`, and no run." in message
    assert "scanloom report out" in message
    assert scanloom("status", "out", "--json").document["cases"] == 1


def test_index_alone_is_told_from_results(workplace: Path) -> None:
    ct(workplace)
    run_command("index", "ct", "--out", "out")

    for command in ("status", "report", "verify", "review"):
        code, message = run_command(command, "out")
        assert code == UNUSABLE
        assert "only an index of scans (NO_RESULTS)" in message


@pytest.fixture
def result(workplace: Path, model: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of a published case, and the command that made it."""
    ct(workplace)
    command = ("segment", "ct", "--model", str(model), "--out", "out", "--device", "cpu")
    assert run_command(*command)[0] == 0
    [folder] = (workplace / "out" / "cases").iterdir()
    return folder, command


def test_another_key_is_refused_and_not_made(
    workplace: Path, result: tuple[Path, tuple[str, ...]]
) -> None:
    _, command = result
    before = content(workplace)

    code, message = run_command(*command, "--key", "other")

    assert code == UNUSABLE
    assert "other: there is no such key file" in message
    assert content(workplace) == before


def damage_labels(folder: Path) -> None:
    (folder / "segmentation.nii.gz").write_bytes(b"\x1f\x8b" * 50)


def add_line(folder: Path) -> None:
    with (folder / "measurements.csv").open("a") as file:
        file.write("x,y\n")


@pytest.mark.parametrize(
    ("damage", "file"),
    [(damage_labels, "segmentation.nii.gz"), (add_line, "measurements.csv")],
)
def test_damaged_result_is_noticed_by_segment_and_report(
    damage: Callable[[Path], None], file: str, result: tuple[Path, tuple[str, ...]]
) -> None:
    folder, command = result
    damage(folder)

    code, message = run_command(*command)
    assert code == UNUSABLE
    assert f"{file} has a different size in the published case (RESULT_DAMAGED)" in message

    code, message = run_command("report", "out")
    assert code == 1
    assert f"case {folder.name} is damaged" in message
    assert "scanloom verify out" in message


def test_nothing_found_is_one_flag_and_a_line(workplace: Path, tmp_path_factory: Any) -> None:
    """The network has no weights: every voxel is background."""
    from support.commands import write_tiny_bundle

    ct(workplace)
    model = write_tiny_bundle(tmp_path_factory.mktemp("blind") / "models")
    silence(model)

    code, message = run_command(
        "segment", "ct", "--model", str(model), "--out", "out", "--device", "cpu"
    )

    assert code == 0, message
    assert message.count("EMPTY") == 1
    assert "Nothing was found: there are no voxels (EMPTY)." in message
    [case] = (workplace / "out" / "cases").glob("*/case.json")
    assert [flag["code"] for flag in json.loads(case.read_text())["flags"]].count("EMPTY") == 1


def silence(bundle: Path) -> None:
    """Let the last layer of a bundle's network choose the background everywhere."""
    import torch

    [file] = (bundle / "models").glob("*.pt")
    weights = torch.load(file, weights_only=True)
    for name, tensor in weights.items():
        weights[name] = torch.zeros_like(tensor)
    last = [name for name, tensor in weights.items() if tensor.shape == (3,)][-1]
    weights[last] = torch.tensor([9.0, 0.0, 0.0])
    torch.save(weights, file)
