"""Optional writers: each module writes, names and checks one kind of file."""
