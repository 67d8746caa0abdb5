"""Read a MONAI bundle as data."""
