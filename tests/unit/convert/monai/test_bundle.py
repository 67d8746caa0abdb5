"""A bundle becomes a card that describes MONAI's steps, or is refused by name."""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import math
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scanloom.cards.card import (
    Argmax,
    Channel,
    Checks,
    FastPreset,
    KeepLargest,
    ModelCard,
    NetworkGrid,
    NetworkSpec,
    Normalize,
    ReferenceDirection,
    ScaleMinMax,
    ScaleRange,
    Threshold,
    Window,
)
from scanloom.convert.monai.bundle import read_bundle
from scanloom.convert.monai.config import MIRRORED_MEAN
from scanloom.convert.weights import ForeignWeights
from scanloom.core import Code, ScanError, Structure
from scanloom.core.measurement import Range, ReferenceRange
from support.bundles import WEIGHTS, spleen_config, spleen_metadata, transform, write_bundle

Change = Callable[[dict[str, Any]], Any]


def changed(tmp_path: Path, change: Change) -> ModelCard:
    """Return the card of the spleen bundle with a changed config."""
    config = spleen_config()
    change(config)
    return read_bundle(write_bundle(tmp_path / "spleen", config))


def refusal(tmp_path: Path, change: Change) -> ScanError:
    with pytest.raises(ScanError) as caught:
        changed(tmp_path, change)
    return caught.value


