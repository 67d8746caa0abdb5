"""scanloom's version, wherever its code is: it may be on Python's path without being installed."""

__version__ = "0.1.0"
