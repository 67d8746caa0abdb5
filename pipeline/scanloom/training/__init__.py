"""Recipes that train the models that ship."""
