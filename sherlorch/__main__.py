"""`python -m sherlorch` is the command `sherlorch`."""

import sys

from sherlorch.cli import main

if __name__ == "__main__":
    sys.exit(main())
