"""Files of a bundle that are outside it, never end, or grow are refused by name."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scanloom.convert.monai.bundle import read_bundle
from scanloom.core import Reason, ScanError, printable
from support.bundles import CONFIG, spleen_config, spleen_metadata, write_bundle

STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj.exe\u2028\x00"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "spleen")


def refusal(folder: Path) -> ScanError:
    with pytest.raises(ScanError) as error:
        read_bundle(folder)
    assert str(folder.parent) not in str(error.value)
    assert str(error.value).isprintable()
    return error.value


FILES = ["models/model.pt", "configs/inference.json", "configs/metadata.json", "LICENSE"]


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_bundle_is_refused(bundle: Path, name: str) -> None:
    """The link is refused even if it leads back into the bundle through a folder outside."""
    outside = bundle.parent / "outside"
    (bundle / "LICENSE").write_text("MIT License")
    (bundle / name).rename(outside)
    (bundle / name).symlink_to(outside)

    error = refusal(bundle)

    assert error.reason is Reason.MODEL_UNSAFE
    assert error.detail == f"{name} is a link out of the bundle: replace it with the file"


@pytest.mark.parametrize("name", ["models", "configs"])
def test_a_folder_that_is_a_link_out_of_the_bundle_is_refused(bundle: Path, name: str) -> None:
    (bundle / name).rename(bundle.parent / name)
    (bundle / name).symlink_to(bundle.parent / name)

    assert refusal(bundle).reason is Reason.MODEL_UNSAFE


def test_links_within_a_bundle_and_to_it_are_followed(bundle: Path) -> None:
    (bundle / "models" / "model.pt").rename(bundle / "models" / "v2.pt")
    (bundle / "models" / "model.pt").symlink_to("v2.pt")
    (bundle.parent / "link").symlink_to(bundle)

    assert read_bundle(bundle.parent / "link").weights.sha256 == read_bundle(bundle).weights.sha256


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize("kind", ["pipe", "folder", "circle", "nothing"])
def test_pipes_and_folders_are_refused_at_once(bundle: Path, name: str, kind: str) -> None:
    file = bundle / name
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "circle":
            file.symlink_to(file)

    assert refusal(bundle).reason is Reason.MODEL_DAMAGED


def test_a_device_is_not_read(bundle: Path) -> None:
    (bundle / "configs" / "metadata.json").unlink()
    (bundle / "configs" / "metadata.json").symlink_to("/dev/zero")

    assert refusal(bundle).reason is Reason.MODEL_DAMAGED


def doubled(levels: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, levels)]
    return "\n".join(lines)


def squared(levels: int) -> str:
    lines = ["a0: 99"]
    lines += [f"a{n}: $@a{n - 1} * @a{n - 1}" for n in range(1, levels)]
    return "\n".join([*lines, f"network_def: '@a{levels - 1}'"])


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"network_def: *a{levels - 1}"])


RUN = """
run: $@evaluator.run()
evaluator: {_target_: SupervisedEvaluator, network: "@network_def"}
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (doubled(60), Reason.MODEL_UNSUPPORTED),
        (laughs(40), Reason.MODEL_UNSUPPORTED),
        ("network_def: " + "[" * 50_000, Reason.MODEL_DAMAGED),
        ("a: &a [*a]\nnetwork_def: *a", Reason.MODEL_UNSUPPORTED),
        ("network_def: 1" + ":59" * 100_000, Reason.MODEL_UNSUPPORTED),
        ("network_def: 1" + ":59" * 100_000 + ".5", Reason.MODEL_UNSUPPORTED),
        (f"network_def: {'9' * 39}", Reason.MODEL_UNSUPPORTED),
        (f"network_def: {'9' * 5_000}", Reason.MODEL_UNSUPPORTED),
        (squared(40), Reason.MODEL_UNSUPPORTED),
        ("x: " + "y" * (1 << 20), Reason.MODEL_DAMAGED),
        ("network_def: !!python/object/apply:os.system [true]", Reason.MODEL_DAMAGED),
    ],
)
def test_a_config_that_grows_is_refused(tmp_path: Path, text: str, reason: Reason) -> None:
    bundle = write_bundle(tmp_path / "spleen", suffix=".yaml")
    (bundle / "configs" / "inference.yaml").write_text(f"{RUN}\n{text}")

    assert refusal(bundle).reason is reason


