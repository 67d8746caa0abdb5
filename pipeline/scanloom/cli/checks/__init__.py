"""Checks of `scanloom doctor`: each yields findings and never raises."""
