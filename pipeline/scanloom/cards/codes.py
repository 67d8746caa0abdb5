"""Codes and colours of structures, looked up by name.

Values and meanings are from DICOM PS3.16 (CID 7150, 7166, 7192, 7194, 244), as in pydicom's
dictionary. TotalSegmentator's names that have a finer code in its own table (Apache-2.0) get that
one. A name that is in neither gets the unspecific code "Tissue".

Colours of structures are looked up by code, in `colors.json`. One hue serves both sides of a
paired structure: the right one is darker. `Structure.color`, which DICOM SEG and `segments.json`
record, is the model's own if it states one; pictures have those of the table.
"""

from __future__ import annotations

import colorsys
import json
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from scanloom.core import Code, Structure, slug
from scanloom.core.segmentation import Color

ANATOMY: Final = Code("91723000", "SCT", "Anatomical Structure")
TISSUE: Final = Code("85756007", "SCT", "Tissue")
SUBSTANCE: Final = Code("91720002", "SCT", "Body Substance")
ABNORMAL: Final = Code("49755003", "SCT", "Morphologically Abnormal Structure")
PHYSICAL_OBJECT: Final = Code("260787004", "SCT", "Physical object")

LEFT: Final = Code("7771000", "SCT", "Left")
RIGHT: Final = Code("24028007", "SCT", "Right")
SIDES: Final = {side.value: side for side in (LEFT, RIGHT)}
"""Lateralities by the values of their codes."""

