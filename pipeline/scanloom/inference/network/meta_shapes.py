"""Computes the shapes of network layers on the meta device, without torch's compiler.

torch's own way to many of these shapes imports its compiler or a library of algebra, which takes
longer than a small scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MetaShapeRules:
    """Rules of a dispatch mode that computes shapes only; `note` is called for each operation.

    No `TorchDispatchMode` itself: what such a class defines makes torch import its compiler (1 s).
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = _shaped(func, args)
        out = func(*args, **(kwargs or {})) if out is None else out
        self.note(func, args, out)
        return out

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Do something about an operation and its result."""


class _Shapes(MetaShapeRules, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has none
    """The mode itself; see `MetaShapeRules` for why it is apart."""


def meta_dispatch() -> AbstractContextManager[object]:
    """Return a context in which what torch does on the meta device takes the short way."""
    return _Shapes()  # type: ignore[no-untyped-call]  # torch has none


def _shaped(func: Any, args: tuple[Any, ...]) -> Any:
    """Return what the usual layers give; None for all else, which goes torch's way."""
    aten = torch.ops.aten
    batched = isinstance(args[0], torch.Tensor) and args[0].ndim == 5
    if func is aten.conv3d.default and batched:
        return _convolved(*args)
    if func is aten.conv_transpose3d.input and batched:
        return _widened(*args)
    if func is aten.max_pool3d_with_indices.default and batched and len(args) < 6:  # no ceil_mode
        return _pooled(*args)
    if func is aten.cat.default:
        joined, axis = args[0], args[1] if len(args) > 1 else 0
        shape = list(joined[0].shape)
        shape[axis] = sum(one.shape[axis] for one in joined)
        return torch.empty(shape, dtype=joined[0].dtype, device=joined[0].device)
    shapes = {one.shape for one in args if isinstance(one, torch.Tensor)}
    norm = func in (aten.batch_norm.default, aten.group_norm.default, aten.instance_norm.default)
    plain = torch.Tag.pointwise in func.tags and len(shapes) == 1
    if not (norm or plain) or not isinstance(args[0], torch.Tensor):
        return None
    return args[0] if func._schema.is_mutable else torch.empty_like(args[0])


def _convolved(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> torch.Tensor | None:
    """Return what a convolution gives; None for what does not fit, so that torch says so."""
    numbers = map(_each, (stride, padding, dilation))
    axes = zip(image.shape[2:], weight.shape[2:], *numbers, strict=True)
    space = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    if image.shape[1] != weight.shape[1] * groups:
        return None
    return _empty(image, weight, bias, [weight.shape[0], *space])


def _widened(
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    more: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> torch.Tensor | None:
    """Return what a transposed convolution gives, or None."""
    numbers = map(_each, (stride, padding, more, dilation))
    axes = zip(image.shape[2:], weight.shape[2:], *numbers, strict=True)
    space = [(n - 1) * s - 2 * p + d * (k - 1) + m + 1 for n, k, s, p, m, d in axes]
    if image.shape[1] != weight.shape[0]:
        return None
    return _empty(image, weight, bias, [weight.shape[1] * groups, *space])


def _pooled(
    image: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return what taking the largest of neighbours gives, and where they were; or None."""
    numbers = map(_each, (kernel, stride or kernel, padding, dilation))
    axes = zip(image.shape[2:], *numbers, strict=True)
    space = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]
    if min(space) < 1:
        return None
    shape = (*image.shape[:2], *space)
    return image.new_empty(shape), image.new_empty(shape, dtype=torch.int64)


def _each(numbers: Sequence[int]) -> Sequence[int]:
    """Return a number for each axis, also where one stands for all."""
    return numbers if len(numbers) == 3 else [numbers[0]] * 3


def _empty(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Sequence[int]
) -> torch.Tensor | None:
    alike = {one.dtype for one in (image, weight, bias) if one is not None}
    if len(alike) > 1 or min(shape) < 1:
        return None
    return image.new_empty((image.shape[0], *shape))
