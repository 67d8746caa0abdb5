"""From a path to results: load, segment, write."""
