"""The hardware: GPUs, energy, imports."""
