"""Computes the output shapes of network layers on the meta device, without torch's compiler.

torch's own rules for many of these shapes import its compiler or SymPy, which takes longer than a
small scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MetaShapeRules:
    """Rules of a dispatch mode that computes shapes only; `note` is called for each operation.

    Not a subclass of `TorchDispatchMode`: if a method is defined on such a class, torch imports its
    compiler (1 s).
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = _apply_rule(func, args)
        out = func(*args, **(kwargs or {})) if out is None else out
        self.note(func, args, out)
        return out

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Handle an operation and its result; does nothing here."""


class _Shapes(MetaShapeRules, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has none
    """The dispatch mode; `MetaShapeRules` explains why it is a class of its own."""


def meta_dispatch() -> AbstractContextManager[object]:
    """Return a context in which operations on the meta device use the rules of `MetaShapeRules`."""
    return _Shapes()  # type: ignore[no-untyped-call]  # torch has none


def _apply_rule(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the output of a common layer; None for any other operation, left to torch."""
    aten = torch.ops.aten
    if func in (aten.item.default, aten._local_scalar_dense.default) and args[0].is_meta:
        return 0.0  # a number that no shape depends on, such as SwinUNETR's rate of dropped paths
    first = args[0][0] if isinstance(args[0], list) and args[0] else args[0]
    if isinstance(first, torch.Tensor) and not first.is_meta:
        return None  # values count, such as those of the architecture of DiNTS
    ndim = args[0].ndim if isinstance(args[0], torch.Tensor) else 0
    if (func, ndim) in ((aten.conv3d.default, 5), (aten.conv2d.default, 4)):
        return _convolution(*args)
    if (func, ndim) in ((aten.conv_transpose3d.input, 5), (aten.conv_transpose2d.input, 4)):
        return _transposed_convolution(*args)
    pooling = ((aten.max_pool3d_with_indices.default, 5), (aten.max_pool2d_with_indices.default, 4))
    if (func, ndim) in pooling and not any(args[5:]):  # no ceil_mode
        return _max_pooling(*args[:5])
    pooling = ((aten.max_pool3d.default, 5), (aten.max_pool2d.default, 4))  # in inference mode
    if (func, ndim) in pooling and not any(args[5:]):
        found = _max_pooling(*args[:5])
        return found and found[0]
    if func is aten.pad.default and len(args) > 2 and args[2] in ("constant", "replicate"):
        return _padding(*args[:2])
    if func is aten.cat.default:
        tensors, axis = args[0], args[1] if len(args) > 1 else 0
        shape = list(tensors[0].shape)
        shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
        return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    shapes = {value.shape for value in args if isinstance(value, torch.Tensor)}
    norm = func in (aten.batch_norm.default, aten.group_norm.default, aten.instance_norm.default)
    pointwise = torch.Tag.pointwise in func.tags and len(shapes) == 1
    if not (norm or pointwise) or not isinstance(args[0], torch.Tensor):
        return None
    if func._schema.is_mutable:
        return args[0]
    if args[0].is_contiguous():
        return args[0].new_empty(args[0].shape)  # `empty_like` can import SymPy
    return torch.empty_like(args[0])


def _convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> torch.Tensor | None:
    """Return the output of a convolution; None if shapes don't match, for torch's own error."""
    count = image.ndim - 2
    options = (_per_axis(numbers, count) for numbers in (stride, padding, dilation))
    axes = zip(image.shape[2:], weight.shape[2:], *options, strict=True)
    space = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    if image.shape[1] != weight.shape[1] * groups:
        return None
    return _empty(image, weight, bias, [weight.shape[0], *space])


def _transposed_convolution(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> torch.Tensor | None:
    """Return the output of a transposed convolution, or None if shapes don't match."""
    count = image.ndim - 2
    options = (_per_axis(n, count) for n in (stride, padding, output_padding, dilation))
    axes = zip(image.shape[2:], weight.shape[2:], *options, strict=True)
    space = [(n - 1) * s - 2 * p + d * (k - 1) + m + 1 for n, k, s, p, m, d in axes]
    if image.shape[1] != weight.shape[0]:
        return None
    return _empty(image, weight, bias, [weight.shape[1] * groups, *space])


def _max_pooling(
    image: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return maxima and indices of max pooling, or None if the image is too small."""
    count = image.ndim - 2
    options = (_per_axis(n, count) for n in (kernel, stride or kernel, padding, dilation))
    axes = zip(image.shape[2:], *options, strict=True)
    space = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    if min(space) < 1:
        return None
    shape = (*image.shape[:2], *space)
    return image.new_empty(shape), image.new_empty(shape, dtype=torch.int64)


def _padding(image: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Return the output of padding by (before, after) of the last axis, the one before it, ..."""
    shape = list(image.shape)
    for n, width in enumerate(widths):
        shape[-1 - n // 2] += width
    return image.new_empty(shape)


def _per_axis(numbers: Sequence[int], count: int) -> Sequence[int]:
    """Return `count` numbers, one per axis; a single number is repeated."""
    return numbers if len(numbers) == count else [numbers[0]] * count


def _empty(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Sequence[int]
) -> torch.Tensor | None:
    """Return a tensor of image's batch size and `shape`; None if types differ or it is empty."""
    dtypes = {tensor.dtype for tensor in (image, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or min(shape) < 1:
        return None
    return image.new_empty((image.shape[0], *shape))
