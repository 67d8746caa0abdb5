"""Decode pixel data."""
