"""Find scans in folders: walk, inspect, group into series, keep the index."""
