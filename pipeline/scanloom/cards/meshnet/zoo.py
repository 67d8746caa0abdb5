"""Read the MeshNets of MONAI's Model Zoo, whose bundles consist of scripts.

The scripts are never run. A bundle is read here if each of its scripts has a known SHA-256: then
it is known what they do, and the network, grid and intensity steps of this package take their
place. A bundle with any other script is left to the reader of MONAI bundles, which refuses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scanloom.cards.card import ANY_MODALITY, ModelCard, NetworkSpec
from scanloom.cards.codes import color
from scanloom.cards.meshnet.make_card import find_weights, make_card
from scanloom.cards.meshnet.recipes import MINDGRAB_QUANTILES, Recipe
from scanloom.cards.meshnet.structures import LabelFields, make_structures
from scanloom.cards.monai.files import find_file, read_json
from scanloom.core import Reason, ScanError

_CONFIG, _METADATA = "configs/inference.json", "configs/metadata.json"
_WEIGHTS: Final = "models/model.pt"
_MAX_SCRIPT: Final = 1 << 18
"""Largest script that is hashed, in bytes."""
_DILATIONS: Final = [16, 8, 4, 2, 1] * 5


@dataclass(frozen=True)
class KnownBundle:
    """A bundle whose scripts are known.

    Parameters
    ----------
    scripts : mapping
        SHA-256 of all scripts of the bundle, by file.
    classes : tuple of str
        Classes of the network, and of the transforms before and after it, as in the config.
    network : mapping
        Arguments of the network.
    recipe : Recipe
        Effects of the transforms.
    """

    scripts: Mapping[str, str]
    classes: tuple[str, str, str]
    network: Mapping[str, Any]
    recipe: Recipe


KNOWN: Final[tuple[KnownBundle, ...]] = (
    KnownBundle(
        scripts={
            "scripts/checkpoint.py": (
                "d0cdc8a050b739a82190e9fec8fbca44dffcd9ce79dd12ab107f62f4bb3306a8"
            ),
            "scripts/conform.py": (
                "799a8c6ae1849993f780466ce3c1ad12cfe976a63dbd5370fa3a32aa082beae5"
            ),
            "scripts/network.py": (
                "e77fb49541ea07d60ecd3ed41d48b35723152aff1e22e5ed74358a4898eeaab3"
            ),
            "scripts/postprocess.py": (
                "4718d1436684c762c38431de1fda3a8eb591826a337f268543088882ebd5171a"
            ),
            "scripts/transforms.py": (
                "2b45421de253cae2a52cd0f873ba6b0035a1e53e952c51853a1c278929e7bdfd"
            ),
        },
        classes=(
            "scripts.network.MindGrabNet",
            "scripts.transforms.MindGrabPreprocessd",
            "scripts.transforms.MindGrabPostprocessd",
        ),
        network={
            "in_channels": 1,
            "channels": 15,
            "classes": 2,
            "dilations": _DILATIONS,
            "activation": "gelu",
            "norm": "instance",
            "bias": False,
            "classifier_bias": False,
        },
        recipe=Recipe(
            "MindGrab: brain in images of any modality",
            MINDGRAB_QUANTILES,
            above=None,
            modality=ANY_MODALITY,
        ),
    ),
)


def is_known_bundle(folder: Path) -> bool:
    """Return whether a folder is a bundle whose scripts are those of a known one."""
    return _find_known(folder) is not None


def read_known_bundle(folder: Path) -> ModelCard:
    """Read a bundle that `is_known_bundle` accepts.

    Raises
    ------
    ScanError
        MODEL_DAMAGED if a file is missing or malformed; MODEL_UNSUPPORTED if the config uses other
        classes or arguments; MODEL_HASH if the weights differ from those that the config names.
    """
    known = _find_known(folder)
    if known is None:
        raise ScanError(Reason.MODEL_UNSAFE, "the bundle's scripts are not known")
    config, metadata = read_json(folder, _CONFIG), read_json(folder, _METADATA)
    _check_config(config, known)
    weights = find_weights(folder, _WEIGHTS, None)
    expected = config.get("checkpoint_sha256")
    if expected not in (None, weights.sha256):
        detail = f"the weights' SHA-256 is {weights.sha256[:12]}.., but another in the config"
        raise ScanError(Reason.MODEL_HASH, detail)
    try:
        names = metadata["network_data_format"]["outputs"]["pred"]["channel_def"]
        labels = [
            LabelFields(number=int(n), name=name, color=color(max(int(n), 1)))
            for n, name in names.items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise ScanError(Reason.MODEL_DAMAGED, f"{_METADATA} does not name the classes") from exc
    structures = make_structures(labels, known.network["classes"])
    network = NetworkSpec("MeshNet", known.network)
    return make_card(folder, network, weights, known.recipe, structures)


def _find_known(folder: Path) -> KnownBundle | None:
    """Return the known bundle with the scripts of a folder, None if there is none."""
    try:
        present = {
            f"scripts/{file.relative_to(folder / 'scripts').as_posix()}": _sha256(folder, file)
            for file in (folder / "scripts").rglob("*.py")
            if file.name != "__init__.py"
        }
    except (OSError, ScanError, ValueError):
        return None
    return next((known for known in KNOWN if dict(known.scripts) == present), None)


def _sha256(folder: Path, file: Path) -> str:
    inside = find_file(folder, file.relative_to(folder).as_posix())
    if inside is None or inside.stat().st_size > _MAX_SCRIPT:
        return ""
    return hashlib.sha256(inside.read_bytes()).hexdigest()


def _check_config(config: Any, known: KnownBundle) -> None:
    """Refuse a config (MODEL_UNSUPPORTED) that is not made of the known classes alone."""
    network, before, after = known.classes
    try:
        transforms = [config[part]["transforms"] for part in ("preprocessing", "postprocessing")]
        targets = [[step["_target_"] for step in steps] for steps in transforms]
        arguments = [set(step) for steps in transforms for step in steps if "scripts." in str(step)]
        as_known = (
            config["network_def"] == {"_target_": network}
            and config["inferer"] == {"_target_": "SimpleInferer"}
            and targets == [["LoadImaged", before, "EnsureTyped"], [after, "SaveImaged"]]
            and all(names <= {"_target_", "keys", "save_conform"} for names in arguments)
            and config.get("save_conform", False) is False
        )
    except (KeyError, TypeError):
        as_known = False
    if not as_known:
        detail = f"{_CONFIG} does more than the known scripts"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
