"""A case from its path to its results, runs over archives, and the service that listens."""
