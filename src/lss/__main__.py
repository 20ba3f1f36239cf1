"""`python -m lss`."""

import sys

from lss.cli import main

if __name__ == "__main__":
    sys.exit(main())
