"""A device of another name than the CPU and CUDA, without float64: its tensors are on the CPU.

It refuses what Apple's and some of Intel's GPUs refuse: float64, and tensors of several devices in
one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_META = torch.device("meta")
_COPIES = {"_to_copy", "to", "copy_"}
_TAKES_HOST_INDICES = {"index", "index_put_", "_index_put_impl_"}


class PlacedTensor(torch.Tensor):
    """A tensor that says it is on the device; `inner` has its values.

    To torch's own code it is on the meta device: this build has no other without values.
    """

    inner: torch.Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> PlacedTensor:
        placed = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_META,
        )
        placed.inner, placed.where = inner, device
        return placed

    is_cpu = is_meta = False

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute
        """The device's name."""
        return self.where

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        return _run(device, func, args, kwargs or {})

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError(f"can't convert {self.device} tensor to numpy")

    def __array__(self, *_: object) -> Any:
        return self.numpy()


def _run(device: torch.device, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the values, and refuse what the device does not have."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, PlacedTensor)]
    targets = [x for x in leaves if isinstance(x, torch.device)]
    name = func._schema.name.partition("::")[2]
    copies = name in _COPIES
    on_device = targets[0].type != "cpu" if targets else bool(ours)
    if not ours and not on_device:
        return func(*args, **kwargs)
    hosts = [x for x in tensors if not isinstance(x, PlacedTensor) and x.dim() > 0]
    if ours and hosts and not copies and name not in _TAKES_HOST_INDICES:
        raise RuntimeError(f"{name}: tensors on {device} and the CPU")

    def plain(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.inner if isinstance(x, PlacedTensor) else x

    a, k = tree_map(plain, (args, dict(kwargs)), is_leaf=lambda x: isinstance(x, torch.Tensor))
    result = func(*a, **k)
    known = {id(x.inner): x for x in ours}

    def placed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, PlacedTensor):
            return x
        if id(x) in known:
            return known[id(x)]
        if x.dtype is torch.float64:
            raise TypeError(f"{name}: {device} has no float64")
        return PlacedTensor(x.clone() if copies and not ours else x, device)

    return tree_map(placed, result) if on_device else result


class _Operations(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        return _run(self.device, func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """Gives torch's own code the device that it knows, for the name of the one that it lacks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))

        def known(x: Any) -> Any:
            named = isinstance(x, torch.device) and x.type == self.device.type
            return _META if named or x in (self.device.type, str(self.device)) else x

        args, kwargs = tree_map(
            lambda x: known(x) if isinstance(x, str | torch.device) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@contextmanager
def plain_device(kind: str) -> Iterator[torch.device]:
    """Let torch have a device of a kind, "mps" or "xpu", in the block."""
    device = torch.device(kind, 0)
    to: Callable[..., torch.nn.Module] = torch.nn.Module.to

    def module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with torch.inference_mode(False):
            return to(module, *args, **kwargs)

    swapped = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.nn.Module.to = module_to
    try:
        with _Operations(device), _Names(device):
            yield device
    finally:
        torch.nn.Module.to = to
        torch.__future__.set_overwrite_module_params_on_conversion(swapped)
