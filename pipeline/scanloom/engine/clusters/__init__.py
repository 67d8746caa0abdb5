"""Clusters for workers: this machine, SLURM, ssh, a Dask scheduler."""
