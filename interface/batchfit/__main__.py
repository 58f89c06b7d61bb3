"""``python -m batchfit``."""

import sys

from batchfit.cli import main

if __name__ == "__main__":
    sys.exit(main())