_ANATOMY: Final = {
    "adrenal": ("23451007", "Adrenal gland"),
    "airway": ("89187006", "Airway structure"),
    "amygdala": ("4958002", "Amygdala"),
    "aorta": ("15825003", "Aorta"),
    "artery": ("51114001", "Artery"),
    "autochthon": ("44947003", "Erector spinae muscle"),
    "brain": ("12738006", "Brain"),
    "brain stem": ("119238007", "Brain Stem"),
    "brain ventricle": ("35764002", "Brain ventricle"),
    "bronchus": ("955009", "Bronchus"),
    "caudate": ("11000004", "Caudate Nucleus"),
    "cerebellum": ("113305005", "Cerebellum"),
    "cerebellum cortex": ("25991003", "Cerebellar Cortex"),
    "cerebellum white matter": ("33060004", "Cerebellar White Matter"),
    "cerebral cortex": ("40146001", "Cerebral cortex"),
    "cerebral white matter": ("68523003", "Cerebral White Matter"),
    "clavicle": ("51299004", "Clavicle"),
    "colon": ("71854001", "Colon"),
    "corpus callosum": ("88442005", "Corpus callosum"),
    "corpus callosum anterior": ("88442005", "Corpus callosum"),
    "corpus callosum central": ("88442005", "Corpus callosum"),
    "corpus callosum mid anterior": ("88442005", "Corpus callosum"),
    "corpus callosum mid posterior": ("88442005", "Corpus callosum"),
    "corpus callosum posterior": ("88442005", "Corpus callosum"),
    "costal cartilage": ("50016007", "Costal Cartilage"),
    "diencephalon": ("87563008", "Diencephalon"),
    "duodenum": ("38848004", "Duodenum"),
    "entorhinal cortex": ("3937002", "Entorhinal Cortex"),
    "esophagus": ("32849002", "Esophagus"),
    "face": ("89545001", "Face"),
    "femur": ("71341001", "Femur"),
    "fourth ventricle": ("35918002", "Fourth Ventricle"),
    "frontal lobe": ("83251001", "Frontal lobe"),
    "gallbladder": ("28231008", "Gallbladder"),
    "gray matter": ("389081007", "Gray Matter"),
    "heart": ("80891009", "Heart"),
    "hepatic vein": ("8993003", "Hepatic vein"),
    "hip": ("29836001", "Hip"),
    "hippocampus": ("5366008", "Hippocampus"),
    "humerus": ("85050009", "Humerus"),
    "iliac artery": ("73634005", "Common iliac artery"),
    "iliac vein": ("46027005", "Common iliac vein"),
    "iliac vena": ("46027005", "Common iliac vein"),
    "inferior lateral ventricle": ("53118009", "Inferior Horn of Lateral Ventricle"),
    "inferior vena cava": ("64131007", "Inferior vena cava"),
    "insula": ("36169008", "Insula"),
    "kidney": ("64033007", "Kidney"),
    "lateral ventricle": ("66720007", "Lateral Ventricle"),
    "left atrium": ("82471001", "Left atrium"),
    "left ventricle": ("87878005", "Left ventricle"),
    "limbic lobe": ("279215006", "Limbic lobe"),
    "liver": ("10200004", "Liver"),
    "lower lobe lung": ("90572001", "Lower lobe of lung"),
    "lung": ("39607008", "Lung"),
    "mediastinum": ("72410000", "Mediastinum"),
    "middle lobe lung": ("72481006", "Middle lobe of right lung"),
    "nucleus accumbens": ("427667007", "Nucleus Accumbens"),
    "occipital lobe": ("31065004", "Occipital lobe"),
    "pallidum": ("14738005", "Globus Pallidus"),
    "pancreas": ("15776009", "Pancreas"),
    "parietal lobe": ("16630005", "Parietal lobe"),
    "parotid": ("45289007", "Parotid gland"),
    "portal splenic vein": ("32764006", "Portal vein"),
    "portal vein": ("32764006", "Portal vein"),
    "prostate": ("41216001", "Prostate"),
    "pulmonary artery": ("81040000", "Pulmonary artery"),
    "pulmonary vein": ("122972007", "Pulmonary vein"),
    "putamen": ("89278009", "Putamen"),
    "rectum": ("34402009", "Rectum"),
    "rib": ("113197003", "Rib"),
    "right atrium": ("73829009", "Right atrium"),
    "right ventricle": ("53085002", "Right ventricle"),
    "sacrum": ("54735007", "Sacrum"),
    "scapula": ("79601000", "Scapula"),
    "skull": ("89546000", "Skull"),
    "small intestine": ("30315005", "Small intestine"),
    "spinal cord": ("2748008", "Spinal cord"),
    "spleen": ("78961009", "Spleen"),
    "splenic vein": ("35819009", "Splenic vein"),
    "sternum": ("56873002", "Sternum"),
    "stomach": ("69695003", "Stomach"),
    "superior vena cava": ("48345005", "Superior vena cava"),
    "temporal lobe": ("78277001", "Temporal lobe"),
    "thalamus": ("42695009", "Thalamus"),
    "third ventricle": ("49841001", "Third ventricle"),
    "thymus": ("9875009", "Thymus"),
    "thyroid": ("69748006", "Thyroid"),
    "trachea": ("44567001", "Trachea"),
    "upper lobe lung": ("45653009", "Upper lobe of lung"),
    "ureter": ("87953007", "Ureter"),
    "urinary bladder": ("89837001", "Bladder"),
    "uterus": ("35039007", "Uterus"),
    "vein": ("29092000", "Vein"),
    "vertebra": ("51282000", "Vertebra"),
    "white matter": ("389080008", "White Matter"),
}
_VERTEBRAE: Final = {
    "C": "14806007 39976000 113205007 5329002 36978003 36054005 87391001",
    "T": "64864005 53733008 1626008 73071006 56401006 45296009 62487009 11068009 82687006 7610001 "
    "12989004 23215003",
    "L": "66794005 14293000 36470004 11994002 49668003",
}
_TISSUE: Final = {
    "bone": ("3138006", "Bone"),
    "fat": ("55603005", "Fat"),
    "muscle": ("91727004", "Muscle"),
    "skin": ("39937001", "Skin"),
    "soft": ("87784001", "Soft tissue"),
}
_SUBSTANCE: Final = {
    "blood": ("87612001", "Blood"),
    "cerebrospinal fluid": ("65216001", "Cerebrospinal Fluid"),
    "fluid": ("32457005", "Body fluid"),
    "gas": ("74947009", "Gas"),
}
_ABNORMAL: Final = {
    "cyst": ("367643001", "Cyst"),
    "edema": ("79654002", "Edema"),
    "lesion": ("52988006", "Lesion"),
    "necrosis": ("6574001", "Necrosis"),
    "tumor": ("108369006", "Neoplasm"),
}
_GYRI: Final = {
    "frontal lobe": "caudalmiddlefrontal frontalpole lateralorbitofrontal medialorbitofrontal "
    "paracentral parsopercularis parsorbitalis parstriangularis precentral rostralmiddlefrontal "
    "superiorfrontal",
    "limbic lobe": "caudalanteriorcingulate isthmuscingulate posteriorcingulate "
    "rostralanteriorcingulate",
    "occipital lobe": "cuneus lateraloccipital lingual pericalcarine",
    "parietal lobe": "inferiorparietal postcentral precuneus superiorparietal supramarginal",
    "temporal lobe": "bankssts fusiform inferiortemporal middletemporal parahippocampal "
    "superiortemporal temporalpole transversetemporal",
}
"""Parcels of FreeSurfer's cortex by the lobe that contains them; DICOM has no codes for most."""
_SAME: Final[Mapping[str, str]] = {
    "3rd": "third",
    "4th": "fourth",
    "accumbens": "nucleus accumbens",
    "adipose": "fat",
    "air": "gas",
    "bladder": "urinary bladder",
    "bones": "bone",
    "bowel": "intestine",
    "bronchi": "bronchus",
    "brainstem": "brain stem",
    "cc": "corpus callosum",
    "clavicula": "clavicle",
    "csf": "cerebrospinal fluid",
    "ctx": "",
    "entorhinal": "entorhinal cortex",
    "gluteus": "muscle",
    "grey": "gray",
    "iliopsoas": "muscle",
    "inf": "inferior",
    "ivc": "inferior vena cava",
    "kideny": "kidney",  # so spelled in a bundle of the zoo
    "kidneys": "kidney",
    "l": "left",  # AAPM TG-263: Kidney_L
    "lat": "lateral",
    "lh": "left",
    "lungs": "lung",
    "lv": "left ventricle",
    "myocardium": "heart",
    "neoplasm": "tumor",
    "oesophagus": "esophagus",
    "r": "right",
    "rh": "right",
    "rv": "right ventricle",
    "tumour": "tumor",
    "veins": "vein",
    "vent": "ventricle",
    "ventraldc": "diencephalon",
    "ventricles": "ventricle",
    "vertebrae": "vertebra",
    **{parcel: lobe for lobe, parcels in _GYRI.items() for parcel in parcels.split()},
}
_NOISE: Final = frozenset(
    (
        "and",
        "area",
        "body",
        "exterior",
        "gland",
        "mask",
        "maximus",
        "medius",
        "minimus",
        "of",
        "pool",
        "proper",
        "the",
        "tissue",
        "tissues",
        "whole",
    )
)

