"""`python -m reproduction`: the paper's tables, from a clone of this repository."""

import sys

from reproduction.command import main

if __name__ == "__main__":
    sys.exit(main())
