"""Builds networks of the classes in `scanloom.cards.networks`, on the meta device too.

On the meta device nothing is allocated. torch's own rules for the shapes of many layers there
import its compiler or SymPy, which takes longer than a small scan: `meta_dispatch` has others.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from scanloom.cards.card import ModelCard, NetworkSpec
from scanloom.cards.networks import NETWORKS, AllowedNetwork
from scanloom.core import Reason, ScanError, read_error
from scanloom.inference.device import is_out_of_memory

_MAX_TENSORS: Final = 20_000
"""Maximum number of weight tensors; the largest allowed networks have 1,000 as published."""
_MAX_ARGUMENT: Final = 1 << 16
"""Largest number in a network's arguments: a larger one is not a count of channels or layers."""


def build_network(spec: NetworkSpec, values: int | None = None) -> nn.Module:
    """Return an untrained network, in evaluation mode, on the CPU.

    Parameters
    ----------
    spec : NetworkSpec
        Class and arguments from the card.
    values : int, optional
        Number of values in the weights file: a much larger network is refused before it is
        allocated.

    Raises
    ------
    ScanError
        MODEL_NETWORK if the class is not allowed or rejects the arguments; MODEL_UNSUPPORTED if the
        network is neither two- nor three-dimensional; MODEL_WEIGHTS if it is much larger than
        `values`; OUT_OF_MEMORY.
    """
    network_class, allowed = find_class(spec)
    if dimensions(spec) not in (2, 3):
        detail = "the model's network is neither two- nor three-dimensional"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)
    args = {name: value for name, value in spec.args.items() if name not in allowed.removed}
    # A card's number could ask for terabytes, or for hours of layers
    for name, value in args.items():
        _check_numbers(value, allowed.largest.get(name, _MAX_ARGUMENT))
    try:
        with _limit_weights(values):
            network: nn.Module = network_class(**args)
    except ScanError:
        raise
    except Exception as exc:  # constructors raise any type of error
        if isinstance(exc, ImportError):
            raise
        if is_out_of_memory(exc):
            # Memory ran out: on the meta device it is refused for its size, if that is the cause
            with (
                suppress(RuntimeError, NotImplementedError),
                torch.device("meta"),
                _limit_weights(values),
            ):
                network_class(**args)
            detail = "the model's network does not fit into memory"
            raise ScanError(Reason.OUT_OF_MEMORY, detail) from exc
        detail = f"{spec.name} rejects the card's arguments ({type(exc).__name__})"
        raise ScanError(Reason.MODEL_NETWORK, detail) from exc
    network.eval()
    return network


def dimensions(spec: NetworkSpec) -> object:
    """Return the number of spatial dimensions, from a network's arguments."""
    return spec.args.get("spatial_dims", 3)


def check_dimensions(card: ModelCard) -> None:
    """Refuse a card (MODEL_UNSUPPORTED) whose windows have other dimensions than its network."""
    expected = 3 if card.window.plane is None else 2
    if dimensions(card.network) != expected:
        detail = f"the model's network is not {'three' if expected == 3 else 'two'}-dimensional"
        raise ScanError(Reason.MODEL_UNSUPPORTED, detail)


def check_network(card: ModelCard) -> None:
    """Refuse a card whose network can't be built, or whose weights can't be read.

    Fast: the network is built on the meta device, and only the headers of the weights are read.

    Raises
    ------
    ScanError
        As `build_network`; MODEL_DAMAGED, UNREADABLE.
    """
    from safetensors import SafetensorError, safe_open

    check_dimensions(card)
    with torch.device("meta"), meta_dispatch():
        build_network(card.network)
    for weights in (card.weights, *card.folds):
        try:
            if not weights.file.is_file():  # to open a pipe would never end
                raise FileNotFoundError
            with weights.file.open("rb"):  # its errors have numbers
                safe_open(weights.file, "numpy")
        except (OSError, SafetensorError) as exc:
            raise read_error(exc, "the model's weights", Reason.MODEL_DAMAGED) from exc


