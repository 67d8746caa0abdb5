"""The workflow file and the selection of series."""
