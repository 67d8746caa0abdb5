"""Clusters for workers: this machine, SLURM, ssh, Kubernetes, a Dask scheduler."""
