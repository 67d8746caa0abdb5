"""The report of a run: a page that opens from disk."""
