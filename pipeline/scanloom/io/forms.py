"""Which forms the NIfTI files of a case carry."""

from __future__ import annotations

from dataclasses import replace

from scanloom.core import Grid
from scanloom.io.quaternion import quaternion_of
from scanloom.io.scan import NiftiSource, Source

SCANNER = 1
"""NIFTI_XFORM_SCANNER_ANAT: mm in the patient, as the scanner says."""


def has_own_forms(source: Source) -> bool:
    """Whether the scan is a NIfTI that says by itself where it lies."""
    return isinstance(source, NiftiSource) and source.sform_code + source.qform_code > 0


def forms_for(grid: Grid, source: Source) -> NiftiSource:
    """Return sform and qform of a result.

    A qform that float32 can't hold is left out, so that all readers take the sform; where there is
    none, the sform says the same with the same code.

    Parameters
    ----------
    grid : Grid
        Of the result.
    source : Source
        Of the scan. Forms of its own are kept.

    Returns
    -------
    NiftiSource
        With a quaternion if it has a qform.
    """
    forms = NiftiSource(grid.affine, SCANNER, grid.affine, SCANNER)
    if isinstance(source, NiftiSource) and has_own_forms(source):
        forms = source
    elif grid.sheared:  # a quaternion can't say it
        return NiftiSource(grid.affine, SCANNER, None, 0)
    if forms.qform is None or forms.quaternion is not None:
        return forms
    quaternion = quaternion_of(forms.qform, grid.shape)
    if quaternion is not None:
        return replace(forms, quaternion=quaternion)
    if forms.sform is None:
        forms = replace(forms, sform=forms.qform, sform_code=forms.qform_code)
    return replace(forms, qform=None, qform_code=0)
