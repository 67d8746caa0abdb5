"""Instance and group normalisation of large windows by pooling, in OpenVINO's networks.

OpenVINO's own operations add the values of a channel one after another in float32. In a window of
128^3 voxels, this loses so many digits that more than 1 % of the voxels change their labels. Means
of means, along an axis each, keep them, and take no more time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

LARGE = 1 << 15
"""Voxels of a channel above which its mean is taken by pooling."""


def pool_norms(model: Any) -> None:
    """Replace the instance and group normalisations of large windows in a network.

    Parameters
    ----------
    model : openvino.Model
        A network for inputs of a fixed size. It is changed.
    """
    before = {node.get_friendly_name() for node in model.get_ops()}
    for node in model.get_ordered_ops():
        if not _is_norm(node) or int(np.prod(node.get_output_shape(0)[2:])) <= LARGE:
            continue
        grouped = node.get_type_name() == "GroupNormalization"
        pooled = _group_norm(node) if grouped else _instance_norm(node)
        _name_steps(pooled, node, before)
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(pooled.output(0))
    model.validate_nodes_and_infer_types()


def _is_norm(node: Any) -> bool:
    """Return whether an operation is an instance or group normalisation, without its factors."""
    kind, name = node.get_type_name(), node.get_friendly_name()
    return kind == "GroupNormalization" or (kind == "MVN" and "aten::instance_norm" in name)


def _instance_norm(node: Any) -> Any:
    """Return the values of an MVN: those of each channel with mean 0 and variance 1."""
    from openvino import opset13 as ops

    values = node.input_value(0)
    centred = ops.subtract(values, _pooled_mean(values))
    variance = _pooled_mean(ops.multiply(centred, centred))
    scale = _inverse_root(variance, node.get_attributes()["eps"])
    return ops.multiply(centred, scale)


def _group_norm(node: Any) -> Any:
    """Return the values of a group normalisation, times its weights, plus its bias."""
    from openvino import opset13 as ops

    values, weight, bias = (node.input_value(i) for i in range(3))
    batch, channels, *spatial = node.get_output_shape(0)
    groups = node.get_attributes()["num_groups"]
    ones = [1] * len(spatial)

    def group_mean(of: Any) -> Any:
        """Return the mean of each channel's group (batch, channel, 1, 1, 1)."""
        means = ops.reshape(_pooled_mean(of), [batch, groups, -1], False)
        means = ops.reduce_mean(means, [2], keep_dims=True)
        means = ops.broadcast(means, [batch, groups, channels // groups])
        return ops.reshape(means, [batch, channels, *ones], False)

    centred = ops.subtract(values, group_mean(values))
    variance = group_mean(ops.multiply(centred, centred))
    scale = _inverse_root(variance, node.get_attributes()["epsilon"])
    factors = ops.multiply(scale, ops.reshape(weight, [1, channels, *ones], False))
    shifts = ops.reshape(bias, [1, channels, *ones], False)
    return ops.add(ops.multiply(centred, factors), shifts)


def _pooled_mean(values: Any) -> Any:
    """Return the mean over the spatial axes, which keep the size 1."""
    from openvino import opset13 as ops

    output = values if hasattr(values, "get_target_inputs") else values.output(0)
    spatial = list(output.get_shape())[2:]
    for axis in reversed(range(len(spatial))):
        kernel = [n if i == axis else 1 for i, n in enumerate(spatial)]
        none = [0] * len(spatial)
        values = ops.avg_pool(values, kernel, none, none, kernel, exclude_pad=True)
        spatial[axis] = 1
    return values


def _inverse_root(variance: Any, epsilon: float) -> Any:
    """Return 1 / sqrt(variance + epsilon)."""
    from openvino import opset13 as ops

    return ops.power(ops.add(variance, np.float32(epsilon)), np.float32(-0.5))


def _name_steps(found: Any, node: Any, before: Collection[str]) -> None:
    """Name an operation, and those that lead to it, after the operation that they replace.

    A layer's precision follows from its name: means of a float32 layer are taken in float32.
    `before` are the names of the operations that were there.
    """
    name = node.get_friendly_name()
    found.set_friendly_name(name)
    steps = [found]
    while steps:
        for source in (value.get_node() for value in steps.pop().input_values()):
            own = source.get_friendly_name()
            if own not in before and not own.startswith(name):
                source.set_friendly_name(f"{name}/{own}")
                steps.append(source)
