"""Names of transfer syntaxes and storage classes agree with pydicom's dictionary."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from pydicom.uid import UID_dictionary

from scanloom.io.dicom import uids

UIDS = {k: v for k, v in vars(uids).items() if k.isupper() and isinstance(v, str)}
PREFIXES = {name for name in UIDS if name.endswith("FAMILY") or name == "STORAGE"}
NOT_IN_PYDICOM = {"DEFLATED_IMAGE_FRAME_COMPRESSION"}
MEMBERS = {
    "WAVEFORM_FAMILY": "Waveform",
    "PRESENTATION_STATE_FAMILY": "PresentationState",
    "SURFACE_SCAN_FAMILY": "SurfaceScan",
    "STRUCTURED_REPORT_FAMILY": "SRStorage|ProcedureLog|KeyObjectSelection",
    "ENCAPSULATED_DOCUMENT_FAMILY": "Encapsulated",
}
"""Pattern that the keywords of a family's members contain."""


@pytest.mark.parametrize("name", sorted(UIDS.keys() - PREFIXES - NOT_IN_PYDICOM))
def test_uids_have_their_keyword_as_name(name):
    assert UID_dictionary[UIDS[name]][4].lower() == name.replace("_", "").lower()


@pytest.mark.parametrize("family", MEMBERS)
def test_families_have_the_members_of_their_name(family):
    prefix = UIDS[family] + "."
    keywords = [entry[4] for uid, entry in UID_dictionary.items() if uid.startswith(prefix)]
    assert keywords
    assert [keyword for keyword in keywords if not re.search(MEMBERS[family], keyword)] == []


def test_reading_headers_does_not_import_pydicom():
    code = "import scanloom.io.dicom.header.header, sys; print('pydicom' in sys.modules)"
    command = [sys.executable, "-c", code]
    reply = subprocess.run(command, capture_output=True, text=True, check=True)
    assert reply.stdout.strip() == "False"
