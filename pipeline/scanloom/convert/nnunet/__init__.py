"""Reader of nnU-Net v2 models."""
