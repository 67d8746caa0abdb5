"""The two patient coordinate systems: RAS in scanloom and NIfTI, LPS in DICOM and ITK."""

from __future__ import annotations

import numpy as np

LPS_TO_RAS = np.array([-1.0, -1.0, 1.0])
"""Signs (3,) that convert coordinates from LPS to RAS, and from RAS to LPS."""
LPS_TO_RAS_AFFINE = np.diag([*LPS_TO_RAS, 1.0])
"""The same conversion as an affine (4, 4)."""
LPS_TO_RAS.flags.writeable = LPS_TO_RAS_AFFINE.flags.writeable = False
