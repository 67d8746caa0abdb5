"""A model is added whole or not at all, and the added files are the ones in use."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from scanloom.cards.card import ModelCard
from scanloom.cards.card_file import card_digest
from scanloom.convert import readers, store
from scanloom.convert.conversion import convert_model
from scanloom.convert.download import addresses
from scanloom.convert.download.add import (
    AddOptions,
    Licence,
    add_model,
    read_licence,
    remove_model,
)
from scanloom.convert.download.sources import find_source, task_zips
from scanloom.convert.monai.bundle import read_bundle
from scanloom.convert.provenance import PROVENANCE_FILE, read_provenance
from scanloom.convert.readers import ModelReader
from scanloom.convert.store import find_model, list_models, locate_model, verify_model
from scanloom.core import Reason, ScanError, slug
from support.bundles import CONFIG, METADATA, saved, spleen_config, write_bundle
from support.https_server import Page, Server
from support.nnunet_folders import CONFIGURATION, PLANS, write_model

NUMBERS = np.random.default_rng(0).standard_normal(75_000, np.float32)
WEIGHTS = save({"weight": NUMBERS})


def never(model: str, licence: Licence) -> bool:
    return False


OPTIONS = AddOptions(accept=never)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's store, empty; nothing ships."""
    (tmp_path / "ships").mkdir()
    monkeypatch.setattr(store, "shipped_models", lambda: tmp_path / "ships")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("SCANLOOM_MODELS", "SCANLOOM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "data" / "scanloom" / "models"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "given" / "spleen", weights=WEIGHTS)


def zipped(folder: Path, base: str = "spleen/") -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, base + file.relative_to(folder).as_posix())
    return stream.getvalue()


def refusal(request: str | Path, options: AddOptions = OPTIONS) -> ScanError:
    with pytest.raises(ScanError) as caught:
        add_model(str(request), options)
    return caught.value


def names(own: Path) -> list[str]:
    return sorted(path.name for path in own.iterdir() if not path.name.startswith("."))


def unfinished(own: Path) -> list[str]:
    return sorted(p.name for p in (own / ".adding").iterdir() if not p.name.endswith(".lock"))


@pytest.mark.parametrize("kind", ["folder", "zip", "address"])
def test_a_model_is_added_from(kind: str, own: Path, bundle: Path, server: Server) -> None:
    (bundle.parent / "spleen.zip").write_bytes(zipped(bundle))
    server.pages["/m/spleen.zip"] = Page(zipped(bundle))
    request = {
        "folder": str(bundle),
        "zip": str(bundle.parent / "spleen.zip"),
        "address": f"{server.address}/m/spleen.zip",
    }[kind]

    added = add_model(request, OPTIONS)

    assert (added.name, added.folder, added.already) == ("spleen", own / "spleen", False)
    assert find_model("spleen").weights.file.read_bytes() == WEIGHTS
    record = read_provenance(own / "spleen")
    assert record is not None
    assert record.files["models/model.pt"].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert PROVENANCE_FILE not in record.files
    assert str(bundle.parent) not in (own / "spleen" / PROVENANCE_FILE).read_text()
    assert (names(own), unfinished(own)) == (["spleen"], [])


def test_a_model_is_added_once(own: Path, bundle: Path, server: Server) -> None:
    server.pages["/spleen.zip"] = Page(zipped(bundle))
    add_model(f"{server.address}/spleen.zip", OPTIONS)

    again = add_model(f"{server.address}/spleen.zip", OPTIONS)
    copied = add_model(str(bundle), OPTIONS)

    assert again.already
    assert copied.already
    assert len(server.log) == 1


def test_a_name_belongs_to_one_model(own: Path, bundle: Path, server: Server) -> None:
    server.pages["/spleen.zip"] = Page(zipped(bundle))
    add_model(str(bundle), OPTIONS)
    second = write_bundle(bundle.parent / "other", weights=saved(1.0))
    shutil.copytree(second, own.parents[2] / "ships" / "tissue")

    for request, name in [(second, "spleen"), (second, "tissue")]:
        assert refusal(request, AddOptions(never, name)).reason is Reason.MODEL_EXISTS
    error = refusal(f"{server.address}/spleen.zip")
    assert error.reason is Reason.MODEL_EXISTS
    assert server.log == []
    add_model(str(second), AddOptions(never, "Other one"))
    assert names(own) == ["other_one", "spleen"]


