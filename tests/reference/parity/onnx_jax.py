"""Export a two-dimensional JAX network by jax2onnx, and label a scan with JAX itself.

python onnx_jax.py SCAN.npy FOLDER

A python with jax and jax2onnx, which has no convolutions of three dimensions. FOLDER gets
model.onnx, for one plane (x, y) of the scan, and labels.npy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax2onnx import to_onnx

AXES = ("NHWC", "HWIO", "NHWC")


def convolve(image: jax.Array, kernel: jax.Array, dilation: int = 1) -> jax.Array:
    """Return a convolution that keeps the size."""
    return jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", rhs_dilation=(dilation,) * 2, dimension_numbers=AXES
    )


def main() -> None:
    """Write the graph and the labels."""
    scan, folder = np.load(sys.argv[1]), Path(sys.argv[2])
    keys = jax.random.split(jax.random.PRNGKey(5), 4)
    shapes = [(3, 3, 1, 8), (3, 3, 8, 8), (3, 3, 8, 8), (1, 1, 8, 4)]
    kernels = [
        jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))
        for key, shape in zip(keys, shapes, strict=True)
    ]

    def scores(image: jax.Array) -> jax.Array:
        """Return the scores of a dilated network, as of MeshNet."""
        for dilation, kernel in zip((1, 2, 4), kernels[:-1], strict=True):
            image = jax.nn.relu(convolve(image, kernel, dilation))
        return convolve(image, kernels[-1])

    image = jnp.clip((jnp.asarray(scan, jnp.float32) + 200) / 400, 0, 1)
    planes = jnp.moveaxis(image, -1, 0)[..., None]
    shift = jnp.median(scores(planes).reshape(-1, 4), axis=0)

    def network(image: jax.Array) -> jax.Array:
        return jax.nn.softmax(scores(image) - shift, axis=-1)

    onnx.save(to_onnx(network, [planes[:1].shape]), folder / "model.onnx")
    labels = jnp.moveaxis(network(planes).argmax(-1), 0, -1)
    np.save(folder / "labels.npy", np.asarray(labels, np.uint8))


if __name__ == "__main__":
    main()
