"""The digital phantom of the IBSI, and the published values of its features.

Phantom: reference manual of the Image Biomarker Standardisation Initiative (IBSI),
arXiv:1612.07003, chapter 5. Values: the reference tables of its chapter 3, in three digits; those
of texture are of the volume (3D), of merged matrices. A tolerance is given where the manual has
one. Names are mirp's.
"""

from __future__ import annotations

import math

import numpy as np

# slices of rows; 0 is outside the region of interest
SLICES = (
    ("14411", "14611", "41641", "44641"),
    ("14411", "11611", "01311", "44611"),
    ("14400", "11111", "11011", "11611"),
    ("14400", "11111", "11111", "11611"),
)
PHANTOM = np.array([[[int(v) for v in row] for row in rows] for rows in SLICES]).T
"""Grey levels (I, J, K) = (5, 4, 4), of voxels of 2 mm."""

MORPHOLOGY = {
    "morph_volume": (556, 4),
    "morph_vol_approx": (592, 4),
    "morph_area_mesh": (388, 3),
    "morph_av": (0.698, 0.004),
    "morph_comp_1": (0.0411, 0.0003),
    "morph_comp_2": (0.599, 0.004),
    "morph_sph_dispr": (1.19, 0.01),
    "morph_sphericity": (0.843, 0.005),
    "morph_asphericity": (0.186, 0.001),
    "morph_com": (0.672, 0.004),
    "morph_diam": (13.1, 0.1),
    "morph_pca_maj_axis": (11.4, 0.1),
    "morph_pca_min_axis": (9.31, 0.06),
    "morph_pca_least_axis": (8.54, 0.05),
    "morph_pca_elongation": (0.816, 0.005),
    "morph_pca_flatness": (0.749, 0.005),
    "morph_vol_dens_aabb": (0.869, 0.005),
    "morph_area_dens_aabb": (0.866, 0.005),
    "morph_vol_dens_aee": (1.17, 0.01),
    "morph_area_dens_aee": (1.36, 0.01),
    "morph_vol_dens_conv_hull": (0.961, 0.006),
    "morph_area_dens_conv_hull": (1.03, 0.01),
    "morph_integ_int": (1200, 10),
}

_FIRST_ORDER = {
    "mean": 2.15,
    "var": 3.05,
    "skew": 1.08,
    "kurt": -0.355,
    "median": 1,
    "min": 1,
    "p10": 1,
    "p90": 4,
    "max": 6,
    "iqr": 3,
    "range": 5,
    "mad": 1.55,
    "rmad": 1.11,
    "medad": 1.15,
    "cov": 0.812,
    "qcod": 0.6,
}
_HISTOGRAM = {
    **_FIRST_ORDER,
    "mode": 1,
    "entropy": 1.27,
    "uniformity": 0.512,
    "max_grad": 8,
    "max_grad_g": 3,
    "min_grad": -50,
    "min_grad_g": 1,
}
_VOLUME_HISTOGRAM = {"v10": 0.324, "v90": 0.0946, "i90": 2, "diff_v10_v90": 0.23}
"""Without the intensities that mirp gives in bins, of which it makes 1,000."""
_GLCM = {
    "joint_max": 0.509,
    "joint_avg": 2.15,
    "joint_var": 3.13,
    "joint_entr": 2.57,
    "diff_avg": 1.38,
    "diff_var": 3.21,
    "diff_entr": 1.64,
    "sum_avg": 4.3,
    "sum_var": 7.41,
    "sum_entr": 2.11,
    "energy": 0.291,
    "contrast": 5.12,
    "dissimilarity": 1.38,
    "inv_diff": 0.688,
    "inv_diff_norm": 0.856,
    "inv_diff_mom": 0.631,
    "inv_diff_mom_norm": 0.902,
    "inv_var": 0.0574,
    "corr": 0.183,
    "auto_corr": 5.19,
    "clust_tend": 7.41,
    "clust_shade": 17.4,
    "clust_prom": 147,
    "info_corr1": -0.0288,
    "info_corr2": 0.269,
}
_GLRLM = {
    "sre": 0.729,
    "lre": 2.76,
    "lgre": 0.607,
    "hgre": 9.64,
    "srlge": 0.372,
    "srhge": 8.67,
    "lrlge": 2.16,
    "lrhge": 15.6,
    "glnu": 281,
    "glnu_norm": 0.43,
    "rlnu": 328,
    "rlnu_norm": 0.501,
    "r_perc": 0.68,
    "gl_var": 3.48,
    "rl_var": 0.598,
    "rl_entr": 2.62,
}
_GLSZM = {
    "sze": 0.255,
    "lze": 550,
    "lgze": 0.253,
    "hgze": 15.6,
    "szlge": 0.0256,
    "szhge": 2.76,
    "lzlge": 503,
    "lzhge": 1490,
    "glnu": 1.4,
    "glnu_norm": 0.28,
    "zsnu": 1,
    "zsnu_norm": 0.2,
    "z_perc": 0.0676,
    "gl_var": 2.64,
    "zs_var": 331,
    "zs_entr": 2.32,
}
_GLDZM = {
    "sde": 1,
    "lde": 1,
    "lgze": 0.253,
    "hgze": 15.6,
    "sdlge": 0.253,
    "sdhge": 15.6,
    "ldlge": 0.253,
    "ldhge": 15.6,
    "glnu": 1.4,
    "glnu_norm": 0.28,
    "zdnu": 5,
    "zdnu_norm": 1,
    "z_perc": 0.0676,
    "gl_var": 2.64,
    "zd_var": 0,
    "zd_entr": 1.92,
}
_NGTDM = {
    "coarseness": 0.0296,
    "contrast": 0.584,
    "busyness": 6.54,
    "complexity": 13.5,
    "strength": 0.763,
}
_NGLDM = {
    "lde": 0.045,
    "hde": 109,
    "lgce": 0.693,
    "hgce": 7.66,
    "ldlge": 0.00963,
    "ldhge": 0.736,
    "hdlge": 102,
    "hdhge": 235,
    "glnu": 37.9,
    "glnu_norm": 0.512,
    "dcnu": 4.86,
    "dcnu_norm": 0.0657,
    "gl_var": 3.05,
    "dc_var": 22.1,
    "dc_entr": 4.4,
    "dc_energy": 0.0533,
}


def published() -> dict[str, tuple[float, float]]:
    """Return value and tolerance of each feature, by mirp's names for six bins."""
    tables = {
        "stat_%s": {**_FIRST_ORDER, "energy": 567, "rms": 2.77},
        "ih_%s_fbn_n6": _HISTOGRAM,
        "ivh_%s": _VOLUME_HISTOGRAM,
        "cm_%s_d1_3d_v_mrg_fbn_n6": _GLCM,
        "rlm_%s_3d_v_mrg_fbn_n6": _GLRLM,
        "szm_%s_3d_fbn_n6": _GLSZM,
        "dzm_%s_3d_fbn_n6": _GLDZM,
        "ngt_%s_3d_fbn_n6": _NGTDM,
        "ngl_%s_d1_a0.0_3d_fbn_n6": _NGLDM,
    }
    texture = {
        pattern % name: (value, half_digit(value))
        for pattern, values in tables.items()
        for name, value in values.items()
    }
    return {**MORPHOLOGY, **texture}


def half_digit(value: float) -> float:
    """Return half of the third digit of a value, and what its last bit may lack."""
    return (1 + 1e-6) * 0.5 * 10 ** (math.floor(math.log10(abs(value) or 1)) - 2)
