"""`SharedScan`: a scan that is resampled once for several models of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable

import torch

from scanloom.cards.card import ModelCard
from scanloom.inference.resampling.exact import decisive_values

Channels = list[torch.Tensor]
_Key = tuple[Hashable, str]


def sharing_key(card: ModelCard) -> Hashable:
    """Return a key that is equal for models that need the same resampled scan.

    Equal are the network grid and the intensity steps before resampling; later steps are those of
    each model. None for a model that runs several others: it shares nothing.
    """
    if card.parts or card.stage is not None:
        return None
    steps = tuple((*channel.steps, *card.before) for channel in card.channels)
    return card.grid, steps, decisive_values(card)


class SharedScan:
    """Input channels of one scan on the network grids of the models that are still to run.

    Each is kept on its device from its first user to its last, which takes it over; others get a
    copy, since intensity steps change it.

    Parameters
    ----------
    users : iterable of (ModelCard, device name)
        The models that will see the scan, each once.
    """

    def __init__(self, users: Iterable[tuple[ModelCard, str]]) -> None:
        keys = ((sharing_key(card), device) for card, device in users)
        self._remaining = Counter[_Key](key for key in keys if key[0] is not None)
        self._kept: dict[_Key, Channels] = {}

    def channels(self, card: ModelCard, device: str, make: Callable[[], Channels]) -> Channels:
        """Return the resampled channels (X, Y, Z) for a model, which may change them.

        `make` resamples them; it is called if no earlier model left them.
        """
        key = (sharing_key(card), device)
        if not self.is_shared(card, device):
            return self._kept.pop(key, None) or make()
        if key not in self._kept:
            self._kept[key] = make()
        return [channel.clone() for channel in self._kept[key]]

    def is_shared(self, card: ModelCard, device: str) -> bool:
        """Return whether a later model needs the same channels."""
        return self._remaining[sharing_key(card), device] > 1

    def finish(self, card: ModelCard, device: str) -> None:
        """Count a model as done, whether or not it used the channels."""
        key = (sharing_key(card), device)
        self._remaining[key] -= 1
        if self._remaining[key] < 1:
            self._kept.pop(key, None)

    def release(self) -> None:
        """Free all channels, and keep none from now on: memory is scarce."""
        self._kept.clear()
        self._remaining.clear()