def test_anchors_are_read(tmp_path: Path) -> None:
    """A YAML anchor that is used twice does not count as growth."""
    bundle = write_bundle(tmp_path / "spleen", suffix=".yaml")
    text = yaml.safe_dump({**CONFIG, "a": 1}, sort_keys=False).replace("a: 1", "a: &a 1\nb: *a")
    (bundle / "configs" / "inference.yaml").write_text(text)

    assert read_bundle(bundle).network.name == "UNet"


def test_weights_that_are_packed_to_grow_are_refused(bundle: Path) -> None:
    with zipfile.ZipFile(bundle / "models/model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/0", bytes(10 << 20))

    error = refusal(bundle)

    assert error.reason is Reason.MODEL_UNSAFE
    assert "would expand to 10 MiB" in error.detail


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_clone_without_git_lfs_is_named(name: str, bundle: Path) -> None:
    (bundle / "models" / "model.pt").unlink()
    (bundle / "models" / name).write_bytes(POINTER)

    assert "get the file itself by `git lfs pull`" in refusal(bundle).detail


def test_weights_of_any_size_are_not_hashed(bundle: Path) -> None:
    with (bundle / "models" / "model.pt").open("wb") as file:
        file.truncate(1 << 42)

    assert refusal(bundle).reason is Reason.MODEL_DAMAGED


def test_texts_of_metadata_can_be_shown(tmp_path: Path) -> None:
    """Texts of a bundle do not steer a terminal; several lines become one."""
    metadata = spleen_metadata()
    for key in ("version", "name", "description", "intended_use", "authors", "copyright"):
        metadata[key] = f"one\ntwo{STEERING}"
    channels = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
    channels["1"] = f"spleen{STEERING}"
    metadata["network_data_format"]["inputs"]["image"]["channel_def"]["0"] = STEERING
    metadata["scanloom"] = {"license": STEERING}

    card = read_bundle(write_bundle(tmp_path / "spleen", metadata=metadata))

    assert card.title == "one two" + printable(STEERING)
    texts = [card.version, card.title, card.description, card.intended_use, card.license]
    texts += [card.attribution, card.channels[0].name, card.structures[0].name]
    assert [text for text in texts if not text.isprintable()] == []


@pytest.mark.parametrize("field", ["name", "type"])
def test_names_and_codes_that_can_not_be_written_are_refused(tmp_path: Path, field: str) -> None:
    """They go into DICOM as they stand."""
    metadata = spleen_metadata()
    code = {"value": "1", "scheme": "99X", "meaning": "a\x1bb"}
    metadata["scanloom"] = {
        "structures": {"spleen": {field: "a\x9bb" if field == "name" else code}}
    }

    assert (
        refusal(write_bundle(tmp_path / "spleen", metadata=metadata)).reason is Reason.MODEL_DAMAGED
    )


@pytest.mark.parametrize("key", ["preprocessing", "inferer", "network_def", "ckpt_path", "unknown"])
@pytest.mark.parametrize("text", [STEERING, "@" + STEERING, "$" + STEERING, "$'" + STEERING + "'"])
def test_quoted_text_of_a_config_is_printable(tmp_path: Path, key: str, text: str) -> None:
    config: dict[str, Any] = spleen_config()
    if key == "unknown":
        config["inferer"][STEERING] = 1
    else:
        config[key] = text
    if key == "ckpt_path":
        del config["checkpointloader"]

    refusal(write_bundle(tmp_path / "spleen", config))
