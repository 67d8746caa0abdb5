"""Positions and weights of sliding windows, and sums of their scores."""
