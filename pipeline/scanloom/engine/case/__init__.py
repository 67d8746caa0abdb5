"""One case: build, load, segment, write, document."""