_CATEGORIES: Final = {code.value: code for code in (TISSUE, SUBSTANCE, ABNORMAL, PHYSICAL_OBJECT)}
OTHER: Final = "Other structures"
"""System of structures whose code is not in the table."""
RIGHT_SHADE: Final = 0.72
"""Brightness of a right structure relative to the left one, as a factor of each sRGB value."""
MIN_RGB_RANGE: Final = 60
"""Smallest difference between the sRGB values of a colour that is distinct from grey."""


@dataclass(frozen=True)
class Coding:
    """DICOM codes of a structure; `known` is False if its name is not in the table."""

    category: Code
    type: Code
    laterality: Code | None
    known: bool = True


def coding(name: str) -> Coding:
    """Return the codes of a structure by its name, such as "kidney_left" or "Right Kidney".

    Word order, case, plural and "of" do not matter. Structures with a separate code for each side
    ("left atrium") get no laterality, nor do levels of the spine ("L 5"). TotalSegmentator's names
    ("rib_left_1") count as a whole.
    """
    return _exact_names().get(slug(name)) or coding_by_words(name)


def coding_by_words(name: str) -> Coding:
    """Return the codes of a structure by the words of its name alone."""
    terms = _terms(name)
    sides = terms & {"left", "right"}
    side = None if len(sides) != 1 else LEFT if "left" in sides else RIGHT
    for candidate, laterality in ((terms, None), (terms - {"left", "right"}, side)):
        for key in (candidate, candidate - {"heart"}):
            if key in _TABLE:
                category, code = _TABLE[key]
                return Coding(category, code, laterality)
    for term in (*_ABNORMAL, *_SUBSTANCE):  # "pancreatic tumor", "gas in the bowel"
        if term in terms:
            category, code = _TABLE[frozenset({term})]
            return Coding(category, code, side)
    return Coding(ANATOMY, TISSUE, side, known=False)


