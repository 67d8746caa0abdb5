"""A bundle's config, read as data."""

from scanloom.convert.monai.config.parser import Config
from scanloom.convert.monai.config.values import Component, Name, truncate

__all__ = ["Component", "Config", "Name", "truncate"]
