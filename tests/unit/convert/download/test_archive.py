"""Models are carried in one file to a machine without a network, unchanged or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scanloom.cards.card_file import card_digest
from scanloom.convert import store
from scanloom.convert.download.add import Added, AddOptions, add_model
from scanloom.convert.download.archive import LIST_FILE, find_sources, write_archive
from scanloom.convert.provenance import PROVENANCE_FILE, read_provenance
from scanloom.convert.store import find_model, locate_model, verify_model
from scanloom.core import Reason, ScanError
from support.bundles import saved, spleen_config, write_bundle
from support.commands import limited_files
from support.totalsegmentator_folders import write_task

Members = dict[str, bytes]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a machine; its store is empty, and nothing ships."""
    (tmp_path / "ships").mkdir()
    monkeypatch.setattr(store, "shipped_models", lambda: tmp_path / "ships")
    monkeypatch.delenv("SCANLOOM_MODELS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "connected"))
    return tmp_path


def add_spleen(folder: Path) -> None:
    """Add a model with licence files to the store."""
    bundle = write_bundle(folder / "spleen", weights=saved(2.0))
    (bundle / "LICENSE").write_text("For non-commercial use.")
    (bundle / "docs").mkdir(exist_ok=True)
    (bundle / "docs" / "data_license.txt").write_text("Of the scans.")
    add_model(str(bundle), AddOptions(lambda model, licence: True))


@pytest.fixture
def here(place: Path) -> Path:
    """Return the folder of a machine whose store has the model `spleen`."""
    add_spleen(place / "made")
    return place


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """Return the files in an archive of the model `spleen`."""
    folder = tmp_path_factory.mktemp("members")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        add_spleen(folder / "made")
        write_archive(["spleen"], folder / "models.zip")
    return read(folder / "models.zip")


@pytest.fixture
def closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Return a function that goes on to a machine without a network, and returns its store."""

    def go_on() -> Path:
        monkeypatch.setenv("XDG_DATA_HOME", str(place / "closed"))
        monkeypatch.setenv("SCANLOOM_OFFLINE", "1")
        return store.user_models()

    return go_on


def add(file: Path, accept: bool = True) -> list[Added]:
    options = AddOptions(lambda model, licence: accept)
    return [add_model(source, options) for source in find_sources(str(file))]


def read(file: Path) -> Members:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def write(file: Path, members: Members) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def tree(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_models_are_the_same_on_the_other_machine(here: Path, closed: Callable[[], Path]) -> None:
    """A model of the store, a folder, and a model with options."""
    config = spleen_config()
    config["highres"] = True
    folder = write_bundle(here / "made" / "body", config, weights=saved(3.0))
    names = ["spleen", str(folder), f"{folder}:highres=false"]
    before = {name: find_model(name) for name in names}
    write_archive(names, here / "models.zip")
    shutil.rmtree(here / "made")
    own = closed()

    added = add(here / "models.zip")

    assert [each.name for each in added] == ["spleen", "body", "body_highres_false"]
    for name, each in zip(names, added, strict=True):
        card = find_model(each.name)
        assert card.weights.file.read_bytes() == before[name].weights.file.read_bytes()
        assert card.weights.sha256 == hashlib.sha256(card.weights.file.read_bytes()).hexdigest()
        assert card.weights.published == before[name].weights.published
        assert card.structures == before[name].structures
        verify_model(locate_model(each.name))
    assert card_digest(find_model("spleen")) == card_digest(before["spleen"])
    assert [each.already for each in add(here / "models.zip")] == [True, True, True]
    assert sorted(p.name for p in own.glob("[!.]*")) == ["body", "body_highres_false", "spleen"]


def test_networks_that_run_on_request_go_with_a_model(
    here: Path, closed: Callable[[], Path]
) -> None:
    """A task of two networks, and the rough model that crops the scan for some structures."""
    weights = here / "made" / "total_mr"
    for task in ("total_mr", "total_mr_fastest"):
        write_task(weights, task)
    before = find_model(str(weights))
    assert before.subset is not None
    write_archive([str(weights)], here / "models.zip")
    shutil.rmtree(here / "made")
    closed()

    [added] = add(here / "models.zip")

    card = find_model(added.name)
    assert card.subset is not None
    assert card_digest(replace(card, name=before.name)) == card_digest(before)
    names = {f"{w.sha256}.safetensors" for w in (*card.folds, card.subset.card.weights)}
    assert names <= {file.name for file in (added.folder / "weights").iterdir()}
    rough = card.subset.card.weights.file
    rough.write_bytes(bytes(rough.stat().st_size))
    (added.folder / PROVENANCE_FILE).unlink()
    with pytest.raises(ScanError, match="the weights differ from those of the card"):
        verify_model(locate_model(added.name))


def test_licences_go_with_a_model_and_are_asked_for_again(
    here: Path, closed: Callable[[], Path]
) -> None:
    write_archive(["spleen"], here / "models.zip")
    own = closed()

    with pytest.raises(ScanError) as caught:
        add(here / "models.zip", accept=False)
    left = tree(own)
    [added] = add(here / "models.zip")

    assert caught.value.reason is Reason.LICENCE
    assert all(name.endswith(".lock") for name in left)
    assert (added.folder / "LICENSE").read_text() == "For non-commercial use."
    assert (added.folder / "docs" / "data_license.txt").read_text() == "Of the scans."
    record = read_provenance(added.folder)
    assert record is not None
    assert (record.source, record.address) == ("model archive models.zip", "folder spleen")
    assert (record.accepted, record.published) == (True, False)


def test_an_archive_holds_the_card_weights_licences_and_hashes_of_a_model(here: Path) -> None:
    write_archive(["spleen"], here / "models.zip")
    first = (here / "models.zip").read_bytes()

    members = read(here / "models.zip")

    assert json.loads(members[LIST_FILE]) == {"schema": 1, "models": ["spleen"]}
    record = json.loads(members[f"spleen/{PROVENANCE_FILE}"])["files"]
    sha256 = find_model("spleen").weights.sha256
    assert sorted(record) == [
        "LICENSE",
        "card.json",
        "docs/data_license.txt",
        f"weights/{sha256}.safetensors",
    ]
    for name, (size, digest) in record.items():
        content = members[f"spleen/{name}"]
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
    write_archive(["spleen"], here / "models.zip")  # an archive is replaced
    assert len((here / "models.zip").read_bytes()) == len(first)


@pytest.mark.parametrize(
    ("names", "file", "detail"),
    [
        (["spleen", "{here}/made/spleen"], "m.zip", "two of the models have the name spleen"),
        (["tissue"], "m.zip", "tissue ships with scanloom"),
        (["splen"], "m.zip", "did you mean spleen"),
        (["spleen"], "scan.nii.gz", "scan.nii.gz exists, and is not a model archive"),
        (["spleen"], "made", "would replace a path that is not a regular file"),
        (["spleen"], "none/m.zip", "its folder is missing"),
    ],
)
def test_what_no_archive_is_written_of_or_to(
    names: list[str], file: str, detail: str, here: Path
) -> None:
    write_bundle(here / "ships" / "tissue")
    (here / "scan.nii.gz").write_bytes(b"a scan")
    before = tree(here)

    with pytest.raises(ScanError) as caught:
        write_archive([name.format(here=here) for name in names], here / file)

    assert detail in caught.value.detail
    assert tree(here) == before
    assert (here / "scan.nii.gz").read_bytes() == b"a scan"


def test_changed_weights_are_not_carried(here: Path) -> None:
    write_archive(["spleen"], here / "models.zip")
    before = (here / "models.zip").read_bytes()
    weights = find_model("spleen").weights.file
    size = weights.stat().st_size
    weights.write_bytes(bytes(size))

    with pytest.raises(ScanError) as caught:
        write_archive(["spleen"], here / "models.zip")

    assert caught.value.reason is Reason.MODEL_HASH
    assert (here / "models.zip").read_bytes() == before


def renamed(old: str, new: str) -> Callable[[Members], object]:
    return lambda m: m.update({new: m.pop(old)})


def record_of_changed(members: Members) -> None:
    """Change the weights, and the record with them: the card has their hash, too."""
    name = next(n for n in members if n.endswith(".safetensors"))
    members[name] = bytes(len(members[name]))
    document = json.loads(members[f"spleen/{PROVENANCE_FILE}"])
    path = name.removeprefix("spleen/")
    digest = hashlib.sha256(members[name]).hexdigest()
    document["files"][path] = [len(members[name]), digest]
    members[f"spleen/{PROVENANCE_FILE}"] = json.dumps(document).encode()


def listing(models: object, schema: int = 1) -> Callable[[Members], object]:
    document = json.dumps({"schema": schema, "models": models}).encode()
    return lambda m: m.update({LIST_FILE: document})


HOSTILE: dict[str, tuple[Callable[[Members], object], Reason]] = {
    "path out of the folder": (lambda m: m.update({"spleen/../../x": b""}), Reason.MODEL_UNSAFE),
    "absolute path": (lambda m: m.update({"/tmp/x": b""}), Reason.MODEL_UNSAFE),
    "name out of the folder": (listing(["../spleen"]), Reason.MODEL_DAMAGED),
    "hidden name": (listing([".adding"]), Reason.MODEL_DAMAGED),
    "no name": (listing([""]), Reason.MODEL_DAMAGED),
    "number as name": (listing([1]), Reason.MODEL_DAMAGED),
    "no list": (listing({"spleen": 1}), Reason.MODEL_DAMAGED),
    "nothing listed": (listing([]), Reason.MODEL_DAMAGED),
    "many names": (listing([f"m{n}" for n in range(2000)]), Reason.MODEL_DAMAGED),
    "deep list": (lambda m: m.update({LIST_FILE: b"[" * 100_000}), Reason.MODEL_DAMAGED),
    "later schema": (listing(["spleen"], 2), Reason.NEWER_VERSION),
    "absent model": (listing(["liver"]), Reason.MODEL_DAMAGED),
    "no record": (lambda m: m.pop(f"spleen/{PROVENANCE_FILE}"), Reason.MODEL_DAMAGED),
    "changed licence": (lambda m: m.update({"spleen/LICENSE": b"MIT"}), Reason.MODEL_HASH),
    "further file": (lambda m: m.update({"spleen/code.py": b"1"}), Reason.MODEL_HASH),
    "missing file": (lambda m: m.pop("spleen/LICENSE"), Reason.MODEL_HASH),
    "other weights": (record_of_changed, Reason.MODEL_HASH),
    "damaged card": (renamed("spleen/card.json", "spleen/car.json"), Reason.MODEL_HASH),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_adds_nothing(
    name: str, members: Members, place: Path, closed: Callable[[], Path]
) -> None:
    change, reason = HOSTILE[name]
    members = dict(members)
    change(members)
    write(place / "models.zip", members)
    outside = tree(place)
    own = closed()

    with pytest.raises(ScanError) as caught:
        add(place / "models.zip")

    assert caught.value.reason is reason
    assert caught.value.detail.isprintable()
    assert [p for p in tree(own) if not p.endswith(".lock")] == []
    assert [p for p in tree(place) if not p.startswith("closed/")] == outside


def test_links_bombs_and_repeated_files_are_refused(
    members: Members, place: Path, closed: Callable[[], Path]
) -> None:
    own = closed()
    link = zipfile.ZipInfo("spleen/weights")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    for further, content in ((link, b"/etc"), ("spleen/a", bytes(64 << 20)), ("spleen/a", b"")):
        with zipfile.ZipFile(place / "bad.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            archive.writestr(further, content)
            if not content:
                with pytest.warns(UserWarning, match="Duplicate name"):
                    archive.writestr(further, content)

        with pytest.raises(ScanError) as caught:
            add(place / "bad.zip")

        assert caught.value.reason is Reason.MODEL_UNSAFE
    assert [p for p in tree(own) if not p.endswith(".lock")] == []


def test_an_unchanged_archive_is_added(
    members: Members, place: Path, closed: Callable[[], Path]
) -> None:
    """So that the refusals above are those of the changes."""
    write(place / "models.zip", members)
    closed()

    assert [each.name for each in add(place / "models.zip")] == ["spleen"]


def test_the_folder_of_a_killed_command_is_removed(here: Path) -> None:
    left = here / ".scanloom-killed"
    left.mkdir()
    (left / "lock").touch()
    (left / "archive").write_bytes(b"half an archive")

    write_archive(["spleen"], here / "models.zip")

    assert not list(here.glob(".scanloom-*"))


@pytest.mark.parametrize("limit", [100, 1500, 3000])
def test_without_space_the_earlier_archive_stays_and_no_half_one(here: Path, limit: int) -> None:
    """A limit of the size of files (EFBIG) stands for a full disk."""
    (here / "out").mkdir()
    target = here / "out" / "models.zip"
    write_archive(["spleen"], target)
    before = target.read_bytes()
    assert len(before) > 3000

    with limited_files(limit), pytest.raises(ScanError) as caught:
        write_archive(["spleen"], target)

    assert caught.value.reason is Reason.OUTPUT_UNWRITABLE
    assert target.read_bytes() == before
    assert [p.name for p in target.parent.iterdir()] == ["models.zip"]
