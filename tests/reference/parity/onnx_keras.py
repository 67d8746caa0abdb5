"""Export a Keras network by tf2onnx, and label a scan with Keras itself.

python onnx_keras.py SCAN.npy FOLDER

A python with tensorflow and tf2onnx. FOLDER gets model.onnx and labels.npy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf2onnx


def network() -> tf.keras.Model:
    """Return a small U-Net with random weights, as TensorFlow has the axes: channels last."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(7)
    image = tf.keras.Input((None, None, None, 1), batch_size=1)
    first = layers.Conv3D(8, 3, padding="same", activation="relu")(image)
    deep = layers.Conv3D(16, 3, strides=2, padding="same")(first)
    deep = layers.LeakyReLU(negative_slope=0.1)(layers.BatchNormalization()(deep))
    up = layers.Conv3DTranspose(8, 2, strides=2, padding="same")(deep)
    joined = layers.Concatenate()([first, up])
    return tf.keras.Model(image, layers.Conv3D(4, 1, activation="softmax")(joined))


def main() -> None:
    """Write the graph and the labels."""
    scan, folder = np.load(sys.argv[1]), Path(sys.argv[2])
    image = np.clip((scan.astype(np.float32) + 200) / 400, 0, 1)[None, ..., None]
    model = network()
    # biases such that each class wins somewhere
    kernel, bias = model.layers[-1].get_weights()
    features = tf.keras.Model(model.input, model.layers[-1].input)(image).numpy()
    scores = features @ kernel[0, 0, 0]
    bias -= np.median(scores.reshape(-1, scores.shape[-1]), axis=0)
    model.layers[-1].set_weights([kernel, bias])
    spec = (tf.TensorSpec((1, None, None, None, 1), tf.float32, name="scan"),)
    tf2onnx.convert.from_keras(model, spec, opset=17, output_path=str(folder / "model.onnx"))
    np.save(folder / "labels.npy", model(image).numpy()[0].argmax(-1).astype(np.uint8))


if __name__ == "__main__":
    main()
