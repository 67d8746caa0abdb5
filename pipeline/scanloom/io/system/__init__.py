"""Files, processes and shared memory: atomic writes, locks, sandbox, archives."""
