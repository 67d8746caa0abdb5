"""Limits, privacy and failures of the process."""
