"""Helpers of the tests: generated scans, models, runs and commands."""
