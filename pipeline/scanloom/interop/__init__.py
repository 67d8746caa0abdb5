"""Conversion of the data types to images and tensors of other libraries, and to HTML."""
