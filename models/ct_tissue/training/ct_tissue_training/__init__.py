"""Data, labelling rules and training of the model `ct_tissue`."""
