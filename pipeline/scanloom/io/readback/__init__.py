"""Decode published results independently of the writers, and compare."""
