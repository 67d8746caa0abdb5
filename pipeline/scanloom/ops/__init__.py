"""Arithmetic on label maps."""
