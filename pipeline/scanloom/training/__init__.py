"""Training data from results, bundles that train, and labels compared with a reference."""
