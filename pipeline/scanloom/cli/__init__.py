"""Commands of the program: parse, call, print."""
