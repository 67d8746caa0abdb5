"""Training data from results, MONAI bundles that train, and the comparison of labels with a reference."""
