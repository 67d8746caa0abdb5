"""Corrections of label maps by people: strokes of a brush, and files from other programs."""