def change(file: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        change("models/model.pt", WEIGHTS[:-1] + b"!"),
        change("configs/metadata.json", json.dumps({**METADATA, "version": "9"}).encode()),
        change("configs/inference.yaml", json.dumps(CONFIG).encode()),
        change("LICENSE", b"MIT License"),
    ],
)
def test_a_model_that_changed_is_refused(
    damage: Callable[[Path], object], own: Path, bundle: Path
) -> None:
    add_model(str(bundle), OPTIONS)
    damage(own / "spleen")

    for check in (lambda: find_model("spleen"), lambda: find_model(str(own / "spleen"))):
        with pytest.raises(ScanError) as caught:
            check()
        assert caught.value.reason is Reason.MODEL_HASH
    with pytest.raises(ScanError, match="changed since the model was added"):
        verify_model(locate_model("spleen"))
    assert [entry.error and entry.error.code for entry in list_models()] == ["MODEL_HASH"]


def test_a_card_in_the_source_does_not_count(own: Path, bundle: Path, tmp_path: Path) -> None:
    convert_model(bundle, {}, bundle)
    text = (bundle / "card.json").read_text()
    (bundle / "card.json").write_text(text.replace('"spleen"', '"liver"'))
    for file in (bundle / "weights").iterdir():
        file.unlink()
        file.write_bytes(b"others")

    add_model(str(bundle), OPTIONS)

    assert [structure.label for structure in find_model("spleen").structures] == ["spleen"]
    verify_model(locate_model("spleen"))


