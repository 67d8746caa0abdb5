"""The final convolution of OpenVINO's networks, written as a product of matrices.

OpenVINO keeps the channels of a voxel together while a network runs. Scores leave it channel by
channel; as a step of its own, rearranging them takes as long as a layer. The product of the final
layer's weights with the transposed features has that order already.
"""

from __future__ import annotations

import math
from typing import Any

FEW_CLASSES = 8
"""Classes below which rearranging scores takes no longer than the product."""


def multiply_final_layer(model: Any) -> None:
    """Replace a convolution of single voxels at a network's end, for many classes.

    Parameters
    ----------
    model : openvino.Model
        A network for inputs of a fixed size, with one output. It is changed if it ends with such
        a convolution, with or without a bias.
    """
    from openvino import opset13 as ops

    result = model.get_results()[0]
    last = result.input_value(0).get_node()
    bias = None
    convolution = last
    if last.get_type_name() == "Add":
        convolution, bias = (last.input_value(n).get_node() for n in (0, 1))
    if not _takes_single_voxels(convolution):
        return
    features, weight = (convolution.input_value(n) for n in (0, 1))
    count, channels, *size = features.get_shape()
    classes = weight.get_shape()[0]
    if classes < FEW_CLASSES or (bias and math.prod(bias.get_output_shape(0)) != classes):
        return
    to_voxels = [0, *range(2, len(size) + 2), 1]
    transposed = ops.transpose(features, to_voxels)
    voxels = ops.reshape(transposed, [count, math.prod(size), channels], special_zero=False)
    matrix = ops.reshape(weight, [classes, channels], special_zero=False)
    scores = ops.matmul(matrix, voxels, transpose_a=False, transpose_b=True)
    new = [transposed, voxels, scores]
    if bias is not None:
        scores = ops.add(scores, ops.reshape(bias, [1, classes, 1], special_zero=False))
        new.append(scores)
    shaped = ops.reshape(scores, [count, classes, *size], special_zero=False)
    for number, node in enumerate((*new, shaped)):  # a layer's precision follows from its name
        node.set_friendly_name(f"{convolution.get_friendly_name()}/Final_{number}")
    result.input(0).replace_source_output(shaped.output(0))
    model.validate_nodes_and_infer_types()


def _takes_single_voxels(node: Any) -> bool:
    """Return whether an operation is a convolution of single voxels, none left out."""
    if node.get_type_name() != "Convolution":
        return False
    features, weight = (node.input_value(n).get_shape() for n in (0, 1))
    return set(weight[2:]) == {1} and features[2:] == node.get_output_shape(0)[2:]
