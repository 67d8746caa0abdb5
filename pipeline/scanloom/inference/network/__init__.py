"""Build a network and load its weights."""