@pytest.mark.parametrize("copied", [False, True])
def test_other_weights_of_the_same_size_are_used(
    copied: bool, own: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of the former weights, which lies next to them, does not count any more."""
    add_model(str(bundle), OPTIONS)
    monkeypatch.setattr("scanloom.convert.provenance.SMALL_BYTES", 0)  # weights are large files
    folder = own / "spleen"
    if copied:
        folder = shutil.copytree(folder, tmp_path / "copy" / "spleen")
    other = save({"weight": NUMBERS[::-1].copy()})
    assert len(other) == len(WEIGHTS)
    (folder / "models" / "model.pt").write_bytes(other)

    card = find_model(str(folder))

    assert card.weights.published == hashlib.sha256(other).hexdigest()


def test_a_large_file_beside_the_weights_is_compared_by_verify(
    own: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bundle / "models" / "model.ts").write_bytes(WEIGHTS)
    add_model(str(bundle), OPTIONS)
    monkeypatch.setattr("scanloom.convert.provenance.SMALL_BYTES", 100_000)
    (own / "spleen" / "models" / "model.ts").write_bytes(WEIGHTS[::-1])

    find_model("spleen")
    with pytest.raises(ScanError, match=r"models/model\.ts"):
        verify_model(locate_model("spleen"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1}', '{"schema": 1, "files": 3}'])
def test_a_damaged_record_is_refused(text: str, own: Path, bundle: Path) -> None:
    add_model(str(bundle), OPTIONS)
    (own / "spleen" / PROVENANCE_FILE).write_text(text)

    with pytest.raises(ScanError) as caught:
        find_model("spleen")
    assert caught.value.reason is Reason.MODEL_DAMAGED


def test_unreadable_folders_are_not_added(own: Path, bundle: Path, tmp_path: Path) -> None:
    (bundle / "models" / "model.pt").unlink()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("")

    assert refusal(bundle).reason is Reason.MODEL_DAMAGED
    assert "holds no model" in refusal(tmp_path / "text").detail
    assert (names(own), unfinished(own)) == ([], [])


@pytest.mark.parametrize(
    ("request_text", "reason"),
    [
        ("http://127.0.0.1/m.zip", Reason.DOWNLOAD),
        ("ftp://127.0.0.1/m.zip", Reason.DOWNLOAD),
        ("https://127.0.0.1/m.zip#md5=1", Reason.DOWNLOAD),
        ("https://127.0.0.1/m.zip#sha256=1", Reason.MODEL_HASH),
        ("no/such/folder", Reason.MODEL_UNKNOWN),
        ("brainchop/mindgrap", Reason.MODEL_UNKNOWN),
        ("totalsegmentator/totl", Reason.MODEL_UNKNOWN),
        ("totalsegmentator/tissue_types", Reason.LICENCE),
        ("tissue_types", Reason.LICENCE),
        ("vertebrae_pp", Reason.MODEL_UNSUPPORTED),
        ("a b", Reason.MODEL_UNKNOWN),
        ("a\0b", Reason.MODEL_UNKNOWN),
        ("x" * 5000, Reason.MODEL_UNKNOWN),
    ],
)
def test_requests_that_name_no_source(request_text: str, reason: Reason, own: Path) -> None:
    error = refusal(request_text)

    assert error.reason is reason
    assert error.detail.isprintable()


@pytest.mark.parametrize(
    ("request_text", "origin"),
    [
        ("total_fast", f"{addresses.TOTALSEGMENTATOR}#total_fast"),
        ("Total_Fast", f"{addresses.TOTALSEGMENTATOR}#total_fast"),
        ("totalsegmentator", f"{addresses.TOTALSEGMENTATOR}#total"),
        ("mindgrab", f"{addresses.BRAINCHOP}/public/models/mindgrab"),
        ("spleen", "MONAI model zoo: spleen_ct_segmentation"),
        ("wholebody_ct_segmentation", "MONAI model zoo: wholeBody_ct_segmentation"),
        ("spleen_ct_segmentation@0.5.9", "MONAI model zoo: spleen_ct_segmentation@0.5.9"),
    ],
)
def test_names_that_people_know_are_sources(request_text: str, origin: str) -> None:
    source = find_source(request_text)

    assert (source.origin, source.remote) == (origin, True)


@pytest.mark.parametrize("name", sorted(addresses.known_names()))
def test_each_known_name_is_that_of_a_source(name: str) -> None:
    request = addresses.known_request(name.upper())
    assert request is not None
    assert slug(find_source(request).name) == slug(request.rpartition("/")[2])


@pytest.mark.parametrize("variable", [False, True])
def test_offline_nothing_is_requested(
    own: Path, bundle: Path, server: Server, monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    monkeypatch.setattr(addresses, "ZOO_LIST", f"{server.address}/list")
    if variable:
        monkeypatch.setenv("SCANLOOM_OFFLINE", "1")
    options = AddOptions(never, offline=not variable)

    for request in (
        f"{server.address}/m.zip",
        "Spleen_CT_Segmentation",
        "monai/x",
        "brainchop/mindgrab",
    ):
        assert refusal(request, options).reason is Reason.OFFLINE
    assert server.log == []
    assert add_model(str(bundle), options).name == "spleen"


@pytest.mark.parametrize("name", ["Dataset042", "spleen_ct_segmentatoin", "my_model@2", "a/b"])
def test_a_name_of_no_known_source_goes_to_no_network(
    name: str, own: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most likely a folder is meant, whose name is nobody's business."""
    monkeypatch.setattr(addresses, "ZOO_LIST", f"{server.address}/list")

    error = refusal(name)

    assert error.reason is Reason.MODEL_UNKNOWN
    assert f"there is no folder or zip file '{name}'" in error.detail
    assert server.log == []


def test_a_pinned_address_is_compared(own: Path, bundle: Path, server: Server) -> None:
    content = zipped(bundle)
    server.pages["/spleen.zip"] = Page(content)

    wrong = refusal(f"{server.address}/spleen.zip#sha256={'0' * 64}")
    add_model(f"{server.address}/spleen.zip#sha256={hashlib.sha256(content).hexdigest()}", OPTIONS)

    record = read_provenance(own / "spleen")
    assert wrong.reason is Reason.MODEL_HASH
    assert record is not None
    assert record.published


class TestLicence:
    """A licence that excludes commercial use is accepted once, by a person or an option."""

    @pytest.fixture
    def address(self, bundle: Path, server: Server) -> str:
        (bundle / "LICENSE").write_text("You may use the weights for non-commercial purposes.")
        server.pages["/spleen.zip"] = Page(zipped(bundle))
        return f"{server.address}/spleen.zip"

    def test_it_is_refused_unless_accepted(self, own: Path, address: str) -> None:
        assert refusal(address).reason is Reason.LICENCE
        assert names(own) == []

    def test_its_text_is_shown_and_the_answer_recorded(
        self, own: Path, address: str, server: Server
    ) -> None:
        """The download is kept for the second attempt."""
        questions = []

        def accept(model: str, licence: Licence) -> bool:
            questions.append((model, licence.text))
            return True

        refusal(address)
        add_model(address, AddOptions(accept))

        record = read_provenance(own / "spleen")
        assert questions == [("spleen", "You may use the weights for non-commercial purposes.")]
        assert record is not None
        assert record.accepted
        assert len(server.log) == 1
        assert unfinished(own) == []

    @pytest.mark.parametrize(
        ("name", "text", "conditions"),
        [
            ("Apache-2.0", "", False),
            ("MIT", "Permission is hereby granted, free of charge", False),
            ("CC-BY-NC-SA-4.0", "", True),
            ("NVIDIA OneWay Noncommercial License", "", True),
            (
                "unknown",
                "GNU GENERAL PUBLIC LICENSE ... only for noncommercial distribution",
                False,
            ),
            ("unknown", "Chapel Hill, NC", False),
            ("unknown", "for academic research purposes only", True),
        ],
    )
    def test_conditions_are_found(self, name: str, text: str, conditions: bool) -> None:
        assert Licence(name, (text,)).has_conditions is conditions
        code = "GNU GENERAL PUBLIC LICENSE ..."  # of the code beside the weights
        assert Licence(name, (code, text)).has_conditions is conditions


class TestZoo:
    """Bundles of MONAI's zoo come from where its list leads to."""

    @pytest.fixture
    def listing(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        monkeypatch.setattr(addresses, "ZOO_LIST", f"{server.address}/list.json")
        monkeypatch.setattr(addresses, "HUGGING_FACE", server.address)

        def write(**entries: tuple[str, bytes]) -> None:
            document = {
                key: {"source": server.address + path, "checksum": hashlib.sha1(data).hexdigest()}
                for key, (path, data) in entries.items()
            }
            server.pages["/list.json"] = Page(json.dumps(document).encode())

        return write

    @pytest.fixture
    def repository(self, server: Server, bundle: Path) -> list[dict[str, object]]:
        """Serve the bundle as a repository: a large file by SHA-256, others by git's SHA-1."""
        entries: list[dict[str, object]] = [
            {"path": "models", "type": "directory", "oid": "0" * 40}
        ]
        for file in sorted(p for p in bundle.rglob("*") if p.is_file()):
            path, data = file.relative_to(bundle).as_posix(), file.read_bytes()
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, object] = {"path": path, "type": "file", "size": len(data), "oid": oid}
            if path.startswith("models/"):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
            entries.append(entry)
            server.pages[f"/MONAI/spleen_ct/resolve/1.10.0/{path}"] = Page(data)
        entries.append({"path": "models/model.ts", "type": "file", "size": 9, "oid": "0" * 40})
        page = Page(json.dumps(entries).encode())
        server.pages["/api/models/MONAI/spleen_ct/tree/1.10.0?recursive=true"] = page
        return entries

    def test_newest_version(
        self, own: Path, bundle: Path, server: Server, listing: Callable[..., None]
    ) -> None:
        content = zipped(bundle, "spleen_ct/")
        server.pages["/new.zip"] = Page(content)
        listing(
            **{
                "spleen_ct_v1.9.0": ("/old.zip", b""),
                "spleen_ct_v1.10.0": ("/new.zip", content),
                "spleen_ct_v1.2.0": ("/older.zip", b""),
            }
        )

        added = add_model("monai/Spleen_CT", OPTIONS)

        record = read_provenance(added.folder)
        assert added.name == "spleen_ct"
        assert record is not None
        assert (record.published, record.address) == (True, f"{server.address}/new.zip")
        assert refusal("monai/spleen_ct@3", AddOptions(never, "b")).reason is Reason.MODEL_UNKNOWN
        assert (
            "did you mean spleen_ct?" in refusal("monai/spleen_tc", AddOptions(never, "b")).detail
        )

    def test_wrong_checksum(
        self, own: Path, bundle: Path, server: Server, listing: Callable[..., None]
    ) -> None:
        server.pages["/new.zip"] = Page(zipped(bundle))
        listing(**{"spleen_ct_v1.0.0": ("/new.zip", b"other")})

        assert refusal("monai/spleen_ct").reason is Reason.MODEL_HASH
        assert (names(own), unfinished(own)) == ([], [])

    @pytest.mark.parametrize("source", ["/MONAI/spleen_ct/tree/1.10.0", "/gone.zip"])
    def test_hugging_face(
        self,
        own: Path,
        repository: list[dict[str, object]],
        listing: Callable[..., None],
        source: str,
    ) -> None:
        """Named by the list, or instead of a zip file that is gone."""
        listing(**{"spleen_ct_v1.10.0": (source, b"")})

        add_model("monai/spleen_ct", OPTIONS)

        record, weights = read_provenance(own / "spleen_ct"), find_model("spleen_ct").weights.file
        assert weights.read_bytes() == WEIGHTS
        assert weights.is_relative_to(own)  # converted once, and not again into the cache
        assert record is not None
        assert record.published
        assert "models/model.ts" not in record.files

    def test_address_of_a_repository(
        self, own: Path, repository: list[dict[str, object]], server: Server, listing: object
    ) -> None:
        add_model(f"{server.address}/MONAI/spleen_ct/tree/1.10.0", OPTIONS)

        assert names(own) == ["spleen_ct"]

    @pytest.mark.parametrize("path", ["models/model.pt", "configs/metadata.json"])
    def test_changed_file_of_a_repository(
        self,
        own: Path,
        repository: list[dict[str, object]],
        server: Server,
        listing: object,
        path: str,
    ) -> None:
        page = server.pages[f"/MONAI/spleen_ct/resolve/1.10.0/{path}"]
        page.content = page.content[:-1] + b"!"

        error = refusal(f"{server.address}/MONAI/spleen_ct/tree/1.10.0")

        assert error.reason is Reason.MODEL_HASH
        assert names(own) == []

    @pytest.mark.parametrize("path", ["../out", "/etc/out", "a\\b"])
    def test_paths_of_a_repository(
        self, own: Path, server: Server, listing: object, path: str
    ) -> None:
        entries = [{"path": path, "type": "file", "size": 1, "oid": "0" * 40}]
        page = Page(json.dumps(entries).encode())
        server.pages["/api/models/MONAI/m/tree/main?recursive=true"] = page

        assert refusal(f"{server.address}/MONAI/m").reason is Reason.MODEL_UNSAFE

    @pytest.mark.parametrize("document", [b"{", b"3", b"[[]]", b"[" * 100_000])
    def test_malformed_lists(
        self, own: Path, server: Server, listing: object, document: bytes
    ) -> None:
        server.pages["/list.json"] = Page(document)
        server.pages["/api/models/MONAI/m/tree/main?recursive=true"] = Page(document)

        for request in ("monai/spleen_ct", f"{server.address}/MONAI/m"):
            assert refusal(request).reason in (Reason.DOWNLOAD, Reason.MODEL_UNKNOWN)

    @pytest.mark.parametrize("algorithm", ["md5", "sha256"])
    def test_large_files_are_downloaded_and_compared(
        self,
        own: Path,
        bundle: Path,
        server: Server,
        listing: Callable[..., None],
        algorithm: str,
    ) -> None:
        (bundle / "models" / "model.pt").unlink()
        (bundle / "large_files.yml").write_text(
            "large_files:\n"
            f"- path: models/model.pt\n  url: {server.address}/w.pt\n"
            f"  hash_type: {algorithm}\n  hash_val: {hashlib.new(algorithm, WEIGHTS).hexdigest()}\n"
            "- path: models/model.ts\n  url: http://127.0.0.1/none\n"
        )
        content = zipped(bundle)
        server.pages["/new.zip"] = Page(content)
        server.pages["/w.pt"] = Page(b"wrong")
        listing(**{"spleen_ct_v1.0.0": ("/new.zip", content)})

        assert refusal("monai/spleen_ct").reason is Reason.MODEL_HASH
        server.pages["/w.pt"] = Page(WEIGHTS)
        add_model("monai/spleen_ct", OPTIONS)

        assert find_model("spleen_ct").weights.file.read_bytes() == WEIGHTS


def test_brainchop_files_are_pinned(
    own: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader accepts any folder with a model.json."""

    def read(folder: Path) -> ModelCard:
        return read_bundle(write_bundle(tmp_path / "card" / folder.name))

    reader = ModelReader("layer model", lambda folder: (folder / "model.json").is_file(), read)
    monkeypatch.setattr(readers, "readers", lambda: iter((reader,)))
    monkeypatch.setattr("scanloom.io.system.sandbox.AVAILABLE", False)
    files = {"model.json": b"{}", "model.bin": WEIGHTS}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    monkeypatch.setattr(addresses, "BRAINCHOP", server.address)
    monkeypatch.setattr(addresses, "BRAINCHOP_MODELS", {"mini": digests})
    licence = "LICENSE", hashlib.sha256(b"MIT License").hexdigest()
    monkeypatch.setattr(addresses, "BRAINCHOP_LICENCE", licence)
    server.pages["/LICENSE"] = Page(b"MIT License")
    for name, data in files.items():
        server.pages[f"/public/models/mini/{name}"] = Page(data)

    added = add_model("brainchop/mini", OPTIONS)

    record = read_provenance(added.folder)
    assert (added.folder / "model.bin").read_bytes() == WEIGHTS
    assert record is not None
    assert (record.licence, record.published) == ("MIT", True)
    server.pages["/public/models/mini/model.bin"].content = WEIGHTS[::-1]
    assert refusal("brainchop/mini", AddOptions(never, "other")).reason is Reason.MODEL_HASH


@pytest.mark.parametrize("task", sorted(addresses.TOTALSEGMENTATOR_TASKS))
def test_each_task_of_totalsegmentator_has_its_zip_files(task: str) -> None:
    source = find_source(f"totalsegmentator/{task}")

    assert source.name == task
    assert len(task_zips(task)) == len(addresses.TOTALSEGMENTATOR_TASKS[task])
    assert all(address.endswith(".zip") for address in task_zips(task))


class TestRemove:
    def test_own_models_are_removed(self, own: Path, bundle: Path) -> None:
        add_model(str(bundle), OPTIONS)
        shutil.copytree(bundle, own / "by hand")

        remove_model("spleen")
        remove_model("by_hand")

        assert (names(own), unfinished(own)) == ([], [])

    def test_a_link_in_the_store_is_removed_and_its_goal_stays(
        self, own: Path, bundle: Path
    ) -> None:
        own.mkdir(parents=True)
        (own / "linked").symlink_to(bundle)

        remove_model("linked")

        assert (bundle / "models" / "model.pt").is_file()
        assert names(own) == []

    @pytest.mark.parametrize("name", ["tissue", "shared", "none", "../spleen", ".adding", ""])
    def test_other_models_stay(
        self, own: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv("SCANLOOM_MODELS", str(bundle.parent / "group"))
        shutil.copytree(bundle, bundle.parent / "group" / "shared")
        shutil.copytree(bundle, own.parents[2] / "ships" / "tissue")

        with pytest.raises(ScanError) as caught:
            remove_model(name)

        assert caught.value.reason is Reason.MODEL_UNKNOWN
        assert len(list_models()) == 2


def start(server: Server, own: Path, request: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(own.parents[1]),
        "SSL_CERT_FILE": str(server.certificate),
    }
    command = [sys.executable, "-m", "scanloom", "models", "add", request]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def slowly(content: bytes, stop: int | None = None) -> Page:
    """Return a page that takes a second, or ends nowhere after `stop` bytes."""

    def reply(handler: object) -> None:
        handler.send_response(200)
        handler.send_header("ETag", '"1"')
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:stop])
        handler.wfile.flush()
        time.sleep(1 if stop is None else 600)

    return Page(reply=reply)


@pytest.mark.thorough
def test_of_two_processes_one_downloads(own: Path, bundle: Path, server: Server) -> None:
    server.pages["/spleen.zip"] = slowly(zipped(bundle))
    request = f"{server.address}/spleen.zip"

    processes = [start(server, own, request) for _ in range(2)]

    assert [process.wait(300) for process in processes] == [0, 0]
    assert len(server.log) == 1
    assert names(own) == ["spleen"]
    assert find_model("spleen").weights.file.read_bytes() == WEIGHTS


@pytest.mark.parametrize("tenth", [1, pytest.param(5, marks=pytest.mark.thorough), 9])
def test_a_killed_process_leaves_no_model_and_the_next_continues(
    own: Path, bundle: Path, server: Server, tenth: int
) -> None:
    content = zipped(bundle)
    stop = len(content) * tenth // 10
    server.pages["/spleen.zip"] = slowly(content, stop)
    process = start(server, own, f"{server.address}/spleen.zip")
    deadline = time.monotonic() + 300
    while sum(p.stat().st_size for p in own.rglob("*.part")) < stop:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()

    assert list_models() == ()
    server.pages["/spleen.zip"] = Page(content)
    add_model(f"{server.address}/spleen.zip", OPTIONS)

    assert server.log[-1][1] == f"bytes={stop}-"
    assert find_model("spleen").weights.file.read_bytes() == WEIGHTS
    assert unfinished(own) == []


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let one reader take folders that hold folders named like nnU-Net's."""

    def read(folder: Path) -> ModelCard:
        return read_bundle(write_bundle(tmp_path / "cards" / str(time.time_ns())))

    reader = ModelReader("nested", lambda folder: any(folder.glob("*__*__*/plans.json")), read)
    monkeypatch.setattr(readers, "readers", lambda: iter((reader,)))
    monkeypatch.setattr("scanloom.io.system.sandbox.AVAILABLE", False)


@pytest.mark.parametrize("configuration", ["2d", "3d_cascade_fullres", "cascade_of_mine"])
def test_nnunets_names_of_folders_are_kept(
    own: Path, nested: None, tmp_path: Path, configuration: str
) -> None:
    """A cascade is copied with its first stage; its name in the store is that of its results."""
    dataset = tmp_path / "Dataset007_Pancreas"
    cascade = {**CONFIGURATION, "previous_stage": "3d_lowres"}
    settings = {"2d": CONFIGURATION, "3d_lowres": CONFIGURATION}
    settings |= {"3d_cascade_fullres": cascade, "cascade_of_mine": cascade}
    for name in settings:
        model = dataset / f"nnUNetTrainer__nnUNetPlans__{name}"
        model.mkdir(parents=True)
        (model / "plans.json").write_text(json.dumps({**PLANS, "configurations": settings}))
        (model / "dataset.json").write_text("{}")

    added = add_model(str(dataset / f"nnUNetTrainer__nnUNetPlans__{configuration}"), OPTIONS)

    stages = ["3d_lowres"] if configuration != "2d" else []
    folders = {f"nnUNetTrainer__nnUNetPlans__{name}" for name in (configuration, *stages)}
    assert added.name == f"dataset007_pancreas_{configuration}"
    assert {path.name for path in added.folder.iterdir()} == {
        *folders,
        PROVENANCE_FILE,
        "card.json",
        "weights",
    }
    assert find_model(added.name).name == added.name


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_model_below_folders_of_a_zip_file_is_found(
    own: Path, nested: None, tmp_path: Path, depth: int
) -> None:
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        base = "/".join(["Dataset007_Pancreas"] * depth + ["a__b__c"])
        archive.writestr(f"{base}/plans.json", "{}")

    added = add_model(str(tmp_path / "export.zip"), OPTIONS)

    assert (added.folder / "a__b__c" / "plans.json").is_file()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Return a file as `nnUNetv2_export_model_to_zip` writes it, of two configurations."""
    dataset = tmp_path / "results" / "Dataset042_Organs"
    plane = copy.deepcopy(PLANS)
    plane["configurations"] = {"3d_lowres": plane["configurations"].pop("3d_fullres")}
    write_model(dataset, plane, configuration="3d_lowres", folds=("0", "1"))
    write_model(dataset)
    (dataset / "LICENSE").write_text("MIT License")
    (tmp_path / "export.zip").write_bytes(zipped(dataset, "Dataset042_Organs/"))
    return tmp_path / "export.zip"


def test_a_zip_file_of_several_models_is_refused_with_the_options_that_choose_one(
    own: Path, export: Path
) -> None:
    error = refusal(export)

    assert error.reason is Reason.MODEL_UNKNOWN
    assert "NAME:configuration=3d_fullres (configuration: 3d_fullres, 3d_lowres)" in error.detail
    assert (names(own), unfinished(own)) == ([], [])


@pytest.mark.parametrize("folder", [False, True])
def test_options_choose_a_model_of_a_source_for_good(folder: bool, own: Path, export: Path) -> None:
    """The others are not kept; the card is that which `segment` gets by the same options."""
    source = export.parent / "results" if folder else export

    added = add_model(f"{source}:configuration=3d_lowres", OPTIONS)

    card = find_model(added.name)
    assert added.name == f"{slug(source.stem)}_configuration_3d_lowres"
    kept = sorted(path.name for path in added.folder.iterdir())
    assert kept == ["Dataset042_Organs", "card.json", PROVENANCE_FILE, "weights"]
    licence = added.folder / "Dataset042_Organs" / "LICENSE"
    assert [*licence.parent.iterdir()] == [licence]
    direct = find_model(f"{export.parent / 'results'}:configuration=3d_lowres")
    assert len(card.folds) == 1
    assert card_digest(replace(card, name=direct.name)) == card_digest(direct)
    verify_model(locate_model(added.name))
    again = add_model(f"{source}:configuration=3d_lowres", OPTIONS)
    assert again.already
    with pytest.raises(ScanError, match="settled when it was added"):
        find_model(f"{added.name}:folds=0")


def test_the_licence_in_a_folder_of_nnunets_is_asked_for(own: Path, export: Path) -> None:
    dataset = export.parent / "results" / "Dataset042_Organs"
    licence = "Only for academic use"
    (dataset / "nnUNetTrainer__nnUNetPlans__3d_fullres" / "LICENSE").write_text(licence)

    for request in (next(dataset.glob("*3d_fullres")), f"{dataset}:configuration=3d_fullres"):
        assert refusal(request).reason is Reason.LICENCE


def test_a_licence_is_shown_once_whatever_the_name_of_its_dataset(tmp_path: Path) -> None:
    dataset = tmp_path / "Dataset042_Organs__Left__Right"
    dataset.mkdir()
    (dataset / "LICENSE").write_text("MIT License")

    assert read_licence(tmp_path, "").texts == ("MIT License",)


def test_an_address_may_have_options(own: Path, export: Path, server: Server) -> None:
    server.pages["/m/export.zip"] = Page(export.read_bytes())
    digest = hashlib.sha256(export.read_bytes()).hexdigest()
    request = f"{server.address}/m/export.zip#sha256={digest}:configuration=3d_lowres"

    added = add_model(request, AddOptions(never, "low"))

    record = read_provenance(added.folder)
    assert record is not None
    assert record.source.endswith("/m/export.zip:configuration=3d_lowres")
    assert add_model(request, AddOptions(never, "low")).already
    other = request.replace("3d_lowres", "3d_fullres")
    assert refusal(other, AddOptions(never, "low")).reason is Reason.MODEL_EXISTS


def test_safetensors_of_a_model_with_options_are_kept(own: Path, tmp_path: Path) -> None:
    """They are no link to the source, which stays as it is."""
    config = spleen_config()
    config["highres"] = True
    bundle = write_bundle(tmp_path / "given" / "spleen", config, weights=WEIGHTS)

    added = add_model(f"{bundle}:highres=false", OPTIONS)

    assert added.name == "spleen_highres_false"
    assert not find_model(added.name).weights.file.is_symlink()
    assert find_model(added.name).weights.file.read_bytes() == WEIGHTS
    assert (bundle / "models" / "model.pt").read_bytes() == WEIGHTS


def test_a_model_among_other_folders_of_a_zip_file_is_found(own: Path, bundle: Path) -> None:
    """With the licence above it, which is asked for."""
    file = bundle.parent / "release.zip"
    file.write_bytes(zipped(bundle, "release/models/spleen/"))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("release/docs/README.md", "")
        archive.writestr("release/LICENSE.txt", "CC BY-NC 4.0")

    assert refusal(file).reason is Reason.LICENCE
    added = add_model(str(file), AddOptions(lambda model, licence: "BY-NC" in licence.text))
    assert (added.folder / "configs").is_dir()
    assert (added.folder / "LICENSE.txt").is_file()


def test_several_models_in_one_zip_file_are_named(own: Path, bundle: Path) -> None:
    file = bundle.parent / "release.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for path in ("spleen/configs/metadata.json", "liver/configs/metadata.json"):
            archive.writestr(path, "{}")

    assert "2 models (liver, spleen): add them one by one" in refusal(file).detail


def test_a_part_of_a_task_of_totalsegmentator_is_not_taken_for_it(
    own: Path, nested: None, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of nnU-Net's models alone would take its data set without the task's recipe."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("Dataset297/a__b__c/plans.json", "{}")
    monkeypatch.setattr(addresses, "TOTALSEGMENTATOR", server.address)
    dataset = "Dataset297_TotalSegmentator_total_3mm_1559subj"
    server.pages[f"/v2.0.0-weights/{dataset}.zip"] = Page(stream.getvalue())

    assert refusal("totalsegmentator/total_fast").reason is Reason.MODEL_UNKNOWN
    assert server.log != []
