"""Where workers run: this machine, SLURM, ssh, Kubernetes, a Dask scheduler."""
