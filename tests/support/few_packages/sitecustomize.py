"""Hides packages that a machine lacks which was set up for PyTorch and MONAI alone.

Python imports this at its start if the folder is on PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HIDDEN = frozenset(
    (
        *("cryptography", "dask", "distributed", "highdicom", "imagecodecs", "jpegls", "libjpeg"),
        *("openjpeg", "openvino", "openvino_telemetry", "rle", "SimpleITK", "onnx", "onnxruntime"),
        *("onnxscript", "tensorrt", "pylibjpeg", "pyjpegls", "_openjpeg", "pandas", "starlette"),
        *("fire", "ignite", "krippendorff", "nrrd", "skimage", "trimesh", "uvicorn"),
    )
)
"""Modules by their first name."""


class Hiding(PathFinder):
    """Finds modules on Python's path, but for the hidden ones."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return where a module is; None if it is hidden, as if it were not installed."""
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


if __name__ == "sitecustomize":
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