def color(number: int) -> Color:
    """Return the colour of structure `number`: distinct, and most different from its neighbours.

    Hues follow the golden ratio; saturation changes with each structure, value with every third.
    """
    hue = (0.02 + (number - 1) * 0.618034) % 1
    saturation = (0.85, 0.55, 0.70)[number % 3]
    value = (1.0, 0.78, 0.90)[number // 3 % 3]
    red, green, blue = (round(255 * c) for c in colorsys.hsv_to_rgb(hue, saturation, value))
    return red, green, blue


def coded_structure(
    label: str, number: int, name: str, *, coded_as: str | None = None, rgb: Color | None = None
) -> Structure:
    """Return a structure with codes by its name, and a colour by its number: see `color_by_code`.

    Parameters
    ----------
    label : str
        Its slug.
    number : int
        Its number in label maps.
    name : str
        Its display name.
    coded_as : str, optional
        The name that its codes are looked up by, instead of `name`.
    rgb : (R, G, B), optional
        Its colour, 0 to 255, if the model states one.

    Raises
    ------
    ValueError
        If label, number or colour are invalid.
    """
    codes = coding(name if coded_as is None else coded_as)
    return Structure(
        label=label,
        number=number,
        name=name,
        category=codes.category,
        type=codes.type,
        color=rgb or color(number),
        laterality=codes.laterality,
    )


@cache
def _exact_names() -> Mapping[str, Coding]:
    """Return the codes of TotalSegmentator's structures, by label."""
    file = Path(__file__).with_name("codes.json")
    codes = json.loads(file.read_text(encoding="utf-8"))["codes"]
    return {
        slug(name): Coding(
            _CATEGORIES.get(category, ANATOMY),
            Code(value, "SCT", meaning),
            None if side is None else SIDES[side],
        )
        for name, (category, value, meaning, side) in codes.items()
    }


_SPINE: Final = re.compile(
    r"vertebra|spin(?:e|al)|dis[ck]|lumbar|^(?:[\W_]*[ctls][\W_]*\d+)+[\W_]*$"
)
"""Names, in lower case, in which a letter before a number is a level of the spine."""


def _terms(name: str) -> frozenset[str]:
    """Return the normalised terms of a name: lower case, singular, without noise words."""
    text = name.lower()
    if _SPINE.search(text):  # "L 5" is no side
        text = re.sub(r"\b([ctls])[\W_]+(?=\d)", r"\1", text.replace("_", " "))
    terms = re.findall(r"[a-z0-9]+", text)
    normalised = {synonym for term in terms for synonym in _SAME.get(term, term).split()} - _NOISE
    if "rib" in normalised or "muscle" in normalised:
        normalised = {term for term in normalised if not term.isdigit()}
    return frozenset(normalised)


def _table() -> dict[frozenset[str], tuple[Code, Code]]:
    table = {}
    for category, entries in (
        (ANATOMY, _ANATOMY),
        (TISSUE, _TISSUE),
        (SUBSTANCE, _SUBSTANCE),
        (ABNORMAL, _ABNORMAL),
    ):
        for name, (value, meaning) in entries.items():
            table[frozenset(name.split())] = (category, Code(value, "SCT", meaning))
    for region, values in _VERTEBRAE.items():
        for n, value in enumerate(values.split(), start=1):
            code = Code(value, "SCT", f"{region}{n} vertebra")
            table[frozenset({"vertebra", f"{region}{n}".lower()})] = (ANATOMY, code)
    return table


_TABLE: Final = _table()


def display_colors(
    structures: Iterable[Structure], taken: Collection[Color] = ()
) -> dict[int, Color]:
    """Return a colour for each structure of a model, by its number.

    A structure gets the colour of its code and side, or the model's own if the table lacks the code
    and it is not greyish. If that is taken by another structure or model, or missing, it gets
    the free colour of the table that is least like those of the model's other structures. The left
    and the right one of a pair share such a colour: the right one is darker.
    """
    colors: dict[int, Color] = {}
    used = set(taken)
    waiting = []
    for pair in _pairs(structures):
        coded = {s.number: table_color(s) or _own_color(s, pair) for s in pair}
        chosen = {number: color for number, color in coded.items() if color is not None}
        if len({*chosen.values()} - used) < len(pair):
            waiting.append(pair)
        else:
            colors |= chosen
            used.update(chosen.values())
    shades = [(color, _darker(color)) for color in _palette()]  # on the left, on the right
    nearest = np.full((len(shades), 2), np.inf)  # their differences to the colours that are shown
    nearest = _closer(nearest, shades, [*colors.values()])
    for n, pair in enumerate(waiting):
        columns = [int(_is_right(s)) for s in pair]
        free = [used.isdisjoint(each[column] for column in columns) for each in shades]
        unlike = np.where(free, nearest[:, columns].min(axis=1), -1)
        best = int(unlike.argmax()) if any(free) else n % len(shades)
        own = [shades[best][column] for column in columns]
        colors.update(zip((s.number for s in pair), own, strict=True))
        used.update(own)
        nearest = _closer(nearest, shades, own)
    return colors


def _pairs(structures: Iterable[Structure]) -> list[tuple[Structure, ...]]:
    """Return the structures in the order of their numbers, with the other side of each beside it.

    The two have one code, and labels that differ in the words of the side alone.
    """
    pairs: dict[Hashable, list[Structure]] = {}
    for structure in sorted(structures, key=lambda s: s.number):
        side = structure.laterality
        tokens = re.findall(r"[a-z0-9]+", structure.label.lower())
        plain = tuple(token for token in tokens if _SAME.get(token, token) not in ("left", "right"))
        is_lateral = side is not None and side.value in SIDES
        key = (structure.type.value, plain) if is_lateral else structure.number
        pairs.setdefault(key, []).append(structure)
        if len({s.laterality for s in pairs[key]}) < len(pairs[key]):  # not each the other's side
            pairs[structure.number] = [pairs[key].pop()]
    return [tuple(pair) for pair in pairs.values()]


def _own_color(structure: Structure, pair: Sequence[Structure]) -> Color | None:
    """Return the model's colour, of a pair that of the left one; None if it is greyish."""
    of_left = min(pair, key=lambda s: s.laterality != LEFT)
    if max(of_left.color) - min(of_left.color) < MIN_RGB_RANGE:
        return None
    return of_left.color if structure is of_left else _of_side(of_left.color, structure)


def color_by_code(
    structures: Sequence[Structure], stated: Collection[str] = ()
) -> tuple[Structure, ...]:
    """Return the structures of a model with the colours of pictures, each its own.

    Those whose labels are in `stated` keep the colour that the model states.
    """
    taken = {s.color for s in structures if s.label in stated}
    colors = display_colors([s for s in structures if s.label not in stated], taken)
    return tuple(replace(s, color=colors.get(s.number, s.color)) for s in structures)


def colors_of_models(
    models: Iterable[tuple[str, Iterable[Structure]]],
) -> dict[tuple[str, int], Color]:
    """Return a colour for each structure, by model and number; no two models share a colour."""
    colors: dict[tuple[str, int], Color] = {}
    for model, structures in models:
        own = display_colors(structures, set(colors.values()))
        colors |= {(model, number): color for number, color in own.items()}
    return colors


def structure_of_entry(entry: Mapping[str, Any]) -> Structure:
    """Return the structure in an entry of `segments.json`."""
    side = entry["laterality"]
    red, green, blue = entry["color"]
    return Structure(
        entry["label"],
        entry["number"],
        entry["name"],
        Code(**entry["category"]),
        Code(**entry["type"]),
        (red, green, blue),
        Code(**side) if side else None,
        entry["experimental"],
    )


def sided(structure: Structure, side: Literal["left", "right"]) -> Structure:
    """Return a structure as that of a side of the body: label, name, code and colour say so.

    Raises
    ------
    ValueError
        If it has a side already, or its label becomes too long.
    """
    if structure.laterality is not None:
        raise ValueError(f"{structure.label} has a side already")
    lateral = replace(
        structure,
        label=f"{structure.label}_{side}",
        name=f"{structure.name}, {side}",
        laterality=LEFT if side == "left" else RIGHT,
    )
    return replace(lateral, color=_of_side(structure.color, lateral))


def table_color(structure: Structure) -> Color | None:
    """Return the colour of a structure's code and side; None if the table lacks the code."""
    entry = _color_table().get(structure.type.value)
    if entry is None:
        return None
    return _of_side(entry[1], structure)


def _of_side(color: Color, structure: Structure) -> Color:
    """Return a colour as the structures of a side have it: darker on the right."""
    return _darker(color) if _is_right(structure) else color


def _is_right(structure: Structure) -> bool:
    return structure.laterality is not None and structure.laterality.value == RIGHT.value


def _darker(color: Color) -> Color:
    red, green, blue = (round(c * RIGHT_SHADE) for c in color)
    return red, green, blue


def _closer(
    nearest: NDArray[np.float64], shades: Sequence[Sequence[Color]], shown: Sequence[Color]
) -> NDArray[np.float64]:
    """Return the least differences (N, 2) after more colours are shown.

    They are weighted as people see them: redmean, compuphase.com/cmetric.htm.
    """
    a, b = np.array(shades, float)[:, :, None], np.array(shown, float).reshape(-1, 3)
    red = (a[..., 0] + b[..., 0]) / 512
    weights = np.stack([2 + red, np.full_like(red, 4), 3 - red], axis=-1)
    difference = (weights * (a - b) ** 2).sum(axis=-1)
    closer: NDArray[np.float64] = np.minimum(nearest, difference.min(axis=-1, initial=np.inf))
    return closer


def shown_name(name: str) -> str:
    """Return the name of a structure as people read it: "Cerebral-White-Matter" has no hyphens.

    Words with digits or with capitals inside stay as they are, as in "Vertebra L1" or "VentralDC".
    """
    words = name.replace("_", " ").split()
    if len(words) == 1:
        words = [*filter(None, words[0].split("-"))]
    plain = [w.lower() if n and w.istitle() and w.isalpha() else w for n, w in enumerate(words)]
    text = " ".join(plain)
    return text[:1].upper() + text[1:]


def system_of(structure: Structure) -> str:
    """Return the system of the body that a structure belongs to, by its code."""
    entry = _color_table().get(structure.type.value)
    return OTHER if entry is None else entry[0]


@cache
def systems() -> tuple[str, ...]:
    """Return the names of all systems, in the order of the table."""
    return (*dict.fromkeys(system for system, _ in _color_table().values()), OTHER)


@cache
def _color_table() -> Mapping[str, tuple[str, Color]]:
    """Return system and colour of each code."""
    file = Path(__file__).with_name("colors.json")
    document = json.loads(file.read_text(encoding="utf-8"))
    return {
        code: (system, (red, green, blue))
        for system, rows in document["systems"].items()
        for code, (_, red, green, blue) in rows.items()
    }


@cache
def _palette() -> tuple[Color, ...]:
    """Return the different colours of the table, each far from the one before it."""
    colors = tuple(dict.fromkeys(color for _, color in _color_table().values()))
    step = next(n for n in (37, 41, 43) if len(colors) % n)
    return tuple(colors[n * step % len(colors)] for n in range(len(colors)))
