"""`python -m scanloom`."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # The working folder, where another user may have put modules. What is running may lie there
    _own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  # without pathlib
    if os.path.abspath(sys.path[0]) != _own:  # noqa: PTH100  # as above
        del sys.path[0]

from scanloom.cli.main import main

if __name__ == "__main__":
    main()
