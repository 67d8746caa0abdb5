"""The worker: child processes, admission, retries, dispatch."""
