"""Report the status of a run."""