def post(config: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = config["postprocessing"]["transforms"]
    return steps


def pre(config: dict[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = config["preprocessing"]["transforms"]
    return steps


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_spleen_bundle_says_all_that_a_card_needs(suffix: str, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "Spleen by Hand", suffix=suffix)

    card = read_bundle(folder)

    assert card == ModelCard(
        name="spleen_by_hand",
        version="1.2.3",
        title="Spleen by hand",
        description="Finds the spleen",
        intended_use="Tests only",
        license="unknown",
        attribution="Nobody. Copyright (c) Nobody. None",
        channels=(Channel("image", "CT"),),
        network=NetworkSpec(
            "UNet",
            {
                "spatial_dims": 3,
                "in_channels": 1,
                "out_channels": 2,
                "channels": [16, 32, 64, 128, 256],
                "strides": [2, 2, 2, 2],
                "num_res_units": 2,
                "norm": "batch",
            },
        ),
        weights=ForeignWeights(
            folder / "models" / "model.pt", hashlib.sha256(WEIGHTS).hexdigest(), key="model"
        ),
        grid=NetworkGrid("RAS", (1.5, 1.5, 2.0), "linear"),
        window=Window((96, 96, 96), 0.5, "constant", 0.125, "constant", 0.0),
        structures=(
            Structure(
                "spleen",
                1,
                "Spleen",
                Code("91723000", "SCT", "Anatomical Structure"),
                Code("78961009", "SCT", "Spleen"),
                card.structures[0].color,
            ),
        ),
        before=(),
        after=(ScaleRange(-57.0, 164.0, 0.0, 1.0, clip=True),),
        activation="softmax",
        decision=Argmax(),
        restore="scores",
        cleaning=(),
        checks=Checks(),
        precisions=("float32",),
    )
    assert card.n_outputs == 2


def test_limitations_are_those_of_the_metadata(tmp_path: Path) -> None:
    metadata = spleen_metadata()
    head = {"text": "Not for heads.", "where": "head"}
    metadata["scanloom"] = {"limitations": ["Misses small spleens.", head]}
    card = read_bundle(write_bundle(tmp_path / "b", metadata=metadata))
    assert card.limitations_in(()) == ("Misses small spleens.",)
    assert card.limitations_in({"head"}) == ("Not for heads.", "Misses small spleens.")


@pytest.mark.parametrize(
    "sentence",
    ["", "a" * 301, "two\nlines", 3, {"text": "Not there.", "where": "lung"}, {"text": "Where?"}],
)
def test_limitations_are_sentences(tmp_path: Path, sentence: object) -> None:
    metadata = spleen_metadata()
    metadata["scanloom"] = {"limitations": [sentence]}
    with pytest.raises(ScanError, match="limitation") as caught:
        read_bundle(write_bundle(tmp_path / "b", metadata=metadata))
    assert caught.value.code == "MODEL_DAMAGED"


def test_reference_ranges_are_those_of_the_metadata(tmp_path: Path) -> None:
    metadata = spleen_metadata()
    stated = {"structure": "spleen", "quantity": "mean_hu", "range": [30, 150], "source": "A page."}
    metadata["scanloom"] = {"reference_ranges": [stated]}
    card = read_bundle(write_bundle(tmp_path / "b", metadata=metadata))
    expected = ReferenceRange("spleen", "mean_hu", Range(30.0, 150.0), "A page.")
    assert card.reference_ranges == (expected,)


@pytest.mark.parametrize(
    "change",
    [{"structure": "rib"}, {"quantity": "mean"}, {"range": [150, 30]}, {"source": ""}],
)
def test_reference_ranges_are_checked(tmp_path: Path, change: dict[str, object]) -> None:
    metadata = spleen_metadata()
    stated = {"structure": "spleen", "quantity": "mean_hu", "range": [30, 150], "source": "A page."}
    metadata["scanloom"] = {"reference_ranges": [{**stated, **change}]}
    with pytest.raises(ScanError, match=r"reference_range|usual value") as caught:
        read_bundle(write_bundle(tmp_path / "b", metadata=metadata))
    assert caught.value.code == "MODEL_DAMAGED"


DIRECTION = {"start": ["spleen"], "end": ["spleen"], "direction": [0, 0, 1], "within": 30}


def test_reference_directions_are_those_of_the_metadata(tmp_path: Path) -> None:
    metadata = spleen_metadata()
    metadata["scanloom"] = {"reference_directions": [{**DIRECTION, "source": "A page."}]}
    card = read_bundle(write_bundle(tmp_path / "b", metadata=metadata))
    both = ("spleen",), ("spleen",)
    expected = ReferenceDirection(*both, (0.0, 0.0, 1.0), 30.0, "A page.")
    assert card.reference_directions == (expected,)


@pytest.mark.parametrize(
    "change",
    [
        {"start": ["rib"]},
        {"end": ["spleen", "rib"]},
        {"end": []},
        {"direction": [0, 0, 0]},
        {"direction": [0, 1]},
        {"within": 0},
        {"within": 180},
    ],
)
def test_reference_directions_are_checked(tmp_path: Path, change: dict[str, object]) -> None:
    metadata = spleen_metadata()
    stated = {**DIRECTION, "source": "A page.", **change}
    metadata["scanloom"] = {"reference_directions": [stated]}
    with pytest.raises(ScanError, match=r"reference_direction|usual value") as caught:
        read_bundle(write_bundle(tmp_path / "b", metadata=metadata))
    assert caught.value.code == "MODEL_DAMAGED"


# --- what a card can express ---------------------------------------------------------------------


def test_intensity_steps_keep_their_place_around_the_resampling(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        step = {"_target_": "NormalizeIntensityd", "keys": ["image"], "nonzero": "True"}
        pre(config).insert(2, step)
        pre(config).append({"_target_": "ScaleIntensityd", "keys": "image", "minv": -1})

    card = changed(tmp_path, change)

    assert card.before == (Normalize(None, None, nonzero=True),)
    assert card.after == (ScaleRange(-57.0, 164.0, 0.0, 1.0, clip=True), ScaleMinMax(-1.0, 1.0))


def test_without_spacing_all_steps_come_after_and_nothing_is_brought_back(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        del pre(config)[2:4]
        del post(config)[1]
        config["inferer"] = {"_target_": "SimpleInferer"}
        post(config).insert(2, {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"})

    card = changed(tmp_path, change)

    assert card.grid == NetworkGrid(None, None)
    assert (card.before, len(card.after)) == ((), 1)
    assert card.window == Window(None)
    assert card.cleaning == (KeepLargest(when="after"),)


def test_decided_first_then_brought_back_by_nearest_neighbour_is_labels(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        steps = post(config)
        transform(config, "Invertd")["nearest_interp"] = True
        steps[1], steps[2] = steps[2], steps[1]
        clean = {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"}
        steps.insert(2, {**clean, "applied_labels": [1], "connectivity": 1, "num_components": 2})
        steps.insert(4, {**clean, "independent": False})

    card = changed(tmp_path, change)

    assert card.restore == "labels"
    assert card.cleaning == (
        KeepLargest((1,), together=False, parts=2, connectivity=6, when="before"),
        KeepLargest((), together=True, parts=1, connectivity=26, when="after"),
    )


def test_scores_brought_back_by_nearest_neighbour_are_labels_too(tmp_path: Path) -> None:
    """Argmax of the nearest voxel's scores is the nearest voxel's argmax."""
    card = changed(tmp_path, lambda c: transform(c, "Invertd").pop("nearest_interp"))

    assert card.restore == "labels"


def two_channels(metadata: dict[str, Any], first: str) -> None:
    pred = metadata["network_data_format"]["outputs"]["pred"]
    pred["channel_def"] = {"0": first, "1": "liver tumor"}


def test_threshold_makes_each_channel_a_structure(tmp_path: Path) -> None:
    """Channel 0 of several is not cleaned unless it is named: so MONAI treats one-hot results."""
    config, metadata = spleen_config(), spleen_metadata()
    transform(config, "Activationsd").update(softmax=False, sigmoid=True)
    config["postprocessing"]["transforms"][2] = {
        "_target_": "AsDiscreted",
        "keys": "pred",
        "threshold": 0.4,
    }
    post(config).insert(-1, {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"})
    two_channels(metadata, "liver")

    card = read_bundle(write_bundle(tmp_path / "liver", config, metadata))

    assert card.decision == Threshold(0.4)
    assert card.activation == "sigmoid"
    assert [(s.number, s.label) for s in card.structures] == [(1, "liver"), (2, "liver_tumor")]
    assert card.cleaning == (KeepLargest((2,), when="after"),)
    assert card.n_outputs == 2

    post(config)[-2]["independent"] = False  # the largest component of all channels united
    united = write_bundle(tmp_path / "united", config, metadata)

    with pytest.raises(ScanError, match="independent"):
        read_bundle(united)


def test_background_channel_of_a_threshold_is_no_structure(tmp_path: Path) -> None:
    config, metadata = spleen_config(), spleen_metadata()
    post(config)[2] = {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5}
    two_channels(metadata, "background")

    card = read_bundle(write_bundle(tmp_path / "liver", config, metadata))

    assert [(s.number, s.label) for s in card.structures] == [(2, "liver_tumor")]
    assert card.n_outputs == 2


def test_scores_that_come_back_before_they_are_activated_need_no_activation(
    tmp_path: Path,
) -> None:
    """sigmoid(x) >= 0.2 is x >= log(0.25); the largest logit is the largest softmax."""

    def late(config: dict[str, Any]) -> None:
        steps = post(config)
        steps[0], steps[1] = steps[1], steps[0]

    def late_sigmoid(config: dict[str, Any]) -> None:
        late(config)
        transform(config, "Activationsd").update(softmax=False, sigmoid=True)
        post(config)[2] = {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.2}

    softmax = changed(tmp_path / "a", late)
    metadata = spleen_metadata()
    two_channels(metadata, "liver")
    config = spleen_config()
    late_sigmoid(config)
    sigmoid = read_bundle(write_bundle(tmp_path / "b" / "liver", config, metadata))

    assert (softmax.activation, softmax.decision, softmax.restore) == (None, Argmax(), "scores")
    assert sigmoid.activation is None
    assert isinstance(sigmoid.decision, Threshold)
    assert sigmoid.decision.value == pytest.approx(-1.3862943611)


def test_full_names_and_other_spellings_mean_the_same(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["network_def"]["_target_"] = "monai.networks.nets.unet.Unet"
        config["inferer"]["_target_"] = "monai.inferers.SlidingWindowInferer"
        for step in pre(config):
            step["_target_"] = step["_target_"].removesuffix("d") + "Dict"
        transform(config, "Invertd")["_target_"] = "monai.transforms.InvertD"

    def nothing(config: dict[str, Any]) -> None:
        """Leave it as it is."""

    assert changed(tmp_path / "a", change).grid == changed(tmp_path / "b", nothing).grid
    assert changed(tmp_path / "c", change).network.name == "UNet"


def test_arguments_that_monai_has_dropped_are_dropped(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["network_def"] = {
            "_target_": "SwinUNETR",
            "img_size": 96,
            "in_channels": 1,
            "out_channels": "$1 + 1",
            "feature_size": 48,
        }

    assert changed(tmp_path, change).network == NetworkSpec(
        "SwinUNETR", {"in_channels": 1, "out_channels": 2, "feature_size": 48}
    )


def test_scanloom_section_of_the_metadata_is_read(tmp_path: Path) -> None:
    metadata = spleen_metadata()
    metadata["scanloom"] = {
        "weights_sha256": hashlib.sha256(WEIGHTS).hexdigest(),
        "checks": {"low": [-1100, -500], "spacing": [0.3, 6], "refuse": ["spacing"]},
        "precisions": ["float32", "float16"],
        "kernel": "soft",
        "fast": {"overlap": 0.1, "spacing": [3, 3, 4.5], "precisions": ["bfloat16"]},
        "structures": {
            "spleen": {
                "name": "The spleen",
                "type": {"value": "10200004", "scheme": "SCT", "meaning": "Liver"},
                "color": [1, 2, 3],
                "experimental": True,
            }
        },
        "license": "CC0-1.0",
        "attribution": "All of us",
    }

    card = read_bundle(write_bundle(tmp_path / "spleen", None, metadata))

    assert card.checks == Checks(low=Range(-1100, -500), spacing=Range(0.3, 6), refuse=("spacing",))
    assert card.precisions == ("float32", "float16")
    assert card.kernel == "soft"
    assert card.fast == FastPreset(0.1, spacing=(3.0, 3.0, 4.5), precisions=("bfloat16",))
    assert (card.license, card.attribution) == ("CC0-1.0", "All of us")
    (spleen,) = card.structures
    assert (spleen.name, spleen.type.meaning, spleen.color) == ("The spleen", "Liver", (1, 2, 3))
    assert spleen.experimental


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Apache License\n Version 2.0", "Apache-2.0"),
        ("MIT License", "MIT"),
        ("Ask us", "see LICENSE"),
    ],
)
def test_licence_is_named_by_its_file(text: str, expected: str, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    (folder / "LICENSE").write_text(text)

    assert read_bundle(folder).license == expected


# --- MONAI as a witness --------------------------------------------------------------------------


def test_defaults_are_monais(tmp_path: Path) -> None:
    """For keys that a config lacks, the card has the defaults of MONAI's signatures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inferers = pytest.importorskip("monai.inferers")
        transforms = pytest.importorskip("monai.transforms")

    def default(owner: Any, name: str) -> Any:
        return inspect.signature(owner).parameters[name].default

    def change(config: dict[str, Any]) -> None:
        config["inferer"] = {"_target_": "SlidingWindowInferer", "roi_size": 32}
        transform(config, "Spacingd").pop("mode")
        transform(config, "ScaleIntensityRanged").pop("clip")
        pre(config).append({"_target_": "ScaleIntensityd", "keys": "image"})
        pre(config).append({"_target_": "NormalizeIntensityd", "keys": "image"})
        post(config).insert(3, {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"})

    card = changed(tmp_path, change)
    window, sliding = card.window, inferers.SlidingWindowInferer
    keep, components = card.cleaning[0], transforms.KeepLargestConnectedComponent
    ranged, scaled, normalised = card.after
    assert isinstance(ranged, ScaleRange)
    assert isinstance(scaled, ScaleMinMax)
    assert isinstance(normalised, Normalize)

    assert window.size == (32, 32, 32)
    assert window.overlap == default(sliding, "overlap")
    assert window.blending == default(sliding, "mode").value
    assert window.sigma_scale == default(sliding, "sigma_scale")
    assert window.padding == default(sliding, "padding_mode").value
    assert window.padding_value == default(sliding, "cval")
    assert default(transforms.Spacingd, "mode").value == "bilinear"
    assert card.grid.mode == "linear"
    assert default(transforms.Spacingd, "padding_mode").value == "border"
    assert ranged.clip is default(transforms.ScaleIntensityRanged, "clip")
    assert scaled.minv == default(transforms.ScaleIntensityd, "minv")
    assert scaled.maxv == default(transforms.ScaleIntensityd, "maxv")
    assert normalised.nonzero is default(transforms.NormalizeIntensityd, "nonzero")
    assert default(transforms.Invertd, "nearest_interp") is True
    assert keep.together is not default(components, "independent")
    assert keep.parts == default(components, "num_components")
    assert default(components, "connectivity") is None
    assert keep.connectivity == 26


def test_networks_are_those_that_can_be_built() -> None:
    """One table has the names that a card may have, and the classes that are built."""
    builder = pytest.importorskip("scanloom.inference.network.architectures")

    for name in builder.NETWORKS:
        network_class, _ = builder.find_class(NetworkSpec(name, {}))
        assert network_class.__name__ == name


# --- what is refused -----------------------------------------------------------------------------

STEP = {"keys": "image"}


def add(name: str, **args: Any) -> Change:
    return lambda c: pre(c).append({"_target_": name, "keys": "image", **args})


def set_in(name: str, **args: Any) -> Change:
    return lambda c: transform(c, name).update(args)


def swap(first: int, second: int) -> Change:
    def change(config: dict[str, Any]) -> None:
        steps = post(config)
        steps[first], steps[second] = steps[second], steps[first]

    return change


def resize(**args: Any) -> Change:
    """Put Resized in the place of Spacingd."""
    resized = {"_target_": "Resized", "keys": "image", "spatial_size": [9, 9, 9], **args}
    return lambda c: pre(c).__setitem__(3, resized)


def each(*changes: Change) -> Change:
    def change(config: dict[str, Any]) -> None:
        for one in changes:
            one(config)

    return change


def set_inferer(**args: Any) -> Change:
    return lambda c: c["inferer"].update(args)


def mean_with_mirrored(channels: Any, function: str = MIRRORED_MEAN) -> Change:
    """Put the mean with the mirrored scan in the place of the inferer."""

    def change(config: dict[str, Any]) -> None:
        config["sliding_window"] = config["inferer"]
        config["order"] = channels
        config["inferer"] = f"${function}(@sliding_window, @order)"

    return change


def test_the_mean_with_the_mirrored_scan(tmp_path: Path) -> None:
    plain = changed(tmp_path, lambda c: None).window

    mirrored = changed(tmp_path / "mirrored", mean_with_mirrored([0, 1])).window

    assert mirrored == replace(plain, mirror=(0,), mirrored_channels=(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mean_with_mirrored([0, 0]), "channels"),
        (mean_with_mirrored([0, 2]), "channels"),
        (mean_with_mirrored([0, 1, 2]), "3 channels of 2"),
        (mean_with_mirrored(["0", "1"]), "channels"),
        (mean_with_mirrored(1), "channels"),
        (mean_with_mirrored([0, 1], MIRRORED_MEAN.replace("x.flip(2)", "x.flip(3)")), "run code"),
        (mean_with_mirrored([0, 1], MIRRORED_MEAN.replace("/ 2", "/ open('/x')")), "run code"),
    ],
)
def test_another_mean_with_a_mirrored_scan_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    assert message in refusal(tmp_path, change).detail


@pytest.mark.parametrize(
    ("pixdim", "spacing"),
    [(1.5, (1.5, 1.5, 1.5)), ([1.5], (1.5, 1.5, 1.5)), ([1.5, 2.0], (1.5, 2.0, 2.0))],
)
def test_missing_spacings_are_equal_to_the_last(
    tmp_path: Path, pixdim: Any, spacing: tuple[float, float, float]
) -> None:
    config = spleen_config()
    set_in("Spacingd", pixdim=pixdim)(config)

    card = read_bundle(write_bundle(tmp_path / "bundle", config))

    assert card.grid.spacing == spacing


UNSUPPORTED: list[tuple[Change, str]] = [
    (add("CropForegroundd", source_key="image", margin=[1, 2, 3]), "margin"),
    (add("CropForegroundd", source_key="image", margin=1, mode="edge"), "mode"),
    (add("CropForegroundd", source_key="image", k_divisible="8"), "k_divisible"),
    (
        each(add("SpatialPadd", spatial_size=99), add("CropForegroundd", source_key="image")),
        "CropForegroundd twice, or after padding",
    ),
    (add("SpatialPadd", spatial_size=[9, 9]), "spatial_size"),
    (add("SpatialPadd", spatial_size=[9, 9, 10**6]), "spatial_size"),
    (add("SpatialPadd", spatial_size=9, mode="wrap"), "mode"),
    (add("SpatialPadd", spatial_size=9, mode="edge", value=1), "value"),
    (add("DivisiblePadd", k=16, method="start"), "method"),
    (add("DivisiblePadd"), "k=None"),
    (
        each(
            lambda c: pre(c).__setitem__(3, {"_target_": "DivisiblePadd", "keys": "image", "k": 2}),
            add("Spacingd", pixdim=2),
        ),
        "padding",
    ),
    (
        each(
            lambda c: pre(c).__setitem__(3, {"_target_": "DivisiblePadd", "keys": "image", "k": 2}),
            lambda c: pre(c).insert(4, pre(c).pop(2)),
        ),
        "Orientationd after padding",
    ),
    (
        each(
            add("ResizeWithPadOrCropd", spatial_size=64),
            set_in("Activationsd", softmax=False, sigmoid=True),
            set_in("AsDiscreted", argmax=False, threshold=0.5),
            swap(0, 1),
        ),
        "Invertd of a crop before Activationsd",
    ),
    (
        each(
            add("ResizeWithPadOrCropd", spatial_size=64),
            set_in("Activationsd", softmax=False),
            set_in("AsDiscreted", argmax=False, threshold=0.0),
            set_in("Invertd", nearest_interp=True),
            swap(1, 2),
        ),
        "with a threshold of at most 0",
    ),
    (
        lambda c: (
            pre(c).append({"_target_": "DivisiblePadd", "keys": "image", "k": 2}),
            post(c).pop(1),
        )[1],
        "padded",
    ),
    (add("CropForegroundd", source_key="label"), "source_key"),
    (
        add(
            "CropForegroundd", source_key="image", select_fn="$lambda x: torch.nan_to_num(x, nan=0)"
        ),
        "select_fn",
    ),
    (add("Lambdad", func="$lambda x: torch.nan_to_num(x, nan=0)"), "Lambdad before the network"),
    (add("Resized", spatial_size=[9, 9, 9]), "Resized"),
    (resize(mode="area", align_corners=True), "align_corners"),
    (
        each(
            resize(mode="area", align_corners=True),
            set_in("AsDiscreted", argmax=False, threshold=0.0),
            swap(1, 2),
        ),
        "align_corners",
    ),
    (resize(mode="nearest"), "mode"),
    (resize(mode="trilinear", anti_aliasing=True), "anti_aliasing"),
    (
        each(resize(mode="trilinear"), add("CropForegroundd", source_key="image")),
        "CropForegroundd after a trilinear Resized",
    ),
    (each(resize(mode="trilinear"), swap(1, 2)), "of labels after Resized"),
    (add("Spacingd", pixdim=[1, 1, 1]), "Spacingd twice"),
    (add("Orientationd", axcodes="RAS"), "Orientationd"),
    (add("Activationsd", softmax=True), "Activationsd"),
    (add("UNet"), "UNet"),
    (lambda c: pre(c)[0].update(keys=["t1", "t2"]), "t1"),
    (lambda c: pre(c)[5].update(keys="label"), "label"),
    (set_in("Orientationd", axcodes="RAX"), "axcodes"),
    (set_in("Orientationd", axcodes="RLS"), "axcodes"),
    (set_in("Orientationd", as_closest_canonical=True), "as_closest_canonical"),
    (set_in("Spacingd", pixdim=[1.5, 1.5, -1]), "pixdim"),
    (set_in("Spacingd", pixdim="@device"), "pixdim"),
    (set_in("Spacingd", diagonal=True), "diagonal"),
    (set_in("Spacingd", padding_mode="zeros"), "padding_mode"),
    (set_in("Spacingd", mode=3), "mode"),
    (set_in("Spacingd", max_pixdim=[2, 2, 2]), "max_pixdim"),
    (set_in("Spacingd", scale_extent=True), "scale_extent"),
    (set_in("Spacingd", newer_argument=1), "newer_argument"),
    (set_in("ScaleIntensityRanged", a_min="low"), "a_min"),
    (set_in("ScaleIntensityRanged", clip="maybe"), "clip"),
    (set_in("ScaleIntensityRanged", dtype="$torch.int16"), "dtype"),
    (set_in("LoadImaged", dtype="$numpy.uint8"), "dtype"),
    (add("ScaleIntensityd", factor=2), "factor"),
    (add("NormalizeIntensityd", subtrahend=[1, 2]), "subtrahend"),
    (add("ScaleIntensityRangePercentilesd", lower=1, upper=101, b_min=0, b_max=1), "lower"),
    (add("ScaleIntensityRangePercentilesd", lower=1, upper=99, relative=True), "relative"),
    (set_inferer(_target_="SliceInferer", spatial_dim=2), "SliceInferer"),
    (set_inferer(_target_="scripts.MyInferer"), "MyInferer"),
    (set_inferer(roi_size=[96, 96]), "roi_size"),
    (set_inferer(roi_size=[96, 96, -1]), "roi_size"),
    (set_inferer(overlap=[0.5, 0.5, 0.25]), "overlap"),
    (set_inferer(overlap=1.0), "overlap"),
    (set_inferer(overlap=0.9999), "overlap"),
    (set_inferer(mode="cosine"), "mode"),
    (set_inferer(padding_mode="circular"), "padding_mode"),
    (set_inferer(with_coord=True), "with_coord"),
    (set_in("Activationsd", other="$torch.float32"), "other"),
    (set_in("Activationsd", sigmoid=True), "sigmoid"),
    (set_in("AsDiscreted", argmax=False), "argmax"),
    (set_in("AsDiscreted", threshold=0.5), "argmax"),
    (set_in("AsDiscreted", to_onehot=2), "to_onehot"),
    (set_in("AsDiscreted", rounding="torchrounding"), "rounding"),
    (lambda c: post(c).pop(2), "AsDiscreted"),
    (lambda c: post(c).pop(1), "Invertd"),
    (swap(0, 2), "Activationsd"),
    (
        lambda c: post(c).append({"_target_": "Activationsd", "keys": "pred", "sigmoid": True}),
        "Activationsd",
    ),
    (set_in("Invertd", transform="@inferer"), "transform"),
    (set_in("Invertd", orig_keys="label"), "orig_keys"),
    (set_in("Invertd", post_func="$torch.float32"), "post_func"),
    (set_in("Invertd", keys="label"), "label"),
    (lambda c: post(c).append({"_target_": "Invertd", "keys": "pred"}), "Invertd"),
    (
        lambda c: post(c).insert(0, {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"}),
        "before AsDiscreted",
    ),
    (
        lambda c: post(c).insert(
            -1,
            {"_target_": "KeepLargestConnectedComponentd", "keys": "pred", "applied_labels": [0]},
        ),
        "applied_labels",
    ),
    (
        lambda c: post(c).insert(
            -1, {"_target_": "KeepLargestConnectedComponentd", "keys": "pred", "connectivity": 4}
        ),
        "connectivity",
    ),
    (
        lambda c: post(c).insert(0, {"_target_": "FillHolesd", "keys": "pred"}),
        "FillHolesd before AsDiscreted",
    ),
    (
        lambda c: post(c).insert(
            -1, {"_target_": "RemoveSmallObjectsd", "keys": "pred", "connectivity": None}
        ),
        "connectivity",
    ),
    (
        each(
            set_in("AsDiscreted", argmax=False, threshold=0.5),
            lambda c: post(c).insert(-1, {"_target_": "RemoveSmallObjectsd", "keys": "pred"}),
        ),
        "RemoveSmallObjectsd of several channels, which it connects",
    ),
    (
        each(
            set_in("AsDiscreted", argmax=False, threshold=0.5),
            lambda c: post(c).insert(
                -1, {"_target_": "FillHolesd", "keys": "pred", "applied_labels": 0}
            ),
        ),
        "applied_labels",
    ),
    (lambda c: c["network_def"].update(spatial_dims=2), "2 dimensions"),
    (lambda c: c["network_def"].update(act="$torch.float32"), "act"),
    (lambda c: c.update(network="@inferer_name", inferer_name="UNet"), "UNet"),
    (lambda c: c.update(postprocessing="pred"), "pred"),
    (lambda c: c["evaluator"].update(postprocessing={"_target_": "Compose"}), "AsDiscreted"),
    (lambda c: c["evaluator"].update(mode="train"), "mode='train'"),
    (lambda c: c["evaluator"].update(decollate=False), "decollate"),
    (lambda c: c["evaluator"].update(to_kwargs={"dtype": "$torch.float16"}), "to_kwargs"),
    (lambda c: c["evaluator"].update(val_handlers=[{"_target_": "TrtHandler"}]), "TrtHandler"),
    (lambda c: c["evaluator"].update(_target_="EnsembleEvaluator"), "EnsembleEvaluator"),
    (lambda c: c["evaluator"].pop("val_data_loader"), "val_data_loader"),
    (lambda c: c["evaluator"].update(_disabled_="$not False"), "is not an evaluator"),
    (lambda c: c["evaluator"].update(_disabled_="$torch.cuda.is_available()"), "_disabled_"),
    (lambda c: c["dataloader"].update(batch_size=None), "batch_size"),
    (lambda c: c["dataset"].update(_target_="PersistentDataset"), "PersistentDataset"),
    (lambda c: c["dataset"].pop("transform"), "LoadImaged is not the first"),
    (lambda c: c["run"].append("$@evaluator.run()"), "2 evaluators"),
    (lambda c: c.update(initialize=["$@checkpointloader(@evaluator) if False else None"]), "loads"),
    (lambda c: c["checkpointloader"].update(strict_shape=False), "strict_shape"),
    (
        lambda c: c["checkpointloader"].update(load_dict={"m": "$copy.deepcopy(@network)"}),
        "load_dict",
    ),
    (lambda c: post(c).append({"_target_": "Activationsd", "keys": "pred"}), "after SaveImaged"),
    (set_in("SaveImaged", scale=255), "scale"),
    (set_in("AsDiscreted", dtype="int4"), "dtype"),
    (set_in("EnsureTyped", track_meta=False), "track_meta"),
    (set_in("EnsureTyped", data_type="numpy"), "data_type"),
    (lambda c: transform(c, "Invertd").pop("orig_keys"), "orig_keys"),
    (lambda c: pre(c).pop(1), "EnsureChannelFirstd"),
    (set_in("EnsureChannelFirstd", channel_dim=0), "channel_dim"),
    (lambda c: c.update({"inferer#overlap": 0.1}), "inferer#overlap"),
    (lambda c: c.update({"+inferer": {"overlap": 0.1}}), "+inferer"),
]


@pytest.mark.parametrize(("change", "named"), UNSUPPORTED)
def test_unsupported_entries_are_refused_by_name(
    change: Change, named: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, change)

    assert named in error.detail
    unsafe = named == "MyInferer"
    assert error.code == ("MODEL_UNSAFE" if unsafe else "MODEL_UNSUPPORTED")


def set_network(**args: Any) -> Change:
    return lambda c: c["network_def"].update(args)


HOSTILE: list[tuple[Change, str]] = [
    (set_network(norm="$import os"), "MODEL_UNSAFE"),
    (set_network(norm="$__import__('os').system('touch owned')"), "MODEL_UNSAFE"),
    (set_network(_target_="os.system"), "MODEL_UNSAFE"),
    (set_network(_target_="subprocess.Popen", args=["touch", "owned"]), "MODEL_UNSAFE"),
    (set_network(_target_="builtins.eval"), "MODEL_UNSAFE"),
    (set_network(_target_="scripts.net.Mine"), "MODEL_UNSAFE"),
    (set_network(_target_="eval"), "MODEL_NETWORK"),
    (set_network(_target_="monai.bundle.scripts.run"), "MODEL_NETWORK"),
    (set_network(_target_="monai.os.system"), "MODEL_NETWORK"),
    (set_network(_target_="monai.networks.nets.ResNet"), "MODEL_NETWORK"),
    (set_network(_target_="NoSuchNet"), "MODEL_NETWORK"),
    (set_network(_target_="Compose"), "MODEL_NETWORK"),
    (lambda c: c.update(network="$open('owned', 'w')"), "MODEL_UNSAFE"),
    (lambda c: c.update(network_def="$monai.networks.nets.vista3d132()"), "MODEL_UNSAFE"),
    (add("os.system"), "MODEL_UNSAFE"),
    (set_in("Spacingd", pixdim="$[__import__('os').getpid()] * 3"), "MODEL_UNSAFE"),
    (set_in("EnsureTyped", device="$__import__('os').system('x')"), "MODEL_UNSAFE"),
    (set_in("Invertd", transform="$copy.copy(@preprocessing)"), "MODEL_UNSAFE"),
    (add("Lambdad", func="$lambda x: x"), "MODEL_UNSAFE"),
    (set_inferer(sw_batch_size="$exec('1')"), "MODEL_UNSAFE"),
    (lambda c: c["evaluator"].update(inferer="@other"), "MODEL_DAMAGED"),
    (lambda c: c.pop("run"), "MODEL_DAMAGED"),
    (lambda c: c["initialize"].append("$@network.half()"), "MODEL_UNSAFE"),
    (lambda c: c["initialize"].append("$print(@network.half())"), "MODEL_UNSAFE"),
    (
        lambda c: c["run"].insert(0, "$[p.data.zero_() for p in @network.parameters()]"),
        "MODEL_UNSAFE",
    ),
    (lambda c: c.update(finalize=["$os.system('touch owned')"]), "MODEL_UNSAFE"),
    (lambda c: c.update(datalist="$[@network.half(), 'a']"), "MODEL_UNSAFE"),
    (lambda c: c["evaluator"].update(key_val_metric={"a": {"_target_": "x.Y"}}), "MODEL_UNSAFE"),
    (lambda c: c["evaluator"].update(prepare_batch="$lambda *a: a"), "MODEL_UNSAFE"),
    (lambda c: c["checkpointloader"].update(load_path="$os.environ['X']"), "MODEL_UNSAFE"),
    (lambda c: c["checkpointloader"].update(load_path="/etc/passwd"), "MODEL_UNSAFE"),
    (lambda c: c["checkpointloader"].update(load_path="../../model.pt"), "MODEL_UNSAFE"),
    (set_network(norm="$" + "1+" * 300 + "1"), "MODEL_UNSUPPORTED"),
    (set_network(norm="$" + "[" * 200 + "]" * 200), "MODEL_UNSUPPORTED"),
    (lambda c: c.update(image_key="@image_key"), "MODEL_DAMAGED"),
    (lambda c: c.pop("network_def"), "MODEL_DAMAGED"),
    (lambda c: c.pop("inferer"), "MODEL_DAMAGED"),
    (set_network(in_channels=3), "MODEL_DAMAGED"),
    (set_network(out_channels=5), "MODEL_DAMAGED"),
]


@pytest.mark.parametrize(("change", "code"), HOSTILE)
def test_hostile_and_broken_configs_are_refused(
    change: Change, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert refusal(tmp_path, change).code == code
    assert not (tmp_path / "owned").exists()


def torchscript() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("model/data.pkl", "model/code/__torch__.py", "model/constants.pkl"):
            archive.writestr(name, b"")
    return stream.getvalue()


def test_weights_must_be_those_that_are_pinned(tmp_path: Path) -> None:
    metadata = spleen_metadata()
    metadata["scanloom"] = {"weights_sha256": hashlib.sha256(WEIGHTS).hexdigest()}
    same = write_bundle(tmp_path / "same", None, metadata)
    altered = write_bundle(tmp_path / "other", None, metadata, weights=WEIGHTS + b"!")

    assert read_bundle(same).weights.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    with pytest.raises(ScanError) as caught:
        read_bundle(altered)
    assert caught.value.code == "MODEL_HASH"


def test_weights_are_where_the_config_says(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    (folder / "models" / "model.pt").unlink()
    (folder / "models" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    twin = read_bundle(folder).weights
    (folder / "models" / "model.safetensors").unlink()

    assert twin.file == folder / "models" / "model.safetensors"
    assert not isinstance(twin, ForeignWeights)
    with pytest.raises(ScanError) as caught:
        read_bundle(folder)
    assert caught.value.code == "MODEL_DAMAGED"


FORMS: list[tuple[Change, str, str | None]] = [
    (lambda c: c["evaluator"].update(val_handlers=[loads("other")]), "other", "model"),
    (lambda c: c["evaluator"].update(val_handlers=[loads("a"), loads("other")]), "other", "model"),
    (
        lambda c: c["evaluator"].update(val_handlers=[{**loads("other"), "_disabled_": "$not 0"}]),
        *("model", "model"),
    ),
    (lambda c: c.update(handlers=[loads("other")]), "model", "model"),
    (lambda c: c["initialize"].append(STATE.format("other", "")), "other", None),
    (lambda c: c["initialize"].append(STATE.format("other", "['net']")), "other", "net"),
    (lambda c: c.update(run=[STATE.format("other", ""), "$@evaluator.run()"]), "other", None),
    (lambda c: c["run"].append(STATE.format("other", "")), "model", "model"),
]
STATE = "$@network.load_state_dict(torch.load('models/{}.pt', map_location=@device){})"


def loads(name: str) -> dict[str, Any]:
    loader = spleen_config()["checkpointloader"]
    return {**loader, "load_path": f"models/{name}.pt"}


@pytest.mark.parametrize(("change", "name", "key"), FORMS)
def test_weights_are_those_that_are_loaded_last(
    change: Change, name: str, key: str | None, tmp_path: Path
) -> None:
    """`initialize`, `run` before the evaluator starts, and handlers can load weights."""
    config = spleen_config()
    change(config)
    folder = write_bundle(tmp_path / "spleen", config)
    (folder / "models" / "other.pt").write_bytes(WEIGHTS)

    weights = read_bundle(folder).weights

    assert (weights.file.stem, weights.key) == (name, key)


def test_weights_that_nothing_loads_are_refused(tmp_path: Path) -> None:
    """MONAI would run the network with random weights."""

    def named(config: dict[str, Any]) -> None:
        config["initialize"] = []
        config["ckpt_path"] = "$@bundle_root + '/models/model.pt'"

    assert "loads weights into the network, as a Checkpoint" in refusal(tmp_path, named).detail


def test_entries_count_by_what_reaches_them(tmp_path: Path) -> None:
    """The dataset's transform counts, not the entry with the name `preprocessing`."""

    def change(config: dict[str, Any]) -> None:
        config["transforms"] = copy.deepcopy(config["preprocessing"])
        config["transforms"]["transforms"][3]["pixdim"] = [3.0, 3.0, 3.0]
        config["dataset"]["transform"] = "@transforms"
        transform(config, "Invertd")["transform"] = "@transforms"
        config["evaluator"]["inferer"] = {"_target_": "SimpleInferer"}

    card = changed(tmp_path, change)

    assert card.grid.spacing == (3.0, 3.0, 3.0)
    assert card.window == Window(None)


def test_transforms_of_a_handler_follow_those_of_the_evaluator(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        keep = {"_target_": "KeepLargestConnectedComponentd", "keys": "pred"}
        post(config).pop()
        handler = {"_target_": "PostProcessing", "transform": [keep]}
        config["evaluator"]["val_handlers"] = [handler]

    assert changed(tmp_path, change).cleaning == (KeepLargest(when="after"),)


@pytest.mark.parametrize("flag", ["$not @off", "@on", "$@on", " TRUE ", True, 1])
def test_transform_is_disabled_by_a_value_or_an_expression(flag: Any, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config.update(on=True, off=False)
        step = {"_target_": "ScaleIntensityd", "keys": "image", "_disabled_": flag}
        pre(config).insert(5, step)

    card = changed(tmp_path, change)

    assert card.after == (ScaleRange(-57.0, 164.0, 0.0, 1.0, clip=True),)


def test_two_configs_that_differ_are_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    text = yaml.safe_dump(spleen_config())
    file = folder / "configs" / "inference.yaml"
    file.write_text(text)

    assert read_bundle(folder).window.overlap == 0.5
    file.write_text(text.replace("overlap: 0.5", "overlap: 0.25"))
    with pytest.raises(ScanError, match=r"inference.json and configs/inference.yaml differ"):
        read_bundle(folder)


def test_imported_module_of_the_bundle_is_code(tmp_path: Path) -> None:
    """MONAI runs it, wherever the import is; an imported library does not belong to the bundle."""
    config = spleen_config()
    config["imports"] = ["$import glob", "$from scripts.patch import run"]
    folder = write_bundle(tmp_path / "spleen", config)
    assert isinstance(read_bundle(folder), ModelCard)

    (folder / "scripts").mkdir()
    (folder / "scripts" / "patch.py").write_text("raise RuntimeError")
    with pytest.raises(ScanError) as caught:
        read_bundle(folder)
    assert (caught.value.code, "scripts/patch.py" in caught.value.detail) == ("MODEL_UNSAFE", True)


def test_bundle_root_is_where_the_bundle_lies(tmp_path: Path) -> None:
    """Some bundles name a folder on their author's machine."""
    card = changed(tmp_path, lambda c: c.update(bundle_root="/models/spleen"))

    assert card.weights.file == tmp_path / "spleen" / "models" / "model.pt"


def test_statistics_over_all_channels_at_once_are_refused(tmp_path: Path) -> None:
    """A card's steps are those of each channel by itself."""

    def two(channel_wise: bool) -> Path:
        config, metadata = spleen_config(), spleen_metadata()
        config["network_def"]["in_channels"] = 2
        metadata["network_data_format"]["inputs"]["image"]["num_channels"] = 2
        step = {"_target_": "NormalizeIntensityd", "keys": "image", "channel_wise": channel_wise}
        pre(config).append(step)
        return write_bundle(tmp_path / str(channel_wise), config, metadata)

    assert len(read_bundle(two(channel_wise=True)).channels) == 2
    with pytest.raises(ScanError) as caught:
        read_bundle(two(channel_wise=False))
    assert caught.value.code == "MODEL_UNSUPPORTED"
    assert "channel_wise" in caught.value.detail


def test_torchscript_is_refused(tmp_path: Path) -> None:
    """Loading it runs code, so it is not even tried."""

    def to_ts(config: dict[str, Any]) -> None:
        config["checkpointloader"]["load_path"] = "models/model.ts"

    config = spleen_config()
    to_ts(config)
    named = write_bundle(tmp_path / "named", config)
    (named / "models" / "model.ts").write_bytes(WEIGHTS)
    hidden = write_bundle(tmp_path / "hidden", weights=torchscript())

    for folder in (named, hidden):
        with pytest.raises(ScanError) as caught:
            read_bundle(folder)
        assert caught.value.code == "MODEL_UNSAFE"


def put(path: str, value: Any) -> Change:
    """Return a change of the metadata; a value of Ellipsis takes the entry out."""

    def change(metadata: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for key in parents:
            metadata = metadata.setdefault(key, {})
        if value is ...:
            del metadata[last]
        else:
            metadata[last] = value

    return change


PRED = "network_data_format/outputs/pred"
IMAGE = "network_data_format/inputs/image"
METADATA_REFUSED: list[tuple[Change, str, str]] = [
    (put("version", ...), "MODEL_DAMAGED", "version is missing"),
    (put("network_data_format", ...), "MODEL_DAMAGED", "network_data_format"),
    (put(f"{PRED}/num_channels", 0), "MODEL_DAMAGED", "num_channels"),
    (put(f"{PRED}/channel_def", {"0": "background"}), "MODEL_DAMAGED", "channel 1"),
    (put(f"{PRED}/channel_def", {"0": "a", "1": "b"}), "MODEL_UNSUPPORTED", "background"),
    (put(f"{PRED}/channel_def", {"0": "bg", "1": "%"}), "MODEL_DAMAGED", "neither a letter"),
    (put(f"{IMAGE}/modality", "n/a"), "MODEL_UNSUPPORTED", "'n/a', and not one of CT, MR, PT"),
    (put(f"{IMAGE}/modality", ...), "MODEL_UNSUPPORTED", "states no modality"),
    (put("network_data_format", []), "MODEL_DAMAGED", "format is not a mapping of names to values"),
    (put(f"{PRED}/num_channels", "two"), "MODEL_DAMAGED", "is not a whole number, but 'two'"),
    (put("scanloom/limitations", [{}]), "MODEL_DAMAGED", "limitations.0.text is missing"),
    (put(f"{IMAGE}/modality", ["CT", "MR"]), "MODEL_UNSUPPORTED", "CT, MR"),
    (put(f"{IMAGE}/num_channels", 2), "MODEL_DAMAGED", "1 channels"),
    (put("network_data_format/inputs/second", {"num_channels": 1}), "MODEL_UNSUPPORTED", "2 inp"),
    (put("scanloom/limitations", [""]), "MODEL_DAMAGED", "fewer than 1 characters"),
    (put("scanloom/colour", 1), "MODEL_DAMAGED", "scanloom.colour is unknown"),
    (put("scanloom/spacing[mm]", 1), "MODEL_DAMAGED", "scanloom.spacing[mm] is unknown"),
    (put("scanloom/checks/low", [3]), "MODEL_DAMAGED", "scanloom.checks.low"),
    (put("scanloom/checks/low", [3, 1]), "MODEL_DAMAGED", "scanloom.checks.low"),
    (put("scanloom/checks/low", [-math.inf, 1]), "MODEL_DAMAGED", "scanloom.checks.low"),
    (put("scanloom/checks/refuse", ["hue"]), "MODEL_DAMAGED", "refuse"),
    (put("scanloom/weights_sha256", "abc"), "MODEL_DAMAGED", "weights_sha256"),
    (put("scanloom/precisions", ["int8"]), "MODEL_DAMAGED", "precisions"),
    (put("scanloom/kernel", "medium"), "MODEL_DAMAGED", "kernel"),
    (put("scanloom/fast", {"spacing": [3, 3, 0]}), "MODEL_DAMAGED", "fast.spacing"),
    (put("scanloom/structures/liver", {}), "MODEL_DAMAGED", "liver"),
    (put("scanloom/structures/spleen", {"color": [0, 0, 999]}), "MODEL_DAMAGED", "color"),
    (put("scanloom/structures/spleen", {"type": {"value": "1"}}), "MODEL_DAMAGED", "scheme"),
]


def test_names_in_other_scripts_have_labels_by_their_numbers(tmp_path: Path) -> None:
    metadata = spleen_metadata()
    put(f"{PRED}/channel_def", {"0": "background", "1": "脾臓"})(metadata)
    put("scanloom/structures/label_1", {"color": [1, 2, 3]})(metadata)

    [structure] = read_bundle(write_bundle(tmp_path / "spleen", None, metadata)).structures

    assert (structure.label, structure.name, structure.color) == ("label_1", "脾臓", (1, 2, 3))


@pytest.mark.parametrize(("change", "code", "named"), METADATA_REFUSED)
def test_wrong_metadata_are_refused_with_the_place(
    change: Change, code: str, named: str, tmp_path: Path
) -> None:
    metadata = copy.deepcopy(spleen_metadata())
    change(metadata)

    with pytest.raises(ScanError) as caught:
        read_bundle(write_bundle(tmp_path / "spleen", None, metadata))

    assert caught.value.code == code
    assert named in caught.value.detail


def places(entries: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every entry in nested dictionaries and lists."""
    if isinstance(entries, dict):
        items = list(entries.items())
    else:
        items = list(enumerate(entries)) if isinstance(entries, list) else []
    return [p for k, v in items for p in ((*path, k), *places(v, (*path, k)))]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["@device", "@inferer", "@preprocessing", "$[]", "$1", "models/x", "q" * 5000]),
    st.lists(st.one_of(st.integers(-1, 3), st.floats(), st.text(max_size=2)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.builds(lambda t: {"_target_": t}, st.sampled_from(["UNet", "Compose", "SaveImaged", "x.y"])),
)


@given(st.booleans(), st.integers(min_value=0), VALUES)
@settings(max_examples=200)
def test_any_change_gives_a_card_or_a_refusal(in_config: bool, which: int, value: Any) -> None:
    """Any value in any entry gives a card or a refusal, never another error."""
    config, metadata = spleen_config(), spleen_metadata()
    metadata["scanloom"] = {"checks": {"low": [0, 1]}, "structures": {"spleen": {"color": [0] * 3}}}
    changed = config if in_config else metadata
    *path, last = places(changed)[which % len(places(changed))]
    entry: Any = changed
    for key in path:
        entry = entry[key]
    entry[last] = value
    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder) / "spleen", config, metadata)
        try:
            result: object = read_bundle(Path(folder) / "spleen")
        except ScanError as exc:
            result = exc
    assert isinstance(result, ModelCard) or str(result).startswith("MODEL_")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metadata.json", None),
        ("metadata.json", b"{"),
        ("metadata.json", b"[]"),
        ("metadata.json", b"\xff\xfe\x00"),
        ("metadata.json", b"[" * 100_000),
        ("inference.json", None),
        ("inference.json", b""),
        ("inference.json", b"[1]"),
        ("inference.json", b"{" * 100_000),
        ("inference.yaml", b"a: [1"),
        ("inference.yaml", b"!!python/object/apply:os.system ['touch owned']"),
        ("inference.yaml", b"[" * 2_000),
        ("inference.yaml", b"- 1"),
        ("inference.yaml", b"x: 2024-99-99"),
    ],
)
def test_damaged_files_are_refused(file: str, content: bytes | None, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "spleen")
    if file == "inference.yaml":
        (folder / "configs" / "inference.json").unlink()
    if content is None:
        (folder / "configs" / file).unlink()
    else:
        (folder / "configs" / file).write_bytes(content)

    with pytest.raises(ScanError) as caught:
        read_bundle(folder)

    assert caught.value.code == "MODEL_DAMAGED"


def test_no_folder_is_a_damaged_bundle(tmp_path: Path) -> None:
    with pytest.raises(ScanError) as caught:
        read_bundle(tmp_path / "nothing")
    assert caught.value.code == "MODEL_DAMAGED"
