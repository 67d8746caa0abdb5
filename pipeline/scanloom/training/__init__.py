"""Training data from results, bundles that train, and the comparison with references."""
