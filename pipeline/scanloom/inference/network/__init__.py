"""Build a network, load its weights, and run some of its layers in other ways."""
