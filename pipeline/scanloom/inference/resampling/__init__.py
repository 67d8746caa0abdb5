"""Resampling: arithmetic along an axis, scans on the network grid, and what the network sees."""
