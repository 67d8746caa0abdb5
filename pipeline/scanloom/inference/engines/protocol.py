"""Input and output of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from scanloom.inference.device import dtype_name
from scanloom.inference.network.layers import MixedBfloat16, PlaneNetwork

Run = Callable[[torch.Tensor], torch.Tensor]
"""Maps windows (N, channels, x, y, z) to scores or features (N, C, x, y, z)."""


class EngineUnfitError(Exception):
    """An engine cannot run a network; the text says why, in words without paths or names."""


@dataclass(frozen=True)
class NetworkRequest:
    """A network for an engine to prepare.

    Parameters
    ----------
    build : callable
        Returns the network in float32 on the CPU, in evaluation mode, its final layer detached if
        its features are summed. It is not to be changed. It is called only if nothing is cached.
    identity : tuple of str
        Hash of the weights, and everything else of the card from which the network follows.
    shape : (N, channels, x, y, z)
        Shape of a batch of windows.
    dtype : torch.dtype
        Type in which the network calculates. The first and last layers are float32 in bfloat16.
    device : torch.device
        Device of the input and the output.
    threads : int
        Threads of the CPU.
    """

    build: Callable[[], nn.Module]
    identity: tuple[str, ...]
    shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    threads: int

    @property
    def precision(self) -> str:
        """The numeric type's name: "float32", "bfloat16", "float16"."""
        return dtype_name(self.dtype)

    @property
    def cache_subject(self) -> dict[str, object]:
        """Everything on which a prepared network depends, but for the engine."""
        return {
            "torch": torch.__version__,
            "network": list(self.identity),
            "shape": list(self.shape),
            "precision": self.precision,
        }

    def torch_network(self) -> nn.Module:
        """Return the network on its device, in the type in which it calculates."""
        network = copy.deepcopy(self.build())
        if self.dtype is not torch.bfloat16:
            return network.to(self.device, self.dtype)
        channels, size = self.shape[1], self.shape[2:]
        # Exact layers are found in the two-dimensional network itself
        if isinstance(network, PlaneNetwork):
            axis = network.dim - 2
            inner = MixedBfloat16(network.network, channels, size[:axis] + size[axis + 1 :])
            return PlaneNetwork(inner, axis)
        return MixedBfloat16(network, channels, size)

    def zeros(self) -> torch.Tensor:
        """Return a batch of zeros on the device, of the type that `torch_network` takes."""
        dtype = torch.float32 if self.dtype is torch.bfloat16 else self.dtype
        return torch.zeros(self.shape, dtype=dtype, device=self.device)


class Engine(Protocol):
    """A library that runs networks: the object `ENGINE` of the module NAME_engine.

    Its NAME is listed in `Engine` of `scanloom.options`.
    """

    name: ClassVar[str]
    """Name, as in `--engine`."""
    package: ClassVar[str]
    """Distribution to install, as in `pip install`."""
    automatic: ClassVar[bool]
    """Whether "auto" measures the engine, if it is installed."""

    def version(self) -> str | None:
        """Return the version of the library; None if it is not installed."""

    def supports(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the engine runs on a device in a numeric type."""

    def prepare(self, request: NetworkRequest) -> Run:
        """Prepare a network, or read it from the user's cache.

        Returns
        -------
        callable
            Maps windows of the request's shape to scores, which later calls leave unchanged.

        Raises
        ------
        EngineUnfitError
            If the library does not support the network, or fails.
        """
