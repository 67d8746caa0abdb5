"""Get models into the store: from folders, zip files and the network."""
