"""Training data from results, MONAI bundles that train, and evaluation against a reference."""
