"""Names of tags and UIDs agree with pydicom's dictionaries."""

from __future__ import annotations

import re

import pytest
from pydicom._private_dict import private_dictionaries
from pydicom.datadict import keyword_for_tag
from pydicom.tag import Tag

from scanloom.io.dicom import tags

TAGS = {name: value for name, value in vars(tags).items() if isinstance(value, int)}
PRIVATE = {name: value for name, value in TAGS.items() if Tag(value).is_private}
CREATORS = {
    "SIEMENS": ("SIEMENS MR HEADER",),
    "GE": ("GEMS_ACQU_01", "GEMS_PARM_01"),
    "PHILIPS": ("Philips Imaging DD 001", "Philips MR Imaging DD 001"),
}
NOT_IN_PYDICOM = {"UIH_B_VALUE", "SIEMENS_IMAGE_TYPE", "PHILIPS_IMAGE_TYPE"}
"""Missing in pydicom's dictionary, or "Unknown" there."""
OTHERWISE_NAMED = {"GE_B_VALUE": "Slopint"}


def letters(text: str) -> str:
    """Return the letters and digits of a text alone, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


@pytest.mark.parametrize("name", sorted(TAGS.keys() - PRIVATE.keys()))
def test_standard_tags_have_their_keyword_as_name(name):
    assert keyword_for_tag(TAGS[name]).lower() == letters(name)


@pytest.mark.parametrize("name", sorted(PRIVATE.keys() - NOT_IN_PYDICOM))
def test_private_tags_have_the_name_of_their_manufacturer_and_attribute(name):
    manufacturer, _, attribute = name.partition("_")
    value = PRIVATE[name]
    key = f"{value >> 16:04X}xx{value & 0xFF:02X}"
    known = [private_dictionaries[creator].get(key) for creator in CREATORS[manufacturer]]
    descriptions = [letters(entry[2]) for entry in known if entry is not None]
    expected = letters(OTHERWISE_NAMED.get(name, attribute))
    assert any(text.startswith(expected) for text in descriptions), descriptions


def test_no_tag_has_two_names():
    assert len(set(TAGS.values())) == len(TAGS)


def test_private_tags_are_in_the_first_block():
    assert {value >> 8 & 0xFF for value in PRIVATE.values()} == {0x10}
