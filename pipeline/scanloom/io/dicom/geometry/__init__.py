"""Slice positions and stacks: regular, sheared, gapped, enhanced, mosaic."""
