"""Corrected results: written and published beside the case, and exported for training."""
