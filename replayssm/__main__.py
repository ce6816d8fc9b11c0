"""``python -m replayssm``: the command line."""

import sys

from replayssm.cli import main

if __name__ == "__main__":
    sys.exit(main())
