"""The sform and qform of the NIfTI files of a case."""

from __future__ import annotations

from dataclasses import replace

from scanloom.core import Grid
from scanloom.io.scan import NiftiSource, Source
from scanloom.io.volumes.quaternion import quaternion_from_affine

SCANNER_ANAT = 1
"""NIFTI_XFORM_SCANNER_ANAT: scanner-based anatomical coordinates."""


def has_own_forms(source: Source) -> bool:
    """Whether the scan is a NIfTI with an sform or a qform."""
    return isinstance(source, NiftiSource) and source.sform_code + source.qform_code > 0


def forms_for(grid: Grid, source: Source) -> NiftiSource:
    """Return sform and qform of a result.

    A qform that float32 cannot represent is left out, so that all readers use the sform. A source
    without an sform then gets one with the affine and code of its qform.

    Parameters
    ----------
    grid : Grid
        Grid of the result.
    source : Source
        Source of the scan, whose own forms are kept.

    Returns
    -------
    NiftiSource
        It has a quaternion if it has a qform.
    """
    forms = NiftiSource(grid.affine, SCANNER_ANAT, grid.affine, SCANNER_ANAT)
    if isinstance(source, NiftiSource) and has_own_forms(source):
        forms = source
    elif grid.sheared:  # a quaternion cannot represent a shear
        return NiftiSource(grid.affine, SCANNER_ANAT, None, 0)
    if forms.qform is None or forms.quaternion is not None:
        return forms
    quaternion = quaternion_from_affine(forms.qform, grid.shape)
    if quaternion is not None:
        return replace(forms, quaternion=quaternion)
    if forms.sform is None:
        forms = replace(forms, sform=forms.qform, sform_code=forms.qform_code)
    return replace(forms, qform=None, qform_code=0)
