"""The preview picture of a case."""
