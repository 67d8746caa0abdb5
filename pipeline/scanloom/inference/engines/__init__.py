"""Engines: libraries that run a network faster than plain torch, with the same labels."""
