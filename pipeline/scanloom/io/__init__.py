"""Scans in, results out."""
