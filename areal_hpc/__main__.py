"""``python -m areal_hpc``: the command line."""

import sys

from areal_hpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
