"""Predict and record the cost of a run."""