def find_class(spec: NetworkSpec) -> tuple[Any, AllowedNetwork]:
    """Import the class of a network; return it with its entry on the list.

    Raises
    ------
    ScanError
        MODEL_NETWORK if the class is not on the list.
    """
    allowed = NETWORKS.get(spec.name)
    if allowed is None:
        raise ScanError(Reason.MODEL_NETWORK, f"the network is not one of {', '.join(NETWORKS)}")
    return getattr(importlib.import_module(allowed.module), spec.name), allowed


def _check_numbers(value: Any, largest: int) -> None:
    """Refuse an argument (MODEL_NETWORK) with a number beyond `largest`, at any depth."""
    if isinstance(value, Mapping):
        value = list(value.values())
    for entry in value if isinstance(value, list | tuple) else (value,):
        if isinstance(entry, list | tuple | Mapping):
            _check_numbers(entry, largest)
        elif isinstance(entry, int | float) and abs(entry) > largest:
            detail = f"an argument of the model's network exceeds {largest}"
            raise ScanError(Reason.MODEL_NETWORK, detail)


@contextmanager
def _limit_weights(values: int | None) -> Iterator[None]:
    """Refuse networks that register too many weights, within this block and thread.

    Weights are counted when a layer registers them, before they are initialised.
    """
    # The hook is global to the process: other threads may build networks meanwhile
    thread, tensors, numbers = threading.get_ident(), 0, 0

    def count(_: nn.Module, __: str, weight: nn.Parameter) -> None:
        nonlocal tensors, numbers
        if threading.get_ident() != thread:
            return
        tensors, numbers = tensors + 1, numbers + weight.numel()
        if tensors > _MAX_TENSORS:
            detail = f"the model's network has more than {_MAX_TENSORS} tensors"
            raise ScanError(Reason.MODEL_NETWORK, detail)
        if values is not None and numbers > 2 * values:  # some layers are built and discarded
            detail = "the model's network is much larger than its weights"
            raise ScanError(Reason.MODEL_WEIGHTS, detail)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


_ACTIVATIONS = (
    "prelu",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "gelu",
    "mish",
    "hardtanh",
    "hardswish",
)
"""Activations, in place too, that not every version of torch tags as pointwise."""


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
    indexed = ((aten.max_pool3d_with_indices.default, 5), (aten.max_pool2d_with_indices.default, 4))
    plain = ((aten.max_pool3d.default, 5), (aten.max_pool2d.default, 4))  # in inference mode
    if (func, ndim) in (*indexed, *plain) and not any(args[5:]):  # no ceil_mode
        pooled = _max_pooling(*args[:5])
        return pooled[0] if pooled and (func, ndim) in plain else pooled
    if func is aten.pad.default and len(args) > 2 and args[2] in ("constant", "replicate"):
        padded = list(args[0].shape)
        for n, width in enumerate(args[1]):  # before and after the last axis, the one before it, ..
            padded[-1 - n // 2] += width
        return args[0].new_empty(padded)
    if func is aten.cat.default:
        tensors, axis = args[0], args[1] if len(args) > 1 else 0
        shape = list(tensors[0].shape)
        shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
        return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    shapes = {value.shape for value in args if isinstance(value, torch.Tensor)}
    norms = (aten.batch_norm.default, aten.group_norm.default, aten.instance_norm.default)
    pointwise = torch.Tag.pointwise in func.tags and len(shapes) == 1
    drawn = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
    activation = func._schema.name.removeprefix("aten::").rstrip("_") in _ACTIVATIONS
    keeps_shape = pointwise or activation or drawn or func in norms
    if not keeps_shape or not isinstance(args[0], torch.Tensor):
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
    if min(space) < 1:  # torch 2.11 accepts it on the meta device only
        raise RuntimeError("the kernel is larger than the padded input")
    # None leaves the call to torch, which raises its own error
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
