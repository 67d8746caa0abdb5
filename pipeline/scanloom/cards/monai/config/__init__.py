"""A bundle's config, read as data."""

from scanloom.cards.monai.config.parser import Config
from scanloom.cards.monai.config.values import Component, Name, truncate

__all__ = ["Component", "Config", "Name", "truncate"]
