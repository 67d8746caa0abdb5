"""Needs of the steps of a case: its models, recipe, writers and documents."""
