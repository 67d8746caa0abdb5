"""Split a series into volumes."""
