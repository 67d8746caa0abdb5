"""`python -m scanloom`."""

from scanloom.cli.main import main

if __name__ == "__main__":
    main()
