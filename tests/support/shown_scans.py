"""Real scans of all kinds on which outlines are judged, and what is outlined in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from scanloom.core import Volume
from scanloom.review.preview.slicing import View, find_body

SHOWN_SCANS = (
    "ct/crlm1004_abdomen_dicom",
    "ct/sts002_thigh/dicom_ct",
    "ct/totalseg_example/example_ct.nii.gz",
    "ct/totalseg_example/example_ct_sm.nii.gz",
    "ct/totalseg_example_dicom/dicom",
    "ct/totalseg_pulmonary/ct_cropped.nii.gz",
    "../train/labelled_ct/sts001_thigh/image.nii.gz",
    "../train/labelled_ct/totalseg_aorta/image_ct.nii.gz",
    "../train/labelled_ct/sts002_thigh/image.nii.gz",
    "mr/d2n_hitachi/dicom",
    "mr/d2n_philips/dicom",
    "mr/hippo_crop_dicom",
    "mr/sts002_thigh_t1/dicom_mr",
    "mr/totalseg_mr/example_mr_sm.nii.gz",
    "enhanced/philips_pcasl_real/Ref_dcm2niix/1901_WIP_3DpCASL_enh_real.nii.gz",
    "orientation/nifti_space/RAS.nii.gz",
    "orientation/nifti_misc/t2_oblique_chunk.nii.gz",
    "../train/labelled_mr/flair_stroke/FLAIR.nii.gz",
    "../models/brainchop/reference/t1_crop.nii.gz",
    "../train/msd_task04_hippocampus/images/hippocampus_001.nii.gz",
)


def parts_of(volume: Volume) -> NDArray[np.uint8]:
    """Return five parts of a scan by intensity, from the darkest to the brightest, as labels.

    They are smoothed: structures of a model have shapes, and are not the noise of a scan.
    """
    values = gaussian_filter(
        np.nan_to_num(volume.array.astype(float)), 3 / np.array(volume.grid.spacing)
    )
    body = find_body(volume, View(volume.grid), volume.unit == "HU")
    inside = values[values > np.percentile(body.values, 5)]
    return np.digitize(values, np.percentile(inside, (10, 35, 60, 85, 97))).astype(np.uint8)
