"""Options of the commands: each panel of `--help` is a frozen dataclass with an option a field."""
